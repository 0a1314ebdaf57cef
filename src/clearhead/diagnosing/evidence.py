"""Evidence other than numbers that fit: rounding to a narrow dtype, dropped weights, a scatter like that of dropout."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import FACTOR, Fit, differences, rms
from clearhead.diagnosing.recipe import RIGHT, Recipe, Selection
from clearhead.diagnosing.softmaxes import rounded_to
from clearhead.diagnosing.workings import Workings

_FEW = 32  # with fewer numbers, nothing can be said about how errors are distributed
_ROWS = 512  # the most whose weights are solved for
_DECIDED, _DECIDED_IN_PAIRS = 12, 64  # the fewest weights that must be decided, alone and beside another mistake
_CLUSTERED = 8.0  # standard deviations by which the zeros of the keys may differ from chance
_BY_CHANCE = 4.0  # standard deviations by which rounding may go with the numbers
_SCATTERED = 64  # about so many rows show a scatter
_SHARPNESS = 0.05  # a solved weight is decided where its error is at most this part of the weight itself


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


# ── dropout ──

_Solved = tuple[Array, Array, Array]  # of weights that were solved for: w_j/a_j, how exact each is, and its key


def dropout(fit: Fit, base: Recipe, selection: Selection) -> Reason | None:
    """That weights were dropped at random at some rate p, where their own weights can be read off; else None.

    A row's output is Σ_j w_j·v_j over the keys it sees. With at most d_v of them, w follows from the output. Each w_j
    must then be 0 or a_j/(1 - p), with one p for all rows, and as many zeros as that p makes likely.
    """
    theirs, fewest = fit.theirs(selection), _DECIDED if base == RIGHT else _DECIDED_IN_PAIRS
    if fit.inputs.stage == "weights":
        right = fit.exact.answer(base, selection)
        if right.shape != theirs.shape or not np.isfinite(theirs).all():
            return None
        live = right > 1e-6 * right.max(initial=0)
        return _rate((theirs[live] / right[live], np.full(int(live.sum()), 1e-3), np.nonzero(live)[-1]), fewest)
    if not _sums_values(fit, base):
        return None
    first = Selection(selection.heads[:1], selection.rows)
    if len(selection.heads) > 1 and _solved(fit, base, first) is None:  # before all heads are computed
        return None
    solved = _solved(fit, base, selection)
    return None if solved is None else _rate(solved, fewest)


def _sums_values(fit: Fit, base: Recipe) -> bool:
    """Are theirs sums of values, by weights that nothing was done to after the softmax?"""
    of_heads = fit.inputs.stage == "output" and not fit.inputs.merged
    return of_heads and not base.half and base.values == "v" and not base.turned


def _solved(fit: Fit, base: Recipe, selection: Selection) -> _Solved | None:
    """The weights of these rows as far as they can be solved for; None where the outputs are no sums of values."""
    theirs, weights = fit.theirs(selection), fit.exact.weights(base, selection)
    values, noise = fit.exact.served(base, "v", selection.heads), fit.allowed(base, selection)
    if theirs.shape[-1] != values.shape[-1] or weights.shape[-1] != values.shape[-2]:
        return None
    ratios, errors, keys = [np.empty(0)], [np.empty(0)], [np.empty(0, int)]
    counts = (weights > 0).sum(axis=-1)
    for b, h, i in np.argwhere((counts > 0) & (counts <= values.shape[-1]))[:_ROWS]:
        seen = weights[b, h, i] > 0
        basis, row, a = values[b, h, seen].T, theirs[b, h, i], weights[b, h, i, seen]
        if not np.isfinite(row).all() or not np.isfinite(basis).all():
            return None
        w, _, rank, singular = np.linalg.lstsq(basis, row, rcond=None)
        spread = noise * np.sqrt(len(row)) / max(float(singular[-1]), 1e-300)
        if rank < len(a):
            continue
        if np.abs(basis @ w - row).max() > 4 * noise + spread:
            return None
        sharp = spread < _SHARPNESS * a
        ratios.append(w[sharp] / a[sharp])
        errors.append(spread / a[sharp])
        keys.append(np.flatnonzero(seen)[sharp])
    return np.concatenate(ratios), np.concatenate(errors), np.concatenate(keys)


def _rate(solved: _Solved, fewest: int) -> Reason | None:
    """The rate p of ratios that are each 0 or 1/(1 - p), the zeros at random; None where they are not."""
    ratios, errors, keys = solved
    kept = ratios > 0.5
    if len(ratios) < fewest or min(kept.sum(), (~kept).sum()) < 2:
        return None
    scale = float(np.median(ratios[kept]))
    rate = 1 - 1 / scale
    off = np.abs(ratios - np.where(kept, scale, 0))
    likely = 5 * np.sqrt(max(rate * (1 - rate), 0) / len(ratios)) + 0.02
    if rate <= 0.005 or not (off <= 3 * errors + 1e-3 * scale).all() or abs(float((~kept).mean()) - rate) > likely:
        return None
    # No key may be dropped much more often than others: a mask, or an empty slot, drops the same keys in all rows.
    each, zeros = np.bincount(keys), np.bincount(keys, weights=~kept)
    spread = float(((zeros - rate * each) ** 2).sum()) / (rate * (1 - rate) * len(keys))
    if not spread < 1 + _CLUSTERED * float(np.sqrt(2 * (each**2).sum())) / len(keys):
        return None
    return Reason("dropped", {"rate": rate, "solved": len(ratios), "zeros": int((~kept).sum()), "factor": scale})


def scatter(fit: Fit, base: Recipe, selection: Selection) -> float | None:
    """The dropout rate p, where theirs scatter around the base as dropped weights do: Cov o = p/(1-p)·Σ a_j²·v_j·v_jᵀ.

    None where the scatter is not that of dropout. Much else scatters so: it is a hint, and no evidence.
    """
    theirs = fit.theirs(selection)
    if not np.isfinite(theirs).all() or not _sums_values(fit, base):
        return None
    weights, right = fit.exact.weights(base, selection), fit.exact.output(base, selection)
    values = fit.exact.served(base, "v", selection.heads)
    if right.shape != theirs.shape or not (np.isfinite(right).all() and np.isfinite(values).all()):
        return None
    estimates, rows = [], list(np.ndindex(weights.shape[:3]))
    for row in rows[:: max(1, len(rows) // _SCATTERED)]:
        covariance = (scaled := weights[row][:, None] * values[row[:2]]).T @ scaled
        if not np.isfinite(covariance).all():  # the squares of values above 1e154
            return None
        variances, axes = np.linalg.eigh(covariance)
        use = variances > 1e-6 * variances.max(initial=1e-300)
        # Along these axes an error and the output itself, in units of what dropped weights make of them.
        error, output = (axes.T[use] @ x / np.sqrt(variances[use]) for x in (theirs[row] - right[row], right[row]))
        if use.any():
            by_length = float(((theirs[row] - right[row]) ** 2).sum() / variances.sum())
            estimates.append((float((error**2).mean()), by_length, float(error @ output), float(output @ output)))
    if len(estimates) < _FEW:
        return None
    ratios, lengths, along, squares = np.array(estimates).T  # p/(1-p), estimated from each row in two ways
    ratio = float(ratios.mean())
    rate = ratio / (1 + ratio)
    if not 0.005 < rate < 0.95 or abs(along.sum()) > 3.5 * np.sqrt(ratio * squares.sum()) + 0.01 * squares.sum():
        return None
    # The relative standard error of the mean; where rates are low, a few rows with large errors decide it.
    standard_error = float(lengths.std() / lengths.mean()) / np.sqrt(len(lengths))
    between_rows = max(1.8, 1 / max(0.2, 1 - 7 * standard_error))  # allowed between quarters of rows
    quarters = [part.mean() for part in np.array_split(ratios[np.argsort(squares)], 4)]
    if max(quarters) > between_rows * ratio or min(quarters) < ratio / between_rows:
        return None
    between_ways = max(1.25, 1 + 4 * standard_error)
    return rate if ratio / between_ways < lengths.mean() < between_ways * ratio else None
