"""A matrix of effects as a picture: the mean under each pixel, and what core/effect_lists.larger leaves there.

A program of `pixels` owns the queries of one pixel row and a tile of keys; `pool_largest` goes through the keys of each
pixel column, as `columns.pool` does for the mean.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.columns import share_of
from clearhead.engines.gpu.inputs import key_block, of_keys, of_queries, query_block
from clearhead.engines.gpu.rules import any_seen, query_range
from clearhead.engines.gpu.sweeps import placed, strip_of
from clearhead.engines.gpu.tiles import values


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
def pixels(inputs, rules, along, terms, mean, largest, first, count, height, sizes):
    """Program (strip of keys × pixel row first … first + count × batch · heads), into (batch · heads, keys, count)."""
    number, rest = placed(tl.cdiv(rules.keys, sizes.M))
    row, head = rest % count, rest // count
    strip = strip_of(rules, head // rules.heads, head % rules.heads, number * sizes.M, rules.keys, sizes.M)
    keys = key_block(of_keys(inputs, strip.b, strip.h), strip.index, rules, sizes)
    queries = of_queries(inputs, strip.b, strip.h)
    begin, end = _under(first + row, height, rules.queries)
    low, _, _, high = query_range(rules, strip.b, strip.first, strip.last, sizes.N, sizes.M)
    total = tl.zeros((sizes.M,), sizes.FLOAT)
    most, least = total, total  # 0 is what is masked
    for start in range(tl.maximum(begin, low), tl.minimum(end, high), sizes.N):
        i = start + tl.arange(0, sizes.N)
        if any_seen(rules, strip.b, strip.h, i[:, None], strip.index[None, :], strip.first, sizes.M):
            block = query_block(queries, i, rules, sizes)
            e, visible = values(block, keys, terms, along, rules, strip.b, strip.h, False, True, sizes)
            e = tl.where(visible & (i < end)[:, None], e, 0.0)
            share = tl.where(i < end, share_of(first + row, height, i, rules.queries), 0.0).to(sizes.FLOAT)
            total += tl.sum(e * share[:, None], axis=0)
            most, least = _extremes(most, least, e)
    place = strip.line * count + row
    tl.store(mean + place, total, mask=strip.inside)
    tl.store(largest + place, _larger(most, least), mask=strip.inside)


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
