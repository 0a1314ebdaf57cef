"""The backward pass: weights are recomputed from the log-sum-exp, once by tiles of keys and once by tiles of queries.

    dS_ij = a_ij·(dO_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|)

A program of the first kernel owns a strip of keys and sums dK and dV; one of the second owns a strip of queries and
sums dQ; one of the third owns a tile of the bias, one of the last sums over the labels of a table of spans. Each result
has one writer and no atomics, so it is deterministic.

Along a direction the same kernels answer the tangents of all this (core/directions.py): each product x·y becomes
moved x·y + x·moved y, and

    ḋS_ij = ȧ_ij·(dO_i·v_j + …) + a_ij·(ġ_i·v_j + dO_i·v̇_j + …),    ġ the tangent of dO
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import (
    key_block,
    mixed,
    not_finite,
    of_keys,
    of_queries,
    products,
    query_block,
    store_rows,
    whole,
)
from clearhead.engines.gpu.rules import (
    LN2,
    any_seen,
    distances,
    logit_grad_tangent,
    logit_tangents,
    logits,
    scaled,
    score_grad,
)
from clearhead.engines.gpu.sweeps import over_keys, over_queries, placed, query_strip, strip_of
from clearhead.engines.gpu.tiles import indices, row_lse


class Loss(NamedTuple):
    """The upstream gradients (base.Upstream) but the output's, or their tangents, contiguous (batch, heads, …).

    None where zero; all are None in the tangents of a pass that is not along a direction.
    """

    logsumexp: Any = None  # that of the forward pass, or its tangent
    rows: Any = None
    keys: Any = None
    entropy: Any = None
    distance: Any = None
    diagonal: Any = None


class Slopes(NamedTuple):
    """What a tile of the backward pass multiplies, or along a direction the tangents of that; 0 where masked."""

    weights: Any
    by_logit: Any  # dS
    by_score: Any  # the gradients of q·k, as score_grad has them
    visible: Any
    still_weights: Any  # without a direction the same as `weights`
    still_score: Any


@triton.jit
def _slope(start, loss, logs, rules, b, h, i, j):
    """What upstream gradients add to the derivative by a weight, beside `start`, dO·v; logs is ln a."""
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    slope = start + tl.load(loss.rows + line, mask=inside, other=0.0)
    if loss.keys is not None:
        key = (b * rules.heads + h).to(tl.int64) * rules.keys + j
        slope += tl.load(loss.keys + key, mask=j < rules.keys, other=0.0)
    if loss.entropy is not None:
        slope -= tl.load(loss.entropy + line, mask=inside, other=0.0) * logs
    if loss.distance is not None:
        away = distances(rules, b, i, j).to(start.dtype)
        slope += tl.load(loss.distance + line, mask=inside, other=0.0) * away
    if loss.diagonal is not None:
        here = distances(rules, b, i, j) == 0
        slope += tl.where(here, tl.load(loss.diagonal + line, mask=inside, other=0.0), 0.0)
    return slope


@triton.jit
def slopes(left, right, loss, change, along, rules, b, h, BY_KEYS: tl.constexpr, MASKED: tl.constexpr, sizes):
    """The Slopes of a tile of two Blocks in either orientation, along a direction where `change` has tangents."""
    i, j = indices(left, right, BY_KEYS)
    inner = tl.zeros((1, 1), sizes.FLOAT)
    moved_slope = inner
    scores, changed = products(left, right, 0, BY_KEYS, sizes)
    if sizes.QUERIES.y:
        inner, moved_slope = products(left, right, 1, BY_KEYS, sizes)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    lse = row_lse(loss.logsumexp, line, inside)
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = (s > -float("inf")) | (s != s)
    logs = s - lse
    p = tl.exp2(logs)
    slope = _slope(inner, loss, logs * LN2, rules, b, h, i, j)
    by_logit = tl.where(p == 0, 0.0, p * slope)
    by_score = score_grad(by_logit, scores, rules, h)
    if MASKED:
        p, by_logit = tl.where(visible, p, 0.0), tl.where(visible, by_logit, 0.0)
        by_score = tl.where(visible, by_score, 0.0)
    if change.rows is None:
        tile = Slopes(p, by_logit, by_score, visible, p, by_score)
    else:
        away = logit_tangents(scores, changed, along, rules, b, h, i, j, visible)
        away -= tl.load(change.logsumexp + line, mask=inside, other=0.0)
        moved_slope = _slope(moved_slope, change, logs * LN2, rules, b, h, i, j)
        if loss.entropy is not None:  # the tangent of ln a
            moved_slope -= tl.load(loss.entropy + line, mask=inside, other=0.0) * away
        counts = visible & (p != 0)
        moved = tl.where(counts, p * away, 0.0)
        moved_logit = tl.where(counts, moved * slope + p * moved_slope, 0.0)
        moved_score = score_grad(moved_logit, scores, rules, h)
        if rules.softcap:
            moved_score += tl.where(by_logit == 0, 0.0, by_logit * logit_grad_tangent(scores, changed, rules, h))
        tile = Slopes(moved, moved_logit, moved_score, visible, p, by_score)
    return tile


@triton.jit
def _add_queries(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    by_k, by_v = state
    keys, queries, loss, change, along = job[0]
    block = query_block(queries, start, sizes.N, rules, sizes)
    tile = slopes(keys, block, loss, change, along, rules, strip.b, strip.h, True, MASKED, sizes)
    rows = whole(block, sizes.QUERIES, sizes)
    by_k = mixed(by_k, tile.by_score, tile.visible, rows.x, MASKED and job[1], False, sizes.PRECISION)
    if sizes.QUERIES.moved_x:
        by_k = mixed(by_k, tile.still_score, tile.visible, rows.moved_x, MASKED and job[1], False, sizes.PRECISION)
    if sizes.QUERIES.y:
        by_v = mixed(by_v, tile.weights, tile.visible, rows.y, MASKED and job[1], False, sizes.PRECISION)
        if sizes.QUERIES.moved_y:
            by_v = mixed(
                by_v, tile.still_weights, tile.visible, rows.moved_y, MASKED and job[1], False, sizes.PRECISION
            )
    return by_k, by_v


@triton.jit
def keys(inputs, rules, loss, change, along, out_k, out_v, together, doubts, sizes, CAREFUL: tl.constexpr):
    """Compute dK and dV, contiguous (batch, heads / together, keys, d_k or d_v). `together` query heads share keys.

    Program (strip of keys × batch · heads / together); out_v is None where there is no gradient of the output.
    CAREFUL and doubts are as in Pass.launch_twice.
    """
    if CAREFUL and doubts is not None:
        if tl.load(doubts + tl.program_id(0)) == 0:
            return
    groups = rules.heads // together
    number, group = placed(tl.cdiv(rules.keys, sizes.M))
    b, first = group // groups, group % groups * together
    start = number * sizes.M
    j = start + tl.arange(0, sizes.M)
    block = key_block(of_keys(inputs, b, first), start, sizes.M, rules, sizes)
    state = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT), tl.zeros((sizes.M, sizes.DV), sizes.FLOAT)
    for head in range(together):
        strip = strip_of(rules, b, first + head, start, rules.keys, sizes.M)
        job = block, of_queries(inputs, b, first + head), loss, change, along
        state = over_queries(_add_queries, state, (job, CAREFUL), rules, strip, None, sizes)
    by_k, by_v = state
    if not CAREFUL:
        tl.store(doubts + tl.program_id(0), not_finite(by_k) | not_finite(by_v))
    line, here = group.to(tl.int64) * rules.keys + j, j < rules.keys
    store_rows(out_k, line, here, scaled(by_k, rules), sizes.d_k)
    if out_v is not None:
        store_rows(out_v, line, here, by_v, sizes.d_v)


@triton.jit
def _add_keys(by_q, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    queries, keys, loss, change, along = job[0]
    block = key_block(keys, start, sizes.N, rules, sizes)
    tile = slopes(queries, block, loss, change, along, rules, strip.b, strip.h, False, MASKED, sizes)
    rows = whole(block, sizes.KEYS, sizes)
    by_q = mixed(by_q, tile.by_score, tile.visible, rows.x, MASKED and job[1], False, sizes.PRECISION)
    if sizes.KEYS.moved_x:
        by_q = mixed(by_q, tile.still_score, tile.visible, rows.moved_x, MASKED and job[1], False, sizes.PRECISION)
    return by_q


@triton.jit
def queries(inputs, rules, loss, change, along, out, doubts, sizes, CAREFUL: tl.constexpr):
    """Compute dQ, likewise. Program (strip of queries × batch · heads)."""
    if CAREFUL and doubts is not None:
        if tl.load(doubts + tl.program_id(0)) == 0:
            return
    strip = query_strip(rules, sizes.M)
    block = query_block(of_queries(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    job = block, of_keys(inputs, strip.b, strip.h), loss, change, along
    by_q = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT)
    by_q = over_keys(_add_keys, by_q, (job, CAREFUL), rules, strip, None, True, sizes)
    if not CAREFUL:
        tl.store(doubts + tl.program_id(0), not_finite(by_q))
    store_rows(out, strip.line, strip.inside, scaled(by_q, rules), sizes.d_k)


@triton.jit
def bias(inputs, rules, loss, change, along, out, batch, bias_batch, bias_heads, across_queries, across_keys, sizes):
    """Σ dS over the bias's broadcast axes. Program (tile of keys × tile of queries × the bias's batch · heads).

    across_queries is the number of queries if the bias is broadcast over them (a program then sums over all), else 1;
    across_keys likewise. Tiles are (N, N).
    """
    height, width = rules.queries, rules.keys
    if across_queries > 1:
        height = 1
    if across_keys > 1:
        width = 1
    tile_j, rest = placed(tl.cdiv(width, sizes.N))
    tiles = tl.cdiv(height, sizes.N)
    tile_i, number = rest % tiles, rest // tiles
    first_b, first_h = number // bias_heads, number % bias_heads
    total = tl.zeros((sizes.N, sizes.N), sizes.FLOAT)
    for more_b in range(batch // bias_batch):
        b = first_b + more_b
        for more_h in range(rules.heads // bias_heads):
            h = first_h + more_h
            queries, keys = of_queries(inputs, b, h), of_keys(inputs, b, h)
            for start_i in range(0, across_queries, sizes.N):
                rows = query_block(queries, tile_i * sizes.N + start_i, sizes.N, rules, sizes)
                for start_j in range(0, across_keys, sizes.N):
                    start = tile_j * sizes.N + start_j
                    j = start + tl.arange(0, sizes.N)
                    if any_seen(rules, b, h, rows.index[:, None], j[None, :], start, sizes.N):
                        block = key_block(keys, start, sizes.N, rules, sizes)
                        total += slopes(rows, block, loss, change, along, rules, b, h, False, True, sizes).by_logit
    if across_queries > 1:
        total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], (sizes.N, sizes.N))
    if across_keys > 1:
        total = tl.broadcast_to(tl.sum(total, axis=1)[:, None], (sizes.N, sizes.N))
    i, j = tile_i * sizes.N + tl.arange(0, sizes.N)[:, None], tile_j * sizes.N + tl.arange(0, sizes.N)[None, :]
    place = out + (number.to(tl.int64) * height + i) * width + j
    tl.store(place, total, mask=(i < height) & (j < width))


@triton.jit
def _add_labels(total, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    queries, keys, loss, change, along, labels = job
    block = key_block(keys, start, sizes.N, rules, sizes)
    tile = slopes(block, queries, loss, change, along, rules, strip.b, strip.h, True, MASKED, sizes)
    place = rules.key_spans + strip.b.to(tl.int64) * rules.keys + block.index
    chosen = tl.load(place, mask=block.index < rules.keys, other=-1)[None, :] == labels[:, None]
    return mixed(total, chosen.to(sizes.FLOAT), chosen, tile.by_logit, MASKED, False, sizes.PRECISION)


@triton.jit
def spans(inputs, rules, loss, change, along, out, first, count, part, sizes, D: tl.constexpr):
    """Σ_j dS_ij over the keys of each of `count` labels from `first` on, into out (batch, heads, queries, count).

    Program (strip of queries × batch · heads). `part` holds the first and the end of the keys that have such a label.
    The sum is a product with ones and zeros; columns.pool then sums over the queries of each label.
    """
    strip = query_strip(rules, sizes.M)
    block = query_block(of_queries(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    e = tl.arange(0, D)
    job = block, of_keys(inputs, strip.b, strip.h), loss, change, along, first + e
    total = tl.zeros((D, sizes.M), sizes.FLOAT)
    total = over_keys(_add_labels, total, job, rules, strip, part, False, sizes)
    place = out + strip.line[None, :] * count + e[:, None]
    tl.store(place, total, mask=strip.inside[None, :] & (e < count)[:, None])
