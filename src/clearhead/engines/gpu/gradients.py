"""The backward pass: weights are recomputed from the rows' states, once by tiles of keys and once by tiles of queries.

    dS_ij = a_ij·(dO_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|)

A program of the first kernel owns a strip of keys and sums dK and dV; one of the second owns a strip of queries and
sums dQ; one of the third owns a tile of the bias, one of the last sums over the labels of a table of spans. Each result
has one writer and no atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LN2, any_seen, distances, logits, scaled, score_grad
from clearhead.engines.gpu.sweeps import over_keys, over_queries, placed, program_strip
from clearhead.engines.gpu.tiles import indices, key_block, log_weights, mixed, product, query_block, store_rows


class Loss(NamedTuple):
    """The forward pass's State of each row and the upstream gradients (base.Upstream) but the output's: contiguous.

    They are (batch, heads, …), None where zero; without `rows`, `keys` answers Aᵀ·g alone.
    """

    state: Any
    rows: Any = None
    keys: Any = None
    entropy: Any = None
    distance: Any = None


class Slopes(NamedTuple):
    """What a tile of the backward pass multiplies; 0 where masked."""

    weights: Any
    by_logit: Any  # dS
    by_score: Any  # the gradients of q·k, as score_grad has them
    visible: Any


@triton.jit
def _slope(start, loss, logs, rules, b, h, i, j):
    """The derivative by a weight, from `start`, dO·v, on; logs is ln a."""
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
    return slope


@triton.jit
def slopes(left, right, inputs, loss, rules, b, h, BY_KEYS: tl.constexpr, MASKED: tl.constexpr, sizes):
    """The Slopes of a tile of two Blocks in either orientation."""
    i, j = indices(left, right, BY_KEYS)
    scores = product(left.x, tl.trans(right.x), sizes.PRECISION)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = (s > -float("inf")) | (s != s)
    logs = log_weights(s, loss.state, line, i < rules.queries)
    p = tl.exp2(logs)
    by_logit, by_score = p, p
    if loss.rows is not None:
        inner = tl.zeros((1, 1), sizes.FLOAT)
        if inputs.v is not None:
            inner = product(left.y, tl.trans(right.y), sizes.PRECISION)
        by_logit = tl.where(p == 0, 0.0, p * _slope(inner, loss, logs * LN2, rules, b, h, i, j))
        by_score = score_grad(by_logit, scores, rules, h)
    if MASKED:
        p, by_logit = tl.where(visible, p, 0.0), tl.where(visible, by_logit, 0.0)
        by_score = tl.where(visible, by_score, 0.0)
    return Slopes(p, by_logit, by_score, visible)


@triton.jit
def _add_queries(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    by_k, by_v = state
    inputs, block, loss = job
    queries = query_block(inputs, rules, strip.b, strip.h, start, sizes.N, sizes)
    tile = slopes(block, queries, inputs, loss, rules, strip.b, strip.h, True, MASKED, sizes)
    if loss.rows is not None:
        by_k = mixed(by_k, tile.by_score, tile.visible, queries.x, MASKED, sizes.PRECISION)
    if inputs.g is not None:
        by_v = mixed(by_v, tile.weights, tile.visible, queries.y, MASKED, sizes.PRECISION)
    return by_k, by_v


@triton.jit
def keys(inputs, rules, loss, out_k, out_v, sizes):
    """Compute dK and dV of each query head, contiguous (batch, heads, keys, d_k or d_v).

    Program (strip of keys × batch · heads). Without loss.rows there is no dK, without g no dV.
    """
    strip = program_strip(rules, rules.keys, sizes.M)
    block = key_block(inputs, rules, strip.b, strip.h, strip.first, sizes.M, sizes)
    state = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT), tl.zeros((sizes.M, sizes.DV), sizes.FLOAT)
    by_k, by_v = over_queries(_add_queries, state, (inputs, block, loss), rules, strip, sizes)
    if loss.rows is not None:
        store_rows(out_k, strip.line, strip.inside, scaled(by_k, rules), sizes.d_k)
    if inputs.g is not None:
        store_rows(out_v, strip.line, strip.inside, by_v, sizes.d_v)


@triton.jit
def _add_keys(by_q, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    inputs, block, loss = job
    keys = key_block(inputs, rules, strip.b, strip.h, start, sizes.N, sizes)
    tile = slopes(block, keys, inputs, loss, rules, strip.b, strip.h, False, MASKED, sizes)
    return mixed(by_q, tile.by_score, tile.visible, keys.x, MASKED, sizes.PRECISION)


@triton.jit
def queries(inputs, rules, loss, out, sizes):
    """Compute dQ, likewise. Program (strip of queries × batch · heads)."""
    strip = program_strip(rules, rules.queries, sizes.M)
    block = query_block(inputs, rules, strip.b, strip.h, strip.first, sizes.M, sizes)
    by_q = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT)
    by_q = over_keys(_add_keys, by_q, (inputs, block, loss), rules, strip, None, sizes)
    store_rows(out, strip.line, strip.inside, scaled(by_q, rules), sizes.d_k)


@triton.jit
def bias(inputs, rules, loss, out, batch, bias_batch, bias_heads, across_queries, across_keys, sizes):
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
            for start_i in range(0, across_queries, sizes.N):
                rows = query_block(inputs, rules, b, h, tile_i * sizes.N + start_i, sizes.N, sizes)
                for start_j in range(0, across_keys, sizes.N):
                    start = tile_j * sizes.N + start_j
                    j = start + tl.arange(0, sizes.N)
                    if any_seen(rules, b, h, rows.index[:, None], j[None, :]):
                        block = key_block(inputs, rules, b, h, start, sizes.N, sizes)
                        total += slopes(rows, block, inputs, loss, rules, b, h, False, True, sizes).by_logit
    if across_queries > 1:
        total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], (sizes.N, sizes.N))
    if across_keys > 1:
        total = tl.broadcast_to(tl.sum(total, axis=1)[:, None], (sizes.N, sizes.N))
    i, j = tile_i * sizes.N + tl.arange(0, sizes.N)[:, None], tile_j * sizes.N + tl.arange(0, sizes.N)[None, :]
    place = out + (number.to(tl.int64) * height + i) * width + j
    tl.store(place, total, mask=(i < height) & (j < width))


@triton.jit
def _add_labels(total, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    inputs, block, loss, labels = job
    keys = key_block(inputs, rules, strip.b, strip.h, start, sizes.N, sizes)
    tile = slopes(keys, block, inputs, loss, rules, strip.b, strip.h, True, MASKED, sizes)
    place = rules.key_spans + strip.b.to(tl.int64) * rules.keys + keys.index
    chosen = tl.load(place, mask=keys.index < rules.keys, other=-1)[None, :] == labels[:, None]
    return mixed(total, chosen.to(sizes.FLOAT), chosen, tile.by_logit, MASKED, sizes.PRECISION)


@triton.jit
def spans(inputs, rules, loss, out, first, count, sizes, D: tl.constexpr):
    """Σ_j dS_ij over the keys of each of `count` labels from `first` on, into out (batch, heads, queries, count).

    Program (strip of queries × batch · heads). The sum is a product with ones and zeros.
    """
    strip = program_strip(rules, rules.queries, sizes.M)
    block = query_block(inputs, rules, strip.b, strip.h, strip.first, sizes.M, sizes)
    e = tl.arange(0, D)
    total = tl.zeros((D, sizes.M), sizes.FLOAT)
    total = over_keys(_add_labels, total, (inputs, block, loss, first + e), rules, strip, None, sizes)
    place = out + strip.line[None, :] * count + e[:, None]
    tl.store(place, total, mask=strip.inside[None, :] & (e < count)[:, None])
