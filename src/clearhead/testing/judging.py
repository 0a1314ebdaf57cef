"""Calls somebody's function and judges its output as `diagnose` does: by the error of a plain run in the same dtype."""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import FLOATS, as_array, on_cpu, statistics_dtype, to_torch
from clearhead.core.axes import Array, named
from clearhead.core.call import describe
from clearhead.core.rules import Rules
from clearhead.diagnosing.fitting import FACTOR, Fit, coarser, differences, largest
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Selection
from clearhead.diagnosing.softmaxes import eps
from clearhead.digits import significant
from clearhead.errors import DtypeError, ShapeError
from clearhead.testing.drawing import Drawn, Draws, Plan, drawn

Arrays = Literal["numpy", "torch", "jax"]
Layout = Literal["bhnd", "bnhd"]
_OUTPUT = {"bhnd": ("batch", "heads", "queries", "d_v"), "bnhd": ("batch", "queries", "heads", "d_v")}


@dataclass(frozen=True)
class Caller:
    """Somebody's function, and how it is called.

    arrays   the kind of array that it takes
    layout   the axes of q, k, v and of its result: (batch, heads, n, d) or (batch, n, heads, d)
    device   where its tensors lie
    """

    fn: Any
    arrays: Arrays
    layout: Layout
    device: str

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__name__", None) or type(self.fn).__name__)

    def converted(self, x: Any, *, swapped: bool | None = None) -> Any:
        """An array as the function takes it; swapped: q, k or v, and whether heads and tokens lie swapped in memory."""
        if isinstance(x, tuple):
            return tuple(self.converted(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        x = np.array(x)  # a function that writes into its inputs does not change ours
        if swapped is not None and self.layout == "bnhd":
            x = x.swapaxes(1, 2)
        if self.arrays == "jax":
            return import_module("jax.numpy").asarray(x)
        if self.arrays == "torch":
            tensor = to_torch(sys.modules["torch"], np.ascontiguousarray(x)).to(self.device)
            return tensor.transpose(1, 2).contiguous().transpose(1, 2) if swapped else tensor
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if swapped else np.ascontiguousarray(x)

    def inputs(self, problem: Drawn, *, swapped: bool) -> tuple[list[Any], dict[str, Any]]:
        """q, k, v and the rules as the function takes them."""
        rules = {name: self.converted(value) for name, value in problem.rules.items()}
        return [self.converted(x, swapped=swapped) for x in problem[:3]], rules

    def output(self, problem: Drawn, *, swapped: bool) -> Array:
        """What the function returns, heads first. Raises whatever it raises, DtypeError, ShapeError."""
        inputs, rules = self.inputs(problem, swapped=swapped)
        with np.errstate(all="ignore"):  # NumPy would warn of the NaN and infinities that are given on purpose
            result = self.fn(*inputs, **rules)
        return self.read(result, problem, "the result")

    def read(self, result: Any, problem: Drawn, name: str, like: Array | None = None) -> Array:
        """An array of the function's with the axes of `like`, or of the output, heads first."""
        if hasattr(result, "detach"):
            result = result.detach()
        array: Array = on_cpu(as_array(result, name)[0])
        if array.dtype not in FLOATS:
            raise DtypeError(f"{name} is {array.dtype}: expected {problem.q.dtype}, or a wider float dtype.")
        want = (*problem.q.shape[:3], problem.v.shape[3]) if like is None else like.shape
        shape = want if self.layout == "bhnd" else (want[0], want[2], want[1], want[3])
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}: expected {named(shape, _OUTPUT[self.layout])}.")
        return array if self.layout == "bhnd" else array.swapaxes(1, 2)


class Failure(NamedTuple):
    """What is wrong with one problem's result."""

    plan: Plan
    problem: Drawn
    kind: str  # failures of one kind are taken for the same mistake
    lines: tuple[str, ...]  # what is wrong, and where
    theirs: Array | None  # the output, where there is one
    error: Exception | None = None

    @property
    def weights(self) -> int:
        sizes = self.plan.sizes
        return sizes.batch * sizes.heads * sizes.queries * sizes.keys


def judged(caller: Caller, draws: Draws, plan: Plan) -> Failure | None:
    """Call the function on a plan's problem; None where its output is right."""
    problem = drawn(draws, plan)
    try:
        theirs = caller.output(problem, swapped=plan.kind == "strides")
    except Exception as error:  # anything that somebody's function may raise
        words = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Failure(plan, problem, type(error).__name__, (words,), None, error)
    if plan.kind != "empty rows":  # empty rows are a kind of their own
        theirs = np.where(problem.empty, 0.0, theirs.astype(np.float64)).astype(theirs.dtype)
    right, gaps, allowed, dtype = _measured(problem, theirs)
    lines = described(gaps, allowed, theirs, right, dtype)
    return Failure(plan, problem, lines[0], lines[1:], theirs) if lines else None


def _measured(problem: Drawn, theirs: Array) -> tuple[Array, Array, Array, np.dtype[Any]]:
    """The right output, how far each number of theirs is off, what is allowed, and the dtype that sets it.

    Kernels that merge parts by their log-sum-exp L round L, and so every weight by eps·|L|; a plain run does not.
    """
    q, k, v = (clean(x) for x in problem[:3])
    described = describe(q, k, v, cast("Rules", problem.rules))
    inputs = Diagnosed(described.problem, described.q, described.k, v, theirs, "output")
    dtype = coarser(described.problem.dtype, theirs.dtype)
    with np.errstate(all="ignore"):
        fit = Fit(inputs, dtype, 0.0)
        everything = Selection(tuple(range(q.shape[1])), tuple(range(q.shape[2])))
        right = fit.exact.answer(RIGHT, everything)
        _, allowed = fit.measure(RIGHT, everything, right)
        logsumexp = definition.attend(described.problem, described.q, described.k).logsumexp
        size = np.where(np.isfinite(logsumexp), np.abs(logsumexp), 0.0)
        rounded = eps(statistics_dtype(described.problem.dtype)) * size[..., None] * largest(v)
        return right, differences(fit.theirs(everything), right), allowed + FACTOR * rounded, dtype


def clean(x: Array) -> Array:
    """The same numbers, 0 for NaN and infinity: those are only where nobody may look."""
    return np.where(np.isfinite(x.astype(np.float64)), x.astype(np.float64), 0.0).astype(x.dtype)


def described(
    gaps: Array, allowed: Array, theirs: Array, right: Array, dtype: np.dtype[Any], name: str = "output"
) -> tuple[str, ...]:
    """The kind of what is wrong, then what and where; nothing where no gap is larger than allowed."""
    wrong = np.argwhere(~(gaps <= allowed))
    if not len(wrong):
        return ()
    place = tuple(int(i) for i in wrong[0])
    axes = ("batch", "head", "query" if name in ("output", "dq") else "key", "column")
    where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=True))
    yours, wanted = (significant(float(x[place]), 6) for x in (theirs, right))
    first = f"first wrong number: {where}: yours {yours}, right {wanted}"
    share = f"{len(wrong):,} of {gaps.size:,} numbers of the {name} are wrong"
    broken = ~np.isfinite(theirs.astype(np.float64))
    if broken.any():
        return "NaN", f"{share}; {int(broken.sum()):,} of them are NaN or infinite", first
    units = np.broadcast_to(allowed / FACTOR, gaps.shape)
    position = np.unravel_index(int(np.argmax(gaps / np.maximum(units, 1e-300))), gaps.shape)
    unit, worst = float(units[position]), float(gaps[position])
    times = f"{significant(worst / unit)} times" if unit else "more than"
    off = (
        f"{share}, by up to {significant(worst)}: {times} the error of a plain run in {dtype} "
        f"({significant(unit, 2)}), where {FACTOR:g} times pass"
    )
    return "numbers", off, first
