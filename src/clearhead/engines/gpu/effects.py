"""The passes over the keys for a matrix of effects: sums, products, lists of what ranks highest; Others for cuts."""

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
    products,
    query_block,
    store_rows,
)
from clearhead.engines.gpu.lists import FREE, insert, keep, no_list, ranks_of
from clearhead.engines.gpu.rules import LN2, logits
from clearhead.engines.gpu.sweeps import over_keys, query_strip, split_of
from clearhead.engines.gpu.tiles import inner_products, values


class ByQuery(NamedTuple):
    """Where `by_queries` writes: contiguous; None where not requested."""

    sums: Any = None  # (splits, batch, heads, queries)
    product: Any = None  # (batch, heads, queries, columns)
    top: Any = None  # values (splits, batch, heads, queries, TOP), and their keys, -1 and below where free
    top_keys: Any = None
    strongest: Any = None  # values (splits, batch, heads, strips, STRONGEST), and places, FREE and above where free
    strongest_places: Any = None


class Others(NamedTuple):
    """Where core/effects.Others is written: contiguous (splits, batch, heads, queries)."""

    strongest: Any  # int32
    logit: Any
    term: Any
    logsumexp: Any
    others: Any


@triton.jit
def _absorb(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    sums, total, top, strongest = state
    queries, keys, terms, along, x, to = job[0]
    block = key_block(keys, start, sizes.N, rules, sizes)
    e, visible = values(queries, block, terms, along, rules, strip.b, strip.h, False, MASKED, sizes)
    if to.sums is not None:
        sums += tl.sum(e, axis=1)
    if to.product is not None:
        head, columns = x
        rows = load_rows(head, columns, block.index, rules.keys, total.shape[1]).to(sizes.FLOAT)
        total = mixed(total, e, visible, rows, MASKED, True, sizes.PRECISION)
    if to.top is not None:
        top = insert(top, ranks_of(e, visible, job[1]), e, block.index[None, :])
    if to.strongest is not None:
        rank = ranks_of(e, visible, "magnitude")
        strongest = keep(strongest, rank, e, strip.index, block.index, rules.keys)
    return sums, total, top, strongest


@triton.jit
def by_queries(inputs, rules, along, terms, x, columns, to, split, sizes, D: tl.constexpr, TOP: tl.constexpr,
               STRONGEST: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """Program (strip of queries × batch · heads, split of the keys): sums, E·x, and what ranks highest."""
    strip = query_strip(rules, sizes.M)
    queries = query_block(of_queries(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    rows = head_of(inputs.k, strip.b, strip.h)
    if to.product is not None:
        rows = head_of(x, strip.b, strip.h)
    kept, none = tl.arange(0, STRONGEST).to(tl.int64), tl.zeros((STRONGEST,), sizes.FLOAT)
    lists = no_list(sizes.M, TOP, sizes.FLOAT), (none - float("inf"), none, kept + FREE)
    state = tl.zeros((sizes.M,), sizes.FLOAT), tl.zeros((sizes.M, D), sizes.FLOAT), lists[0], lists[1]
    keys = of_keys(inputs, strip.b, strip.h)
    job = queries, keys, terms, along, (rows, columns), to
    sums, total, top, strongest = over_keys(_absorb, state, (job, ORDER), rules, strip, split_of(split), True, sizes)
    if to.product is not None:
        store_rows(to.product, strip.line, strip.inside, total, columns)
    strips = tl.cdiv(rules.queries, sizes.M)
    head = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // strips)
    line = head * rules.queries + strip.line
    if to.sums is not None:
        tl.store(to.sums + line, sums, mask=strip.inside)
    if to.top is not None:
        slots = line[:, None] * TOP + tl.arange(0, TOP)[None, :]
        tl.store(to.top + slots, top[1], mask=strip.inside[:, None])
        tl.store(to.top_keys + slots, top[2], mask=strip.inside[:, None])
    if to.strongest is not None:
        head += strip.b * rules.heads + strip.h
        slots = (head * strips + strip.first // sizes.M) * STRONGEST + kept
        tl.store(to.strongest + slots, strongest[1])
        tl.store(to.strongest_places + slots, strongest[2])


@triton.jit
def _apart(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    """The online softmax of all keys but the strongest so far, which is added when another takes its place."""
    strongest, top, term, high, total, mass = state
    queries, keys = job
    columns = tl.arange(0, sizes.N)
    block = key_block(keys, start, sizes.N, rules, sizes)
    scores, _ = products(queries, block, 0, False, sizes)
    inner = inner_products(queries, block, False, sizes)
    s = logits(scores, rules, strip.b, strip.h, strip.index[:, None], block.index[None, :], MASKED)
    best = tl.max(s, axis=1)
    column = tl.min(tl.where(s == best[:, None], columns[None, :], sizes.N), axis=1)
    here = columns[None, :] == column[:, None]
    its = tl.sum(tl.where(here & (s > -float("inf")), inner, 0.0), axis=1)
    s = tl.where(here, -float("inf"), s)
    better = best > top  # of equal logits the earlier key stays
    lost, its_term = tl.where(better, top, best), tl.where(better, term, its)
    strongest, top = tl.where(better, tl.cast(start, tl.int32) + column, strongest), tl.maximum(top, best)
    term = tl.where(better, its, term)
    higher = tl.maximum(high, tl.maximum(tl.max(s, axis=1), lost))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink, share = tl.exp2(high - safe), tl.exp2(lost - safe)
    total = total * shrink + tl.sum(p, axis=1) + share
    mass = mass * shrink + tl.sum(tl.where(s > -float("inf"), p * inner, 0.0), axis=1)
    mass += tl.where(lost > -float("inf"), share * its_term, 0.0)
    return strongest, top, term, higher, total, mass


@triton.jit
def others(inputs, rules, to, split, sizes):
    """Each row's key of the largest logit, and the answer of all its other keys, which its cuts need.

    Program (strip of queries × batch · heads, split of the keys).
    """
    strip = query_strip(rules, sizes.M)
    queries = query_block(of_queries(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    state = tl.zeros((sizes.M,), tl.int32) - 1, none - float("inf"), none, none - float("inf"), none, none
    job = queries, of_keys(inputs, strip.b, strip.h)
    state = over_keys(_apart, state, job, rules, strip, split_of(split), True, sizes)
    strongest, top, term, highest, total, mass = state
    alone = total == 0
    heads = tl.num_programs(0) // tl.cdiv(rules.queries, sizes.M)
    line = tl.program_id(1).to(tl.int64) * heads * rules.queries + strip.line
    total = tl.where(alone, 1.0, total)
    tl.store(to.strongest + line, strongest, mask=strip.inside)
    tl.store(to.logit + line, top * LN2, mask=strip.inside)
    tl.store(to.term + line, term, mask=strip.inside)
    lse = tl.where(alone, -float("inf"), highest + tl.log2(total)) * LN2
    tl.store(to.logsumexp + line, lse, mask=strip.inside)
    tl.store(to.others + line, mass / total, mask=strip.inside)
