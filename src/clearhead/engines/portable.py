"""The portable engine: NumPy, streaming over blocks of keys; memory O(n + m) beyond inputs and outputs.

Sums are in float64. The row pass is online softmax (Milakov & Gimelshein 2018; Rabe & Staats 2021); the column pass
recomputes the weights from the rows' states. portable_tiles.py has the blocks, portable_effects.py what single edges
did.
"""

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.call import Call
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Upstream, elsewhere, room_for_columns, room_for_rows, unsupported
from clearhead.engines.online_softmax import OnlineSoftmax, Values, mix
from clearhead.engines.portable_effects import effect_product, effect_tile, effects, others, turned_values
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
from clearhead.engines.products import product

__all__ = [  # what an engine answers
    "RULES", "STATISTICS", "columns", "effect_product", "effect_tile", "effects", "gradients", "others",
    "reasons_not", "rows", "transposed", "weights",
]  # fmt: skip
STATISTICS = frozenset((
    "output", "logsumexp", "max_logit", "entropy", "distance", "diagonal", "top", "received", "peak", "image", "groups",
))  # fmt: skip
RULES = EVERYWHERE

_quiet = np.errstate(all="ignore")  # NaN and infinity are legal values, and need no warning


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: arrays not in the CPU's memory, or a rule it does not support."""
    against = elsewhere(problem)
    return ([against] if against else []) + unsupported("the portable engine", RULES, problem)


@_quiet
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    problem, q, k, v = call.problem, call.q, call.k, call.v
    result = room_for_rows(problem, v, want, STATISTICS)
    for head in heads_of(problem, k, v):
        for block in blocks(problem.queries, QUERY_BLOCK):
            queries = padded(q[head.batch, head.index, block], QUERY_BLOCK)
            running = OnlineSoftmax(QUERY_BLOCK, want, head.d_v)
            for cols in key_blocks(problem, head.batch, block):
                logits = logits_of(problem, head, block, cols, queries)
                if logits is not None:
                    far = distances(problem, head.batch, block, cols) if want.distance or want.diagonal else None
                    running.add(logits, cols.start, head.values(cols.start), far)
            sink = None if problem.sinks is None else problem.sinks[head.index]
            answers = running.finish(sink, statistics_dtype(problem.dtype))
            for name, array in result.items():
                array[head.batch, head.index, block] = answers[name][: block.stop - block.start]
    return result


@_quiet
def columns(call: Call, state: State, want: Wanted) -> dict[str, Array]:
    """The column statistics, in one pass over weights recomputed with the rows' states."""
    problem, q, k = call.problem, call.q, call.k
    result = room_for_columns(problem, want, STATISTICS)
    for head in heads_of(problem, k):
        total = {name: array[head.batch, head.index] for name, array in result.items()}
        for block, cols, whole in weight_tiles(problem, head, q, state):
            weights = whole[: block.stop - block.start, : cols.stop - cols.start]
            if want.received:
                total["received"][cols] += weights.sum(axis=0)
            if want.peak:
                np.maximum(total["peak"][cols], weights.max(axis=0), out=total["peak"][cols])
            if want.image is not None:
                high, tall = areas(want.image[0], problem.queries, block)
                across, broad = areas(want.image[1], problem.keys, cols)
                total["image"][high, across] += sandwich(tall, weights, broad)
            if want.groups is not None:
                labels = want.groups[0][head.batch, block], want.groups[1][head.batch, cols]
                add_groups(total["groups"], weights, *labels)
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in result.items()}


@_quiet
def weights(call: Call, state: State) -> Array:
    """Every weight of this (small) problem: exp((logit - m) - l)."""
    problem, q, k = call.problem, call.q, call.k
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    result = np.zeros(shape, statistics_dtype(problem.dtype))
    for head in heads_of(problem, k):
        for block, cols, whole in weight_tiles(problem, head, q, state):
            result[head.batch, head.index, block, cols] = whole[: block.stop - block.start, : cols.stop - cols.start]
    return result


@_quiet
def transposed(call: Call, state: State, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d); blocks of zero rows are skipped."""
    problem, q, k = call.problem, call.q, call.k
    result = np.zeros((problem.batch, problem.heads, problem.keys, g.shape[-1]), np.float64)
    for head in heads_of(problem, k):
        rows = g[head.batch, head.index if g.shape[1] > 1 else 0]
        busy = [block for block in blocks(problem.queries, QUERY_BLOCK) if rows[block].any()]  # in rollout, one row
        parts = {block.start: Values.of(padded(rows[block], QUERY_BLOCK)) for block in busy}
        for block, cols, whole in weight_tiles(problem, head, q, state, set(parts)):
            mixed = mix(whole.T, whole.T != 0, parts[block.start])
            result[head.batch, head.index, cols] += mixed[: cols.stop - cols.start]
    return result.astype(statistics_dtype(problem.dtype), copy=False)


@_quiet
def gradients(call: Call, state: State, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k, v, the bias and the table of spans, in one pass over the recomputed weights."""
    problem, q, k, v = call.problem, call.q, call.k, call.v
    values = None if upstream.output is None else v
    shapes = {name: x.shape for name, x in (("q", q), ("k", k), ("v", values)) if x is not None}
    shapes |= {name: shape for name in ("bias", "spans") if (shape := getattr(upstream, name)) is not None}
    result = {name: np.zeros(shape) for name, shape in shapes.items()}
    for head in heads_of(problem, k):
        place = head.batch, head.index
        key_place = head.batch, problem.kv_head_of(head.index)
        keys = [Values.of(block) for block in packed(k[key_place])]
        group = 1 if values is None else group_size(problem.heads, values.shape[1])
        value_place = head.batch, head.index // group
        turned = None if values is None else turned_values(problem, head, values)
        for rows, cols, logs in log_weight_tiles(problem, head, q, state):
            block, height, width = cols.start // KEY_BLOCK, rows.stop - rows.start, cols.stop - cols.start
            visible, weights = ~np.isneginf(logs), np.exp(logs)
            slope = np.zeros_like(logs)
            slope[:height] += upstream.rows[place][rows, None]
            if upstream.keys is not None:
                slope[:, :width] += upstream.keys[place][cols]
            if upstream.entropy is not None:
                slope[:height] -= upstream.entropy[place][rows, None] * logs[:height]
            if upstream.distance is not None:
                far = distances(problem, head.batch, rows, cols)[:height]
                slope[:height] += upstream.distance[place][rows, None] * far
            if turned is not None and upstream.output is not None:
                output = padded(upstream.output[place][rows], QUERY_BLOCK)
                slope += product(output, turned[block], KEY_BLOCK)
                result["v"][value_place][cols] += mix(weights.T, visible.T, Values.of(output))[:width]
            by_logit = np.where(visible, weights * slope, 0.0)
            if upstream.bias is not None:
                add_shared(result["bias"], place, rows, cols, by_logit[:height, :width])
            if upstream.spans is not None:
                row_labels, col_labels, _ = visibility.spans_of(problem, *place, rows, cols)
                shared = zip(place, upstream.spans, strict=False)
                total = result["spans"][tuple(index if size > 1 else 0 for index, size in shared)]
                spans.add_sums(total, row_labels, col_labels, by_logit[:height, :width])
            queries = padded(q[place][rows], QUERY_BLOCK)
            scale = problem.scale[head.index]
            by_score = np.where(visible, scale * softcap_grad(problem, head, block, queries) * by_logit, 0.0)
            result["q"][place][rows] += mix(by_score, visible, keys[block])[:height]
            result["k"][key_place][cols] += mix(by_score.T, visible.T, Values.of(queries))[:width]
    usual = statistics_dtype(problem.dtype)
    dtypes = {"bias": usual, "spans": usual} | (dict.fromkeys("qkv", usual) if upstream.keep_float32 else {})
    return {name: array.astype(dtypes.get(name, problem.dtype), copy=False) for name, array in result.items()}
