"""The portable engine: NumPy, streaming over blocks of keys; memory O(n + m) beyond inputs and outputs.

Sums are in float64. The row pass is online softmax (Milakov & Gimelshein 2018; Rabe & Staats 2021); the column pass
recomputes the weights from the log-sum-exp. portable_tiles.py has the blocks, portable_effects.py
what single edges did.
"""

from dataclasses import replace

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.directions import Directions
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Upstream, elsewhere, room_for_columns, room_for_rows, unsupported
from clearhead.engines.online_softmax import OnlineSoftmax, Values, mix
from clearhead.engines.portable_effects import effect_product, effect_tile, effects, others
from clearhead.engines.portable_second import second_tangents
from clearhead.engines.portable_tangents import column_tangents, gradient_tangents, row_tangents
from clearhead.engines.portable_tiles import (
    KEY_BLOCK,
    QUERY_BLOCK,
    add_groups,
    add_shared,
    distances,
    heads_of,
    key_blocks,
    log_weight_tiles,
    logits_of,
    packed,
    padded,
    sandwich,
    softcap_grad,
    weight_tiles,
)
from clearhead.engines.products import pieces, product

__all__ = [  # what an engine answers
    "RULES", "STATISTICS", "column_tangents", "columns", "effect_product", "effect_tile", "effects",
    "gradient_tangents", "gradients", "others", "reasons_not", "rows", "second_tangents", "tangents",
    "transposed", "weights",
]  # fmt: skip
STATISTICS = frozenset((
    "output", "logsumexp", "max_logit", "entropy", "distance", "own", "top", "received", "peak", "image", "groups",
))  # fmt: skip
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
    for head in heads_of(problem, k, v):
        for at in blocks(problem.queries, QUERY_BLOCK):
            queries = padded(q[head.batch, head.index, at], QUERY_BLOCK)
            running = OnlineSoftmax(QUERY_BLOCK, want, head.d_v)
            for cols in key_blocks(problem, head.batch, at):
                logits = logits_of(problem, head, at, cols, queries)
                if logits is not None:
                    far = distances(problem, head.batch, at, cols) if want.distance or want.own else None
                    running.add(logits, cols.start, head.values(cols.start), far)
            answers = running.finish(None if problem.sinks is None else problem.sinks[head.index])
            for name, array in found.items():
                array[head.batch, head.index, at] = answers[name][: at.stop - at.start]
    return found


def tangents(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    want: Wanted,
    logsumexp: Array | None = None,
    output: Array | None = None,  # noqa: ARG001 it is computed in float64
) -> dict[str, Array]:
    """The tangents of the row statistics, and without the log-sum-exp these statistics too."""
    found = {} if logsumexp is not None else rows(problem, q, k, v, replace(want, logsumexp=True))
    known = found["logsumexp"] if logsumexp is None else logsumexp
    return found | row_tangents(problem, q, k, v, along, want, known)


@_quiet
def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, in one pass over weights recomputed with the log-sum-exp."""
    found = room_for_columns(problem, want, STATISTICS)
    for head in heads_of(problem, k):
        total = {name: array[head.batch, head.index] for name, array in found.items()}
        for at, cols, whole in weight_tiles(problem, head, q, logsumexp):
            weights = whole[: at.stop - at.start, : cols.stop - cols.start]
            if want.received:
                total["received"][cols] += weights.sum(axis=0)
            if want.peak:
                np.maximum(total["peak"][cols], weights.max(axis=0), out=total["peak"][cols])
            if want.image is not None:
                high, tall = areas(want.image[0], problem.queries, at)
                wide, broad = areas(want.image[1], problem.keys, cols)
                total["image"][high, wide] += sandwich(tall, weights, broad)
            if want.groups is not None:
                labels = want.groups[0][head.batch, at], want.groups[1][head.batch, cols]
                add_groups(total["groups"], weights, *labels)
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in found.items()}


@_quiet
def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    found = np.zeros(shape, statistics_dtype(problem.dtype))
    for head in heads_of(problem, k):
        for at, cols, whole in weight_tiles(problem, head, q, logsumexp):
            found[head.batch, head.index, at, cols] = whole[: at.stop - at.start, : cols.stop - cols.start]
    return found


@_quiet
def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d); blocks of zero rows are skipped."""
    found = np.zeros((problem.batch, problem.heads, problem.keys, g.shape[-1]), np.float64)
    for head in heads_of(problem, k):
        given = g[head.batch, head.index if g.shape[1] > 1 else 0]
        busy = [at for at in blocks(problem.queries, QUERY_BLOCK) if given[at].any()]  # rollout starts with one row
        parts = {at.start: Values.of(padded(given[at], QUERY_BLOCK)) for at in busy}
        for at, cols, whole in weight_tiles(problem, head, q, logsumexp, set(parts)):
            mixed = mix(whole.T, whole.T != 0, parts[at.start])
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
    for head in heads_of(problem, k):
        at = head.batch, head.index
        key_at = head.batch, problem.kv_head_of(head.index)
        keys = [Values.of(block) for block in packed(k[key_at])]
        value_at = key_at if values is None else (head.batch, head.index // group_size(problem.heads, values.shape[1]))
        turned = None if values is None else [pieces(block.T) for block in packed(values[value_at])]
        for rows, cols, logs in log_weight_tiles(problem, head, q, logsumexp):
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
                    upstream.distance[at][rows, None] * distances(problem, head.batch, rows, cols)[:height]
                )
            if turned is not None and upstream.output is not None:
                given = padded(upstream.output[at][rows], QUERY_BLOCK)
                slope += product(given, turned[block], KEY_BLOCK)
                found["v"][value_at][cols] += mix(weights.T, visible.T, Values.of(given))[:width]
            by_logit = np.where(visible, weights * slope, 0.0)
            if upstream.bias is not None:
                add_shared(found["bias"], at, rows, cols, by_logit[:height, :width])
            if upstream.spans is not None:
                row_labels, col_labels, _ = visibility.spans_of(problem, *at, rows, cols)
                total = found["spans"][tuple(i if n > 1 else 0 for i, n in zip(at, upstream.spans, strict=False))]
                spans.add_sums(total, row_labels, col_labels, by_logit[:height, :width])
            queries = padded(q[at][rows], QUERY_BLOCK)
            scale = problem.scale[head.index]
            by_score = np.where(visible, scale * softcap_grad(problem, head, block, queries) * by_logit, 0.0)
            found["q"][at][rows] += mix(by_score, visible, keys[block])[:height]
            found["k"][key_at][cols] += mix(by_score.T, visible.T, Values.of(queries))[:width]
    usual = statistics_dtype(problem.dtype)
    dtypes = {"bias": usual, "spans": usual} | (dict.fromkeys("qkv", usual) if upstream.keep_float32 else {})
    return {name: array.astype(dtypes.get(name, problem.dtype), copy=False) for name, array in found.items()}
