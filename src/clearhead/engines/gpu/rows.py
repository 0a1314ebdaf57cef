"""The row pass: output, log-sum-exp, maximum, entropy, distance and the top weights in one pass over the keys.

Online softmax (Milakov & Gimelshein 2018) for a tile of rows, which are the queries of `pack` heads. With few queries,
heads that share keys are packed into one tile, the keys are split among programs, and `merge` merges their states. The
splits depend on the number of keys only, so no bit depends on the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LN2, LOG2E, any_seen, distances, key_range, logits, mixed, placed, product

STATISTICS = frozenset(("output", "logsumexp", "max_logit", "entropy", "distance", "own", "top"))


class Rows(NamedTuple):
    """Where the results are written: contiguous (batch, heads, queries, …); None where not requested."""

    output: Any
    logsumexp: Any
    max_logit: Any
    entropy: Any
    distance: Any
    own: Any
    top_weights: Any
    top_indices: Any


class Partial(NamedTuple):
    """The state of each row after each split of the keys: contiguous (splits, batch · heads · queries, …)."""

    maximum: Any
    total: Any
    centred: Any
    far: Any
    own: Any
    top: Any
    places: Any
    output: Any

    @staticmethod
    def room(make: Callable[..., Any], want: Rows, slots: int, d_v: int) -> "Partial":
        """Allocate with `make` the states that the requested results need."""
        ranked = want.top_weights is not None
        return Partial(
            maximum=make(),
            total=make(),
            centred=make() if want.entropy is not None else None,
            far=make() if want.distance is not None else None,
            own=make() if want.own is not None else None,
            top=make(slots) if ranked else None,
            places=make(slots, dtype=torch.int32) if ranked else None,
            output=make(d_v) if want.output is not None else None,
        )


class State(NamedTuple):
    """The online softmax state of a tile of rows, after the keys so far."""

    maximum: Any
    total: Any  # Σ p
    centred: Any  # Σ p·(s - maximum)
    far: Any  # Σ p·distance
    own: Any  # logit of the key at the query's own position
    top: Any  # largest logits, and their keys
    places: Any
    output: Any  # Σ p·v


@triton.jit
def _fresh(M: tl.constexpr, DV: tl.constexpr, TOP: tl.constexpr, FLOAT: tl.constexpr):
    """The initial state, before any key."""
    none = tl.zeros((M,), FLOAT)
    top = tl.full((M, TOP), -float("inf"), FLOAT)
    places = tl.zeros((M, TOP), tl.int32) - 1 - tl.arange(0, TOP)[None, :]
    return State(none - float("inf"), none, none, none, none - float("inf"), top, places, tl.zeros((M, DV), FLOAT))


@triton.jit
def _recentred(centred, total, drop):
    """Σ p·(s - maximum), of which entropy is made, after the maximum rises by -drop and before p is rescaled."""
    return centred + total * drop


@triton.jit
def _insert(top, places, found, start, N: tl.constexpr):
    """Merge a tile's logits (queries, keys) into the list of the largest; of equal logits the earlier key stays."""
    columns = tl.arange(0, N)[None, :]
    weakest, best = tl.min(top, axis=1), tl.max(found, axis=1)
    while tl.max((best > weakest).to(tl.int32), axis=0) > 0:
        at = tl.min(tl.where(found == best[:, None], columns, N), axis=1)
        last = tl.max(tl.where(top == weakest[:, None], places, -2147483647), axis=1)
        taken = (places == last[:, None]) & (top == weakest[:, None]) & (best > weakest)[:, None]
        top = tl.where(taken, best[:, None], top)
        places = tl.where(taken, (start + at)[:, None], places)
        found = tl.where(columns == at[:, None], -float("inf"), found)
        weakest, best = tl.min(top, axis=1), tl.max(found, axis=1)
    return top, places


@triton.jit
def _absorb(state, q, rules, b, h, i, start, keys, values, want, MASKED: tl.constexpr, N: tl.constexpr,
            DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after one more block of keys; a fully masked block is skipped."""
    if MASKED and rules.content:
        if any_seen(rules, b, h[:, None], i[:, None], start + tl.arange(0, N)[None, :], start, N):
            state = _take_in(state, q, rules, b, h, i, start, keys, values, want, MASKED, N, DK, DV, PRECISION)
    else:
        state = _take_in(state, q, rules, b, h, i, start, keys, values, want, MASKED, N, DK, DV, PRECISION)
    return state


@triton.jit
def _take_in(state, q, rules, b, h, i, start, keys, values, want, MASKED: tl.constexpr, N: tl.constexpr,
             DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    maximum, total, centred, far, own, top, places, output = state
    k, k_step, k_along, d_k = keys
    v, v_step, v_along, d_v = values
    j = start + tl.arange(0, N)
    c = tl.arange(0, DK)
    here = (c < d_k)[:, None]
    if MASKED:
        here &= (j < rules.keys)[None, :]
    block = tl.load(k + j.to(tl.int64)[None, :] * k_step + c.to(tl.int64)[:, None] * k_along, mask=here, other=0.0)
    scores = product(q, block, PRECISION)
    s = logits(scores, rules, b, h[:, None], i[:, None], j[None, :], MASKED)
    if want.top_weights is not None:
        top, places = _insert(top, places, s, start, N)
    higher = tl.maximum(maximum, tl.max(s, axis=1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    lower = s - safe[:, None]
    p = tl.exp2(lower)
    shrink = tl.exp2(maximum - safe)
    if want.entropy is not None:
        drop = tl.where(maximum == -float("inf"), 0.0, maximum - safe)
        centred = shrink * _recentred(centred, total, drop) + tl.sum(p * tl.maximum(lower, -1e30), axis=1)
    if want.distance is not None:
        away = distances(rules, b, i[:, None], j[None, :]).to(p.dtype)
        far = far * shrink + tl.sum(p * away, axis=1)
    if want.own is not None:
        here_it_is = distances(rules, b, i[:, None], j[None, :]) == 0
        own = tl.maximum(own, tl.max(tl.where(here_it_is, s, -float("inf")), axis=1))
    total = total * shrink + tl.sum(p, axis=1)
    if want.output is not None:
        e = tl.arange(0, DV)
        here = (e < d_v)[None, :]
        if MASKED:
            here &= (j < rules.keys)[:, None]
        block = tl.load(v + j.to(tl.int64)[:, None] * v_step + e.to(tl.int64)[None, :] * v_along, mask=here, other=0.0)
        output = mixed(output * shrink[:, None], p, s > -float("inf"), block, MASKED, PRECISION)
    return State(higher, total, centred, far, own, top, places, output)


@triton.jit
def _finish(state, rules, h, to, line, here, d_v, count, DV: tl.constexpr):
    """Store the results of rows `line`, with the sink in the denominator; 0 and lse -inf without visible keys."""
    maximum, total, centred, far, own, top, places, output = state
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    keys_lse = maximum + tl.log2(total)
    lse = keys_lse
    if rules.sinks is not None:
        sink = tl.load(rules.sinks + h) * LOG2E
        high = tl.where(empty, 0.0, tl.maximum(keys_lse, sink))
        lse = high + tl.log2(tl.exp2(keys_lse - high) + tl.exp2(sink - high))
    lse = tl.where(empty, -float("inf"), lse)
    safe = tl.where(empty, 0.0, lse)
    rise = tl.where(empty, 0.0, lse - keys_lse)
    share = tl.where(empty, 0.0, tl.exp2(-rise))
    if to.output is not None:
        e = tl.arange(0, DV)
        answer = output * (share / total)[:, None]
        place = to.output + line[:, None] * d_v + e[None, :]
        tl.store(place, answer.to(to.output.dtype.element_ty), mask=here[:, None] & (e < d_v)[None, :])
    if to.logsumexp is not None:
        tl.store(to.logsumexp + line, lse * LN2, mask=here)
    if to.max_logit is not None:
        unknown = (total != total) & (maximum != float("inf"))
        tl.store(to.max_logit + line, tl.where(unknown, float("nan"), maximum * LN2), mask=here)
    if to.entropy is not None:
        tl.store(to.entropy + line, share * (tl.log2(total) - centred / total + rise) * LN2, mask=here)
    if to.distance is not None:
        tl.store(to.distance + line, far * (share / total), mask=here)
    if to.own is not None:
        tl.store(to.own + line, tl.where(own == -float("inf"), 0.0, tl.exp2(own - safe)), mask=here)
    if to.top_weights is not None:
        for rank in range(count):  # take the largest that is left; of equal logits the earlier key
            best = tl.max(top, axis=1)
            tied = tl.where(top == best[:, None], places, 2147483647)
            earliest = tl.min(tied, axis=1)
            found = best > -float("inf")
            at = line * count + rank
            tl.store(to.top_weights + at, tl.exp2(best - safe), mask=here)
            tl.store(to.top_indices + at, tl.where(found, earliest, -1).to(tl.int64), mask=here)
            top = tl.where((tied == earliest[:, None]) & found[:, None], -float("inf"), top)


@triton.jit
def rows(q, q_strides, k, k_strides, v, v_strides, d_k, d_v, rules, want, part, pack, per_key, per_value, split, count,
         M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TOP: tl.constexpr,
         FLOAT: tl.constexpr, PRECISION: tl.constexpr, REPAIR: tl.constexpr):  # fmt: skip
    """Program (tile of rows × batch · heads / pack, split of the keys); per_key heads share keys, per_value values.

    With REPAIR, an output exists already, and only its tiles with NaN or infinity are recomputed.
    """
    tiles = tl.cdiv(pack * rules.queries, M)
    later, group = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    together = rules.heads // pack
    b, first_head = group // together, group % together * pack
    r = tile * M + tl.arange(0, M)
    here = r < pack * rules.queries
    i = tl.where(here, r % rules.queries, rules.queries)  # rows past the end have no visible keys
    h = first_head + tl.minimum(r // rules.queries, pack - 1)
    c = tl.arange(0, DK)
    place = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64)[:, None] * q_strides[1]
    place += i.to(tl.int64)[:, None] * q_strides[2] + c.to(tl.int64)[None, :] * q_strides[3]
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    if REPAIR:
        e = tl.arange(0, DV)
        place_o = want.output + line[:, None] * d_v + e[None, :]
        answer = tl.load(place_o, mask=here[:, None] & (e < d_v)[None, :], other=0.0).to(FLOAT)
        if tl.sum(tl.sum((tl.abs(answer) < float("inf")).to(tl.int32), axis=1), axis=0) == M * DV:
            return
    mine = tl.load(place, mask=here[:, None] & (c < d_k)[None, :], other=0.0)
    keys = k + b.to(tl.int64) * k_strides[0] + (first_head // per_key).to(tl.int64) * k_strides[1]
    values = v
    if want.output is not None:
        values += b.to(tl.int64) * v_strides[0] + (first_head // per_value).to(tl.int64) * v_strides[1]
    first, last = tile * M, tl.minimum(tile * M + M, rules.queries) - 1
    if pack > 1:
        first, last = 0 * first, 0 * last + rules.queries - 1
    low, full_low, full_high, high = key_range(rules, b, first, last, N, M)
    if split is not None:
        at = tl.program_id(1)
        low, high = tl.maximum(low, at * split), tl.minimum(high, (at + 1) * split)
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
        full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    state = _fresh(M, DV, TOP, FLOAT)
    along_k, along_v = (keys, k_strides[2], k_strides[3], d_k), (values, v_strides[2], v_strides[3], d_v)
    for start in range(low, full_low, N):
        state = _absorb(state, mine, rules, b, h, i, start, along_k, along_v, want, True, N, DK, DV, PRECISION)
    for start in range(full_low, full_high, N):
        state = _absorb(state, mine, rules, b, h, i, start, along_k, along_v, want, False, N, DK, DV, PRECISION)
    for start in range(full_high, high, N):
        state = _absorb(state, mine, rules, b, h, i, start, along_k, along_v, want, True, N, DK, DV, PRECISION)
    if split is None:
        _finish(state, rules, h, want, line, here, d_v, count, DV)
    else:
        lines = (tl.num_programs(0) // tiles).to(tl.int64) * pack * rules.queries
        _keep(state, part, tl.program_id(1).to(tl.int64) * lines + line, here, d_v, DV, TOP)


@triton.jit
def _keep(state, part, line, here, d_v, DV: tl.constexpr, TOP: tl.constexpr):
    tl.store(part.maximum + line, state.maximum, mask=here)
    tl.store(part.total + line, state.total, mask=here)
    if part.centred is not None:
        tl.store(part.centred + line, state.centred, mask=here)
    if part.far is not None:
        tl.store(part.far + line, state.far, mask=here)
    if part.own is not None:
        tl.store(part.own + line, state.own, mask=here)
    if part.top is not None:
        slots = tl.arange(0, TOP)[None, :]
        tl.store(part.top + line[:, None] * TOP + slots, state.top, mask=here[:, None])
        tl.store(part.places + line[:, None] * TOP + slots, state.places, mask=here[:, None])
    if part.output is not None:
        e = tl.arange(0, DV)[None, :]
        tl.store(part.output + line[:, None] * d_v + e, state.output, mask=here[:, None] & (e < d_v))


@triton.jit
def merge(rules, want, part, lines, splits, d_v, count, M: tl.constexpr, DV: tl.constexpr, TOP: tl.constexpr,
          FLOAT: tl.constexpr):  # fmt: skip
    """Merge the states of the splits in the order of the keys, and store the results."""
    line = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    here = line < lines
    h = line // rules.queries % rules.heads
    maximum, total, centred, far, own, top, places, output = _fresh(M, DV, TOP, FLOAT)
    slots, e = tl.arange(0, TOP)[None, :], tl.arange(0, DV)[None, :]
    at = line
    for _ in range(splits):
        theirs = tl.load(part.maximum + at, mask=here, other=-float("inf"))
        higher = tl.maximum(maximum, theirs)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, grow = tl.exp2(maximum - safe), tl.exp2(theirs - safe)
        more = tl.load(part.total + at, mask=here, other=0.0)
        if part.centred is not None:
            drop = tl.where(maximum == -float("inf"), 0.0, maximum - safe)
            fall = tl.where(theirs == -float("inf"), 0.0, theirs - safe)
            other = tl.load(part.centred + at, mask=here, other=0.0)
            centred = shrink * _recentred(centred, total, drop) + grow * _recentred(other, more, fall)
        if part.far is not None:
            far = far * shrink + grow * tl.load(part.far + at, mask=here, other=0.0)
        if part.own is not None:
            own = tl.maximum(own, tl.load(part.own + at, mask=here, other=-float("inf")))
        if part.top is not None:
            top, places = _join(top, places, part, at, here, slots, TOP)
        if part.output is not None:
            block = tl.load(part.output + at[:, None] * d_v + e, mask=here[:, None] & (e < d_v), other=0.0)
            output = output * shrink[:, None] + tl.where((grow > 0)[:, None], block * grow[:, None], 0.0)
        total = total * shrink + more * grow
        maximum = higher
        at += lines
    state = State(maximum, total, centred, far, own, top, places, output)
    _finish(state, rules, h, want, line, here, d_v, count, DV)


@triton.jit
def _join(top, places, part, at, here, slots, TOP: tl.constexpr):
    """Merge two lists of largest logits; all keys of the second list come later."""
    found = tl.load(part.top + at[:, None] * TOP + slots, mask=here[:, None], other=-float("inf"))
    where = tl.load(part.places + at[:, None] * TOP + slots, mask=here[:, None], other=-1)
    for _ in range(TOP):
        weakest, best = tl.min(top, axis=1), tl.max(found, axis=1)
        tied = tl.where(found == best[:, None], where, 2147483647)
        place = tl.min(tied, axis=1)
        last = tl.max(tl.where(top == weakest[:, None], places, -2147483647), axis=1)
        better = best > weakest
        taken = (places == last[:, None]) & (top == weakest[:, None]) & better[:, None]
        top = tl.where(taken, best[:, None], top)
        places = tl.where(taken, place[:, None], places)
        found = tl.where(tied == place[:, None], -float("inf"), found)
    return top, places
