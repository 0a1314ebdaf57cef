"""Dropout, shown: where a row sees at most d_v keys its weights can be solved for, and each is 0 or a/(1 - p)."""

from typing import NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import Fit
from clearhead.diagnosing.recipe import RIGHT, Recipe, Selection

_ROWS = 512  # the most that are solved for
_DECIDED, _DECIDED_IN_PAIRS = 12, 64  # the fewest weights that must be decided, alone and beside another mistake
_CLUSTERED = 8.0  # standard deviations by which the zeros of the keys may differ from chance
_SHARPNESS = 0.05  # a solved weight is decided where its error is at most this part of the weight itself


class Solved(NamedTuple):
    """Weights that were solved for: w_j/a_j, how exact each is, and its key."""

    ratios: Array
    errors: Array
    keys: Array


class Dropped(NamedTuple):
    """The rate, how many weights were solved for, how many of them are 0, and what the others are multiplied by."""

    rate: float
    solved: int
    zeros: int
    factor: float


def dropout(fit: Fit, base: Recipe, selection: Selection) -> Dropped | None:
    """The rate p of weights that were dropped at random, where their own weights can be read off; else None.

    A row's output is Σ_j w_j·v_j over the keys it sees. With at most d_v of them, w follows from the output. Each w_j
    must then be 0 or a_j/(1 - p), with one p for all rows, and as many zeros as that p makes likely.
    """
    theirs, fewest = fit.theirs(selection), _DECIDED if base == RIGHT else _DECIDED_IN_PAIRS
    if fit.inputs.stage == "weights":
        right = fit.exact.answer(base, selection)
        if right.shape != theirs.shape or not np.isfinite(theirs).all():
            return None
        live = right > 1e-6 * right.max(initial=0)
        solved = Solved(theirs[live] / right[live], np.full(int(live.sum()), 1e-3), np.nonzero(live)[-1])
        return _rate(solved, fewest)
    if fit.inputs.stage != "output" or fit.inputs.merged or base.half or base.values != "v" or base.turned:
        return None
    first = fit.exact.selection(selection.heads[:1], selection.rows)
    if len(selection.heads) > 1 and _read_off(fit, base, first) is None:  # before all heads are computed
        return None
    read = _read_off(fit, base, selection)
    return None if read is None else _rate(read, fewest)


def _read_off(fit: Fit, base: Recipe, selection: Selection) -> Solved | None:
    """The weights of these rows as far as they can be solved for; None where the outputs are no sums of values."""
    theirs = fit.theirs(selection)
    weights = fit.exact.weights(base, selection)
    values = fit.exact.served(base, "v", selection.heads)
    if theirs.shape[-1] != values.shape[-1] or weights.shape[-1] != values.shape[-2]:
        return None
    return _solved(theirs, weights, values, fit.tolerance(base, selection))


def _solved(theirs: Array, weights: Array, values: Array, noise: float) -> Solved | None:
    """The weights that can be read off; None where the outputs are no such sums."""
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
    return Solved(*(np.concatenate(parts) for parts in (ratios, errors, keys)))


def _rate(solved: Solved, fewest: int) -> Dropped | None:
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
    if not _at_random(~kept, keys, rate):
        return None
    return Dropped(rate, len(ratios), int((~kept).sum()), scale)


def _at_random(dropped: Array, keys: Array, rate: float) -> bool:
    """Is no key dropped much more often than others? A mask, or an empty slot, drops the same keys in all rows."""
    solved, zeros = np.bincount(keys), np.bincount(keys, weights=dropped)
    spread = float(((zeros - rate * solved) ** 2).sum()) / (rate * (1 - rate) * len(keys))
    return spread < 1 + _CLUSTERED * float(np.sqrt(2 * (solved**2).sum())) / len(keys)
