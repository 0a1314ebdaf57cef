"""Is an output right? Measured as `diagnose` measures it: by the error of a plain run in the same dtype."""

from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.rules import Rules
from clearhead.diagnosing.fitting import FACTOR, Fit, coarser, differences, largest
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Selection
from clearhead.diagnosing.softmaxes import eps
from clearhead.digits import significant
from clearhead.testing.calling import Caller
from clearhead.testing.drawing import Drawn, Draws, Plan, drawn


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
