"""Block: the arrays and rules of one block of rows; they broadcast to its matrix of weights."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import WEIGHTS, Array
from clearhead.core.namespace import beside
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS


class BlockPlace(NamedTuple):
    """Where a block lies in the whole matrix."""

    batches: slice
    heads: slice
    rows: slice
    keys: slice


def everything(problem: Problem) -> BlockPlace:
    """The place of the whole matrix."""
    return BlockPlace(*(slice(0, size) for size in (problem.batch, problem.heads, problem.queries, problem.keys)))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Block:
    """The arrays of a block, NumPy's or PyTorch's, and its rules; the matrix is (…, heads, rows, keys).

    A rule that is not in use, or that cannot forbid anything in this block, is None.
    """

    q: Any = None  # (…, heads, rows, d_k)
    k: Any = None  # (…, kv_heads, keys, d_k)
    positions: Any  # (…, 1, rows, 1): where among the keys each query stands
    places: Any  # (keys,)
    scale: Any = 1.0  # or (heads, 1, 1)
    softcap: float | None = None
    bias: Any = None  # (…, heads, rows, keys)
    alibi_slopes: Any = None  # (heads, 1, 1)
    query_spans: Any = None  # (…, 1, rows, 1)
    key_spans: Any = None  # (…, 1, 1, keys)
    span_table: Any = None  # (…, heads, query_spans, key_spans)
    left: int | None = None  # how many keys before its position a query may attend to
    right: int | None = None  # and after it; 0 is causal
    mask: Any = None  # (…, heads, rows, keys)
    queries_there: Any = None  # (…, 1, rows, 1)
    keys_there: Any = None  # (…, 1, 1, keys)
    query_segments: Any = None  # (…, 1, rows, 1)
    kv_segments: Any = None  # (…, 1, 1, keys)
    sinks: Any = None  # (heads, 1, 1)
    seen: Any = None  # where a query may attend to a key, if that was computed before
    unknown: Any = None  # (…, heads, rows, keys), NaN where q or k was; 0 elsewhere

    @property
    def ahead(self) -> Any:
        """The key's position minus the query's, (…, 1, rows, keys)."""
        return self.places - self.positions


_RULES = [one.name for one in fields(Block) if one.name in FIELDS and one.name not in ("scale", "softcap")]


def block_of(problem: Problem, place: BlockPlace, q: Any = None, k: Any = None) -> Block:
    """Make a block of a problem, in the kind of array that q is, or NumPy's without q.

    q (batch, heads, rows, d_k) and k (batch, kv_heads, keys, d_k) are this block's, in the dtype of sums.
    """
    like, at = np.zeros(0) if q is None else q, dict(zip(WEIGHTS, place, strict=True))
    batches, _, rows, keys = place

    def of(name: str) -> Any:
        x, axes = getattr(problem, name), FIELDS[name]
        along = axes if len(axes) == 4 else WEIGHTS[WEIGHTS.index(axes[0]) :]
        index = tuple(at.get(axis, slice(None)) if axis in axes else None for axis in along)
        return None if x is None else beside(x[index], like)

    queries, places = _indices(problem.rows[rows])[:, None], _indices(problem.cols[keys])
    offset, *lengths = (
        None if x is None else _alike(x[batches])[:, None, None, None]
        for x in (problem.query_offset, problem.query_lengths, problem.kv_lengths)
    )
    positions = queries + offset
    there = [None if size is None else at < size for at, size in zip((queries, places), lengths, strict=True)]
    left, right = problem.reach
    if positions.size and places.size:
        left = None if left is None or positions.max() - places.min() <= left else left
        right = None if right is None or places.max() - positions.min() <= right else right
    there = [None if x is None or x.all() else beside(x, like) for x in there]
    return Block(
        q=q, k=k, positions=beside(positions, like), places=beside(places, like),
        scale=of("scale") if problem.one_scale is None else problem.one_scale, softcap=problem.softcap,
        left=left, right=right, queries_there=there[0], keys_there=there[1], **{name: of(name) for name in _RULES},
    )  # fmt: skip


def _indices(chosen: range) -> Array:
    return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)


def _alike(x: Array) -> Array:
    """Numbers for each batch entry, or one of them where all are equal."""
    return x[:1] if (x == x[:1]).all() else x
