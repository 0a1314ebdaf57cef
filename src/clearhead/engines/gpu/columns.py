"""The column pass: sums and maxima over the queries of weights, and the weights themselves."""

import triton
import triton.language as tl

from clearhead.engines.gpu.sweeps import over_queries, program_strip
from clearhead.engines.gpu.tiles import indices, key_block, query_block, weights

STATISTICS = frozenset(("received", "peak"))


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
