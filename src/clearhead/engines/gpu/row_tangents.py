"""The tangents of the output and of the row statistics along a direction, in one pass over the keys.

The log-sum-exp is known, and the output too, so that each row needs one sum as wide as a value:

    m_i = Σ_j a_ij·ṡ_ij + a_i,sink·(sink tangent)        ȯ_i = Σ_j a_ij·ṡ_ij·v_j + a_ij·v̇_j - m_i·o_i

and likewise for Σ a ln a and Σ a·distance (core/directions.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import key_block, mixed, of_keys, of_queries, products, query_block, store_rows, whole
from clearhead.engines.gpu.rules import LN2, LOG2E, distances, logit_tangents, logits
from clearhead.engines.gpu.sweeps import over_keys, query_strip
from clearhead.engines.gpu.tiles import indices


class _Sums(NamedTuple):
    """What has been summed of a tile of rows, after the keys so far."""

    mass: Any  # Σ a
    mean: Any  # Σ a·ṡ
    logs: Any  # Σ a·ln a
    moved_logs: Any  # Σ a·ṡ·ln a
    far: Any  # Σ a·distance, and so on
    moved_far: Any
    diagonal: Any
    moved_diagonal: Any
    output: Any  # Σ a·ṡ·v + a·v̇


@triton.jit
def _absorb(sums, job, rules, strip, start, MASKED: tl.constexpr, sizes):
    mass, mean, logs, moved_logs, far, moved_far, diagonal, moved_diagonal, output = sums
    queries, keys, along, lse, to = job
    block = key_block(keys, start, sizes.N, rules, sizes)
    scores, changed = products(queries, block, 0, False, sizes)
    b, h = strip.b, strip.h
    i, j = indices(queries, block, False)
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = (s > -float("inf")) | (s != s)
    log = tl.where(visible, s - lse[:, None], 0.0)
    p = tl.where(visible, tl.exp2(log), 0.0)
    moved = tl.where(p == 0, 0.0, p * logit_tangents(scores, changed, along, rules, b, h, i, j, visible))
    mean += tl.sum(moved, axis=1)
    if to.entropy is not None:
        log = tl.where(p == 0, 0.0, log) * LN2
        mass += tl.sum(p, axis=1)
        logs += tl.sum(p * log, axis=1)
        moved_logs += tl.sum(moved * log, axis=1)
    if to.distance is not None:
        away = distances(rules, b, i, j).to(p.dtype)
        far += tl.sum(p * away, axis=1)
        moved_far += tl.sum(moved * away, axis=1)
    if to.diagonal is not None:
        here = distances(rules, b, i, j) == 0
        diagonal += tl.sum(tl.where(here, p, 0.0), axis=1)
        moved_diagonal += tl.sum(tl.where(here, moved, 0.0), axis=1)
    if to.output is not None:
        rows = whole(block, sizes.KEYS, sizes)
        output = mixed(output, moved, visible, rows.y, MASKED, False, sizes.PRECISION)
        if sizes.KEYS.moved_y:
            output = mixed(output, p, visible, rows.moved_y, MASKED, False, sizes.PRECISION)
    return _Sums(mass, mean, logs, moved_logs, far, moved_far, diagonal, moved_diagonal, output)


@triton.jit
def rows(inputs, rules, along, logsumexp, known, to, sizes):
    """Program (strip of queries × batch · heads); `to` are Rows, `known` is the output, in the statistics' dtype."""
    strip = query_strip(rules, sizes.M)
    line, here = strip.line, strip.inside
    queries = query_block(of_queries(inputs, strip.b, strip.h), strip.first, sizes.M, rules, sizes)
    lse = tl.load(logsumexp + line, mask=here, other=-float("inf"))
    empty = lse == -float("inf")
    lse = tl.where(empty, float("inf"), lse * LOG2E)
    none = tl.zeros((sizes.M,), sizes.FLOAT)
    sums = _Sums(none, none, none, none, none, none, none, none, tl.zeros((sizes.M, sizes.DV), sizes.FLOAT))
    job = queries, of_keys(inputs, strip.b, strip.h), along, lse, to
    sums = over_keys(_absorb, sums, job, rules, strip, None, False, sizes)
    middle = sums.mean
    if along.sinks is not None:
        share = tl.where(empty, 0.0, tl.exp2(tl.load(rules.sinks + strip.h) * LOG2E - lse))
        middle += share * tl.load(along.sinks + strip.h)
    tl.store(to.logsumexp + line, middle, mask=here)
    if to.entropy is not None:
        moved = middle * sums.logs - sums.moved_logs - (sums.mean - middle * sums.mass)
        tl.store(to.entropy + line, moved, mask=here)
    if to.distance is not None:
        tl.store(to.distance + line, sums.moved_far - middle * sums.far, mask=here)
    if to.diagonal is not None:
        tl.store(to.diagonal + line, sums.moved_diagonal - middle * sums.diagonal, mask=here)
    if to.output is not None:
        e = tl.arange(0, sizes.DV)[None, :]
        place = line[:, None] * sizes.d_v + e
        still = tl.load(known + place, mask=here[:, None] & (e < sizes.d_v), other=0.0)
        store_rows(to.output, line, here, sums.output - middle[:, None] * still, sizes.d_v)
