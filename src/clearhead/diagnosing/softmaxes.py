"""What stands in the softmax's place: over other axes, with another denominator, or in blocks with their classic bugs.

All are functions of the logits, -inf where hidden; the definition's softmax does the work where it can.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.core.definition import softmax

AXES = {"queries": (-2,), "matrix": (-2, -1), "heads": (1,), "batch": (0,), "all": (0, 1, 2, 3)}


def over(axes: tuple[int, ...], x: Array) -> Array:
    """The softmax along these axes together."""
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(x, axes, last)
    flat = moved.reshape(*moved.shape[: -len(axes)], -1) if len(axes) < x.ndim else moved.reshape(1, -1)
    return np.asarray(np.moveaxis(softmax(flat)[1].reshape(moved.shape), last, axes))


Denominator = Callable[[Array, Array], Any]  # of a row's largest logit m and log-sum-exp L, (…, rows, 1)

DENOMINATORS: dict[str, Denominator] = {  # the logarithm of what each power is divided by
    "no sum": lambda m, _: m,
    "no sum, no maximum": lambda *_: 0.0,
    "one more": lambda _, total: np.logaddexp(total, 0.0),
    "one more, shifted": np.logaddexp,
    "unkept sum": lambda m, total: m + (total - m).swapaxes(-1, -2),  # they lie along the keys
    "unkept sum and maximum": lambda _, total: total.swapaxes(-1, -2),
}


def divided(x: Array, denominator: Denominator, sinks: Array | None = None) -> Array:
    """Powers of the logits by another denominator; m is the largest of the keys, the sinks count in L."""
    m = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    total = softmax(x, sinks)[0].logsumexp[..., None]
    return np.where(np.isneginf(x), 0.0, np.exp(x - denominator(m, total)))


def overflowing(x: Array, dtype: str, sinks: Array | None) -> Array:
    """The softmax in this dtype without a row's maximum subtracted."""
    powers = np.exp(x.astype(dtype)).astype(x.dtype)
    total = powers.astype(dtype).sum(axis=-1, keepdims=True).astype(x.dtype)
    total = np.where((x > -np.inf).any(axis=-1, keepdims=True) & (total == 0), np.nan, total)
    return quotient(powers, total if sinks is None else total + np.exp(sinks))


def _finite(peak: Array) -> Array:
    return np.where(np.isneginf(peak), peak.dtype.type(0), peak)


def in_blocks(bug: tuple[str, int], x: Array, sinks: Array | None) -> Array:
    """An online softmax over blocks of keys of a size, with a bug."""
    what, size = bug
    block, starts = np.arange(x.shape[-1]) // size, np.arange(0, x.shape[-1], size)
    tops = np.maximum.reduceat(x, starts, axis=-1)
    running = _finite(np.maximum.accumulate(tops, axis=-1))
    final = running[..., -1:]
    powers = total = right = np.exp(x - final)
    if what in ("unshifted", "averaged"):  # each block by its own maximum
        powers = total = np.exp(x - _finite(tops)[..., block])
        if what == "averaged":
            sums = np.add.reduceat(powers, starts, axis=-1)[..., block]
            powers, total = quotient(powers, sums), np.full_like(x[..., :1], len(starts))
    elif what == "nan":  # of exp(-inf - -inf) in the first block, which no later block mends
        total = np.where(np.isneginf(tops[..., :1]), np.nan, right)
    elif what.startswith("last"):
        last = np.where(np.isneginf(x), -1, block).max(axis=-1, keepdims=True)
        powers = np.where(block == last, right, x.dtype.type(0))
        total = right if what == "last values" else powers
    else:
        stale = np.exp(x - running[..., block])  # what each block adds, as if no later block raised the maximum
        powers, total = (right if what == kept else stale for kept in ("rescale sum", "rescale values"))
    sums = total.sum(axis=-1, keepdims=True)
    return quotient(powers, sums if sinks is None else sums + np.exp(sinks - final))


def quotient(powers: Array, total: Array) -> Array:
    """Powers / total, 0 where the total is 0."""
    return np.divide(powers, total, out=np.zeros_like(powers), where=total != 0)


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)
