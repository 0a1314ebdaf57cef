"""The portable engine: NumPy, streaming over blocks of keys; memory O(n + m) beyond inputs and outputs.

Sums are in float64. Blocks are padded so that every matrix product has the same shape whatever part of the matrix is
requested: the bits of a row do not depend on other rows. products.py makes them independent of the number of threads.
The row pass is online softmax (Milakov & Gimelshein 2018; Rabe & Staats 2021); the column pass recomputes the weights
from the log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Upstream, elsewhere, room_for_columns, room_for_rows, unsupported
from clearhead.engines.online_softmax import OnlineSoftmax, Values, mix
from clearhead.engines.products import pieces, product

STATISTICS = frozenset((
    "output", "logsumexp", "max_logit", "entropy", "distance", "own", "top", "received", "peak", "image", "groups",
))  # fmt: skip
QUERY_BLOCK, KEY_BLOCK = 64, 512
RULES = frozenset({
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip

_quiet = np.errstate(all="ignore")  # NaN and infinity are legal values, and need no warning


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: arrays not in the CPU's memory, or a rule it does not support."""
    against = elsewhere(problem)
    return ([against] if against else []) + unsupported("the portable engine", RULES, problem)


@_quiet
def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    found = room_for_rows(problem, v, want, STATISTICS)
    for head in _heads(problem, k, v):
        for at in blocks(problem.queries, QUERY_BLOCK):
            queries = _padded(q[head.batch, head.index, at], QUERY_BLOCK)
            running = OnlineSoftmax(QUERY_BLOCK, want, head.d_v)
            for cols in _key_blocks(problem, head.batch, at):
                logits = _logits(problem, head, at, cols, queries)
                if logits is not None:
                    far = _distances(problem, head.batch, at, cols) if want.distance or want.own else None
                    running.add(logits, cols.start, head.values(cols.start), far)
            answers = running.finish(None if problem.sinks is None else problem.sinks[head.index])
            for name, array in found.items():
                array[head.batch, head.index, at] = answers[name][: at.stop - at.start]
    return found


@_quiet
def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, in one pass over weights recomputed with the log-sum-exp."""
    found = room_for_columns(problem, want, STATISTICS)
    for head in _heads(problem, k):
        total = {name: array[head.batch, head.index] for name, array in found.items()}
        for at, cols, padded in _weight_tiles(problem, head, q, logsumexp):
            weights = padded[: at.stop - at.start, : cols.stop - cols.start]
            if want.received:
                total["received"][cols] += weights.sum(axis=0)
            if want.peak:
                np.maximum(total["peak"][cols], weights.max(axis=0), out=total["peak"][cols])
            if want.image is not None:
                high, tall = areas(want.image[0], problem.queries, at)
                wide, broad = areas(want.image[1], problem.keys, cols)
                total["image"][high, wide] += _sandwich(tall, weights, broad)
            if want.groups is not None:
                labels = want.groups[0][head.batch, at], want.groups[1][head.batch, cols]
                _add_groups(total["groups"], weights, *labels)
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in found.items()}


@_quiet
def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    found = np.zeros(shape, statistics_dtype(problem.dtype))
    for head in _heads(problem, k):
        for at, cols, padded in _weight_tiles(problem, head, q, logsumexp):
            found[head.batch, head.index, at, cols] = padded[: at.stop - at.start, : cols.stop - cols.start]
    return found


@_quiet
def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d); blocks of zero rows are skipped."""
    found = np.zeros((problem.batch, problem.heads, problem.keys, g.shape[-1]), np.float64)
    for head in _heads(problem, k):
        given = g[head.batch, head.index if g.shape[1] > 1 else 0]
        busy = [at for at in blocks(problem.queries, QUERY_BLOCK) if given[at].any()]  # rollout starts with one row
        parts = {at.start: Values.of(_padded(given[at], QUERY_BLOCK)) for at in busy}
        for at, cols, padded in _weight_tiles(problem, head, q, logsumexp, set(parts)):
            mixed = mix(padded.T, padded.T != 0, parts[at.start])
            found[head.batch, head.index, cols] += mixed[: cols.stop - cols.start]
    return found.astype(statistics_dtype(problem.dtype), copy=False)


@_quiet
def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The gradients of q, k, v, the bias and the table of spans, in one pass over the recomputed weights."""
    values = None if upstream.output is None else v
    found = {name: np.zeros(x.shape) for name, x in (("q", q), ("k", k), ("v", values)) if x is not None}
    if upstream.bias is not None:
        found["bias"] = np.zeros(upstream.bias)
    if upstream.spans is not None:
        found["spans"] = np.zeros(upstream.spans)
    for head in _heads(problem, k):
        at = head.batch, head.index
        key_at = head.batch, problem.kv_head_of(head.index)
        keys = [Values.of(block) for block in _packed(k[key_at])]
        value_at = key_at if values is None else (head.batch, head.index // group_size(problem.heads, values.shape[1]))
        turned = None if values is None else [pieces(block.T) for block in _packed(values[value_at])]
        for rows, cols, logs in _log_weight_tiles(problem, head, q, logsumexp):
            block, height, width = cols.start // KEY_BLOCK, rows.stop - rows.start, cols.stop - cols.start
            visible, weights = ~np.isneginf(logs), np.exp(logs)
            slope = np.zeros_like(logs)
            slope[:height] += upstream.rows[at][rows, None]
            if upstream.keys is not None:
                slope[:, :width] += upstream.keys[at][cols]
            if upstream.entropy is not None:
                slope[:height] -= upstream.entropy[at][rows, None] * logs[:height]
            if upstream.distance is not None:
                slope[:height] += (
                    upstream.distance[at][rows, None] * _distances(problem, head.batch, rows, cols)[:height]
                )
            if turned is not None and upstream.output is not None:
                given = _padded(upstream.output[at][rows], QUERY_BLOCK)
                slope += product(given, turned[block], KEY_BLOCK)
                found["v"][value_at][cols] += mix(weights.T, visible.T, Values.of(given))[:width]
            by_logit = np.where(visible, weights * slope, 0.0)
            if upstream.bias is not None:
                _add_shared(found["bias"], at, rows, cols, by_logit[:height, :width])
            if upstream.spans is not None:
                row_labels, col_labels, _ = visibility.spans_of(problem, *at, rows, cols)
                total = found["spans"][tuple(i if n > 1 else 0 for i, n in zip(at, upstream.spans, strict=False))]
                spans.add_sums(total, row_labels, col_labels, by_logit[:height, :width])
            queries = _padded(q[at][rows], QUERY_BLOCK)
            scale = problem.scale[head.index]
            by_score = np.where(visible, scale * _softcap_grad(problem, head, block, queries) * by_logit, 0.0)
            found["q"][at][rows] += mix(by_score, visible, keys[block])[:height]
            found["k"][key_at][cols] += mix(by_score.T, visible.T, Values.of(queries))[:width]
    usual = statistics_dtype(problem.dtype)
    dtypes = {"bias": usual, "spans": usual} | (dict.fromkeys("qkv", usual) if upstream.keep_float32 else {})
    return {name: array.astype(dtypes.get(name, problem.dtype), copy=False) for name, array in found.items()}


@dataclass(frozen=True, slots=True)
class _Head:
    """One query head with its keys and values, in float64 blocks of equal size, the last one padded with zeros."""

    batch: int
    index: int
    keys: list[Array]  # for each block, the pieces of (d_k, KEY_BLOCK)
    packed: list[Values] | None
    d_v: int | None

    def values(self, start: int) -> Values | None:
        return None if self.packed is None else self.packed[start // KEY_BLOCK]


def _heads(problem: Problem, k: Array, v: Array | None = None) -> Iterator[_Head]:
    """Every query head; keys and values are packed once for all the query heads that share them."""
    for batch in range(problem.batch):
        key_head = value_head = -1
        keys: list[Array] = []
        values = None
        for head in range(problem.heads):
            if problem.kv_head_of(head) != key_head:
                key_head = problem.kv_head_of(head)
                keys = [pieces(block.T) for block in _packed(k[batch, key_head])]
            if v is not None and head // group_size(problem.heads, v.shape[1]) != value_head:
                value_head = head // group_size(problem.heads, v.shape[1])
                values = [Values.of(block) for block in _packed(v[batch, value_head])]
            yield _Head(batch, head, keys, values, None if v is None else v.shape[-1])


def _packed(x: Array) -> Array:
    count = -(-len(x) // KEY_BLOCK)
    return _padded(x, count * KEY_BLOCK).reshape(count, KEY_BLOCK, x.shape[-1])


def _padded(x: Array, length: int) -> Array:
    full = np.zeros((length, x.shape[-1]))
    full[: len(x)] = x
    return full


def _key_blocks(problem: Problem, batch: int, rows: slice) -> Iterator[slice]:
    """The key blocks visible to some of these queries; blocks always start at multiples of KEY_BLOCK."""
    span = visibility.key_span(problem, batch, rows)
    for start in range(span.start - span.start % KEY_BLOCK, span.stop, KEY_BLOCK):
        yield slice(start, min(start + KEY_BLOCK, problem.keys))


def _logits(problem: Problem, head: _Head, rows: slice, cols: slice, queries: Array) -> Array | None:
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
        logits[:height, :width] += problem.bias[head.batch, head.index, rows, cols].astype(np.float64)
    if problem.alibi_slopes is not None:
        far = visibility.distances(problem, head.batch, rows, cols)
        logits[:height, :width] -= problem.alibi_slopes[head.index] * far
    if problem.span_table is not None:
        logits[:height, :width] += spans.added(*visibility.spans_of(problem, head.batch, head.index, rows, cols))
    if visible is not True:
        logits[:height, :width][~visible] = -np.inf
    logits[:, width:] = -np.inf
    logits[height:] = -np.inf
    return logits


def _softcap_grad(problem: Problem, head: _Head, block: int, queries: Array) -> Array | float:
    """The derivative of the softcap, 1 - tanh²(score / c), (QUERY_BLOCK, KEY_BLOCK); 1 where there is none."""
    if problem.softcap is None:
        return 1.0
    scores = problem.scale[head.index] * product(queries, head.keys[block], KEY_BLOCK)
    grad: Array = 1 - np.tanh(scores / problem.softcap) ** 2
    return grad


def _add_shared(total: Array, at: tuple[int, int], rows: slice, cols: slice, part: Array) -> None:
    """Add a block to `total` (batch, heads, queries, keys), summed over the axes along which `total` has size 1."""
    here = total[tuple(place if size > 1 else 0 for place, size in zip(at, total.shape, strict=False))]
    summed = tuple(axis for axis in (0, 1) if here.shape[axis] == 1)
    here[rows if here.shape[0] > 1 else slice(1), cols if here.shape[1] > 1 else slice(1)] += part.sum(
        axis=summed, keepdims=True
    )


def _weight_tiles(
    problem: Problem, head: _Head, q: Array, logsumexp: Array, only: set[int] | None = None
) -> Iterator[tuple[slice, slice, Array]]:
    """(queries, keys, weights) for every block that is not fully masked; weights are zero past the end."""
    for rows, cols, logs in _log_weight_tiles(problem, head, q, logsumexp, only):
        yield rows, cols, np.exp(logs, out=logs)


def _log_weight_tiles(
    problem: Problem, head: _Head, q: Array, logsumexp: Array, only: set[int] | None = None
) -> Iterator[tuple[slice, slice, Array]]:
    """The same blocks as ln a = logit - log-sum-exp; -inf where masked or past the end."""
    lse = logsumexp[head.batch, head.index].astype(np.float64)
    safe = _padded(np.where(np.isneginf(lse), 0.0, lse)[:, None], -(-problem.queries // QUERY_BLOCK) * QUERY_BLOCK)
    own = _padded(q[head.batch, head.index], -(-problem.queries // QUERY_BLOCK) * QUERY_BLOCK)
    for cols in blocks(problem.keys, KEY_BLOCK):
        span = visibility.query_span(problem, head.batch, cols)
        for start in range(span.start - span.start % QUERY_BLOCK, span.stop, QUERY_BLOCK):
            if only is not None and start not in only:
                continue
            rows = slice(start, min(start + QUERY_BLOCK, problem.queries))
            logits = _logits(problem, head, rows, cols, own[start : start + QUERY_BLOCK])
            if logits is not None:
                final = safe[start : start + QUERY_BLOCK]
                hidden = None if np.isfinite(final).all() else np.isneginf(logits)
                logits -= final
                if hidden is not None:  # a NaN in a row must not reach keys masked for that row
                    logits[hidden] = -np.inf
                yield rows, cols, logits


def _distances(problem: Problem, batch: int, rows: slice, cols: slice) -> Array:
    far = np.zeros((QUERY_BLOCK, KEY_BLOCK))
    far[: rows.stop - rows.start, : cols.stop - cols.start] = visibility.distances(problem, batch, rows, cols)
    return far


def _add_groups(total: Array, weights: Array, query_labels: Array, key_labels: Array) -> None:
    """Add a block's weights to the sums of its groups; labels below 0 belong to no group."""
    query_groups, left = _one_hot(query_labels)
    key_groups, right = _one_hot(key_labels)
    total[np.ix_(query_groups, key_groups)] += _sandwich(left, weights, right)


def _sandwich(left: Array, weights: Array, right: Array) -> Array:
    """left·weights·rightᵀ."""
    return product(product(left, pieces(weights), weights.shape[1]), pieces(right.T), len(right))


def _one_hot(labels: Array) -> tuple[Array, Array]:
    present = np.unique(labels[labels >= 0])
    return present, (present[:, None] == labels).astype(np.float64)
