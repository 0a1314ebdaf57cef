"""The column pass: recomputes every weight from the log-sum-exp, for statistics that are sums over the queries.

A program owns a tile of keys and goes through the queries in order. Each result has one writer and no atomics, so it is
deterministic. Images and groups use the product Aᵀ·g too: there g is the share of each query in each pixel row or
group, computed in the kernel, and `pool` sums over the keys of each pixel column or group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LOG2E, any_seen, logits, mixed, placed, product, query_range

STATISTICS = frozenset(("received", "peak", "image", "groups"))  # image and groups through Aᵀ·g


class Columns(NamedTuple):
    """Where the results are written: contiguous (batch, heads, …); None where not requested."""

    received: Any  # (batch, heads, keys)
    peak: Any
    weights: Any  # (batch, heads, queries, keys)
    product: Any  # (batch, heads, keys, columns)


@triton.jit
def weigh(q, k, lse, rules, b, h, i, j, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The weights of a tile, transposed: (keys, queries); 0 where masked."""
    scores = product(k, q, PRECISION)
    s = logits(scores, rules, b, h, i[None, :], j[:, None], MASKED)
    p = tl.exp2(s - lse[None, :])
    if MASKED:
        p = tl.where(s > -float("inf"), p, tl.where(s != s, s, 0.0))
    return p, s


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
    k,
    q,
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
    only,
    to,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after one more block of queries; a fully masked block is skipped."""
    if MASKED and rules.content:
        j = start_j + tl.arange(0, k.shape[0])
        if any_seen(rules, b, h, start + tl.arange(0, N)[None, :], j[:, None], start_j, k.shape[0]):
            state = _look_at(state, k, q, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size, columns,
                             only, to, MASKED, N, D, FLOAT, PRECISION)  # fmt: skip
    else:
        state = _look_at(state, k, q, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size, columns,
                         only, to, MASKED, N, D, FLOAT, PRECISION)  # fmt: skip
    return state


@triton.jit
def _look_at(
    state,
    k,
    q,
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
    only,
    to,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    received, peak, total = state
    rows, along, columns_along, d_k = q
    i, j = start + tl.arange(0, N), start_j + tl.arange(0, k.shape[0])
    c = tl.arange(0, k.shape[1])
    here = (c < d_k)[:, None]
    inside = i < rules.queries
    if MASKED:
        here &= inside[None, :]
    turned = rows + i.to(tl.int64)[None, :] * along + c.to(tl.int64)[:, None] * columns_along
    block = tl.load(turned, mask=here, other=0.0)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    mine = tl.load(lse + line, mask=inside, other=float("inf")) * LOG2E
    mine = tl.where(mine == -float("inf"), float("inf"), mine)
    p, s = weigh(block, k, mine, rules, b, h, i, j, MASKED, PRECISION)
    if to.weights is not None:
        place = to.weights + line[None, :] * rules.keys + j[:, None]
        tl.store(place, p, mask=inside[None, :] & (j < rules.keys)[:, None])
    if to.received is not None or to.peak is not None:
        counted = p
        if only is not None:
            counted = tl.where((start >= only[0]) & (start < only[1]), p, 0.0)
        if to.received is not None:
            received += tl.sum(counted, axis=1)
        if to.peak is not None:
            unknown = tl.max((counted != counted).to(tl.int32), axis=1) > 0
            peak = tl.where(unknown | (peak != peak), float("nan"), tl.maximum(peak, tl.max(counted, axis=1)))
    if to.product is not None:
        right = factor_rows(g, g_strides, labels, rules, b, h, i, first, size, columns, D, FLOAT)
        total = mixed(total, p, s > -float("inf"), right, MASKED, PRECISION)
    return received, peak, total


@triton.jit
def columns(q, q_strides, k, k_strides, lse, g, g_strides, labels, d_k, rules, to, per_key, first, size, columns, span,
            only, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, D: tl.constexpr, FLOAT: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of keys × batch · heads); uses `columns` columns of g from `first` on, and the queries in `span`.

    If an image takes several launches, `only` is the range of queries (whole tiles) that this one adds to received and
    peak, in the order of a single launch, so that the bits are the same.
    """
    tile, head = placed(tl.cdiv(rules.keys, M))
    b, h = head // rules.heads, head % rules.heads
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    c = tl.arange(0, DK)
    place = k + b.to(tl.int64) * k_strides[0] + (h // per_key).to(tl.int64) * k_strides[1]
    place += j.to(tl.int64)[:, None] * k_strides[2] + c.to(tl.int64)[None, :] * k_strides[3]
    mine = tl.load(place, mask=(j < rules.keys)[:, None] & (c < d_k)[None, :], other=0.0)
    low, full_low, full_high, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    if span is not None:
        low, high = tl.maximum(low, span[0]), tl.minimum(high, span[1])
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
        full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    here = j < rules.keys
    line = head.to(tl.int64) * rules.keys + j
    received, peak = tl.zeros((M,), FLOAT), tl.zeros((M,), FLOAT)
    if only is not None and to.received is not None:
        received = tl.load(to.received + line, mask=here, other=0.0)
    if only is not None and to.peak is not None:
        peak = tl.load(to.peak + line, mask=here, other=0.0)
    state = received, peak, tl.zeros((M, D), FLOAT)
    along = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1], q_strides[2], q_strides[3], d_k
    for start in range(low, full_low, N):
        state = _look(state, mine, along, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size, columns,
                      only, to, True, N, D, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_low, full_high, N):
        state = _look(state, mine, along, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size, columns,
                      only, to, False, N, D, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_high, high, N):
        state = _look(state, mine, along, lse, g, g_strides, labels, rules, b, h, start, start_j, first, size, columns,
                      only, to, True, N, D, FLOAT, PRECISION)  # fmt: skip
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
