"""The softmax of a recipe, right or wrong: powers of the logits, and what they are divided by.

Also what kernels do to it: blocks of keys with their classic bugs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.diagnosing.recipe import Recipe


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
    top = x.max(axis=axis, keepdims=True, initial=-np.inf)
    peak = row_peak = _finite(top)
    for extra, _ in extras if recipe.sinks != "unshifted" else ():
        peak = np.maximum(peak, extra)
    if recipe.overflow:
        result = np.exp(x.astype(recipe.overflow)).astype(x.dtype)
        total = result.astype(recipe.overflow).sum(axis=axis, keepdims=True).astype(x.dtype)
        return result, np.where((top > -np.inf) & (total == 0), np.nan, total)
    if recipe.softmax == "no sum, no maximum":
        return np.exp(x), np.ones_like(peak)
    if recipe.softmax == "unkept sum and maximum":
        peak = peak.swapaxes(-1, -2)
    result = rounded(np.exp(x - peak))
    if recipe.softmax == "no sum":
        return rounded(np.exp(x - row_peak)), np.ones_like(peak)
    total = result.sum(axis=axis, keepdims=True)
    for extra, count in extras:
        total = total + count * np.exp(extra if recipe.sinks == "unshifted" else extra - peak)
    if recipe.softmax == "one more, shifted":
        total = total + np.exp(row_peak - peak)
    return result, rounded(total.swapaxes(-1, -2) if recipe.softmax.startswith("unkept") else total)


def scored(softmax: str, x: Array) -> Array:
    """Weights that come from each logit, not from a quotient."""
    if softmax == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-x)))
    peak = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.asarray(x - peak - np.log(np.exp(x - peak).sum(axis=-1, keepdims=True)))


def _finite(peak: Array) -> Array:
    return np.where(np.isneginf(peak), peak.dtype.type(0), peak)


def tiled(what: str, size: int, x: Array) -> tuple[Array, Array, Array]:
    """An online softmax over blocks of keys with the bug `what`: powers, their total, and the final maximum."""
    block, starts = np.arange(x.shape[-1]) // size, np.arange(0, x.shape[-1], size)
    tops = np.maximum.reduceat(x, starts, axis=-1)
    running = _finite(np.maximum.accumulate(tops, axis=-1))
    final = running[..., -1:]
    if what in ("unshifted", "averaged"):  # each block by its own maximum
        local = np.exp(x - _finite(tops)[..., block])
        if what == "unshifted":
            return local, local.sum(axis=-1, keepdims=True), final
        sums = np.add.reduceat(local, starts, axis=-1)[..., block]
        means = np.divide(local, sums, out=np.zeros_like(local), where=sums != 0)
        return means, np.full_like(x[..., :1], len(starts)), final
    right = np.exp(x - final)
    if what == "nan":  # of exp(-inf - -inf) in the first block, which no later block mends
        return right, np.where(np.isneginf(tops[..., :1]), np.nan, right.sum(axis=-1, keepdims=True)), final
    if what.startswith("last"):
        last = np.where(np.isneginf(x), -1, block).max(axis=-1, keepdims=True)
        powers = np.where(block == last, right, x.dtype.type(0))
        return powers, (right if what == "last values" else powers).sum(axis=-1, keepdims=True), final
    stale = np.exp(x - running[..., block])  # what each block adds, as if no later block raised the maximum
    powers = right if what == "rescale sum" else stale
    return powers, (right if what == "rescale values" else stale).sum(axis=-1, keepdims=True), final


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)
