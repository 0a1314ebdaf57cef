"""The blocks that the portable engine computes with: a head's keys and values, and tiles of its logits and weights.

Blocks are padded so that every matrix product has the same shape whatever part of the matrix is requested: the bits of
a row do not depend on other rows. products.py makes them independent of the number of threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.problem import Problem
from clearhead.core.rule_values import within_range
from clearhead.core.state import State, rounded
from clearhead.engines.online_softmax import Values
from clearhead.engines.products import pieces, product

QUERY_BLOCK, KEY_BLOCK = 64, 512


@dataclass(frozen=True, slots=True)
class Head:
    """One query head with its keys and values, in float64 blocks of equal size, the last one padded with zeros."""

    batch: int
    index: int
    keys: list[Array]  # for each block, the pieces of (d_k, KEY_BLOCK)
    packed: list[Values] | None
    d_v: int | None

    def values(self, start: int) -> Values | None:
        return None if self.packed is None else self.packed[start // KEY_BLOCK]


def heads_of(problem: Problem, k: Array, v: Array | None = None) -> Iterator[Head]:
    """Every query head; keys and values are packed once for all the query heads that share them."""
    for batch in range(problem.batch):
        key_head = value_head = -1
        keys: list[Array] = []
        values = None
        for head in range(problem.heads):
            if problem.kv_head_of(head) != key_head:
                key_head = problem.kv_head_of(head)
                keys = [pieces(block.T) for block in packed(k[batch, key_head])]
            if v is not None and head // group_size(problem.heads, v.shape[1]) != value_head:
                value_head = head // group_size(problem.heads, v.shape[1])
                values = [Values.of(block) for block in packed(v[batch, value_head])]
            yield Head(batch, head, keys, values, None if v is None else v.shape[-1])


def packed(x: Array) -> Array:
    """The rows of x in float64 blocks, (blocks, KEY_BLOCK, columns), the last one padded with zeros."""
    count = -(-len(x) // KEY_BLOCK)
    return padded(x, count * KEY_BLOCK).reshape(count, KEY_BLOCK, x.shape[-1])


def padded(x: Array, length: int) -> Array:
    """The rows of x in float64, with rows of zeros up to this length."""
    full = np.zeros((length, x.shape[-1]))
    full[: len(x)] = x
    return full


def key_blocks(problem: Problem, batch: int, rows: slice) -> Iterator[slice]:
    """The key blocks visible to some of these queries; blocks always start at multiples of KEY_BLOCK."""
    span = visibility.key_span(problem, batch, rows)
    for start in range(span.start - span.start % KEY_BLOCK, span.stop, KEY_BLOCK):
        yield slice(start, min(start + KEY_BLOCK, problem.keys))


def logits_of(problem: Problem, head: Head, rows: slice, cols: slice, queries: Array) -> Array | None:
    """The logits of a tile, (QUERY_BLOCK, KEY_BLOCK), -inf where masked or past the end; None if all are masked."""
    visible = visibility.tile(problem, head.batch, head.index, rows, cols)
    if visible is False:
        return None
    height, width = rows.stop - rows.start, cols.stop - cols.start
    logits = product(queries, head.keys[cols.start // KEY_BLOCK], KEY_BLOCK)
    logits *= problem.scale[head.index]
    if problem.softcap is not None:
        np.tanh(logits / problem.softcap, out=logits)
        logits *= problem.softcap
    if problem.bias is not None:
        bias = problem.bias[head.batch, head.index, rows, cols]
        logits[:height, :width] += within_range(bias)
    if problem.alibi_slopes is not None:
        far = visibility.distances(problem, head.batch, rows, cols)
        logits[:height, :width] -= problem.alibi_slopes[head.index] * far
    if problem.span_table is not None:
        logits[:height, :width] += spans.added(*visibility.spans_of(problem, head.batch, head.index, rows, cols))
    logits = rounded(logits, statistics_dtype(problem.dtype))
    if visible is not True:
        logits[:height, :width][~visible] = -np.inf
    logits[:, width:] = -np.inf
    logits[height:] = -np.inf
    return logits


def softcap_grad(problem: Problem, head: Head, block: int, queries: Array) -> Array | float:
    """The derivative of the softcap, 1 - tanh²(score / c), (QUERY_BLOCK, KEY_BLOCK); 1 where there is none."""
    if problem.softcap is None:
        return 1.0
    scores = problem.scale[head.index] * product(queries, head.keys[block], KEY_BLOCK)
    grad: Array = 1 - np.tanh(scores / problem.softcap) ** 2
    return grad


def weight_tiles(
    problem: Problem, head: Head, q: Array, state: State, only: set[int] | None = None
) -> Iterator[tuple[slice, slice, Array]]:
    """(queries, keys, weights) for every block that is not fully masked; weights are zero past the end."""
    for rows, cols, logs in log_weight_tiles(problem, head, q, state, only):
        yield rows, cols, np.exp(logs, out=logs)


def log_weight_tiles(
    problem: Problem, head: Head, q: Array, state: State, only: set[int] | None = None
) -> Iterator[tuple[slice, slice, Array]]:
    """The same blocks as ln a = (logit - m) - l, by the rows' state; -inf where masked or past the end."""
    length = -(-problem.queries // QUERY_BLOCK) * QUERY_BLOCK
    largest, log_sum = (padded(x[head.batch, head.index][:, None], length) for x in state)
    largest[np.isneginf(largest)] = 0.0
    queries = padded(q[head.batch, head.index], length)
    for cols in blocks(problem.keys, KEY_BLOCK):
        span = visibility.query_span(problem, head.batch, cols)
        for start in range(span.start - span.start % QUERY_BLOCK, span.stop, QUERY_BLOCK):
            if only is not None and start not in only:
                continue
            rows = slice(start, min(start + QUERY_BLOCK, problem.queries))
            logits = logits_of(problem, head, rows, cols, queries[start : start + QUERY_BLOCK])
            if logits is not None:
                block = slice(start, start + QUERY_BLOCK)
                hidden = None if np.isfinite(log_sum[block]).all() else np.isneginf(logits)
                logits -= largest[block]
                logits -= log_sum[block]
                if hidden is not None:  # a NaN in a row must not reach keys masked for that row
                    logits[hidden] = -np.inf
                yield rows, cols, logits


def distances(problem: Problem, batch: int, rows: slice, cols: slice) -> Array:
    """|position of i - j| in a tile (QUERY_BLOCK, KEY_BLOCK), 0 past the end."""
    far = np.zeros((QUERY_BLOCK, KEY_BLOCK))
    far[: rows.stop - rows.start, : cols.stop - cols.start] = visibility.distances(problem, batch, rows, cols)
    return far


def add_groups(total: Array, weights: Array, query_labels: Array, key_labels: Array) -> None:
    """Add a block's weights to the sums of its groups; labels below 0 belong to no group."""
    query_groups, left = _one_hot(query_labels)
    key_groups, right = _one_hot(key_labels)
    total[np.ix_(query_groups, key_groups)] += sandwich(left, weights, right)


def sandwich(left: Array, weights: Array, right: Array) -> Array:
    """left·weights·rightᵀ, for shares of at least 0; a NaN or an infinity counts where neither of its shares is 0."""
    finite = np.isfinite(weights)
    known = weights if finite.all() else np.where(finite, weights, 0.0)
    total = product(product(left, pieces(known), weights.shape[1]), pieces(right.T), len(right))
    if known is not weights:
        rows, cols = ((shares > 1e-9).astype(np.float64) for shares in (left, right))  # less is a rounding error
        for value, cells in ((np.nan, np.isnan(weights)), (np.inf, weights == np.inf), (-np.inf, weights == -np.inf)):
            total = total + np.where(rows @ cells @ cols.T > 0, value, 0.0)
    return total


def _one_hot(labels: Array) -> tuple[Array, Array]:
    present = np.unique(labels[labels >= 0])
    return present, (present[:, None] == labels).astype(np.float64)


def add_shared(total: Array, place: tuple[int, int], rows: slice, cols: slice, part: Array) -> None:
    """Add a block to `total` (batch, heads, queries, keys), summed over the axes along which `total` has size 1."""
    here = total[tuple(index if size > 1 else 0 for index, size in zip(place, total.shape, strict=False))]
    summed = tuple(axis for axis in (0, 1) if here.shape[axis] == 1)
    here[rows if here.shape[0] > 1 else slice(1), cols if here.shape[1] > 1 else slice(1)] += part.sum(
        axis=summed, keepdims=True
    )
