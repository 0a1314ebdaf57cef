"""Mistakes that leave no exact numbers: rounding to a narrow dtype and dropout, recognised by size and statistics."""

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import FACTOR, Fit, differences, eps, largest
from clearhead.diagnosing.recipe import Recipe, Selection
from clearhead.diagnosing.tiles import dtype_named
from clearhead.diagnosing.workings import Workings

_COARSE = 0.1  # the largest error that rounding can cause, as relative root mean square


def is_close(fit: Fit, base: Recipe, selection: Selection, workings: Workings | None = None) -> bool:
    """Could rounding alone explain how far theirs lie from the recipe's numbers?"""
    theirs, computed = fit.theirs(selection), (workings or fit.exact).answer(base, selection)
    return computed.shape == theirs.shape and _rms(theirs - computed) <= _COARSE * _rms(theirs)


def rms_error(fit: Fit, base: Recipe, selection: Selection) -> float:
    """The root mean square of what theirs differ by from the recipe's numbers; infinite where the shapes differ."""
    theirs, computed = fit.theirs(selection), fit.exact.answer(base, selection)
    return _rms(theirs - computed) if computed.shape == theirs.shape else float("inf")


def scatters_around(fit: Fit, base: Recipe, selection: Selection, workings: Workings) -> bool:
    """Could theirs scatter around the recipe's numbers, neither larger nor smaller on the whole?"""
    theirs, computed = fit.theirs(selection), workings.answer(base, selection)
    if computed.shape != theirs.shape or not np.isfinite(theirs).all() or not np.isfinite(computed).all():
        return False
    return abs(float((theirs * computed).sum()) - float((computed**2).sum())) <= 0.6 * float((computed**2).sum())


def rounding(fit: Fit, base: Recipe, halved: Recipe, selection: Selection) -> tuple[float, float] | None:
    """The largest difference that is left after rounding as `halved` does, and that without rounding.

    The order in which they summed is not known, so rounding cannot be repeated exactly; None where it leaves half of
    the difference or more.
    """
    theirs = fit.theirs(selection)
    plain, computed = fit.exact.answer(base, selection), fit.exact.answer(halved, selection)
    before, left = _rms(theirs - plain), _rms(theirs - computed)
    if not before > fit.tolerance(base, selection) / FACTOR or not left < 0.5 * before:
        return None
    return float(differences(theirs, computed).max(initial=0)), float(differences(theirs, plain).max(initial=0))


def somewhere(fit: Fit, base: Recipe, dtype: str, selection: Selection) -> float | None:
    """How the size of theirs' error compares with that of a plain run in a narrow dtype: a ratio from 1 up.

    None where the error cannot come from rounding: a number is further off than such a run would be, or the error is
    proportional to the numbers.
    """
    exact = fit.exact.answer(base, selection)
    theirs = fit.theirs(selection)
    narrow = Workings(fit.inputs, dtype_named(dtype)).answer(base, selection).astype(np.float64)
    error, their_error = narrow - exact, theirs - exact
    worst = float(np.abs(error[np.isfinite(error)]).max(initial=0.0))
    if not differences(theirs, exact).max(initial=0) <= FACTOR * (worst + eps(dtype_named(dtype)) * largest(exact)):
        return None
    correlation = float((their_error * exact).sum()) / (np.linalg.norm(their_error) * np.linalg.norm(exact) + 1e-300)
    if abs(correlation) >= max(0.5, 4 / np.sqrt(their_error.size)):
        return None
    ratio = _rms(their_error) / max(_rms(error), 1e-300)
    return max(ratio, 1 / max(ratio, 1e-300))


def dropout(fit: Fit, base: Recipe, selection: Selection, *, strict: bool = False) -> float | None:
    """The dropout rate p, where theirs scatter around the base as dropped weights do: Var o = p/(1-p)·Σ a²·v².

    strict    for a base that is a mistake itself: many bases come near by chance, so the scatter must fit better
    None where the scatter is not that of dropout.
    """
    theirs = fit.theirs(selection)
    if not np.isfinite(theirs).all():
        return None
    if fit.inputs.stage == "weights":
        return _dropped_weights(theirs, fit.exact.answer(base, selection))
    if fit.inputs.stage != "output" or fit.inputs.merged or base.half or base.values != "v" or base.turned:
        return None
    weights, right = fit.exact.weights(base, selection), fit.exact.output(base, selection)
    values = fit.exact.serving(base, fit.exact.operand(base, "v"), selection.heads)
    if right.shape != theirs.shape or not np.isfinite(right).all():
        return None
    spread = weights**2 @ values**2
    error = theirs - right
    use = spread > 1e-12 * spread.max(initial=0)
    if use.sum() < 64:
        return None
    ratios = (error**2).sum(axis=-1) / np.maximum(spread.sum(axis=-1), 1e-300)  # p/(1-p), estimated from each row
    live = use.any(axis=-1)
    ratio = float(ratios[live].mean())
    share = float((error * right)[use].sum() / (right[use] ** 2).sum())
    along = weights**2 * (right @ values.swapaxes(-1, -2)) ** 2  # a dropped weight changes all columns at once
    deviation = float(np.sqrt(ratio * along.sum()) / (right[use] ** 2).sum())
    rate = ratio / (1 + ratio)
    if abs(share) > 3.5 * deviation + 0.01 or not 0.005 < rate < 0.95:
        return None
    order = np.argsort(spread.sum(axis=-1)[live])
    quarters = [float(ratios[live][rows].mean()) for rows in np.array_split(order, 4)]
    # The relative standard error of the mean; where rates are low, a few rows with large errors decide it.
    standard_error = float(ratios[live].std()) / ratio / np.sqrt(live.sum())
    between_rows = max(1.8 if strict else 3.0, 1 / max(0.2, 1 - 7 * standard_error))  # allowed between quarters of rows
    to_whole = max(1.25 if strict else 1.6, 1 + 4 * standard_error)  # allowed against the whole covariance
    if max(quarters) > between_rows * ratio or min(quarters) < ratio / between_rows:
        return None
    return rate if ratio / to_whole < _by_covariance(weights, values, error, ratio) < to_whole * ratio else None


def _by_covariance(weights: Array, values: Array, error: Array, ratio: float) -> float:
    """p/(1-p) from the whole covariance Σ_j a_j²·v_j·v_jᵀ of each row, which only dropped weights have.

    The given ratio where too few rows have a covariance that can be inverted.
    """
    width = values.shape[-1]
    estimates = []
    rows = list(np.ndindex(weights.shape[:3]))
    for row in rows[:: max(1, len(rows) // 256)]:
        scaled = weights[row][:, None] * values[row[:2]]
        spread = scaled.T @ scaled
        if np.linalg.cond(spread) < 1e6:
            estimates.append(float(error[row] @ np.linalg.solve(spread, error[row])) / width)
    return float(np.mean(estimates)) if len(estimates) >= 4 else ratio


def _dropped_weights(theirs: Array, right: Array) -> float | None:
    """The dropout rate of weights that are each either 0 or scaled up by one number; None where they are not."""
    if right.shape != theirs.shape:
        return None
    live = right > 1e-6 * right.max(initial=0)
    dropped = live & (theirs == 0)
    kept = live & ~dropped
    if not kept.any() or not dropped.any():
        return None
    scale = theirs[kept] / right[kept]
    median = float(np.median(scale))
    rate = 1 - 1 / median if median > 1 else 0.0
    share = dropped.sum() / live.sum()
    one_scale = float(np.abs(scale / median - 1).max()) < 1e-2
    return rate if one_scale and abs(share - rate) < 5 * np.sqrt(0.25 / live.sum()) + 0.02 else None


def _rms(x: Array) -> float:
    """Root mean square; infinite where a number is NaN or infinite."""
    size = float(np.sqrt(np.mean(x**2))) if x.size else 0.0
    return size if np.isfinite(size) else float("inf")
