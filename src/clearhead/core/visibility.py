"""Which query may attend to which key: the one definition of causal, window, lengths, segments, mask and -inf.

Query i of the whole matrix stands at key position p = i + query_offset. It may attend to key j if all of these hold:

    causal            j ≤ p                     window (left, right)   p - left ≤ j ≤ p + right
    kv_lengths        j < kv_lengths            query_lengths          i < query_lengths
    segments          query_segments[i] = kv_segments[j]
    mask, bias        mask[i, j] is True, and bias[i, j] is not -inf
    spans             table[query_spans[i], key_spans[j]] is not -inf

`visible` is the mask of a block, in NumPy or in PyTorch; `key_span` bounds, from positions alone, the keys that a block
of queries has to visit.
"""

from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.block import Block, BlockPlace, block_of, everything
from clearhead.core.problem import Problem
from clearhead.core.spans import added


def visible(x: Block) -> Any:
    """Where a query may attend to a key, bool, broadcasts to (…, heads, rows, keys); None: everywhere."""
    if x.seen is not None:
        return x.seen
    seen = [part for part in (x.mask, x.queries_there, x.keys_there) if part is not None]
    if x.right is not None:
        seen.append(x.places <= x.positions + x.right)
    if x.left is not None:
        seen.append(x.places >= x.positions - x.left)
    if x.query_segments is not None:
        seen.append(x.query_segments == x.kv_segments)
    if x.bias is not None:
        seen.append(x.bias != -np.inf)
    if x.span_table is not None:
        seen.append(added(x.query_spans, x.key_spans, x.span_table) != -np.inf)
    return reduce(and_, seen) if seen else None


def tile(problem: Problem, batch: int, head: int, rows: slice, cols: slice) -> Array | bool:
    """The mask of one block, bool (queries, keys); False for a fully masked block, True for a fully visible one."""
    place = BlockPlace(slice(batch, batch + 1), slice(head, head + 1), rows, cols)
    shape = len(problem.rows[rows]), len(problem.cols[cols])
    if 0 in shape:
        return False
    seen = visible(block_of(problem, place))
    if seen is None or not seen.any():
        return seen is None
    result: Array = np.broadcast_to(seen, (1, 1, *shape))[0, 0]
    return bool(result.all()) or result


def dense(problem: Problem) -> Array:
    """The whole mask, bool (batch, heads, queries, keys): True where a query may attend to a key."""
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    seen = visible(block_of(problem, everything(problem)))
    return np.ones(shape, dtype=bool) if seen is None else np.broadcast_to(seen, shape).copy()


def key_span(problem: Problem, batch: int, rows: slice) -> slice:
    """The slice of keys that any of these queries may attend to, judged by position, lengths and window alone."""
    queries, offset = problem.rows[rows], int(problem.query_offset[batch])
    if not queries or (problem.query_lengths is not None and min(queries) >= problem.query_lengths[batch]):
        return slice(0, 0)
    left, right = problem.reach
    low = None if left is None else min(queries) + offset - left
    high = None if right is None else max(queries) + offset + right
    if problem.kv_lengths is not None:
        last = int(problem.kv_lengths[batch]) - 1
        high = last if high is None else min(high, last)
    return _within(problem.cols, low, high)


def _within(axis: range, low: int | None, high: int | None) -> slice:
    """The places on `axis` whose index lies in low..high, both included, as one slice."""
    if axis.step < 0:
        mirrored = _within(axis[::-1], low, high)
        return slice(len(axis) - mirrored.stop, len(axis) - mirrored.start)
    start = 0 if low is None else max(0, -(-(low - axis.start) // axis.step))
    stop = len(axis) if high is None else min(len(axis), (high - axis.start) // axis.step + 1)
    start = min(start, len(axis))
    return slice(start, max(start, stop))
