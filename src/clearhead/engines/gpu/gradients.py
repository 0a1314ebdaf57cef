"""The backward pass: weights are recomputed from the log-sum-exp, once by tiles of keys and once by tiles of queries.

    dS_ij = a_ij·(dO_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|)

A program of the first kernel owns a tile of keys and sums dK, dV and, at no extra cost, the mass that they receive; one
of the second owns a tile of queries and sums dQ; one of the third owns a tile of the bias. Each result has one writer
and no atomics, so it is deterministic.

Along a direction the same kernels answer the tangents of all this (core/directions.py): each product x·y becomes
moved x·y + x·moved y, and

    ḋS_ij = ȧ_ij·(dO_i·v_j + …) + a_ij·(ġ_i·v_j + dO_i·v̇_j + …),    ġ the tangent of dO
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import held, load, of_keys, of_queries, products
from clearhead.engines.gpu.rules import (
    LN2,
    LOG2E,
    any_seen,
    distances,
    key_range,
    logit_bend,
    logit_grad,
    logit_tangents,
    logits,
    mixed,
    placed,
    query_range,
)


class Loss(NamedTuple):
    """The upstream gradients (base.Upstream), or their tangents, contiguous (batch, heads, …) except `output`.

    None where zero; all are None in the tangents of a pass that is not along a direction.
    """

    logsumexp: Any  # that of the forward pass, or its tangent
    rows: Any
    keys: Any
    entropy: Any
    distance: Any
    own: Any
    output: Any


class Places(NamedTuple):
    """Where the gradients are written, contiguous; None where not requested."""

    k: Any  # (batch, heads / together, keys, d_k)
    v: Any
    received: Any  # (batch, heads, keys)


class Slopes(NamedTuple):
    """What a tile of the backward pass multiplies, or along a direction the tangents of that; 0 where masked."""

    weights: Any
    by_logit: Any  # dS
    by_score: Any  # the gradients of q·k
    visible: Any
    still_weights: Any  # without a direction the same as `weights`
    still_score: Any


@triton.jit
def _slope(start, given, logs, rules, b, h, i, j):
    """What upstream gradients add to the derivative by a weight, beside `start`, dO·v; logs is ln a."""
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    slope = start + tl.load(given.rows + line, mask=inside, other=0.0)
    if given.keys is not None:
        theirs = (b * rules.heads + h).to(tl.int64) * rules.keys + j
        slope += tl.load(given.keys + theirs, mask=j < rules.keys, other=0.0)
    if given.entropy is not None:
        slope -= tl.load(given.entropy + line, mask=inside, other=0.0) * logs
    if given.distance is not None:
        away = distances(rules, b, i, j).to(start.dtype)
        slope += tl.load(given.distance + line, mask=inside, other=0.0) * away
    if given.own is not None:
        here = distances(rules, b, i, j) == 0
        slope += tl.where(here, tl.load(given.own + line, mask=inside, other=0.0), 0.0)
    return slope


@triton.jit
def slopes(mine, theirs, loss, change, along, rules, b, h, i, j, d_k, d_v, BY_KEYS: tl.constexpr, MASKED: tl.constexpr,
           FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The Slopes of a tile in either orientation, along a direction where `change` has tangents of the loss.

    mine, theirs    the rows and the columns of the tile, as inputs.held gives them; BY_KEYS: the rows are keys
    i, j            the queries and the keys
    """
    inner = tl.zeros((1, 1), FLOAT)
    bent = inner
    if BY_KEYS:
        scores, changed = products(mine, theirs, along.k, along.q, j, rules.keys, i, rules.queries, d_k, 0, FLOAT,
                                   CHUNK, PRECISION)  # fmt: skip
        if loss.output is not None:
            inner, bent = products(mine, theirs, along.v, along.output, j, rules.keys, i, rules.queries, d_v, 1, FLOAT,
                                   CHUNK, PRECISION)  # fmt: skip
        i, j = i[None, :], j[:, None]
    else:
        scores, changed = products(mine, theirs, along.q, along.k, i, rules.queries, j, rules.keys, d_k, 0, FLOAT,
                                   CHUNK, PRECISION)  # fmt: skip
        if loss.output is not None:
            inner, bent = products(mine, theirs, along.output, along.v, i, rules.queries, j, rules.keys, d_v, 1, FLOAT,
                                   CHUNK, PRECISION)  # fmt: skip
        i, j = i[:, None], j[None, :]
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    lse = tl.load(loss.logsumexp + line, mask=inside, other=float("inf")) * LOG2E
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = (s > -float("inf")) | (s != s)
    logs = s - lse
    p = tl.exp2(logs)
    slope = _slope(inner, loss, logs * LN2, rules, b, h, i, j)
    by_logit = tl.where(p == 0, 0.0, p * slope)
    slant = logit_grad(scores, rules, h)
    by_score = by_logit * slant
    if MASKED:
        p, by_logit = tl.where(visible, p, 0.0), tl.where(visible, by_logit, 0.0)
        by_score = tl.where(visible, by_score, 0.0)
    if change.rows is None:
        found = Slopes(p, by_logit, by_score, visible, p, by_score)
    else:
        away = logit_tangents(scores, changed, along, rules, b, h, i, j, visible)
        away -= tl.load(change.logsumexp + line, mask=inside, other=0.0)
        bent = _slope(bent, change, logs * LN2, rules, b, h, i, j)
        if loss.entropy is not None:  # the tangent of ln a
            bent -= tl.load(loss.entropy + line, mask=inside, other=0.0) * away
        counts = visible & (p != 0)
        moved = tl.where(counts, p * away, 0.0)
        moved_logit = tl.where(counts, moved * slope + p * bent, 0.0)
        moved_score = tl.where(moved_logit == 0, 0.0, moved_logit * slant)
        if rules.softcap:
            moved_score += tl.where(by_logit == 0, 0.0, by_logit * logit_bend(scores, changed, rules, h))
        found = Slopes(moved, moved_logit, moved_score, visible, p, by_score)
    return found


@triton.jit
def _by_keys(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
             MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
             FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after one more block of queries; a fully masked block is skipped."""
    if MASKED and rules.content:
        j = start_j + tl.arange(0, M)
        if any_seen(rules, b, h, start + tl.arange(0, N)[None, :], j[:, None], start_j, M):
            state = _add_queries(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                                 MASKED, M, N, DK, DV, FLOAT, CHUNK, PRECISION)  # fmt: skip
    else:
        state = _add_queries(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                             MASKED, M, N, DK, DV, FLOAT, CHUNK, PRECISION)  # fmt: skip
    return state


@triton.jit
def _add_queries(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                 MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
             FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    by_k, by_v, received = state
    i, j = start + tl.arange(0, N), start_j + tl.arange(0, M)
    block = held(queries, loss.output, along.q, along.output, i, rules.queries, d_k, d_v, DK, DV, CHUNK)
    tile = slopes(mine, block, loss, change, along, rules, b, h, i, j, d_k, d_v, True, MASKED, FLOAT,
                  CHUNK, PRECISION)  # fmt: skip
    if CHUNK:
        block = load(queries, loss.output, along.q, along.output, i, rules.queries, d_k, d_v, DK, DV)
    by_k = mixed(by_k, tile.by_score, tile.visible, block.x, MASKED, PRECISION)
    if along.q is not None:
        by_k = mixed(by_k, tile.still_score, tile.visible, block.moved_x, MASKED, PRECISION)
    if to.v is not None:
        by_v = mixed(by_v, tile.weights, tile.visible, block.y, MASKED, PRECISION)
        if along.output is not None:
            by_v = mixed(by_v, tile.still_weights, tile.visible, block.moved_y, MASKED, PRECISION)
    if to.received is not None:
        received += tl.sum(tile.weights, axis=1)
    return by_k, by_v, received


@triton.jit
def keys(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss, change, along, steps, to, together,
         per_key, per_value, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FLOAT: tl.constexpr,
         CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dK, dV and received. Program (tile of keys × batch · heads / together); `together` query heads share keys."""
    groups = rules.heads // together
    tile, group = placed(tl.cdiv(rules.keys, M))
    b, first = group // groups, group % groups * together
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    own = of_keys(k, k_strides, v, v_strides, along, steps, b, first, per_key, per_value)
    mine = held(own, loss.output, along.k, along.v, j, rules.keys, d_k, d_v, DK, DV, CHUNK)
    low, full_low, full_high, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    by_k, by_v = tl.zeros((M, DK), FLOAT), tl.zeros((M, DV), FLOAT)
    here = j < rules.keys
    for head in range(together):
        h = first + head
        queries = of_queries(q, q_strides, loss.output, o_strides, along, steps, b, h)
        state = by_k, by_v, tl.zeros((M,), FLOAT)
        for start in range(low, full_low, N):
            state = _by_keys(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                             True, M, N, DK, DV, FLOAT, CHUNK, PRECISION)  # fmt: skip
        for start in range(full_low, full_high, N):
            state = _by_keys(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                             False, M, N, DK, DV, FLOAT, CHUNK, PRECISION)  # fmt: skip
        for start in range(full_high, high, N):
            state = _by_keys(state, mine, queries, loss, change, along, rules, b, h, start, start_j, d_k, d_v, to,
                             True, M, N, DK, DV, FLOAT, CHUNK, PRECISION)  # fmt: skip
        by_k, by_v, received = state
        if to.received is not None:
            line = (b * rules.heads + h).to(tl.int64) * rules.keys + j
            tl.store(to.received + line, received, mask=here)
    line = group.to(tl.int64) * rules.keys + j
    c, e = tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
    tl.store(to.k + line[:, None] * d_k + c, by_k.to(to.k.dtype.element_ty), mask=here[:, None] & (c < d_k))
    if to.v is not None:
        tl.store(to.v + line[:, None] * d_v + e, by_v.to(to.v.dtype.element_ty), mask=here[:, None] & (e < d_v))


@triton.jit
def _by_queries(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, MASKED: tl.constexpr,
                N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FLOAT: tl.constexpr, CHUNK: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """The dQ after one more block of keys; a fully masked block is skipped."""
    if MASKED and rules.content:
        if any_seen(rules, b, h, i[:, None], start + tl.arange(0, N)[None, :], start, N):
            by_q = _add_keys(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, MASKED, N, DK, DV,
                             FLOAT, CHUNK, PRECISION)  # fmt: skip
    else:
        by_q = _add_keys(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, MASKED, N, DK, DV,
                         FLOAT, CHUNK, PRECISION)  # fmt: skip
    return by_q


@triton.jit
def _add_keys(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, MASKED: tl.constexpr,
              N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FLOAT: tl.constexpr, CHUNK: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    j = start + tl.arange(0, N)
    block = held(keys, loss.output, along.k, along.v, j, rules.keys, d_k, d_v, DK, DV, CHUNK)
    tile = slopes(mine, block, loss, change, along, rules, b, h, i, j, d_k, d_v, False, MASKED, FLOAT,
                  CHUNK, PRECISION)  # fmt: skip
    if CHUNK:
        block = load(keys, None, along.k, None, j, rules.keys, d_k, d_v, DK, DV)
    by_q = mixed(by_q, tile.by_score, tile.visible, block.x, MASKED, PRECISION)
    if along.k is not None:
        by_q = mixed(by_q, tile.still_score, tile.visible, block.moved_x, MASKED, PRECISION)
    return by_q


@triton.jit
def queries(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss, change, along, steps, out,
            per_key, per_value, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
            FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute dQ. Program (tile of queries × batch · heads)."""
    tiles = tl.cdiv(rules.queries, M)
    later, head = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    own = of_queries(q, q_strides, loss.output, o_strides, along, steps, b, h)
    mine = held(own, loss.output, along.q, along.output, i, rules.queries, d_k, d_v, DK, DV, CHUNK)
    keys = of_keys(k, k_strides, v, v_strides, along, steps, b, h, per_key, per_value)
    low, full_low, full_high, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    by_q = tl.zeros((M, DK), FLOAT)
    for start in range(low, full_low, N):
        by_q = _by_queries(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, True, N, DK, DV,
                           FLOAT, CHUNK, PRECISION)  # fmt: skip
    for start in range(full_low, full_high, N):
        by_q = _by_queries(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, False, N, DK, DV,
                           FLOAT, CHUNK, PRECISION)  # fmt: skip
    for start in range(full_high, high, N):
        by_q = _by_queries(by_q, mine, keys, loss, change, along, rules, b, h, i, start, d_k, d_v, True, N, DK, DV,
                           FLOAT, CHUNK, PRECISION)  # fmt: skip
    line = head.to(tl.int64) * rules.queries + i
    c = tl.arange(0, DK)[None, :]
    place = out + line[:, None] * d_k + c
    tl.store(place, by_q.to(out.dtype.element_ty), mask=(i < rules.queries)[:, None] & (c < d_k))


@triton.jit
def bias(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss, change, along, steps, out, batch,
         own_batch, own_heads, over_queries, over_keys, per_key, per_value, M: tl.constexpr, N: tl.constexpr,
         DK: tl.constexpr, DV: tl.constexpr, FLOAT: tl.constexpr, CHUNK: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Σ dS over the bias's broadcast axes. Program (tile of keys × tile of queries × the bias's batch · heads).

    over_queries is the number of queries if the bias is broadcast over them (a program then sums over all), else 1;
    over_keys likewise.
    """
    height, width = rules.queries, rules.keys
    if over_queries > 1:
        height = 1
    if over_keys > 1:
        width = 1
    tile_j, rest = placed(tl.cdiv(width, N))
    tiles = tl.cdiv(height, M)
    tile_i, own = rest % tiles, rest // tiles
    own_b, own_h = own // own_heads, own % own_heads
    total = tl.zeros((M, N), FLOAT)
    for more_b in range(batch // own_batch):
        b = own_b + more_b
        for more_h in range(rules.heads // own_heads):
            h = own_h + more_h
            queries = of_queries(q, q_strides, loss.output, o_strides, along, steps, b, h)
            keys = of_keys(k, k_strides, v, v_strides, along, steps, b, h, per_key, per_value)
            for start_i in range(0, over_queries, M):
                i = tile_i * M + start_i + tl.arange(0, M)
                mine = held(queries, loss.output, along.q, along.output, i, rules.queries, d_k, d_v, DK, DV, CHUNK)
                for start_j in range(0, over_keys, N):
                    j = tile_j * N + start_j + tl.arange(0, N)
                    if any_seen(rules, b, h, i[:, None], j[None, :], tile_j * N + start_j, N):
                        block = held(keys, loss.output, along.k, along.v, j, rules.keys, d_k, d_v, DK, DV, CHUNK)
                        tile = slopes(mine, block, loss, change, along, rules, b, h, i, j, d_k, d_v, False, True,
                                      FLOAT, CHUNK, PRECISION)  # fmt: skip
                        total += tile.by_logit
    if over_queries > 1:
        total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], (M, N))
    if over_keys > 1:
        total = tl.broadcast_to(tl.sum(total, axis=1)[:, None], (M, N))
    i, j = tile_i * M + tl.arange(0, M)[:, None], tile_j * N + tl.arange(0, N)[None, :]
    place = out + (own.to(tl.int64) * height + i) * width + j
    tl.store(place, total, mask=(i < height) & (j < width))
