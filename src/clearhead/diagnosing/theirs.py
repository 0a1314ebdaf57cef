"""Reads the numbers that somebody's attention gave, and says how to give them the shape of the right ones."""

from math import prod
from typing import Any

from clearhead.core.arrays import FLOATS, as_array
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.problem import Problem
from clearhead.diagnosing.recipe import STAGES, Stage
from clearhead.errors import DtypeError, RuleError, ShapeError, shown


def read_theirs(theirs: Any, output: tuple[int, ...], problem: Problem, stage: Stage) -> Array:
    """Their numbers, where they have the stage's shape; else a ShapeError that says how to give them that shape."""
    if not isinstance(stage, str) or stage not in STAGES:
        raise RuleError(f"stage is {shown(stage)}: expected one of {', '.join(STAGES)}.")
    array: Array = as_array(theirs, "theirs")[0]
    if array.dtype not in FLOATS:
        raise DtypeError(f"theirs is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    want = output if stage == "output" else problem.shape
    if array.shape == want:
        return array
    axes: tuple[str, ...] = WEIGHTS if stage != "output" else ("batch", "heads", "queries", "d_v")
    if len(output) == len(problem.prefix) + 1:  # a layer's output, its heads joined
        axes = ("batch", "queries", "d_out") if stage == "output" else WEIGHTS
    hint = _hint(array.shape, want, output, problem, stage)
    raise ShapeError(f"theirs has shape {array.shape}: at stage {stage!r} expected {named(want, axes)}.", hint)


def _hint(shape: tuple[int, ...], want: tuple[int, ...], output: tuple[int, ...], problem: Problem, stage: str) -> str:
    if shape == output:
        return 'it has the shape of the output: stage="output".'
    if shape == problem.shape:
        return 'it has the shape of the weights: stage="weights".'
    if shape == (*want[:-2], want[-1], want[-2]):
        return "its last two axes are swapped: theirs.swapaxes(-1, -2)."
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3], want[-1]):
        return "it is (batch, queries, heads, …): theirs.swapaxes(-2, -3)."
    if stage == "output" and len(want) > 2 and shape == (*want[:-3], want[-2], want[-3] * want[-1]):
        split = f"*theirs.shape[:-1], {want[-3]}, {want[-1]}"
        return f"its heads are joined: theirs.reshape({split}).swapaxes(-2, -3)."
    if prod(shape) == prod(want):
        return "it has as many numbers: a reshape may do, if their order is right."
    return ""
