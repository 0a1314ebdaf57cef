"""The column pass: sums over the queries of weights, of their tangents or of effects, by what tiles.values is told.

Groups use the product Aᵀ·g too: there g is 1 where a query has a label, and `pool` sums over the keys of each label. A
program of `pixels` owns a tile of keys and the queries of one pixel row of an image; `pool` sums over the keys of each
pixel column. Of effects it also answers what core/effect_lists.larger leaves there, as `pool_largest` does.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import (
    head_of,
    key_block,
    load_rows,
    mixed,
    of_keys,
    of_queries,
    query_block,
    shared_out,
    store_rows,
)
from clearhead.engines.gpu.sweeps import key_strip, over_queries, placed, strip_of
from clearhead.engines.gpu.tiles import indices, values

STATISTICS = frozenset(("received", "peak", "image", "groups"))  # image and groups through Aᵀ·g


class Columns(NamedTuple):
    """Where the results are written: contiguous (batch, heads, …); None where not requested."""

    received: Any = None  # (batch, heads, keys)
    peak: Any = None
    weights: Any = None  # (batch, heads, queries, keys)
    product: Any = None  # (batch, heads, keys, columns)


class Factor(NamedTuple):
    """What g is in the product Aᵀ·g: an array, or else 1 where a query has one of the `columns` labels from `first`."""

    columns: Any = 0
    g: Any = None  # Strided
    labels: Any = None  # (batch, queries)
    first: Any = 0


@triton.jit
def _shares(pixel, pixels, index, cells, FLOAT: tl.constexpr):
    """The shares of cells in a pixel, as observations.areas; counted from its first cell, which FLOAT holds exactly."""
    low, high = pixel.to(tl.float64) * cells / pixels, (pixel + 1).to(tl.float64) * cells / pixels
    first = tl.floor(low)
    place = (index - first.to(tl.int32)).to(FLOAT)
    inside = tl.minimum((high - first).to(FLOAT), place + 1) - tl.maximum((low - first).to(FLOAT), place)
    return tl.maximum(inside, 0.0) * (1.0 / (high - low)).to(FLOAT)


@triton.jit
def _under(pixel, pixels, cells):
    """The first cell that a pixel covers, if only in part, and their end."""
    pixel = pixel.to(tl.int64)
    low, high = pixel * cells // pixels, ((pixel + 1) * cells + pixels - 1) // pixels
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _factor_rows(factor, rules, b, h, i, D: tl.constexpr, FLOAT: tl.constexpr):
    """The rows of the factor for queries i."""
    c = tl.arange(0, D)
    if factor.g is not None:
        right = load_rows(head_of(factor.g, b, h), factor.columns, i, rules.queries, D).to(FLOAT)
    else:
        label = tl.load(factor.labels + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=-1)
        right = (label[:, None] == factor.first + c[None, :]).to(FLOAT)
    return right


@triton.jit
def _absorb(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    received, peak, total = state
    keys, queries, terms, along, factor, to = job
    block = query_block(queries, start, sizes.N, rules, sizes)
    if to.product is not None and sizes.QUERIES.y:  # turned, as these products of float32 would spill registers
        p, visible = values(block, keys, terms, along, rules, strip.b, strip.h, False, MASKED, sizes)
        p, visible = tl.trans(p), tl.trans(visible)
    else:
        p, visible = values(keys, block, terms, along, rules, strip.b, strip.h, True, MASKED, sizes)
    if to.weights is not None:
        i, j = indices(keys, block, True)
        line = (strip.b * rules.heads + strip.h).to(tl.int64) * rules.queries + i
        tl.store(to.weights + line * rules.keys + j, p, mask=(i < rules.queries) & (j < rules.keys))
    if to.received is not None:
        received += tl.sum(p, axis=1)
    if to.peak is not None:
        unknown = tl.max((p != p).to(tl.int32), axis=1) > 0
        peak = tl.where(unknown | (peak != peak), float("nan"), tl.maximum(peak, tl.max(p, axis=1)))
    if to.product is not None:
        right = _factor_rows(factor, rules, strip.b, strip.h, block.index, total.shape[1], sizes.FLOAT)
        if factor.g is not None:
            total = mixed(total, p, visible, right, MASKED, sizes.QUERIES.y, sizes.PRECISION)
        else:
            total = shared_out(total, p, right, sizes.PRECISION)
    return received, peak, total


@triton.jit
def columns(inputs, rules, along, terms, factor, to, span, sizes, D: tl.constexpr):
    """Program (strip of keys × batch · heads); of the queries in `span`, where there is one."""
    strip = key_strip(rules, sizes.M)
    keys = key_block(of_keys(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    job = keys, of_queries(inputs, strip.b, strip.h), terms, along, factor, to
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    state = none, none, tl.zeros((sizes.M, D), sizes.FLOAT)
    received, peak, total = over_queries(_absorb, state, job, rules, strip, span, sizes)
    if to.received is not None:
        tl.store(to.received + strip.line, received, mask=strip.inside)
    if to.peak is not None:
        tl.store(to.peak + strip.line, peak, mask=strip.inside)
    if to.product is not None:
        store_rows(to.product, strip.line, strip.inside, total, factor.columns)


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
        low, high = _under(part, parts, keys)
    for start in range(low, high, N):
        number = start + tl.arange(0, N)
        here = number < high
        if order is not None:
            j = tl.load(order + line // width * keys + number, mask=here, other=0)
            share = here.to(FLOAT)
        else:
            j = number
            share = tl.where(here, _shares(part, parts, number, keys, FLOAT), 0.0)
        rows = product + (line * keys + j)[:, None] * columns + e[None, :]
        block = tl.load(rows, mask=here[:, None] & (e < columns)[None, :], other=0.0)
        total += tl.sum(block * share[:, None], axis=0)
    tl.store(out + (line * height + first + e) * parts + part, total, mask=e < columns)


@triton.jit
def _extremes(most, least, e, AXIS: tl.constexpr):
    """The largest and the smallest effect so far, with a block e more along an axis; of the largest, NaN counts."""
    known = tl.where(e == e, e, 0.0)
    unknown = tl.max((e != e).to(tl.int32), axis=AXIS) > 0
    highest = tl.where(unknown, float("nan"), tl.max(known, axis=AXIS))
    return tl.maximum(most, highest, tl.PropagateNan.ALL), tl.minimum(least, tl.min(known, axis=AXIS))


@triton.jit
def _larger(most, least):
    return tl.where(-least > most, least, most)


@triton.jit
def _under_pixel(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    total, most, least = state
    keys, queries, terms, along, row, height, end, largest = job
    block = query_block(queries, start, sizes.N, rules, sizes)
    e, visible = values(keys, block, terms, along, rules, strip.b, strip.h, True, MASKED, sizes)
    inside = block.index < end
    share = tl.where(inside, _shares(row, height, block.index, rules.queries, sizes.FLOAT), 0.0)
    e = tl.where((visible & inside[None, :]) if MASKED else inside[None, :], e, 0.0)
    total += tl.sum(e * share[None, :], axis=1)
    if largest is not None:
        most, least = _extremes(most, least, e, 1)
    return total, most, least


@triton.jit
def pixels(inputs, rules, along, terms, mean, largest, first, count, height, sizes):
    """Program (strip of keys × pixel row first … first + count × batch · heads), into (batch · heads, keys, count)."""
    number, rest = placed(tl.cdiv(rules.keys, sizes.M))
    row, head = first + rest % count, rest // count
    strip = strip_of(rules, head // rules.heads, head % rules.heads, number * sizes.M, rules.keys, sizes.M)
    keys = key_block(of_keys(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    begin, end = _under(row, height, rules.queries)
    job = keys, of_queries(inputs, strip.b, strip.h), terms, along, row, height, end, largest
    none = tl.zeros((sizes.M,), sizes.FLOAT)  # the effect of what is masked
    total, most, least = over_queries(_under_pixel, (none, none, none), job, rules, strip, (begin, end), sizes)
    place = strip.line * count + row - first
    tl.store(mean + place, total, mask=strip.inside)
    if largest is not None:
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
        most, least = _extremes(most, least, block, 0)
    tl.store(out + (line * height + first + c) * width + part, _larger(most, least), mask=c < columns)
