"""Which query may attend to which key: the one definition of causal, window, lengths, segments, mask and -inf.

Query i of the whole matrix stands at key position p = i + query_offset. It may attend to key j if all of these hold:

    causal            j ≤ p                     window (left, right)   p - left ≤ j ≤ p + right
    kv_lengths        j < kv_lengths            query_lengths          i < query_lengths
    segments          query_segments[i] = kv_segments[j]
    mask, bias        mask[i, j] is True, and bias[i, j] is not -inf
    spans             table[query_spans[i], key_spans[j]] is not -inf

The same definition in three forms: `dense` is the whole mask, for the reference; `tile` is the mask of one block;
`key_span` and `query_span` bound, from positions alone, what a block of queries or of keys has to visit.
"""

import numpy as np

from clearhead.core import spans
from clearhead.core.axes import Array
from clearhead.core.problem import Problem


def positions(problem: Problem, batch: int, rows: slice) -> Array:
    """The key positions at which these queries stand, (queries,)."""
    return _indices(problem.rows[rows]) + problem.query_offset[batch]


def distances(problem: Problem, batch: int, rows: slice, cols: slice) -> Array:
    """|query position - key position|, (queries, keys)."""
    keys = _indices(problem.cols[cols])
    return np.abs(positions(problem, batch, rows)[:, None] - keys)


def tile(problem: Problem, batch: int, head: int, rows: slice, cols: slice) -> Array | bool:
    """The mask of one block, bool (queries, keys); False for a fully masked block, True for a fully visible one."""
    result = _by_position(problem, batch, rows, cols)
    if result is False:
        return False
    for part in _by_content(problem, batch, head, rows, cols):
        if part is False or not np.any(part):
            return False
        if part is not True:
            result = part if result is True else result & part
    if isinstance(result, bool):
        return result
    return bool(result.any()) and (bool(result.all()) or result)


def dense(problem: Problem) -> Array:
    """The whole mask, bool (batch, heads, queries, keys): True where a query may attend to a key."""
    rows, cols = slice(0, problem.queries), slice(0, problem.keys)
    full = np.ones((problem.batch, problem.heads, problem.queries, problem.keys), dtype=bool)
    for batch, head in np.ndindex(full.shape[:2]):
        full[batch, head] = tile(problem, batch, head, rows, cols)
    return full


def reach(problem: Problem) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query may attend to, (left, right); causal is a right of 0."""
    left, right = problem.window
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def spans_of(problem: Problem, batch: int, head: int, rows: slice, cols: slice) -> tuple[Array, Array, Array]:
    """The labels of one block's queries and keys, and its head's table, of a problem with `spans`."""
    assert problem.query_spans is not None
    assert problem.key_spans is not None
    assert problem.span_table is not None
    return problem.query_spans[batch, rows], problem.key_spans[batch, cols], problem.span_table[batch, head]


def key_span(problem: Problem, batch: int, rows: slice) -> slice:
    """The places of keys outside of which none of these queries may attend to any key, judged by position alone."""
    return _within(problem.cols, *_bounds(problem, batch, rows))


def query_span(problem: Problem, batch: int, cols: slice) -> slice:
    """The places of queries outside of which no query may attend to any of these keys, judged by position alone."""
    keys, offset = problem.cols[cols], int(problem.query_offset[batch])
    if not keys:
        return slice(0, 0)
    left, right = reach(problem)
    low = None if right is None else min(keys) - right - offset
    high = None if left is None else max(keys) + left - offset
    if problem.query_lengths is not None:
        last = int(problem.query_lengths[batch]) - 1
        high = last if high is None else min(high, last)
    if problem.kv_lengths is not None and min(keys) >= problem.kv_lengths[batch]:
        return slice(0, 0)
    return _within(problem.rows, low, high)


def _bounds(problem: Problem, batch: int, rows: slice) -> tuple[int | None, int | None]:
    """The first and last key position that any of these queries may attend to; None is no limit."""
    queries, offset = problem.rows[rows], int(problem.query_offset[batch])
    if not queries or (problem.query_lengths is not None and min(queries) >= problem.query_lengths[batch]):
        return 0, -1
    left, right = reach(problem)
    low = None if left is None else min(queries) + offset - left
    high = None if right is None else max(queries) + offset + right
    if problem.kv_lengths is not None:
        last = int(problem.kv_lengths[batch]) - 1
        high = last if high is None else min(high, last)
    return low, high


def _within(axis: range, low: int | None, high: int | None) -> slice:
    """The places on `axis` whose index lies in low..high, both included, as one slice."""
    if axis.step < 0:
        mirrored = _within(axis[::-1], low, high)
        return slice(len(axis) - mirrored.stop, len(axis) - mirrored.start)
    start = 0 if low is None else max(0, -(-(low - axis.start) // axis.step))
    stop = len(axis) if high is None else min(len(axis), (high - axis.start) // axis.step + 1)
    start = min(start, len(axis))
    return slice(start, max(start, stop))


def _by_position(problem: Problem, batch: int, rows: slice, cols: slice) -> Array | bool:
    """Causal, window and lengths in one block; no array is made where the block's corners already decide it."""
    queries, keys = problem.rows[rows], problem.cols[cols]
    low, high = _bounds(problem, batch, rows)
    if not queries or not keys or (low is not None and max(keys) < low) or (high is not None and min(keys) > high):
        return False
    i, j = _indices(queries)[:, None], _indices(keys)
    position = i + problem.query_offset[batch]
    left, right = reach(problem)
    result: Array | bool = True
    if left is not None and min(keys) < position.max() - left:
        result = result & (j >= position - left)
    if right is not None and max(keys) > position.min() + right:
        result = result & (j <= position + right)
    if problem.kv_lengths is not None and max(keys) >= problem.kv_lengths[batch]:
        result = result & (j < problem.kv_lengths[batch])
    if problem.query_lengths is not None and max(queries) >= problem.query_lengths[batch]:
        result = result & (i < problem.query_lengths[batch])
    return result if result is True else np.broadcast_to(result, (len(queries), len(keys)))


def _by_content(problem: Problem, batch: int, head: int, rows: slice, cols: slice) -> list[Array | bool]:
    """Spans, segments, mask and bias in one block, whose values must be read."""
    parts: list[Array | bool] = []
    if problem.span_table is not None:
        parts.append(spans.allowed(*spans_of(problem, batch, head, rows, cols)))
    if problem.query_segments is not None and problem.kv_segments is not None:
        parts.append(problem.query_segments[batch, rows, None] == problem.kv_segments[batch, cols])
    if problem.mask is not None:
        parts.append(problem.mask[batch, head, rows, cols])
    if problem.bias is not None:
        parts.append(~np.isneginf(problem.bias[batch, head, rows, cols]))
    return parts


def _indices(chosen: range) -> Array:
    return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
