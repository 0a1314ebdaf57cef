"""The passes over a matrix of effects, which compute it tile by tile (effect_tiles.py).

A program of `by_queries` owns a tile of queries and goes through the keys, one of `by_keys` a tile of keys and goes
through the queries. Each result has one writer and no atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.columns import factor_rows
from clearhead.engines.gpu.effect_tiles import effects, load, of_keys, of_queries, products, within
from clearhead.engines.gpu.inputs import load_rows
from clearhead.engines.gpu.rules import any_seen, key_range, placed, product, query_range, shared_out

FREE = tl.constexpr(1 << 62)  # places from here on are free


class ByQuery(NamedTuple):
    """Where `by_queries` writes: contiguous; None where not requested."""

    sums: Any  # (splits, batch, heads, queries)
    tile: Any  # (batch, heads, queries, keys)
    product: Any  # (batch, heads, queries, columns)
    top: Any  # values (splits, batch, heads, queries, TOP), and their keys, -1 and below where free
    top_keys: Any
    strongest: Any  # values (batch, heads, splits, tiles, STRONGEST), and their places, FREE and above where free
    strongest_places: Any


@triton.jit
def _reached(reaches, kind):
    """Which of +inf, -inf and NaN some row of `reaches` meets, of columns of 1, 256 and 32768; as in rules.mixed."""
    found = tl.dot(reaches.to(tl.float16), kind).to(tl.int32)
    return (found & 255) > 0, (found & 32512) > 0, found >= 32768


@triton.jit
def _mixed(total, e, visible, x, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add e·x to `total`. If MASKED, a nonfinite x reaches only those that it is visible to; e may have any sign."""
    if not MASKED:
        return total + product(e, x, PRECISION)
    finite = tl.abs(x) < float("inf")
    total += product(e, tl.where(finite, x, 0.0), PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        kind = tl.where(x == float("inf"), 1.0, tl.where(x == -float("inf"), 256.0, 32768.0))
        kind = tl.where(finite, 0.0, kind).to(tl.float16)
        up, down, unknown = _reached(visible & (e > 0), kind)
        down_too, up_too, unknown_too = _reached(visible & (e < 0), kind)
        never, nor, none = _reached(visible & (e == 0), kind)
        total += tl.where(up | up_too, float("inf"), 0.0)
        total += tl.where(down | down_too, -float("inf"), 0.0)
        total += tl.where(unknown | unknown_too | never | nor | none, float("nan"), 0.0)
    return total


@triton.jit
def _ranks(e, visible, ORDER: tl.constexpr):
    """What is to be listed first is largest; -inf for what is never listed, so that an effect's own -inf is raised."""
    rank = e
    if ORDER == "magnitude":
        rank = tl.abs(e)
    if ORDER == "smallest":
        rank = -e
    lowest = -1.7976931348623157e308 if rank.dtype == tl.float64 else -3.4028234663852886e38
    rank = tl.where(rank == -float("inf"), lowest, rank)
    return tl.where(visible & (rank == rank), rank, -float("inf"))


@triton.jit
def _insert(top, rank, e, start, N: tl.constexpr):
    """Merge a tile into each query's list of what ranks highest; of equal ranks the earlier key stays."""
    ranks, values, keys = top
    columns = tl.arange(0, N)[None, :]
    weakest, best = tl.min(ranks, axis=1), tl.max(rank, axis=1)
    while tl.max((best > weakest).to(tl.int32), axis=0) > 0:
        at = tl.min(tl.where(rank == best[:, None], columns, N), axis=1)
        here = columns == at[:, None]
        last = tl.max(tl.where(ranks == weakest[:, None], keys, -2147483647), axis=1)
        taken = (keys == last[:, None]) & (ranks == weakest[:, None]) & (best > weakest)[:, None]
        ranks = tl.where(taken, best[:, None], ranks)
        values = tl.where(taken, tl.sum(tl.where(here, e, 0.0), axis=1)[:, None], values)
        keys = tl.where(taken, (start + at)[:, None], keys)
        rank = tl.where(here, -float("inf"), rank)
        weakest, best = tl.min(ranks, axis=1), tl.max(rank, axis=1)
    return ranks, values, keys


@triton.jit
def _promising(best, weakest):
    return (best > -float("inf")).to(tl.int32) * (best >= weakest).to(tl.int32)


@triton.jit
def _keep(strongest, rank, e, i, j, rules):
    """Merge a tile into this program's list of what ranks highest; of equal ranks the earlier place stays."""
    ranks, values, places = strongest
    at = i.to(tl.int64)[:, None] * rules.keys + j[None, :]
    weakest, best = tl.min(ranks, axis=0), tl.max(tl.max(rank, axis=1), axis=0)
    going = _promising(best, weakest)
    while going > 0:
        place = tl.min(tl.min(tl.where(rank == best, at, FREE), axis=1), axis=0)
        here = (at == place) & (rank == best)
        last = tl.max(tl.where(ranks == weakest, places, -1), axis=0)
        better = tl.maximum((best > weakest).to(tl.int32), (place < last).to(tl.int32))
        taken = (places == last) & (ranks == weakest) & (better > 0)
        ranks = tl.where(taken, best, ranks)
        values = tl.where(taken, tl.sum(tl.sum(tl.where(here, e, 0.0), axis=1), axis=0), values)
        places = tl.where(taken, place, places)
        rank = tl.where(here, -float("inf"), rank)
        weakest, best = tl.min(ranks, axis=0), tl.max(tl.max(rank, axis=1), axis=0)
        going = _promising(best, weakest) * better
    return ranks, values, places


@triton.jit
def _across(state, mine, queries, keys, x, terms, rules, b, h, i, start, to, MASKED: tl.constexpr, N: tl.constexpr,
            DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ORDER: tl.constexpr,
            FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after one more block of keys; a fully masked block is skipped."""
    if MASKED and rules.content:
        if any_seen(rules, b, h, i[:, None], start + tl.arange(0, N)[None, :], start, N):
            state = _across_at(state, mine, queries, keys, x, terms, rules, b, h, i, start, to, MASKED, N, DK, DV, D,
                               WIDE, ORDER, FLOAT, PRECISION)  # fmt: skip
    else:
        state = _across_at(state, mine, queries, keys, x, terms, rules, b, h, i, start, to, MASKED, N, DK, DV, D,
                           WIDE, ORDER, FLOAT, PRECISION)  # fmt: skip
    return state


@triton.jit
def _across_at(state, mine, queries, keys, x, terms, rules, b, h, i, start, to, MASKED: tl.constexpr, N: tl.constexpr,
               DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ORDER: tl.constexpr,
               FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    sums, total, top, strongest = state
    j = start + tl.arange(0, N)
    theirs = load(keys, j, rules.keys, DK, DV)
    scores, along = products(mine, theirs, queries, keys, rules, i, j, DV, WIDE, PRECISION)
    e, visible = effects(scores, along, terms, rules, b, h, i, j, MASKED)
    if to.sums is not None:
        sums += tl.sum(e, axis=1)
    if to.tile is not None:
        line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
        inside = (i < rules.queries)[:, None] & (j < rules.keys)[None, :]
        tl.store(to.tile + line[:, None] * rules.keys + j[None, :], e, mask=inside)
    if to.product is not None:
        base, along_x, across_x, columns = x
        total = _mixed(total, e, visible, load_rows(base, along_x, across_x, columns, j, rules.keys, D).to(FLOAT),
                       MASKED, PRECISION)  # fmt: skip
    if to.top is not None:
        top = _insert(top, _ranks(e, visible, ORDER), e, start, N)
    if to.strongest is not None:
        strongest = _keep(strongest, _ranks(e, visible, "magnitude"), e, i, j, rules)
    return sums, total, top, strongest


@triton.jit
def by_queries(q, q_strides, g, g_strides, k, k_strides, v, v_strides, x, x_strides, d_k, d_v, columns, rules, terms,
               to, per_key, per_value, per_x, split, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr,
               DV: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr, STRONGEST: tl.constexpr, WIDE: tl.constexpr,
               ORDER: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of queries × batch · heads, split of the keys): sums, tiles, E·x, and what ranks highest."""
    tiles = tl.cdiv(rules.queries, M)
    later, head = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    queries = of_queries(q, q_strides, g, g_strides, d_k, d_v, b, h)
    keys = of_keys(k, k_strides, v, v_strides, d_k, d_v, b, h, per_key, per_value)
    mine = load(queries, i, rules.queries, DK, DV)
    given = q, 0, 0, 0
    if to.product is not None:
        own = x + b.to(tl.int64) * x_strides[0] + (h // per_x).to(tl.int64) * x_strides[1]
        given = own, x_strides[2], x_strides[3], columns
    low, full_low, full_high, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    if split is not None:
        low, full_low, full_high, high = within(split, low, full_low, full_high, high)
    slots, kept = tl.arange(0, TOP), tl.arange(0, STRONGEST)
    top = tl.full((M, TOP), -float("inf"), FLOAT), tl.zeros((M, TOP), FLOAT), tl.zeros((M, TOP), tl.int32) - 1 - slots
    strongest = tl.full((STRONGEST,), -float("inf"), FLOAT), tl.zeros((STRONGEST,), FLOAT), kept.to(tl.int64) + FREE
    state = tl.zeros((M,), FLOAT), tl.zeros((M, D), FLOAT), top, strongest
    for start in range(low, full_low, N):
        state = _across(state, mine, queries, keys, given, terms, rules, b, h, i, start, to, True, N, DK, DV, D, WIDE,
                        ORDER, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_low, full_high, N):
        state = _across(state, mine, queries, keys, given, terms, rules, b, h, i, start, to, False, N, DK, DV, D, WIDE,
                        ORDER, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_high, high, N):
        state = _across(state, mine, queries, keys, given, terms, rules, b, h, i, start, to, True, N, DK, DV, D, WIDE,
                        ORDER, FLOAT, PRECISION)  # fmt: skip
    sums, total, top, strongest = state
    here = i < rules.queries
    line = head.to(tl.int64) * rules.queries + i
    if to.product is not None:
        c = tl.arange(0, D)[None, :]
        tl.store(to.product + line[:, None] * columns + c, total, mask=here[:, None] & (c < columns))
    heads, splits = tl.num_programs(0) // tiles, tl.num_programs(1)
    line += tl.program_id(1).to(tl.int64) * heads * rules.queries
    if to.sums is not None:
        tl.store(to.sums + line, sums, mask=here)
    if to.top is not None:
        _, values, places = top
        at = line[:, None] * TOP + slots[None, :]
        tl.store(to.top + at, values, mask=here[:, None])
        tl.store(to.top_keys + at, places, mask=here[:, None])
    if to.strongest is not None:
        _, values, places = strongest
        at = ((head.to(tl.int64) * splits + tl.program_id(1)) * tiles + tile) * STRONGEST + kept
        tl.store(to.strongest + at, values)
        tl.store(to.strongest_places + at, places)


@triton.jit
def _down(state, mine, queries, keys, x, labels, terms, rules, b, h, start, start_j, to, MASKED: tl.constexpr,
          M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
          FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after one more block of queries; a fully masked block is skipped."""
    if MASKED and rules.content:
        j = start_j + tl.arange(0, M)
        if any_seen(rules, b, h, start + tl.arange(0, N)[:, None], j[None, :], start_j, M):
            state = _down_at(state, mine, queries, keys, x, labels, terms, rules, b, h, start, start_j, to, MASKED, M,
                             N, DK, DV, D, WIDE, FLOAT, PRECISION)  # fmt: skip
    else:
        state = _down_at(state, mine, queries, keys, x, labels, terms, rules, b, h, start, start_j, to, MASKED, M,
                         N, DK, DV, D, WIDE, FLOAT, PRECISION)  # fmt: skip
    return state


@triton.jit
def _down_at(state, mine, queries, keys, x, labels, terms, rules, b, h, start, start_j, to, MASKED: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
             FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    sums, total = state
    out, out_product = to
    i, j = start + tl.arange(0, N), start_j + tl.arange(0, M)
    theirs = load(queries, i, rules.queries, DK, DV)
    scores, along = products(theirs, mine, queries, keys, rules, i, j, DV, WIDE, PRECISION)
    e, visible = effects(scores, along, terms, rules, b, h, i, j, MASKED)
    if out is not None:
        sums += tl.sum(e, axis=0)
    if out_product is not None:
        base, strides, per_x, first, columns = x
        right = factor_rows(base, strides, labels, rules, b, h // per_x, i, first, 1, columns, D, FLOAT)
        if base is not None:
            total = _mixed(total, tl.trans(e), tl.trans(visible), right, MASKED, PRECISION)
        else:
            total = shared_out(total, tl.trans(e), right, PRECISION)
    return sums, total


@triton.jit
def by_keys(q, q_strides, g, g_strides, k, k_strides, v, v_strides, x, x_strides, labels, d_k, d_v, first, columns,
            rules, terms, out, out_product, per_key, per_value, per_x, span, M: tl.constexpr, N: tl.constexpr,
            DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, FLOAT: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of keys × batch · heads): sums over the queries, and Eᵀ·x.

    x is given, or says which of the groups first … first + columns each query belongs to, by `labels`; then only the
    queries in `span` count.
    """
    tile, head = placed(tl.cdiv(rules.keys, M))
    b, h = head // rules.heads, head % rules.heads
    start_j = tile * M
    j = start_j + tl.arange(0, M)
    queries = of_queries(q, q_strides, g, g_strides, d_k, d_v, b, h)
    keys = of_keys(k, k_strides, v, v_strides, d_k, d_v, b, h, per_key, per_value)
    mine = load(keys, j, rules.keys, DK, DV)
    low, full_low, full_high, high = query_range(rules, b, start_j, start_j + M - 1, N, M)
    if span is not None:
        low, high = tl.maximum(low, span[0]), tl.minimum(high, span[1])
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
        full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    given, to = (x, x_strides, per_x, first, columns), (out, out_product)
    state = tl.zeros((M,), FLOAT), tl.zeros((M, D), FLOAT)
    for start in range(low, full_low, N):
        state = _down(state, mine, queries, keys, given, labels, terms, rules, b, h, start, start_j, to, True, M, N,
                      DK, DV, D, WIDE, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_low, full_high, N):
        state = _down(state, mine, queries, keys, given, labels, terms, rules, b, h, start, start_j, to, False, M, N,
                      DK, DV, D, WIDE, FLOAT, PRECISION)  # fmt: skip
    for start in range(full_high, high, N):
        state = _down(state, mine, queries, keys, given, labels, terms, rules, b, h, start, start_j, to, True, M, N,
                      DK, DV, D, WIDE, FLOAT, PRECISION)  # fmt: skip
    sums, total = state
    line = head.to(tl.int64) * rules.keys + j
    if out is not None:
        tl.store(out + line, sums, mask=j < rules.keys)
    if out_product is not None:
        c = tl.arange(0, D)[None, :]
        place = out_product + line[:, None] * columns + c
        tl.store(place, total, mask=(j < rules.keys)[:, None] & (c < columns))
