"""The backward pass: weights are recomputed from the rows' states, once by tiles of keys and once by tiles of queries.

    dS_ij = a_ij·(dO_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|)

A program of the first kernel owns a strip of keys and sums dK and dV; one of the second owns a strip of queries and
sums dQ. Each result has one writer and no atomics, so it is deterministic. The gradients of a bias and of a table of
spans are recomputed (derivatives/torch_recomputed.py). `loss` is a base.Upstream whose numbers are contiguous, (batch,
heads, …); without its rows `keys` answers Aᵀ·g alone. `state` has the forward pass's State of each row.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LN2, distances, logits, score_grad
from clearhead.engines.gpu.tiles import (
    indices,
    log_weights,
    mixed,
    over,
    product,
    program_strip,
    store_rows,
    tokens,
)


@triton.jit
def _slope(start, loss, logs, rules, b, h, i, j):
    """The slope of a weight: `start` (dO·v) plus the terms per row and per key; logs is ln a."""
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
def slopes(left, right, inputs, state, loss, rules, b, h, BY_KEYS: tl.constexpr, MASKED: tl.constexpr, sizes):
    """(weights, gradients of scale·q·k, visible) of the tile of two Tokens; 0 where masked."""
    i, j = indices(left, right, BY_KEYS)
    scores = product(left.x, tl.trans(right.x), sizes.PRECISION)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = (s > -float("inf")) | (s != s)
    logs = log_weights(s, state, line, i < rules.queries)
    p = tl.exp2(logs)
    by_score = p
    if loss.rows is not None:
        inner = tl.zeros((1, 1), sizes.FLOAT)
        if inputs.v is not None:
            inner = product(left.y, tl.trans(right.y), sizes.PRECISION)
        by_logit = tl.where(p == 0, 0.0, p * _slope(inner, loss, logs * LN2, rules, b, h, i, j))
        by_score = score_grad(by_logit, scores, rules, h)
    if MASKED:
        p, by_score = tl.where(visible, p, 0.0), tl.where(visible, by_score, 0.0)
    return p, by_score, visible


@triton.jit
def _add_queries(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    by_k, by_v = state
    inputs, block, states, loss = job
    queries = tokens(inputs.q, inputs.g, strip.b, strip.h, start, rules.queries, sizes.N, sizes)
    p, by_score, visible = slopes(block, queries, inputs, states, loss, rules, strip.b, strip.h, True, MASKED, sizes)
    if loss.rows is not None:
        by_k = mixed(by_k, by_score, visible, queries.x, MASKED, sizes.PRECISION)
    if inputs.g is not None:
        by_v = mixed(by_v, p, visible, queries.y, MASKED, sizes.PRECISION)
    return by_k, by_v


@triton.jit
def keys(inputs, rules, state, loss, out_k, out_v, sizes):
    """Compute dK and dV of each query head, contiguous (batch, heads, keys, d_k or d_v).

    Program (strip of keys × batch · heads). Without a loss there is no dK, without g no dV.
    """
    strip = program_strip(rules, rules.keys, sizes.M)
    block = tokens(inputs.k, inputs.v, strip.b, strip.h, strip.first, rules.keys, sizes.M, sizes)
    sums = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT), tl.zeros((sizes.M, sizes.DV), sizes.FLOAT)
    by_k, by_v = over(_add_queries, sums, (inputs, block, state, loss), rules, strip, False, sizes)
    if loss.rows is not None:
        store_rows(out_k, strip.line, strip.inside, by_k * tl.load(rules.scales + strip.h), sizes.d_k)
    if inputs.g is not None:
        store_rows(out_v, strip.line, strip.inside, by_v, sizes.d_v)


@triton.jit
def _add_keys(by_q, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    inputs, block, states, loss = job
    keys = tokens(inputs.k, inputs.v, strip.b, strip.h, start, rules.keys, sizes.N, sizes)
    _, by_score, visible = slopes(block, keys, inputs, states, loss, rules, strip.b, strip.h, False, MASKED, sizes)
    return mixed(by_q, by_score, visible, keys.x, MASKED, sizes.PRECISION)


@triton.jit
def queries(inputs, rules, state, loss, out, sizes):
    """Compute dQ, likewise. Program (strip of queries × batch · heads)."""
    strip = program_strip(rules, rules.queries, sizes.M)
    block = tokens(inputs.q, inputs.g, strip.b, strip.h, strip.first, rules.queries, sizes.M, sizes)
    by_q = tl.zeros((sizes.M, sizes.DK), sizes.FLOAT)
    by_q = over(_add_keys, by_q, (inputs, block, state, loss), rules, strip, True, sizes)
    store_rows(out, strip.line, strip.inside, by_q * tl.load(rules.scales + strip.h), sizes.d_k)
