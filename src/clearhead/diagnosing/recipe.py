"""Diagnosed inputs, and recipes: changes of the textbook's attention, as data.

A recipe maps fields to changes; a field that it lacks is as in the textbook. changes.py applies changes of queries,
keys, values and rules, workings.py those of the steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, bfloat16, near
from clearhead.core.axes import KEY, QUERY, VALUE, WEIGHTS, Array, heads_first, named, split_heads
from clearhead.core.call import describe, describe_whole
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_flag, read_number
from clearhead.core.rules import EVERYWHERE, Rules, check_names
from clearhead.errors import DtypeError, RuleError, ShapeError, expected, shown
from clearhead.textbook.case_file import INPUTS, LAYER, half_a_decimal, inputs_of, numbers, precision
from clearhead.textbook.computed import LayerArrays, read_layer
from clearhead.textbook.shapes import Convention, check_convention, turned

Stage = Literal["q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "heads", "concat", "output"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_OF_LAYERS = {"q": QUERY, "k": KEY, "v": VALUE, "heads": (*QUERY[:3], "d_v"), "concat": ("batch", "queries", "d_out")}
Change = Mapping[str, Any]  # field -> value
RULES = EVERYWHERE  # the rules that recipes can change
Rotary = tuple[float, bool]  # the base of the angles position·base^(-2i/d); are pairs (2i, 2i + 1)? else (i, i + d/2)
Rows = tuple[int, ...]  # the queries that are compared


class Recipe(dict[str, Any]):
    """The changes of a computation, by field; None for an unchanged field. Treated as immutable."""

    def __missing__(self, field: str) -> None:
        return None

    def key(self, fields: frozenset[str]) -> tuple[tuple[str, Any], ...]:
        """The changes of these fields, as a key."""
        return tuple((field, value) for field, value in self.items() if field in fields)

    def but(self, **changes: Any) -> "Recipe":
        """Make a recipe with other values; None removes a change."""
        return Recipe({field: value for field, value in {**self, **changes}.items() if value is not None})

    @property
    def wide(self) -> bool:
        """Does a row need the scores of all rows?"""
        return bool(self["turned"]) or self["axis"] in ("queries", "matrix", "all")


RIGHT = Recipe()


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosed:
    """The checked arguments of diagnose: q (batch, heads, queries, d_k), k and v, or a layer, and theirs."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    theirs: Array  # (batch, heads, queries, …); a layer's output has one head
    stage: Stage
    layer: LayerArrays | None = None  # x (batch, queries, d_model), context (batch, keys, d_model)
    rotary: Rotary | None = None

    @property
    def merged(self) -> bool:
        """Does theirs have the layer's heads joined?"""
        return self.layer is not None and self.stage in ("concat", "output")

    def mapped(self, tokens: Callable[[Array], Array], matrices: Callable[[Array], Array] = lambda x: x) -> "Diagnosed":
        """Map the numbers: `tokens` converts the arrays along tokens, `matrices` a layer's W and b."""
        layer = self.layer
        if layer is not None:
            x = tokens(layer.x)
            context = x if layer.context is layer.x else tokens(layer.context)
            w, b = ({name: matrices(array) for name, array in arrays.items()} for arrays in (layer.w, layer.b))
            layer = LayerArrays(x, context, w, b)
        q, k, v = map(tokens, (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, layer=layer)


def eps(dtype: np.dtype[Any]) -> float:
    """The machine epsilon: the distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


# ── what is diagnosed, read from a call or a file's values ──


@np.errstate(over="ignore", invalid="ignore")  # a layer is projected only for the shapes, so overflow does not matter
def read_inputs(
    arrays: Mapping[str, Any],
    theirs: Any,
    stage: Stage,
    *,
    num_heads: int = 1,
    convention: Convention = "rows",
    rotary: tuple[Any, Any] = (None, False),
    rules: Mapping[str, Any] = MappingProxyType({}),
) -> Diagnosed:
    """Read and check the arguments: `arrays` are q, k and v, or a layer's, by name.

    rotary   the base of rotary positions or None, and whether pairs are interleaved
    """
    check_convention(convention)
    arrays, rules = ({name: near(x) for name, x in some.items()} for some in (arrays, rules))
    turning, layer, given = None, None, cast("Rules", rules)
    if rotary[0] is not None:
        turning = read_number("rotary", rotary[0], 0.0), read_flag("rotary_interleaved", rotary[1])
        if turning[0] <= 0:
            raise RuleError(expected("rotary", rotary[0], "the base of the angles, a positive number"))
    theirs = turned(as_array(near(theirs), "theirs")[0], convention)
    if "x" in arrays:
        check_names(given)
        layer, sizes = read_layer(arrays, num_heads, convention)
        parts = ((layer.x, "q", num_heads), (layer.context, "k", sizes.kv_heads), (layer.context, "v", sizes.kv_heads))
        q, k, v = (split_heads(layer.projected(x, part).astype(x.dtype), many or 1) for x, part, many in parts)
        call, joined = describe(q, k, v, given), (*sizes.lead, sizes.queries, num_heads * sizes.d_v)
        stages = {"q": q.shape, "k": k.shape, "v": v.shape, "heads": (*q.shape[:-1], sizes.d_v), "concat": joined}
        stages["output"] = joined if layer.out is None else (*joined[:-1], layer.out[1])
        x, context = (x.reshape(call.problem.batch, *x.shape[-2:]) for x in (layer.x, layer.context))
        layer = replace(layer, x=x, context=context)
    else:
        q, k, v = (turned(arrays[name], convention) for name in INPUTS)
        call = describe_whole(q, k, v, given)
    problem = call.problem
    assert call.v is not None
    if turning is not None and problem.d_k % 2:
        raise RuleError(f"rotary is {shown(rotary[0])} and d_k {problem.d_k}: pairs of columns need an even d_k.")
    if layer is None:
        stages = {"output": (*problem.prefix, problem.queries, call.v.shape[-1])}
    theirs = read_theirs(theirs, stages, problem, stage)
    theirs = heads_first(theirs) if layer is None else theirs.reshape(problem.batch, -1, *theirs.shape[-2:])
    return Diagnosed(problem, call.q, call.k, call.v, theirs, stage, layer, turning)


def read_written(name: str, written: Any) -> tuple[Array, float]:
    """Read a file's numbers in a float dtype; return also half of their last decimal if printed, else 0."""
    array = numbers(name, written)
    array = array if array.dtype in FLOATS else array.astype(np.float64)
    printed = not isinstance(written, np.ndarray)
    return (precision(written, array), half_a_decimal(written)) if printed else (array, 0.0)


def file_inputs(place: Path, values: Mapping[str, Any], theirs: Array, stage: Any) -> Diagnosed:
    """Read and check the inputs and rules among a file's values."""
    needed, rules = inputs_of(place, values), dict(values)
    stage = str(stage.item()) if isinstance(stage, np.ndarray) and stage.ndim == 0 else stage
    arrays = {name: rules.pop(name) for name in (INPUTS if needed == INPUTS else LAYER) if name in rules}
    options = {name: rules.pop(name) for name in ("num_heads", "convention") if name in rules}
    rotary = rules.pop("rotary", None), rules.pop("rotary_interleaved", False)
    return read_inputs(arrays, theirs, stage, rotary=rotary, rules=rules, **options)


def read_theirs(array: Array, stages: dict[str, tuple[int, ...]], problem: Problem, stage: Stage) -> Array:
    """Check that theirs has the stage's shape; otherwise raise a ShapeError that says how to reshape it.

    stages   the shapes of all stages except those with the weights' shape
    """
    known = [name for name in STAGES if name in stages or name not in _OF_LAYERS]
    if not isinstance(stage, str) or stage not in known:
        raise RuleError(f"stage is {shown(stage)}: expected one of {', '.join(known)}.")
    if array.dtype not in FLOATS:
        raise DtypeError(f"theirs is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    want = stages.get(stage, problem.shape)
    if array.shape == want:
        return array
    if stage == "weights" and problem.prefix and array.shape == (*want[:-3], *want[-2:]):  # perhaps a mean over heads
        return np.broadcast_to(array[..., None, :, :], want)
    axes = _OF_LAYERS | {"output": _OF_LAYERS["concat" if "concat" in stages else "heads"]}
    hint = _hint(array.shape, want, stages, problem)
    raise ShapeError(
        f"theirs has shape {array.shape}: at stage {stage!r} expected {named(want, axes.get(stage, WEIGHTS))}.", hint
    )


def _hint(shape: tuple[int, ...], want: tuple[int, ...], stages: dict[str, tuple[int, ...]], problem: Problem) -> str:
    for stage, other in (("output", stages["output"]), ("weights", problem.shape)):
        if shape == other:
            return f'it has the shape of the {stage}: stage="{stage}".'
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3], want[-1]):
        return "it is (batch, queries, heads, …): theirs.swapaxes(-2, -3)."
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3] * want[-1]):
        return f"its heads are joined: theirs.reshape(*theirs.shape[:-1], {want[-3]}, {want[-1]}).swapaxes(-2, -3)."
    return "its last two axes are swapped: theirs.swapaxes(-1, -2)." if shape == (*want[:-2], *want[:-3:-1]) else ""
