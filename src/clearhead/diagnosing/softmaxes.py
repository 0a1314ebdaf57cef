"""The softmax of a recipe, right or wrong: powers of the logits, and what they are divided by."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.recipe import Recipe
from clearhead.diagnosing.tiles import rounded_to, sum_in_half, tiled


def powers(
    recipe: Recipe, x: Array, extras: list[tuple[Array, int]], rounded: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """The numerators and the denominator, up to a common factor of each row.

    x        logits, (batch, heads, rows, keys); -inf where hidden
    extras   logits in the denominator that belong to no key, and how often each counts
    """
    if recipe.powers == "2":
        x, extras = x * x.dtype.type(np.log(2)), [(extra * np.log(2), count) for extra, count in extras]
    if recipe.blocks[0]:
        result, total, final = tiled(*recipe.blocks, x)
        for extra, count in extras:
            total = total + count * np.exp(extra - final)
        return result, total
    axis: Any = {"keys": -1, "queries": -2, "matrix": (-2, -1), "heads": 1, "batch": 0, "all": None}[recipe.axis]
    own_peak = _finite(x.max(axis=axis, keepdims=True, initial=-np.inf))
    peak = own_peak
    for extra, _ in extras if recipe.sinks != "unshifted" else ():
        peak = np.maximum(peak, extra)
    if recipe.overflow:
        result = np.exp(x.astype(recipe.overflow)).astype(x.dtype)
        total = result.astype(recipe.overflow).sum(axis=axis, keepdims=True).astype(x.dtype)
        live = x.max(axis=axis, keepdims=True, initial=-np.inf) > -np.inf
        return result, np.where(live & (total == 0), np.nan, total)
    if recipe.softmax == "no sum, no maximum":
        return np.exp(x), np.ones_like(peak)
    if recipe.softmax == "unkept sum and maximum":
        peak = peak.swapaxes(-1, -2)
    result = rounded(np.exp(x - peak))
    if recipe.half == "powers":
        result = rounded_to(result, recipe.half_dtype)
    if recipe.softmax == "no sum":
        return rounded(np.exp(x - own_peak)), np.ones_like(peak)
    total = sum_in_half(result, recipe.half_dtype) if recipe.half == "sum" else result.sum(axis=axis, keepdims=True)
    for extra, count in extras:
        total = total + count * np.exp(extra if recipe.sinks == "unshifted" else extra - peak)
    if recipe.softmax == "one more, shifted":
        total = total + np.exp(own_peak - peak)
    return result, rounded(total.swapaxes(-1, -2) if recipe.softmax.startswith("unkept") else total)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _logarithm(x: Array) -> Array:
    peak = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.asarray(x - peak - np.log(np.exp(x - peak).sum(axis=-1, keepdims=True)))


SCORED = {"sigmoid": _sigmoid, "logarithm": _logarithm}  # weights that come from each logit, not from a quotient


def _finite(peak: Array) -> Array:
    return np.where(np.isneginf(peak), peak.dtype.type(0), peak)
