"""A matrix of effects as a picture: the mean under each pixel, and what core/effect_lists.larger leaves there.

A program of `pixels` owns the queries of one pixel row and a tile of keys; `pool_largest` goes through the keys of each
pixel column, as `columns.pool` does for the mean.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.columns import share_of
from clearhead.engines.gpu.effect_tiles import effects, load, of_keys, of_queries, products
from clearhead.engines.gpu.rules import any_seen, placed, query_range


@triton.jit
def _under(pixel, pixels, cells):
    """The first cell that a pixel covers, if only in part, and their end."""
    pixel = pixel.to(tl.int64)
    low, high = pixel * cells // pixels, ((pixel + 1) * cells + pixels - 1) // pixels
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _extremes(most, least, e):
    """The largest and the smallest effect of each column so far, with a block e more; of the largest, NaN counts."""
    known = tl.where(e == e, e, 0.0)
    unknown = tl.max((e != e).to(tl.int32), axis=0) > 0
    highest = tl.where(unknown, float("nan"), tl.max(known, axis=0))
    return tl.maximum(most, highest, tl.PropagateNan.ALL), tl.minimum(least, tl.min(known, axis=0))


@triton.jit
def _larger(most, least):
    return tl.where(-least > most, least, most)


@triton.jit
def pixels(q, q_strides, g, g_strides, k, k_strides, v, v_strides, d_k, d_v, rules, terms, mean, largest, first, count,
           height, per_key, per_value, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
           WIDE: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of keys × pixel row first … first + count × batch · heads), into (batch · heads, keys, count)."""
    tile, rest = placed(tl.cdiv(rules.keys, M))
    row, head = rest % count, rest // count
    b, h = head // rules.heads, head % rules.heads
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    queries = of_queries(q, q_strides, g, g_strides, d_k, d_v, b, h)
    keys = of_keys(k, k_strides, v, v_strides, d_k, d_v, b, h, per_key, per_value)
    mine = load(keys, j, rules.keys, DK, DV)
    begin, end = _under(first + row, height, rules.queries)
    low, _, _, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    total, most, least = tl.zeros((M,), FLOAT), tl.zeros((M,), FLOAT), tl.zeros((M,), FLOAT)  # 0 is what is masked
    for start in range(tl.maximum(begin, low), tl.minimum(end, high), N):
        i = start + tl.arange(0, N)
        if any_seen(rules, b, h, i[:, None], j[None, :], start_j, M):
            theirs = load(queries, i, rules.queries, DK, DV)
            scores, along = products(theirs, mine, queries, keys, rules, i, j, DV, WIDE, PRECISION)
            e, visible = effects(scores, along, terms, rules, b, h, i, j, True)
            e = tl.where(visible & (i < end)[:, None], e, 0.0)
            share = tl.where(i < end, share_of(first + row, height, i, rules.queries), 0.0).to(FLOAT)
            total += tl.sum(e * share[:, None], axis=0)
            most, least = _extremes(most, least, e)
    place = (head.to(tl.int64) * rules.keys + j) * count + row
    tl.store(mean + place, total, mask=j < rules.keys)
    tl.store(largest + place, _larger(most, least), mask=j < rules.keys)


@triton.jit
def pool_largest(largest, out, keys, width, columns, first, height, D: tl.constexpr, FLOAT: tl.constexpr,
                 N: tl.constexpr):  # fmt: skip
    """What core/effect_lists.larger leaves of (batch · heads, keys, columns) among the keys of each pixel column.

    Program (pixel column × batch · heads); into out (batch · heads, height, width), in rows first … first + columns.
    """
    part, head = placed(width)
    line = head.to(tl.int64)
    c = tl.arange(0, D)
    most, least = tl.zeros((D,), FLOAT), tl.zeros((D,), FLOAT)
    low, high = _under(part, width, keys)
    for start in range(low, high, N):
        j = start + tl.arange(0, N)
        here = (j < high)[:, None] & (c < columns)[None, :]
        block = tl.load(largest + (line * keys + j)[:, None] * columns + c[None, :], mask=here, other=0.0)
        most, least = _extremes(most, least, block)
    tl.store(out + (line * height + first + c) * width + part, _larger(most, least), mask=c < columns)
