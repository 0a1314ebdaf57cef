"""What kernels do to the softmax: blocks of keys with their classic bugs, and sums in a narrow dtype."""

from typing import Any

import numpy as np

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array


def tiled(what: str, size: int, x: Array) -> tuple[Array, Array, Array]:
    """An online softmax over blocks of keys with the bug `what`: powers, their total, and the final maximum."""
    block = np.arange(x.shape[-1]) // size
    running = np.maximum.accumulate(np.maximum.reduceat(x, np.arange(0, x.shape[-1], size), axis=-1), axis=-1)
    running = np.where(np.isneginf(running), x.dtype.type(0), running)
    final = running[..., -1:]
    right = np.exp(x - final)
    if what in ("averaged", "unshifted", "nan"):
        return *_merged(what, size, x), final
    if what.startswith("last"):
        last = np.where(np.isneginf(x), -1, block).max(axis=-1, keepdims=True)
        powers = np.where(block == last, right, x.dtype.type(0))
        return powers, (right if what == "last values" else powers).sum(axis=-1, keepdims=True), final
    stale = np.exp(x - running[..., block])  # what each block adds, as if no later block raised the maximum
    powers = right if what == "rescale sum" else stale
    return powers, (right if what == "rescale values" else stale).sum(axis=-1, keepdims=True), final


def _merged(what: str, size: int, x: Array) -> tuple[Array, Array]:
    """Blocks that are merged wrongly: powers and their total."""
    starts = np.arange(0, x.shape[-1], size)
    block = np.arange(x.shape[-1]) // size
    tops = np.maximum.reduceat(x, starts, axis=-1)
    local = np.exp(x - np.where(np.isneginf(tops), x.dtype.type(0), tops)[..., block])
    if what == "unshifted":  # each block by its own maximum
        return local, local.sum(axis=-1, keepdims=True)
    if what == "averaged":
        sums = np.add.reduceat(local, starts, axis=-1)[..., block]
        return np.divide(local, sums, out=np.zeros_like(local), where=sums != 0), np.full_like(x[..., :1], len(starts))
    first = np.isneginf(tops[..., :1])  # exp(-inf - -inf), which no later block mends
    peak = x.max(axis=-1, keepdims=True)
    powers = np.exp(x - np.where(np.isneginf(peak), x.dtype.type(0), peak))
    return powers, np.where(first, np.nan, powers.sum(axis=-1, keepdims=True))


def rounded_to(x: Array, dtype: str) -> Array:
    """Rounded to a narrow dtype and back."""
    return x.astype(dtype_named(dtype)).astype(x.dtype)


def dtype_named(dtype: str) -> np.dtype[Any]:
    """The dtype of this name; NumPy does not know bfloat16 itself."""
    return bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


def sum_in_half(powers: Array, dtype: str) -> Array:
    """Σ_j p_j over keys, each partial sum rounded."""
    total = np.zeros_like(powers[..., :1])
    for j in range(powers.shape[-1]):
        total = rounded_to(total + powers[..., j : j + 1], dtype)
    return total


def product_in_half(powers: Array, values: Array, dtype: str) -> Array:
    """Σ_j p_j·v_j over keys, each partial sum rounded."""
    total = np.zeros((*powers.shape[:-1], values.shape[-1]), powers.dtype)
    for j in range(powers.shape[-1]):
        total = rounded_to(total + powers[..., j : j + 1] * values[..., j : j + 1, :], dtype)
    return total
