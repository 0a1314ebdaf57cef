"""The column pass: sums and maxima over the queries of weights, the weights themselves, and the pixels of an image."""

import triton
import triton.language as tl

from clearhead.engines.gpu.sweeps import over_keys, over_queries, placed, program_strip, strip_of
from clearhead.engines.gpu.tiles import indices, key_block, query_block, weights

STATISTICS = frozenset(("received", "peak", "image"))


@triton.jit
def _absorb(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    received, peak = state
    inputs, keys, states, to = job
    block = query_block(inputs, rules, strip.b, strip.h, start, sizes.N, sizes)
    p = weights(keys, block, states, rules, strip.b, strip.h, True, MASKED, sizes)
    if to.weights is not None:
        i, j = indices(keys, block, True)
        line = (strip.b * rules.heads + strip.h).to(tl.int64) * rules.queries + i
        tl.store(to.weights + line * rules.keys + j, p, mask=(i < rules.queries) & (j < rules.keys))
    if to.received is not None:
        received += tl.sum(p, axis=1)
    if to.peak is not None:
        unknown = tl.max((p != p).to(tl.int32), axis=1) > 0
        peak = tl.where(unknown | (peak != peak), float("nan"), tl.maximum(peak, tl.max(p, axis=1)))
    return received, peak


@triton.jit
def columns(inputs, rules, state, to, sizes):
    """Program (strip of keys × batch · heads)."""
    strip = program_strip(rules, rules.keys, sizes.M)
    keys = key_block(inputs, rules, strip.b, strip.h, strip.first, sizes.M, sizes)
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    received, peak = over_queries(_absorb, (none, none), (inputs, keys, state, to), rules, strip, sizes)
    if to.received is not None:
        tl.store(to.received + strip.line, received, mask=strip.inside)
    if to.peak is not None:
        tl.store(to.peak + strip.line, peak, mask=strip.inside)


@triton.jit
def _under(pixel, pixels, cells):
    """The first cell that a pixel covers, if only in part, and their end."""
    pixel = pixel.to(tl.int64)
    low, high = pixel * cells // pixels, ((pixel + 1) * cells + pixels - 1) // pixels
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _shares(pixel, pixels, index, cells, FLOAT: tl.constexpr):
    """The shares of cells in a pixel, as observations.areas; counted from its first cell, which FLOAT holds exactly."""
    low, high = pixel.to(tl.float64) * cells / pixels, (pixel + 1).to(tl.float64) * cells / pixels
    first = tl.floor(low)
    place = (index - first.to(tl.int32)).to(FLOAT)
    inside = tl.minimum((high - first).to(FLOAT), place + 1) - tl.maximum((low - first).to(FLOAT), place)
    return tl.maximum(inside, 0.0) * (1.0 / (high - low)).to(FLOAT)


@triton.jit
def _under_pixel(total, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    inputs, queries, states, shares, column, width = job
    block = key_block(inputs, rules, strip.b, strip.h, start, sizes.N, sizes)
    p = weights(queries, block, states, rules, strip.b, strip.h, False, MASKED, sizes)
    share = shares[:, None] * _shares(column, width, block.index, rules.keys, sizes.FLOAT)[None, :]
    return total + tl.sum(tl.where(share > 0, p * share, 0.0), axis=1)  # a NaN beside the pixel stays out


@triton.jit
def pixels(inputs, rules, state, to, height, width, sizes):
    """The mean of the weights under each pixel, into (batch, heads, height, width). Program (pixel × batch · heads)."""
    pixel, head = placed(height * width)
    row, column = pixel // width, pixel % width
    b, h = head // rules.heads, head % rules.heads
    begin, end = _under(row, height, rules.queries)
    part = _under(column, width, rules.keys)
    total = tl.zeros((sizes.M,), sizes.FLOAT)
    for start in range(begin, end, sizes.M):
        strip = strip_of(rules, b, h, start, rules.queries, sizes.M)
        queries = query_block(inputs, rules, b, h, start, sizes.M, sizes)
        shares = _shares(row, height, queries.index, rules.queries, sizes.FLOAT)
        job = inputs, queries, state, shares, column, width
        total = over_keys(_under_pixel, total, job, rules, strip, part, sizes)
    tl.store(to + tl.program_id(0).to(tl.int64), tl.sum(total, axis=0))
