"""The backward pass: weights are recomputed from the log-sum-exp, once by tiles of keys and once by tiles of queries.

    dS_ij = a_ij·(dO_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|)

A program of the first kernel owns a tile of keys and sums dK, dV and, at no extra cost, the mass that they receive; one
of the second owns a tile of queries and sums dQ; one of the third owns a tile of the bias. Each result has one writer
and no atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import (
    LN2,
    LOG2E,
    any_seen,
    distances,
    key_range,
    logit_grad,
    logits,
    mixed,
    placed,
    product,
    query_range,
)


class Loss(NamedTuple):
    """The upstream gradients (base.Upstream), contiguous (batch, heads, …) except `output`; None where zero."""

    logsumexp: Any
    rows: Any
    keys: Any
    entropy: Any
    distance: Any
    output: Any


class Places(NamedTuple):
    """Where the gradients are written, contiguous; None where not requested."""

    k: Any  # (batch, heads / together, keys, d_k)
    v: Any
    received: Any  # (batch, heads, keys)


@triton.jit
def load_rows(base, along, across, d, at, most, D: tl.constexpr):
    """Load rows `at` of a matrix with `most` rows of `d` elements; zeros past its end."""
    c = tl.arange(0, D)
    place = base + at.to(tl.int64)[:, None] * along + c.to(tl.int64)[None, :] * across
    return tl.load(place, mask=(at < most)[:, None] & (c < d)[None, :], other=0.0)


@triton.jit
def slopes(scores, inner, loss, rules, b, h, i, j, MASKED: tl.constexpr):
    """The weights, dS and the gradient of q·k for a tile in either orientation; 0 where masked.

    `inner` is dO·v; i and j have shapes that broadcast to the tile's.
    """
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    lse = tl.load(loss.logsumexp + line, mask=inside, other=float("inf")) * LOG2E
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = s > -float("inf")
    logs = s - lse
    p = tl.exp2(logs)
    slope = inner + tl.load(loss.rows + line, mask=inside, other=0.0)
    if loss.keys is not None:
        theirs = (b * rules.heads + h).to(tl.int64) * rules.keys + j
        slope += tl.load(loss.keys + theirs, mask=j < rules.keys, other=0.0)
    if loss.entropy is not None:
        slope -= tl.load(loss.entropy + line, mask=inside, other=0.0) * (logs * LN2)
    if loss.distance is not None:
        away = distances(rules, b, i, j).to(scores.dtype)
        slope += tl.load(loss.distance + line, mask=inside, other=0.0) * away
    by_logit = tl.where(p == 0, 0.0, p * slope)
    by_score = by_logit * logit_grad(scores, rules, h)
    if MASKED:
        visible |= s != s
        p, by_logit = tl.where(visible, p, 0.0), tl.where(visible, by_logit, 0.0)
        by_score = tl.where(visible, by_score, 0.0)
    return p, by_logit, by_score, visible


@triton.jit
def _by_keys(
    state,
    mine,
    values,
    heads,
    loss,
    rules,
    b,
    h,
    start,
    start_j,
    d_k,
    d_v,
    to,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after one more block of queries; a fully masked block is skipped."""
    if MASKED and rules.content:
        j = start_j + tl.arange(0, mine.shape[0])
        if any_seen(rules, b, h, start + tl.arange(0, N)[None, :], j[:, None], start_j, mine.shape[0]):
            state = _add_queries(state, mine, values, heads, loss, rules, b, h, start, start_j, d_k, d_v, to, MASKED,
                                 N, DK, DV, PRECISION)  # fmt: skip
    else:
        state = _add_queries(state, mine, values, heads, loss, rules, b, h, start, start_j, d_k, d_v, to, MASKED,
                             N, DK, DV, PRECISION)  # fmt: skip
    return state


@triton.jit
def _add_queries(state, mine, values, heads, loss, rules, b, h, start, start_j, d_k, d_v, to, MASKED: tl.constexpr,
                 N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    by_k, by_v, received = state
    q, q_along, q_across, output, o_along, o_across = heads
    i, j = start + tl.arange(0, N), start_j + tl.arange(0, mine.shape[0])
    block = load_rows(q, q_along, q_across, d_k, i, rules.queries, DK)
    scores = product(mine, tl.trans(block), PRECISION)
    inner = tl.zeros_like(scores)
    given = block
    if loss.output is not None:
        given = load_rows(output, o_along, o_across, d_v, i, rules.queries, DV)
        inner = product(values, tl.trans(given), PRECISION)
    p, _, by_score, visible = slopes(scores, inner, loss, rules, b, h, i[None, :], j[:, None], MASKED)
    by_k = mixed(by_k, by_score, visible, block, MASKED, PRECISION)
    if to.v is not None:
        by_v = mixed(by_v, p, visible, given, MASKED, PRECISION)
    if to.received is not None:
        received += tl.sum(p, axis=1)
    return by_k, by_v, received


@triton.jit
def keys(
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    o_strides,
    d_k,
    d_v,
    rules,
    loss,
    to,
    together,
    per_key,
    per_value,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK, dV and received. Program (tile of keys × batch · heads / together); `together` query heads share keys."""
    groups = rules.heads // together
    tile, group = placed(tl.cdiv(rules.keys, M))
    b, first = group // groups, group % groups * together
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    own = k + b.to(tl.int64) * k_strides[0] + (first // per_key).to(tl.int64) * k_strides[1]
    mine = load_rows(own, k_strides[2], k_strides[3], d_k, j, rules.keys, DK)
    values = mine
    if loss.output is not None:
        theirs = v + b.to(tl.int64) * v_strides[0] + (first // per_value).to(tl.int64) * v_strides[1]
        values = load_rows(theirs, v_strides[2], v_strides[3], d_v, j, rules.keys, DV)
    low, full_low, full_high, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    by_k, by_v = tl.zeros((M, DK), FLOAT), tl.zeros((M, DV), FLOAT)
    here = j < rules.keys
    for head in range(together):
        h = first + head
        queries = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
        output = queries
        if loss.output is not None:
            output = loss.output + b.to(tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1]
        along = queries, q_strides[2], q_strides[3], output, o_strides[2], o_strides[3]
        state = by_k, by_v, tl.zeros((M,), FLOAT)
        for start in range(low, full_low, N):
            state = _by_keys(
                state, mine, values, along, loss, rules, b, h, start, start_j, d_k, d_v, to, True, N, DK, DV, PRECISION
            )
        for start in range(full_low, full_high, N):
            state = _by_keys(
                state, mine, values, along, loss, rules, b, h, start, start_j, d_k, d_v, to, False, N, DK, DV, PRECISION
            )
        for start in range(full_high, high, N):
            state = _by_keys(
                state, mine, values, along, loss, rules, b, h, start, start_j, d_k, d_v, to, True, N, DK, DV, PRECISION
            )
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
def load_queries(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss, b, h, i, per_key,
                 per_value, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """Queries i of a head with their upstream gradients, and where the keys and values begin that it attends to."""
    own = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    mine = load_rows(own, q_strides[2], q_strides[3], d_k, i, rules.queries, DK)
    given, values = mine, k
    if loss.output is not None:
        output = loss.output + b.to(tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1]
        given = load_rows(output, o_strides[2], o_strides[3], d_v, i, rules.queries, DV)
        values = v + b.to(tl.int64) * v_strides[0] + (h // per_value).to(tl.int64) * v_strides[1]
    keys = k + b.to(tl.int64) * k_strides[0] + (h // per_key).to(tl.int64) * k_strides[1]
    return mine, given, keys, values


@triton.jit
def _by_queries(
    by_q,
    mine,
    given,
    keys,
    values,
    loss,
    rules,
    b,
    h,
    i,
    start,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The dQ after one more block of keys; a fully masked block is skipped."""
    if MASKED and rules.content:
        if any_seen(rules, b, h, i[:, None], start + tl.arange(0, N)[None, :], start, N):
            by_q = _add_keys(by_q, mine, given, keys, values, loss, rules, b, h, i, start, MASKED, N, DK, DV, PRECISION)
    else:
        by_q = _add_keys(by_q, mine, given, keys, values, loss, rules, b, h, i, start, MASKED, N, DK, DV, PRECISION)
    return by_q


@triton.jit
def _add_keys(by_q, mine, given, keys, values, loss, rules, b, h, i, start, MASKED: tl.constexpr, N: tl.constexpr,
              DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    k, k_along, k_across, d_k = keys
    v, v_along, v_across, d_v = values
    j = start + tl.arange(0, N)
    block = load_rows(k, k_along, k_across, d_k, j, rules.keys, DK)
    scores = product(mine, tl.trans(block), PRECISION)
    inner = tl.zeros_like(scores)
    if loss.output is not None:
        inner = product(given, tl.trans(load_rows(v, v_along, v_across, d_v, j, rules.keys, DV)), PRECISION)
    _, _, by_score, visible = slopes(scores, inner, loss, rules, b, h, i[:, None], j[None, :], MASKED)
    return mixed(by_q, by_score, visible, block, MASKED, PRECISION)


@triton.jit
def queries(
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    o_strides,
    d_k,
    d_v,
    rules,
    loss,
    out,
    per_key,
    per_value,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dQ. Program (tile of queries × batch · heads)."""
    tiles = tl.cdiv(rules.queries, M)
    later, head = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    mine, given, keys, values = load_queries(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss,
                                             b, h, i, per_key, per_value, DK, DV)  # fmt: skip
    low, full_low, full_high, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    along, beside = (keys, k_strides[2], k_strides[3], d_k), (values, v_strides[2], v_strides[3], d_v)
    by_q = tl.zeros((M, DK), FLOAT)
    for start in range(low, full_low, N):
        by_q = _by_queries(by_q, mine, given, along, beside, loss, rules, b, h, i, start, True, N, DK, DV, PRECISION)
    for start in range(full_low, full_high, N):
        by_q = _by_queries(by_q, mine, given, along, beside, loss, rules, b, h, i, start, False, N, DK, DV, PRECISION)
    for start in range(full_high, high, N):
        by_q = _by_queries(by_q, mine, given, along, beside, loss, rules, b, h, i, start, True, N, DK, DV, PRECISION)
    line = head.to(tl.int64) * rules.queries + i
    c = tl.arange(0, DK)[None, :]
    place = out + line[:, None] * d_k + c
    tl.store(place, by_q.to(out.dtype.element_ty), mask=(i < rules.queries)[:, None] & (c < d_k))


@triton.jit
def bias(
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    o_strides,
    d_k,
    d_v,
    rules,
    loss,
    out,
    batch,
    own_batch,
    own_heads,
    over_queries,
    over_keys,
    per_key,
    per_value,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
            for start_i in range(0, over_queries, M):
                i = tile_i * M + start_i + tl.arange(0, M)
                head = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
                mine = load_rows(head, q_strides[2], q_strides[3], d_k, i, rules.queries, DK)
                given = mine
                if loss.output is not None:
                    head = loss.output + b.to(tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1]
                    given = load_rows(head, o_strides[2], o_strides[3], d_v, i, rules.queries, DV)
                for start_j in range(0, over_keys, N):
                    j = tile_j * N + start_j + tl.arange(0, N)
                    if any_seen(rules, b, h, i[:, None], j[None, :], tile_j * N + start_j, N):
                        head = k + b.to(tl.int64) * k_strides[0] + (h // per_key).to(tl.int64) * k_strides[1]
                        block = load_rows(head, k_strides[2], k_strides[3], d_k, j, rules.keys, DK)
                        scores = product(mine, tl.trans(block), PRECISION)
                        inner = tl.zeros_like(scores)
                        if loss.output is not None:
                            head = v + b.to(tl.int64) * v_strides[0] + (h // per_value).to(tl.int64) * v_strides[1]
                            block = load_rows(head, v_strides[2], v_strides[3], d_v, j, rules.keys, DV)
                            inner = product(given, tl.trans(block), PRECISION)
                        _, by, _, _ = slopes(scores, inner, loss, rules, b, h, i[:, None], j[None, :], True)
                        total += by
    if over_queries > 1:
        total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], (M, N))
    if over_keys > 1:
        total = tl.broadcast_to(tl.sum(total, axis=1)[:, None], (M, N))
    i, j = tile_i * M + tl.arange(0, M)[:, None], tile_j * N + tl.arange(0, N)[None, :]
    place = out + (own.to(tl.int64) * height + i) * width + j
    tl.store(place, total, mask=(i < height) & (j < width))
