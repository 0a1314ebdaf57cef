"""What each row must know for its cuts: its key of the largest logit, and the answer of all its other keys.

One pass over the keys: the online softmax of the others, to which the strongest key so far is added when another takes
its place. Each result has one writer and no atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.effect_tiles import load, of_keys, of_queries, products, within
from clearhead.engines.gpu.rules import LN2, any_seen, key_range, logits, placed


class Found(NamedTuple):
    """Where core/effects.Others is written: contiguous (splits, batch, heads, queries)."""

    strongest: Any  # int32
    logit: Any
    term: Any
    logsumexp: Any
    others: Any


@triton.jit
def _look(state, mine, queries, keys, rules, b, h, i, start, MASKED: tl.constexpr, N: tl.constexpr, DK: tl.constexpr,
          DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after one more block of keys; a fully masked block is skipped."""
    if MASKED and rules.content:
        if any_seen(rules, b, h, i[:, None], start + tl.arange(0, N)[None, :], start, N):
            state = _look_at(state, mine, queries, keys, rules, b, h, i, start, MASKED, N, DK, DV, WIDE, PRECISION)
    else:
        state = _look_at(state, mine, queries, keys, rules, b, h, i, start, MASKED, N, DK, DV, WIDE, PRECISION)
    return state


@triton.jit
def _look_at(state, mine, queries, keys, rules, b, h, i, start, MASKED: tl.constexpr, N: tl.constexpr, DK: tl.constexpr,
             DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    strongest, top, term, high, total, mass = state
    columns = tl.arange(0, N)
    j = start + columns
    theirs = load(keys, j, rules.keys, DK, DV)
    scores, along = products(mine, theirs, queries, keys, rules, i, j, DV, WIDE, PRECISION)
    s = logits(scores, rules, b, h, i[:, None], j[None, :], MASKED)
    best = tl.max(s, axis=1)
    at = tl.min(tl.where(s == best[:, None], columns[None, :], N), axis=1)
    here = columns[None, :] == at[:, None]
    its = tl.sum(tl.where(here & (s > -float("inf")), along, 0.0), axis=1)
    s = tl.where(here, -float("inf"), s)
    better = best > top  # of equal logits the earlier key stays
    lost, its_term = tl.where(better, top, best), tl.where(better, term, its)
    strongest, top, term = tl.where(better, start + at, strongest), tl.maximum(top, best), tl.where(better, its, term)
    higher = tl.maximum(high, tl.maximum(tl.max(s, axis=1), lost))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink, share = tl.exp2(high - safe), tl.exp2(lost - safe)
    total = total * shrink + tl.sum(p, axis=1) + share
    mass = mass * shrink + tl.sum(tl.where(s > -float("inf"), p * along, 0.0), axis=1)
    mass += tl.where(lost > -float("inf"), share * its_term, 0.0)
    return strongest, top, term, higher, total, mass


@triton.jit
def others(q, q_strides, g, g_strides, k, k_strides, v, v_strides, d_k, d_v, rules, to, per_key, per_value, split,
           M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr,
           FLOAT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of queries × batch · heads, split of the keys)."""
    tiles = tl.cdiv(rules.queries, M)
    later, head = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    queries = of_queries(q, q_strides, g, g_strides, d_k, d_v, b, h)
    keys = of_keys(k, k_strides, v, v_strides, d_k, d_v, b, h, per_key, per_value)
    mine = load(queries, i, rules.queries, DK, DV)
    low, full_low, full_high, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    if split is not None:
        low, full_low, full_high, high = within(split, low, full_low, full_high, high)
    none = tl.zeros((M,), FLOAT)
    state = tl.zeros((M,), tl.int32) - 1, none - float("inf"), none, none - float("inf"), none, none
    for start in range(low, full_low, N):
        state = _look(state, mine, queries, keys, rules, b, h, i, start, True, N, DK, DV, WIDE, PRECISION)
    for start in range(full_low, full_high, N):
        state = _look(state, mine, queries, keys, rules, b, h, i, start, False, N, DK, DV, WIDE, PRECISION)
    for start in range(full_high, high, N):
        state = _look(state, mine, queries, keys, rules, b, h, i, start, True, N, DK, DV, WIDE, PRECISION)
    strongest, top, term, highest, total, mass = state
    here, alone = i < rules.queries, total == 0
    line = (tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // tiles) + head) * rules.queries + i
    total = tl.where(alone, 1.0, total)
    tl.store(to.strongest + line, strongest, mask=here)
    tl.store(to.logit + line, top * LN2, mask=here)
    tl.store(to.term + line, term, mask=here)
    tl.store(to.logsumexp + line, tl.where(alone, -float("inf"), highest + tl.log2(total)) * LN2, mask=here)
    tl.store(to.others + line, mass / total, mask=here)
