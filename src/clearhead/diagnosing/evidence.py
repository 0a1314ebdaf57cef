"""Mistakes that leave no exact numbers: rounding to a narrow dtype, and dropout, told by their size and statistics."""

import numpy as np

from clearhead.axes import Array
from clearhead.diagnosing.fitting import FACTOR, Fit, differences, eps, largest
from clearhead.diagnosing.recipe import Part, Recipe
from clearhead.diagnosing.tiles import named
from clearhead.diagnosing.workings import Workings

_COARSE = 0.1  # rounding, however unlucky, leaves numbers this close (relative root mean square)


def near(fit: Fit, base: Recipe, part: Part, work: Workings | None = None) -> bool:
    """Do theirs lie as close to the recipe's numbers as rounding could leave them?"""
    theirs, made = fit.theirs(part), (work or fit.exact).answer(base, part)
    return made.shape == theirs.shape and _size(theirs - made) <= _COARSE * _size(theirs)


def off(fit: Fit, base: Recipe, part: Part) -> float:
    """How far theirs lie from the recipe's numbers, root mean square."""
    theirs, made = fit.theirs(part), fit.exact.answer(base, part)
    return _size(theirs - made) if made.shape == theirs.shape else float("inf")


def around(fit: Fit, base: Recipe, part: Part, work: Workings) -> bool:
    """Could theirs scatter around the recipe's numbers, neither larger nor smaller in all?"""
    theirs, made = fit.theirs(part), work.answer(base, part)
    if made.shape != theirs.shape or not np.isfinite(theirs).all() or not np.isfinite(made).all():
        return False
    return abs(float((theirs * made).sum()) - float((made**2).sum())) <= 0.6 * float((made**2).sum())


def rounding(fit: Fit, base: Recipe, halved: Recipe, part: Part) -> tuple[float, float] | None:
    """What is left when the base is rounded as `halved` says, and what was there before; None if that explains little.

    The order of a sum is not known, so that the numbers agree only in part: less than half must be left.
    """
    theirs = fit.theirs(part)
    plain, made = fit.exact.answer(base, part), fit.exact.answer(halved, part)
    before, left = _size(theirs - plain), _size(theirs - made)
    if not before > fit.tolerance(base, part) / FACTOR or not left < 0.5 * before:
        return None
    return float(differences(theirs, made).max(initial=0)), float(differences(theirs, plain).max(initial=0))


def somewhere(fit: Fit, base: Recipe, dtype: str, part: Part) -> float | None:
    """How unlike the error of a plain run in a narrow dtype theirs is, as a ratio of sizes; None where it cannot be.

    No number may be further off than such a run comes, and the error may be no share of the numbers.
    """
    exact = fit.exact.answer(base, part)
    theirs = fit.theirs(part)
    narrow = Workings(fit.given, named(dtype)).answer(base, part).astype(np.float64)
    error, apart = narrow - exact, theirs - exact
    worst = float(np.abs(error[np.isfinite(error)]).max(initial=0.0))
    if not differences(theirs, exact).max(initial=0) <= FACTOR * (worst + eps(named(dtype)) * largest(exact)):
        return None
    together = float((apart * exact).sum()) / (np.linalg.norm(apart) * np.linalg.norm(exact) + 1e-300)
    if abs(together) >= max(0.5, 4 / np.sqrt(apart.size)):
        return None
    ratio = _size(apart) / max(_size(error), 1e-300)
    return max(ratio, 1 / max(ratio, 1e-300))


def dropout(fit: Fit, base: Recipe, part: Part, *, strict: bool = False) -> float | None:
    """The rate, where theirs scatter around the base as dropped weights make them: Var o = p/(1-p)·Σ a²·v².

    strict, for a base that is a mistake itself: many bases come near by chance, so the scatter must fit well.
    """
    theirs = fit.theirs(part)
    if not np.isfinite(theirs).all():
        return None
    if fit.given.stage == "weights":
        return _dropped_weights(theirs, fit.exact.answer(base, part))
    if fit.given.stage != "output" or fit.given.merged or base.half or base.values != "v" or base.turned:
        return None
    weights, right = fit.exact.weights(base, part), fit.exact.output(base, part)
    values = fit.exact.serving(base, fit.exact.operand(base, "v"), part.heads)
    if right.shape != theirs.shape or not np.isfinite(right).all():
        return None
    spread = weights**2 @ values**2
    off = theirs - right
    use = spread > 1e-12 * spread.max(initial=0)
    if use.sum() < 64:
        return None
    each = (off**2).sum(axis=-1) / np.maximum(spread.sum(axis=-1), 1e-300)  # every row alike, whatever its keys
    live = use.any(axis=-1)
    ratio = float(each[live].mean())
    share = float((off * right)[use].sum() / (right[use] ** 2).sum())
    along = weights**2 * (right @ values.swapaxes(-1, -2)) ** 2  # a dropped weight takes from all columns at once
    doubt = float(np.sqrt(ratio * along.sum()) / (right[use] ** 2).sum())
    rate = ratio / (1 + ratio)
    if abs(share) > 3.5 * doubt + 0.01 or not 0.005 < rate < 0.95:
        return None
    order = np.argsort(spread.sum(axis=-1)[live])
    quarters = [float(each[live][at].mean()) for at in np.array_split(order, 4)]
    luck = (
        float(each[live].std()) / ratio / np.sqrt(live.sum())
    )  # of the mean; few heavy rows decide where rates are low
    apart = max(1.8 if strict else 3.0, 1 / max(0.2, 1 - 7 * luck))  # how unlike quarters of the rows may be
    alike = max(1.25 if strict else 1.6, 1 + 4 * luck)  # how unlike the whole covariance may be
    if max(quarters) > apart * ratio or min(quarters) < ratio / apart:
        return None
    return rate if ratio / alike < _shaped(weights, values, off, ratio) < alike * ratio else None


def _shaped(weights: Array, values: Array, off: Array, ratio: float) -> float:
    """The same ratio from the whole covariance Σ_j a_j²·v_j·v_jᵀ, which only dropped weights have."""
    width = values.shape[-1]
    found = []
    places = list(np.ndindex(weights.shape[:3]))
    for batch, head, row in places[:: max(1, len(places) // 256)]:
        scaled = weights[batch, head, row, :, None] * values[batch, head]
        spread = scaled.T @ scaled
        if np.linalg.cond(spread) < 1e6:
            found.append(float(off[batch, head, row] @ np.linalg.solve(spread, off[batch, head, row])) / width)
    return float(np.mean(found)) if len(found) >= 4 else ratio


def _dropped_weights(theirs: Array, right: Array) -> float | None:
    """Each weight 0 or scaled up by the same number."""
    if right.shape != theirs.shape:
        return None
    live = right > 1e-6 * right.max(initial=0)
    gone = live & (theirs == 0)
    kept = live & ~gone
    if not kept.any() or not gone.any():
        return None
    scale = theirs[kept] / right[kept]
    middle = float(np.median(scale))
    rate = 1 - 1 / middle if middle > 1 else 0.0
    share = gone.sum() / live.sum()
    steady = float(np.abs(scale / middle - 1).max()) < 1e-2
    return rate if steady and abs(share - rate) < 5 * np.sqrt(0.25 / live.sum()) + 0.02 else None


def _size(x: Array) -> float:
    """Root mean square; infinite where a number is missing."""
    size = float(np.sqrt(np.mean(x**2))) if x.size else 0.0
    return size if np.isfinite(size) else float("inf")
