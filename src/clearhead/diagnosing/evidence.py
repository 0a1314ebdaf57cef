"""Mistakes that leave no exact numbers: rounding to a narrow dtype, and a scatter like that of dropout."""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import FACTOR, Fit, differences
from clearhead.diagnosing.recipe import Inputs, LayerInputs, Recipe, Selection
from clearhead.diagnosing.tiles import dtype_named, rounded_to
from clearhead.diagnosing.workings import Workings

_FEW = 32  # with fewer numbers, nothing can be said about how errors are distributed
_COARSE = 0.1  # the largest error that rounding can cause, as relative root mean square


def is_close(fit: Fit, base: Recipe, selection: Selection, workings: Workings | None = None) -> bool:
    """Could rounding alone explain how far theirs lie from the recipe's numbers?"""
    theirs, computed = fit.theirs(selection), (workings or fit.exact).answer(base, selection)
    return computed.shape == theirs.shape and _rms(theirs - computed) <= _COARSE * _rms(theirs)


def rms_error(fit: Fit, base: Recipe, selection: Selection, workings: Workings) -> float:
    """The root mean square of what theirs differ by from the recipe's numbers; infinite where the shapes differ."""
    theirs, computed = fit.theirs(selection), workings.answer(base, selection)
    return _rms(theirs - computed) if computed.shape == theirs.shape else float("inf")


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


def share_left(fit: Fit, base: Recipe, halved: Recipe, selection: Selection) -> float:
    """How much of the difference from theirs rounding as `halved` does leaves; 0 where there is no difference."""
    theirs = fit.theirs(selection)
    before, left = (_rms(theirs - fit.exact.answer(recipe, selection)) for recipe in (base, halved))
    return left / before if before > 0 else 0.0


def somewhere(fit: Fit, base: Recipe, dtype: str, selection: Selection) -> float | None:
    """How the size of theirs' error compares with that of a run in a narrow dtype: a ratio from 1 to 2.

    None where the error does not look like rounding: it is larger or smaller than that of such runs, or its mean is not
    zero, or it follows the numbers or their neighbours; and where nothing shows this dtype: not every number is one of
    the dtype's, and the error has nothing in common with that of inputs or of a whole run rounded to it.
    """
    exact, theirs = fit.exact.answer(base, selection), fit.theirs(selection)
    error, narrow = theirs - exact, dtype_named(dtype)
    size = _rms(error)
    if not 0 < size < float("inf") or error.size < _FEW or follows(error, exact):
        return None
    whole = Workings(fit.inputs, narrow).answer(base, selection).astype(np.float64)
    inputs = Workings(rounded_inputs(fit.inputs, dtype)).answer(base, selection)
    runs = [run - exact for run in (whole, inputs, rounded_to(exact, dtype)) if np.isfinite(run).all()]
    written = bool((rounded_to(theirs, dtype) == theirs).all())
    ratios = [
        max(size / _rms(run), _rms(run) / size)
        for run in runs
        if _rms(run) > 0 and (written or correlation(error, run) > max(0.3, 6 / np.sqrt(error.size)))
    ]
    return min((ratio for ratio in ratios if ratio <= 2), default=None)


def follows(error: Array, exact: Array) -> bool:
    """Does an error have a mean, or go with the numbers themselves or with their neighbours, as rounding does not?"""
    limit = max(0.25, 6 / np.sqrt(error.size))
    if abs(float(error.mean())) > limit * _rms(error):
        return True
    beside = (exact, *(np.roll(exact, 1, axis) for axis in range(4) if exact.shape[axis] > 1))
    return any(abs(correlation(error, x)) > limit for x in beside)


def correlation(a: Array, b: Array) -> float:
    """Σ a·b / (|a|·|b|), 0 where one of them is 0."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / size if size else 0.0


def rounded_inputs(inputs: Inputs, dtype: str) -> Inputs:
    """The same inputs, rounded to a narrow dtype and back."""

    def rounded(x: Any) -> Any:
        return None if x is None else rounded_to(np.asarray(x, np.float64), dtype)

    layer = inputs.layer
    if layer is not None:
        w, b = ({name: rounded(x) for name, x in given.items()} for given in (layer.w, layer.b))
        layer = LayerInputs(rounded(layer.x), rounded(layer.context), w, b)
    q, k, v, weights = (rounded(x) for x in (inputs.q, inputs.k, inputs.v, inputs.weights))
    return replace(inputs, q=q, k=k, v=v, weights=weights, layer=layer)


def scatter(fit: Fit, base: Recipe, selection: Selection) -> float | None:
    """The dropout rate p, where theirs scatter around the base as dropped weights do: Var o = p/(1-p)·Σ a²·v².

    None where the scatter is not that of dropout. Much else scatters so: it is a hint, and no evidence.
    """
    theirs = fit.theirs(selection)
    if not np.isfinite(theirs).all():
        return None
    if fit.inputs.stage != "output" or fit.inputs.merged or base.half or base.values != "v" or base.turned:
        return None
    weights, right = fit.exact.weights(base, selection), fit.exact.output(base, selection)
    values = fit.exact.served(base, "v", selection.heads)
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
    between_rows = max(1.8, 1 / max(0.2, 1 - 7 * standard_error))  # allowed between quarters of rows
    to_whole = max(1.25, 1 + 4 * standard_error)  # allowed against the whole covariance
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
    for row in rows[:: max(1, len(rows) // 64)]:
        scaled = weights[row][:, None] * values[row[:2]]
        spread = scaled.T @ scaled
        if np.linalg.cond(spread) < 1e6:
            estimates.append(float(error[row] @ np.linalg.solve(spread, error[row])) / width)
    return float(np.mean(estimates)) if len(estimates) >= 4 else ratio


def _rms(x: Array) -> float:
    """Root mean square; infinite where a number is NaN or infinite."""
    size = float(np.sqrt(np.mean(x**2))) if x.size else 0.0
    return size if np.isfinite(size) else float("inf")
