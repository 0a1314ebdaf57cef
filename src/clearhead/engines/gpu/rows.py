"""The row pass: output, log-sum-exp, maximum, entropy, distance and the top weights in one pass over the keys.

Online softmax (Milakov & Gimelshein 2018) for a tile of rows, which are the queries of `pack` heads. With few queries,
heads that share keys are packed into one tile, the keys are split among programs, and `merge` merges their states. The
splits depend on the number of keys only, so no bit depends on the batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import head_of, load_block, load_rows, mixed, not_finite, product, store_rows
from clearhead.engines.gpu.lists import insert, no_list
from clearhead.engines.gpu.rules import LN2, LOG2E, distances, largest, logits
from clearhead.engines.gpu.sweeps import Strip, over_keys, placed, split_of

STATISTICS = frozenset(("output", "logsumexp", "max_logit", "entropy", "distance", "diagonal", "top"))


class Rows(NamedTuple):
    """Where the results are written: contiguous (batch, heads, queries, …); None where not requested."""

    output: Any = None
    logsumexp: Any = None
    max_logit: Any = None
    entropy: Any = None
    distance: Any = None
    diagonal: Any = None
    top_weights: Any = None
    top_indices: Any = None


class State(NamedTuple):
    """The online softmax state of rows after some keys, or where it is kept: (splits, batch · heads · queries, …).

    There it is contiguous, with None for what no requested result needs.
    """

    maximum: Any
    total: Any  # Σ p
    centred: Any  # Σ p·(s - maximum)
    far: Any  # Σ p·distance
    diagonal: Any  # logit of the key at the query's own position
    top: Any  # largest logits, and their keys
    places: Any
    output: Any  # Σ p·v


@triton.jit
def _fresh(TOP: tl.constexpr, M: tl.constexpr, sizes):
    """The initial state, before any key."""
    none = tl.zeros((M,), sizes.FLOAT)
    top, _, places = no_list(M, TOP, sizes.FLOAT)
    return State(none - float("inf"), none, none, none, none - float("inf"), top, places,
                 tl.zeros((M, sizes.DV), sizes.FLOAT))  # fmt: skip


@triton.jit
def _absorb(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    maximum, total, centred, far, diagonal, top, places, output = state
    q, keys, values, want = job[0]
    b, h, i, j = strip.b, strip.h, strip.index[:, None], tl.cast(start, tl.int32) + tl.arange(0, sizes.N)
    size = rules.keys if MASKED else start + sizes.N
    block = load_block(keys, sizes.d_k, start, sizes.N, size, sizes.DK)
    scores = product(q, tl.trans(block), sizes.PRECISION)
    s = logits(scores, rules, b, h, i, j[None, :], MASKED)
    if want.top_weights is not None:
        top, _, places = insert((top, top, places), s, None, j[None, :])
    higher = tl.maximum(maximum, largest(s, scores, rules, h, MASKED))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    lower = s - safe[:, None]
    p = tl.exp2(lower)
    if MASKED or job[1]:
        lower = tl.maximum(lower, -1e30)
    shrink = tl.exp2(maximum - safe)
    if want.entropy is not None:
        drop = tl.where(maximum == -float("inf"), 0.0, maximum - safe)  # the maximum rises by -drop
        centred = shrink * (centred + total * drop) + tl.sum(p * lower, axis=1)
    if want.distance is not None:
        away = distances(rules, b, i, j[None, :]).to(p.dtype)
        far = far * shrink + tl.sum(p * away, axis=1)
    if want.diagonal is not None:
        here = (distances(rules, b, i, j[None, :]) == 0) & ((s > -float("inf")) | (s != s))
        found = tl.max(here.to(tl.int32), axis=1) > 0  # one key at most, so that a sum keeps its NaN, as no maximum does
        diagonal = tl.where(found, tl.sum(tl.where(here, s, 0.0), axis=1), diagonal)
    total = total * shrink + tl.sum(p, axis=1)
    if want.output is not None:
        block = load_block(values, sizes.d_v, start, sizes.N, size, sizes.DV)
        kept = output * shrink[:, None]
        output = mixed(kept, p, s > -float("inf"), block, MASKED and job[1], False, sizes.PRECISION)
    return State(higher, total, centred, far, diagonal, top, places, output)


@triton.jit
def _finish(state, rules, h, to, line, here, count, sizes):
    """Store the results of rows `line`, with the sink in the denominator; 0 and lse -inf without visible keys."""
    maximum, total, centred, far, diagonal, top, places, output = state
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
        store_rows(to.output, line, here, output * (share / total)[:, None], sizes.d_v)
    if to.logsumexp is not None:
        tl.store(to.logsumexp + line, lse * LN2, mask=here)
    if to.max_logit is not None:
        unknown = (total != total) & (maximum != float("inf"))
        tl.store(to.max_logit + line, tl.where(unknown, float("nan"), maximum * LN2), mask=here)
    if to.entropy is not None:
        tl.store(to.entropy + line, share * (tl.log2(total) - centred / total + rise) * LN2, mask=here)
    if to.distance is not None:
        tl.store(to.distance + line, far * (share / total), mask=here)
    if to.diagonal is not None:
        tl.store(to.diagonal + line, tl.where(diagonal == -float("inf"), 0.0, tl.exp2(diagonal - safe)), mask=here)
    if to.top_weights is not None:
        for rank in range(count):  # take the largest that is left; of equal logits the earlier key
            best = tl.max(top, axis=1)
            tied = tl.where(top == best[:, None], places, 2147483647)
            earliest = tl.min(tied, axis=1)
            some = best > -float("inf")
            slot = line * count + rank
            tl.store(to.top_weights + slot, tl.exp2(best - safe), mask=here)
            tl.store(to.top_indices + slot, tl.where(some, earliest, -1).to(tl.int64), mask=here)
            top = tl.where((tied == earliest[:, None]) & some[:, None], -float("inf"), top)


@triton.jit
def rows(inputs, rules, want, part, pack, split, count, doubts, sizes, TOP: tl.constexpr, REPAIR: tl.constexpr,
         CAREFUL: tl.constexpr):  # fmt: skip
    """Program (strip of rows × batch · heads / pack, split of the keys); CAREFUL and doubts as in Pass.launch_twice.

    With REPAIR, an output exists already, and only its tiles with NaN or infinity are recomputed.
    """
    if CAREFUL and doubts is not None:
        if tl.load(doubts + tl.program_id(0)) == 0:
            return
    strips = tl.cdiv(pack * rules.queries, sizes.M)
    later, group = placed(strips)
    first = (strips - 1 - later) * sizes.M  # last strips first: under a causal mask they have the most keys
    together = rules.heads // pack
    b, first_head = group // together, group % together * pack
    r = first + tl.arange(0, sizes.M)
    here = r < pack * rules.queries
    i = tl.where(here, r % rules.queries, rules.queries)  # rows past the end have no visible keys
    h = first_head + tl.minimum(r // rules.queries, pack - 1)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    if REPAIR:
        e = tl.arange(0, sizes.DV)
        place_o = want.output + line[:, None] * sizes.d_v + e[None, :]
        answer = tl.load(place_o, mask=here[:, None] & (e < sizes.d_v)[None, :], other=0.0).to(sizes.FLOAT)
        if tl.sum(tl.sum((tl.abs(answer) < float("inf")).to(tl.int32), axis=1), axis=0) == sizes.M * sizes.DV:
            return
    block = load_rows(head_of(inputs.q, b, h[:, None]), sizes.d_k, i, rules.queries, sizes.DK)
    keys = head_of(inputs.k, b, first_head)
    values = keys
    if want.output is not None:
        values = head_of(inputs.v, b, first_head)
    last = tl.minimum(first + sizes.M, rules.queries) - 1
    if pack > 1:
        first, last = 0 * first, 0 * last + rules.queries - 1
    strip = Strip(b, h[:, None], first, last, i, here, line)
    job, state = (block, keys, values, want), _fresh(TOP, sizes.M, sizes)
    state = over_keys(_absorb, state, (job, CAREFUL), rules, strip, split_of(split), True, sizes)
    if not CAREFUL:
        doubt = 0
        if want.output is not None:
            doubt = not_finite(state.output)
        if want.entropy is not None:  # 0·(logit of -inf)
            doubt |= tl.max(((state.centred != state.centred) & (state.total == state.total)).to(tl.int32), axis=0)
        tl.store(doubts + tl.program_id(0), doubt)
    if split is None:
        _finish(state, rules, h, want, line, here, count, sizes)
    else:
        lines = (tl.num_programs(0) // strips).to(tl.int64) * pack * rules.queries
        _keep(state, part, tl.program_id(1).to(tl.int64) * lines + line, here, TOP, sizes)


@triton.jit
def _keep(state, part, line, here, TOP: tl.constexpr, sizes):
    for number in tl.static_range(5):
        if part[number] is not None:
            tl.store(part[number] + line, state[number], mask=here)
    if part.top is not None:
        slots = tl.arange(0, TOP)[None, :]
        tl.store(part.top + line[:, None] * TOP + slots, state.top, mask=here[:, None])
        tl.store(part.places + line[:, None] * TOP + slots, state.places, mask=here[:, None])
    if part.output is not None:
        store_rows(part.output, line, here, state.output, sizes.d_v)


@triton.jit
def merge(rules, want, part, lines, splits, count, sizes, M: tl.constexpr, TOP: tl.constexpr):
    """Merge the states of the splits in the order of the keys, and store the results."""
    line = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    here = line < lines
    h = line // rules.queries % rules.heads
    maximum, total, centred, far, diagonal, top, places, output = _fresh(TOP, M, sizes)
    slots, e = tl.arange(0, TOP)[None, :], tl.arange(0, sizes.DV)[None, :]
    place = line
    for _ in range(splits):
        other_maximum = tl.load(part.maximum + place, mask=here, other=-float("inf"))
        higher = tl.maximum(maximum, other_maximum)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, grow = tl.exp2(maximum - safe), tl.exp2(other_maximum - safe)
        more = tl.load(part.total + place, mask=here, other=0.0)
        if part.centred is not None:
            drop = tl.where(maximum == -float("inf"), 0.0, maximum - safe)
            fall = tl.where(other_maximum == -float("inf"), 0.0, other_maximum - safe)
            other = tl.load(part.centred + place, mask=here, other=0.0)
            centred = shrink * (centred + total * drop) + grow * (other + more * fall)
        if part.far is not None:
            far = far * shrink + grow * tl.load(part.far + place, mask=here, other=0.0)
        if part.diagonal is not None:
            other = tl.load(part.diagonal + place, mask=here, other=-float("inf"))
            diagonal = tl.where(other == -float("inf"), diagonal, other)
        if part.top is not None:
            lists = place[:, None] * TOP + slots
            later = tl.load(part.top + lists, mask=here[:, None], other=-float("inf"))
            keys = tl.load(part.places + lists, mask=here[:, None], other=-1)
            top, _, places = insert((top, top, places), later, None, keys)
        if part.output is not None:
            inside = here[:, None] & (e < sizes.d_v)
            block = tl.load(part.output + place[:, None] * sizes.d_v + e, mask=inside, other=0.0)
            output = output * shrink[:, None] + tl.where((grow > 0)[:, None], block * grow[:, None], 0.0)
        total = total * shrink + more * grow
        maximum = higher
        place += lines
    state = State(maximum, total, centred, far, diagonal, top, places, output)
    _finish(state, rules, h, want, line, here, count, sizes)
