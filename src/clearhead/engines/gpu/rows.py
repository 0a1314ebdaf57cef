"""The row pass, which computes the output and all row statistics in one pass over the keys, and the column pass.

The first is online softmax (Milakov & Gimelshein 2018) for a tile of queries; the second sums weights over the queries,
or stores them.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LN2, LOG2E, distances, logits
from clearhead.engines.gpu.tiles import (
    indices,
    mixed,
    over,
    product,
    program_strip,
    store_rows,
    tokens,
    weights,
)

OF_ROWS = frozenset(("output", "logsumexp", "max_logit", "entropy", "distance", "diagonal", "top"))
OF_COLUMNS = frozenset(("received", "peak"))


@triton.jit
def _insert(top, places, rank, j):
    """Merge a tile (queries, keys) into each query's list of its largest logits; of equals the earlier key stays.

    The keys j, which broadcast to the tile, all come after those in the lists.
    """
    weakest, best = tl.min(top, axis=1), tl.max(rank, axis=1)
    while tl.max((best > weakest).to(tl.int32), axis=0) > 0:
        key = tl.min(tl.where(rank == best[:, None], j, 2147483647), axis=1)
        last = tl.max(tl.where(top == weakest[:, None], places, -2147483647), axis=1)
        taken = (places == last[:, None]) & (top == weakest[:, None]) & (best > weakest)[:, None]
        top, places = tl.where(taken, best[:, None], top), tl.where(taken, key[:, None], places)
        rank = tl.where(j == key[:, None], -float("inf"), rank)
        weakest, best = tl.min(top, axis=1), tl.max(rank, axis=1)
    return top, places


@triton.jit
def _absorb(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    # The queries' online softmax so far: the largest logit, Σ p, Σ p·(s - maximum), Σ p·distance, the logit of the key
    # at the query's position, the largest logits and their keys (below 0 in unused slots), Σ p·v.
    maximum, total, centred, far, diagonal, top, places, output = state
    inputs, queries, want = job
    block = tokens(inputs.k, inputs.v, strip.b, strip.h, start, rules.keys, sizes.N, sizes)
    i, j = strip.index[:, None], block.index[None, :]
    s = logits(product(queries.x, tl.trans(block.x), sizes.PRECISION), rules, strip.b, strip.h, i, j, MASKED)
    if want.top_weights is not None:
        top, places = _insert(top, places, s, j)
    higher = tl.maximum(maximum, tl.max(s, axis=1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    lower = (s - safe[:, None]) * LOG2E
    p = tl.exp2(lower)
    rise = (maximum - safe) * LOG2E
    shrink = tl.exp2(rise)
    if want.entropy is not None:
        drop = tl.where(maximum == -float("inf"), 0.0, rise)  # the maximum rises by -drop
        lower = tl.maximum(lower, -1e30)  # 0·(logit of -inf) is 0
        centred = shrink * (centred + total * drop) + tl.sum(p * lower, axis=1)
    if want.distance is not None:
        away = distances(rules, strip.b, i, j).to(p.dtype)
        far = far * shrink + tl.sum(p * away, axis=1)
    if want.diagonal is not None:
        here = (distances(rules, strip.b, i, j) == 0) & ((s > -float("inf")) | (s != s))
        found = tl.max(here.to(tl.int32), axis=1) > 0  # at most one key: a sum keeps its NaN, a maximum does not
        diagonal = tl.where(found, tl.sum(tl.where(here, s, 0.0), axis=1), diagonal)
    total = total * shrink + tl.sum(p, axis=1)
    if want.output is not None:
        output = mixed(output * shrink[:, None], p, s > -float("inf"), block.y, MASKED, sizes.PRECISION)
    return higher, total, centred, far, diagonal, top, places, output


@triton.jit
def rows(inputs, rules, want, count, sizes, TOP: tl.constexpr):
    """Program (strip of queries × batch · heads). The lists of the `count` largest have TOP slots."""
    strip = program_strip(rules, rules.queries, sizes.M)
    queries = tokens(inputs.q, inputs.g, strip.b, strip.h, strip.first, rules.queries, sizes.M, sizes)
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    lowest = none - float("inf")
    places = tl.zeros((sizes.M, TOP), tl.int32) - 1 - tl.arange(0, TOP)[None, :]
    top, output = tl.full((sizes.M, TOP), -float("inf"), sizes.FLOAT), tl.zeros((sizes.M, sizes.DV), sizes.FLOAT)
    state = lowest, none, none, none, lowest, top, places, output
    state = over(_absorb, state, (inputs, queries, want), rules, strip, True, sizes)
    _finish(state, rules, strip, want, count, sizes)


@triton.jit
def _finish(state, rules, strip, to, count, sizes):
    """Store the results, with the sink in the denominator; 0 and the state -inf, 0 for a row without visible keys."""
    maximum, total, centred, far, diagonal, top, places, output = state
    line, here = strip.line, strip.inside
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    largest, of_keys = maximum, tl.log2(total)
    log_sum = of_keys  # of the keys, and with the sink, relative to the largest logit, in units of ln 2
    if rules.sinks is not None:
        sink = tl.load(rules.sinks + strip.h)
        largest = tl.where(empty, maximum, tl.maximum(maximum, sink))
        of_keys += tl.where(empty, 0.0, maximum - largest) * LOG2E
        by_sink = tl.where(empty, 0.0, sink - largest) * LOG2E
        high = tl.maximum(of_keys, by_sink)
        log_sum = high + tl.log2(tl.exp2(of_keys - high) + tl.exp2(by_sink - high))
    log_sum = tl.where(empty, 0.0, log_sum)
    safe = tl.where(empty, 0.0, largest)
    rise = tl.where(empty, 0.0, log_sum - of_keys)
    share = tl.where(empty, 0.0, tl.exp2(-rise))
    if to.output is not None:
        store_rows(to.output, line, here, output * (share / total)[:, None], sizes.d_v)
    if to.largest is not None:
        tl.store(to.largest + line, largest, mask=here)
        tl.store(to.log_sum + line, log_sum * LN2, mask=here)
    if to.max_logit is not None:
        unknown = (total != total) & (maximum != float("inf"))
        tl.store(to.max_logit + line, tl.where(unknown, float("nan"), maximum), mask=here)
    if to.entropy is not None:
        entropy = share * (tl.log2(total) - centred / total + rise) * LN2
        tl.store(to.entropy + line, tl.where(share == 0, 0.0, entropy), mask=here)
    if to.distance is not None:
        tl.store(to.distance + line, far * (share / total), mask=here)
    if to.diagonal is not None:
        weight = tl.exp2((diagonal - safe) * LOG2E - log_sum)
        tl.store(to.diagonal + line, tl.where(diagonal == -float("inf"), 0.0, weight), mask=here)
    if to.top_weights is not None:
        for rank in range(count):  # take the largest that is left; of equal logits the earlier key
            best = tl.max(top, axis=1)
            tied = tl.where(top == best[:, None], places, 2147483647)
            earliest = tl.min(tied, axis=1)
            some = best > -float("inf")
            slot = line * count + rank
            tl.store(to.top_weights + slot, tl.exp2((best - safe) * LOG2E - log_sum), mask=here)
            tl.store(to.top_indices + slot, tl.where(some, earliest, -1).to(tl.int64), mask=here)
            top = tl.where((tied == earliest[:, None]) & some[:, None], -float("inf"), top)


@triton.jit
def _absorb_queries(state, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    received, peak = state
    inputs, keys, states, to = job
    block = tokens(inputs.q, inputs.g, strip.b, strip.h, start, rules.queries, sizes.N, sizes)
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
    keys = tokens(inputs.k, inputs.v, strip.b, strip.h, strip.first, rules.keys, sizes.M, sizes)
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    received, peak = over(_absorb_queries, (none, none), (inputs, keys, state, to), rules, strip, False, sizes)
    if to.received is not None:
        tl.store(to.received + strip.line, received, mask=strip.inside)
    if to.peak is not None:
        tl.store(to.peak + strip.line, peak, mask=strip.inside)
