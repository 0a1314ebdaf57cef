"""The column pass: recomputes every weight from the log-sum-exp, for statistics that are sums over the queries.

A program owns a tile of keys and goes through the queries in order. Each result has one writer and no atomics, so it is
deterministic. Images and groups use the product Aᵀ·g too: there g is the share of each query in each pixel row or
group, computed in the kernel, and `pool` sums over the keys of each pixel column or group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import held, of_keys, of_queries, products
from clearhead.engines.gpu.rules import (
    LOG2E,
    any_seen,
    logit_tangents,
    logits,
    mixed,
    placed,
    query_range,
    shared_out,
)

STATISTICS = frozenset(("received", "peak", "image", "groups"))  # image and groups through Aᵀ·g


class Columns(NamedTuple):
    """Where the results are written: contiguous (batch, heads, …); None where not requested."""

    received: Any  # (batch, heads, keys)
    peak: Any
    weights: Any  # (batch, heads, queries, keys)
    product: Any  # (batch, heads, keys, columns)


@triton.jit
def _weigh(scores, lse, rules, b, h, i, j, MASKED: tl.constexpr):
    """The weights of a tile, transposed: (keys, queries); 0 where masked."""
    s = logits(scores, rules, b, h, i[None, :], j[:, None], MASKED)
    p = tl.exp2(s - lse[None, :])
    if MASKED:
        p = tl.where(s > -float("inf"), p, tl.where(s != s, s, 0.0))
    return p, (s > -float("inf")) | (s != s)


@triton.jit
def _moved(p, scores, changed, middle, along, rules, b, h, i, j, visible):
    """The tangents of such weights, from those of q·k (`changed`) and of the log-sum-exp."""
    tangents = logit_tangents(scores, changed, along, rules, b, h, i[None, :], j[:, None], visible)
    return tl.where(p == 0, 0.0, p * (tangents - middle[None, :]))


@triton.jit
def share_of(pixel, pixels, cell, cells):
    """The share of one cell in one of `pixels` pixels over `cells` cells: observations.areas for integer tensors."""
    low, high = pixel.to(tl.float64) * cells / pixels, (pixel + 1).to(tl.float64) * cells / pixels
    place = cell.to(tl.float64)
    return tl.maximum(tl.minimum(high, place + 1) - tl.maximum(low, place), 0.0) / (high - low)


@triton.jit
def factor_rows(g, g_strides, labels, rules, b, h, i, first, size, columns, D: tl.constexpr, FLOAT: tl.constexpr):
    """The rows of g in Aᵀ·g for queries i: loaded from memory, or computed from labels or from pixel rows."""
    c = tl.arange(0, D)
    if g is not None:
        place = g + b.to(tl.int64) * g_strides[0] + h.to(tl.int64) * g_strides[1]
        place += i.to(tl.int64)[:, None] * g_strides[2] + c.to(tl.int64)[None, :] * g_strides[3]
        right = tl.load(place, mask=(i < rules.queries)[:, None] & (c < columns)[None, :], other=0.0).to(FLOAT)
    elif labels is not None:
        mine = tl.load(labels + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=-1)
        right = (mine[:, None] == first + c[None, :]).to(FLOAT)
    else:
        row = first + c[None, :]
        share = share_of(row, size, i[:, None], rules.queries)
        right = tl.where(row < first + columns, share, 0.0).to(FLOAT)
    return right


@triton.jit
def _look(
    state,
    keys,
    queries,
    d_k,
    lse,
    g,
    g_strides,
    labels,
    rules,
    b,
    h,
    start,
    start_j,
    first,
    size,
    columns,
    to,
    along,
    tangent,
    MASKED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after one more block of queries; a fully masked block is skipped."""
    if MASKED and rules.content:
        j = start_j + tl.arange(0, M)
        if any_seen(rules, b, h, start + tl.arange(0, N)[None, :], j[:, None], start_j, M):
            state = _look_at(state, keys, queries, d_k, lse, g, g_strides, labels, rules, b, h, start, start_j, first,
                             size, columns, to, along, tangent, MASKED, M, N, DK, D, FLOAT, CHUNK,
                             PRECISION)  # fmt: skip
    else:
        state = _look_at(state, keys, queries, d_k, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size,
                         columns, to, along, tangent, MASKED, M, N, DK, D, FLOAT, CHUNK, PRECISION)  # fmt: skip
    return state


@triton.jit
def _look_at(
    state,
    keys,
    queries,
    d_k,
    lse,
    g,
    g_strides,
    labels,
    rules,
    b,
    h,
    start,
    start_j,
    first,
    size,
    columns,
    to,
    along,
    tangent,
    MASKED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    received, peak, total = state
    i, j = start + tl.arange(0, N), start_j + tl.arange(0, M)
    inside = i < rules.queries
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    mine = tl.load(lse + line, mask=inside, other=float("inf")) * LOG2E
    mine = tl.where(mine == -float("inf"), float("inf"), mine)
    block = held(queries, None, along.q, None, i, rules.queries, d_k, 0, DK, D, CHUNK)
    scores, changed = products(keys, block, along.k, along.q, j, rules.keys, i, rules.queries, d_k, 0, FLOAT, CHUNK,
                               PRECISION)  # fmt: skip
    p, visible = _weigh(scores, mine, rules, b, h, i, j, MASKED)
    if tangent is not None:
        middle = tl.load(tangent + line, mask=inside, other=0.0)
        p = _moved(p, scores, changed, middle, along, rules, b, h, i, j, visible)
    if to.weights is not None:
        place = to.weights + line[None, :] * rules.keys + j[:, None]
        tl.store(place, p, mask=inside[None, :] & (j < rules.keys)[:, None])
    if to.received is not None:
        received += tl.sum(p, axis=1)
    if to.peak is not None:
        unknown = tl.max((p != p).to(tl.int32), axis=1) > 0
        peak = tl.where(unknown | (peak != peak), float("nan"), tl.maximum(peak, tl.max(p, axis=1)))
    if to.product is not None:
        right = factor_rows(g, g_strides, labels, rules, b, h, i, first, size, columns, D, FLOAT)
        if g is not None:
            total = mixed(total, p, visible, right, MASKED, PRECISION)
        else:
            total = shared_out(total, p, right, PRECISION)
    return received, peak, total


@triton.jit
def columns(q, q_strides, k, k_strides, lse, g, g_strides, labels, d_k, rules, to, per_key, first, size, columns, span,
            along, steps, tangent, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
            FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of keys × batch · heads); uses `columns` columns of g from `first` on, and the queries in `span`.

    With the tangent of the log-sum-exp, the tangents of all weights along a Direction take their place.
    """
    tile, head = placed(tl.cdiv(rules.keys, M))
    b, h = head // rules.heads, head % rules.heads
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    own = of_keys(k, k_strides, None, k_strides, along, steps, b, h, per_key, per_key)
    queries = of_queries(q, q_strides, None, q_strides, along, steps, b, h)
    mine = held(own, None, along.k, None, j, rules.keys, d_k, 0, DK, D, CHUNK)
    low, full_low, full_high, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    if span is not None:
        low, high = tl.maximum(low, span[0]), tl.minimum(high, span[1])
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
        full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    here = j < rules.keys
    line = head.to(tl.int64) * rules.keys + j
    state = tl.zeros((M,), FLOAT), tl.zeros((M,), FLOAT), tl.zeros((M, D), FLOAT)
    for start in range(low, full_low, N):
        state = _look(state, mine, queries, d_k, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size,
                      columns, to, along, tangent, True, M, N, DK, D, FLOAT, CHUNK, PRECISION)  # fmt: skip
    for start in range(full_low, full_high, N):
        state = _look(state, mine, queries, d_k, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size,
                      columns, to, along, tangent, False, M, N, DK, D, FLOAT, CHUNK, PRECISION)  # fmt: skip
    for start in range(full_high, high, N):
        state = _look(state, mine, queries, d_k, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size,
                      columns, to, along, tangent, True, M, N, DK, D, FLOAT, CHUNK, PRECISION)  # fmt: skip
    received, peak, total = state
    if to.received is not None:
        tl.store(to.received + line, received, mask=here)
    if to.peak is not None:
        tl.store(to.peak + line, peak, mask=here)
    if to.product is not None:
        e = tl.arange(0, D)[None, :]
        tl.store(to.product + line[:, None] * columns + e, total, mask=here[:, None] & (e < columns))


@triton.jit
def pool(product, out, order, starts, keys, parts, width, columns, first, height, D: tl.constexpr, FLOAT: tl.constexpr,
         N: tl.constexpr):  # fmt: skip
    """Sum product (batch·heads, keys, columns) over the keys of each part, into out (batch·heads, height, parts).

    Program (part × batch·heads). With `order`, part p has the keys order[starts[p]:starts[p + 1]] of its batch item,
    each of which has `width` heads; else it is pixel column p of an image, and keys cut by its edge count in part.
    """
    part, head = placed(parts)
    line = head.to(tl.int64)
    e = tl.arange(0, D)
    total = tl.zeros((D,), FLOAT)
    if order is not None:
        table = starts + line // width * (parts + 1) + part
        low, high = tl.load(table), tl.load(table + 1)
    else:
        low, high = part.to(tl.int64) * keys // parts, ((part + 1).to(tl.int64) * keys + parts - 1) // parts
    for start in range(low.to(tl.int32), high.to(tl.int32), N):
        at = start + tl.arange(0, N)
        here = at < high
        if order is not None:
            j = tl.load(order + line // width * keys + at, mask=here, other=0)
            share = here.to(FLOAT)
        else:
            j = at
            share = tl.where(here, share_of(part, parts, at, keys), 0.0).to(FLOAT)
        rows = product + (line * keys + j)[:, None] * columns + e[None, :]
        block = tl.load(rows, mask=here[:, None] & (e < columns)[None, :], other=0.0)
        total += tl.sum(block * share[:, None], axis=0)
    at = out + (line * height + first + e) * parts + part
    tl.store(at, total, mask=e < columns)
