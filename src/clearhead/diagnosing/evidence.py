"""Evidence other than numbers that fit: rounding to a narrow dtype."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import FACTOR, Fit, differences, rms
from clearhead.diagnosing.recipe import Recipe, Selection
from clearhead.diagnosing.softmaxes import rounded_to
from clearhead.diagnosing.workings import Workings

_FEW = 32  # with fewer numbers, nothing can be said about how errors are distributed
_BY_CHANCE = 4.0  # standard deviations by which rounding may go with the numbers


class Reason(NamedTuple):
    """A piece of evidence: a key in words/diagnose.toml, and the values that the sentence names."""

    key: str
    values: Mapping[str, Any] = MappingProxyType({})


# ── rounding ──


def error_of(fit: Fit, recipe: Recipe, selection: Selection, workings: Workings | None = None) -> float:
    """The root mean square of what theirs differ by from the recipe's numbers; infinite where the shapes differ."""
    theirs, computed = fit.theirs(selection), (workings or fit.exact).answer(recipe, selection)
    return rms(theirs - computed) if computed.shape == theirs.shape else float("inf")


def rounding(fit: Fit, base: Recipe, halved: Recipe, selection: Selection) -> tuple[float, float] | None:
    """The largest difference that is left after rounding as `halved` does, and that without rounding.

    The order in which they summed is not known, so rounding cannot be repeated exactly; None where it leaves half of
    the difference or more.
    """
    before = error_of(fit, base, selection)
    if not before > fit.allowed(base, selection) / FACTOR or not error_of(fit, halved, selection) < 0.5 * before:
        return None
    theirs = fit.theirs(selection)
    left, gap = (differences(theirs, fit.exact.answer(recipe, selection)).max(initial=0) for recipe in (halved, base))
    return float(left), float(gap)


def somewhere(fit: Fit, base: Recipe, dtype: str, selection: Selection) -> float | None:
    """How the size of theirs' error compares with that of a run in a narrow dtype: a ratio from 1 to 2.

    None where the error does not look like rounding: it is larger or smaller than that of such runs, or its mean is not
    zero, or it follows the numbers or their neighbours; and where nothing shows this dtype: not every number is one of
    the dtype's, and the error has nothing in common with that of inputs or of a whole run rounded to it.
    """

    def rounded(x: Array) -> Array:
        return rounded_to(np.asarray(x, np.float64), dtype)

    exact, theirs = fit.exact.answer(base, selection), fit.theirs(selection)
    error = theirs - exact
    size = rms(error)
    if not 0 < size < float("inf") or error.size < _FEW or follows(error, exact):
        return None
    whole = Workings(fit.inputs, np.dtype(dtype)).answer(base, selection).astype(np.float64)
    inputs = Workings(fit.inputs.mapped(rounded, rounded)).answer(base, selection)
    runs = [run - exact for run in (whole, inputs, rounded(exact)) if np.isfinite(run).all()]
    written = bool((rounded(theirs) == theirs).all())
    least = max(0.3, 6 / np.sqrt(error.size))
    alike = [rms(run) for run in runs if rms(run) > 0 and (written or correlation(error, run) > least)]
    ratios = (max(size / other, other / size) for other in alike)
    return min((ratio for ratio in ratios if ratio <= 2), default=None)


def follows(error: Array, exact: Array) -> bool:
    """Does an error have a mean, or go with the numbers themselves or with their neighbours, as rounding does not?

    A row's numbers are off together, as its scores and its total are rounded once for all columns. So whole rows tell
    by how much rounding goes with the numbers by chance; an error that is half theirs is never taken for chance.
    """
    limit = max(0.25, 6 / np.sqrt(error.size))
    if abs(float(error.mean())) > limit * rms(error):
        return True
    for x in (exact, *(np.roll(exact, 1, axis) for axis in range(4) if exact.shape[axis] > 1)):
        rows, size = (error * x).sum(axis=-1), float(np.linalg.norm(error) * np.linalg.norm(x))
        by_chance = _BY_CHANCE * float(np.linalg.norm(rows))
        if abs(float(rows.sum())) > max(limit * size, min(by_chance, 0.5 * size)):
            return True
    return False


def correlation(a: Array, b: Array) -> float:
    """Σ a·b / (|a|·|b|), 0 where one of them is 0."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / size if size else 0.0
