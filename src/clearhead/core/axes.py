"""The axes and the one way to write a shape: (batch 2, heads 16, queries 128, d_k 64).

batch · heads · kv_heads · queries · keys · d_k · d_v · d_model
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

QUERY = ("batch", "heads", "queries", "d_k")
KEY = ("batch", "kv_heads", "keys", "d_k")
VALUE = ("batch", "kv_heads", "keys", "d_v")
WEIGHTS = ("batch", "heads", "queries", "keys")


def named(shape: Sequence[int], axes: Sequence[str]) -> str:
    """Write `shape` with the names of its last axes.

    >>> named((16, 128, 64), QUERY)
    '(heads 16, queries 128, d_k 64)'
    """
    extra = max(0, len(shape) - len(axes))
    names = ("batch",) * extra + tuple(axes)[max(0, len(axes) - len(shape)) :]
    return "(" + ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True)) + ")"


def brief(kind: str, parts: Mapping[str, Any]) -> str:
    """One line about an object: arrays by their shape; values that are None are left out.

    >>> brief("Top", {"weights": np.ones((3, 2)), "k": 2, "rest": None})
    'Top(weights (3, 2), k 2)'
    """
    words = (f"{name} {tuple(x.shape) if hasattr(x, 'shape') else x}" for name, x in parts.items() if x is not None)
    return f"{kind}({', '.join(words)})"


def group_size(heads: int, kv_heads: int) -> int:
    """How many query heads share a key or value head: query head h reads key head h // group_size.

    >>> group_size(8, 2), group_size(0, 0)
    (4, 0)
    """
    return heads // max(1, kv_heads)


def heads_first(x: Array) -> Array:
    """View (…, heads, length, d) as (batch, heads, length, d)."""
    if x.ndim == 4:
        return x
    if x.ndim == 2:
        return x[None, None]
    return x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


def split_heads(x: Any, heads: int) -> Any:
    """(…, tokens, heads·width) to (…, heads, tokens, width); an array or a tensor."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)


def join_heads(x: Any) -> Any:
    """(…, heads, tokens, width) to (…, tokens, heads·width)."""
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], x.shape[-3] * x.shape[-1])


def blocks(size: int, block: int) -> list[slice]:
    """Consecutive slices of `block` that cover `size`; the last may be shorter.

    >>> blocks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


def as_slice(chosen: range) -> slice:
    """The slice that selects the indices of `chosen`; a range that runs down to index 0 stops at -1, a slice at None.

    >>> as_slice(range(3, -1, -1)), as_slice(range(-1, 2, -1))
    (slice(3, None, -1), slice(0, 0, None))
    """
    if not chosen:
        return slice(0, 0)
    stop = None if chosen.step < 0 and chosen.stop < 0 else chosen.stop
    return slice(chosen.start, stop, chosen.step)


def as_places(chosen: Array) -> slice | Array:
    """An index that selects the same places as `chosen`: a slice, which copies nothing, where they are evenly spaced.

    >>> as_places(np.array([2, 4, 6])), as_places(np.array([0, 1, 6]))
    (slice(2, 7, 2), array([0, 1, 6]))
    """
    steps = np.unique(np.diff(chosen)) if len(chosen) > 1 else np.ones(1, np.int64)
    if not len(chosen) or len(steps) > 1 or steps[0] == 0:
        return chosen
    step = int(steps[0])
    return as_slice(range(int(chosen[0]), int(chosen[-1]) + (1 if step > 0 else -1), step))


def part_of(x: Any, batches: Array | None, heads: range | None, queries: range | None) -> Any:
    """Take some batches, heads and queries of an array (batch, heads, queries, …); None takes all."""
    x = x[:, slice(None) if heads is None else as_slice(heads), slice(None) if queries is None else as_slice(queries)]
    return x if batches is None else x[as_places(batches)]
