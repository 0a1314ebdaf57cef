"""The tangents of the output and of the row statistics along a direction, in one pass over the keys.

The log-sum-exp is known, and the output too, so that each row needs one sum as wide as a value:

    m_i = Σ_j a_ij·ṡ_ij + a_i,sink·(sink tangent)        ȯ_i = Σ_j a_ij·ṡ_ij·v_j + a_ij·v̇_j - m_i·o_i

and likewise for Σ a ln a and Σ a·distance (core/directions.py). Each result has one writer and no atomics.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import held, load, of_keys, of_queries, products
from clearhead.engines.gpu.rules import (
    LN2,
    LOG2E,
    any_seen,
    distances,
    key_range,
    logit_tangents,
    logits,
    mixed,
    placed,
)


class RowTangents(NamedTuple):
    """Where the tangents are written: contiguous (batch, heads, queries, …); None where not requested."""

    output: Any
    logsumexp: Any
    entropy: Any
    distance: Any
    own: Any


class _Sums(NamedTuple):
    """What has been summed of a tile of rows, after the keys so far."""

    mass: Any  # Σ a
    mean: Any  # Σ a·ṡ
    logs: Any  # Σ a·ln a
    moved_logs: Any  # Σ a·ṡ·ln a
    far: Any  # Σ a·distance, and so on
    moved_far: Any
    own: Any
    moved_own: Any
    output: Any  # Σ a·ṡ·v + a·v̇


@triton.jit
def _absorb(sums, mine, keys, along, lse, rules, b, h, i, start, d_k, d_v, to, N: tl.constexpr, DK: tl.constexpr,
            DV: tl.constexpr, FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The sums after one more block of keys."""
    mass, mean, logs, moved_logs, far, moved_far, own, moved_own, output = sums
    j = start + tl.arange(0, N)
    block = held(keys, to.output, along.k, along.v, j, rules.keys, d_k, d_v, DK, DV, CHUNK)
    scores, changed = products(mine, block, along.q, along.k, i, rules.queries, j, rules.keys, d_k, 0, FLOAT, CHUNK,
                               PRECISION)  # fmt: skip
    s = logits(scores, rules, b, h, i[:, None], j[None, :], True)
    visible = (s > -float("inf")) | (s != s)
    log = tl.where(visible, s - lse[:, None], 0.0)
    p = tl.where(visible, tl.exp2(log), 0.0)
    tangents = logit_tangents(scores, changed, along, rules, b, h, i[:, None], j[None, :], visible)
    moved = tl.where(p == 0, 0.0, p * tangents)
    mean += tl.sum(moved, axis=1)
    if to.entropy is not None:
        log = tl.where(p == 0, 0.0, log) * LN2
        mass += tl.sum(p, axis=1)
        logs += tl.sum(p * log, axis=1)
        moved_logs += tl.sum(moved * log, axis=1)
    if to.distance is not None:
        away = distances(rules, b, i[:, None], j[None, :]).to(p.dtype)
        far += tl.sum(p * away, axis=1)
        moved_far += tl.sum(moved * away, axis=1)
    if to.own is not None:
        here = distances(rules, b, i[:, None], j[None, :]) == 0
        own += tl.sum(tl.where(here, p, 0.0), axis=1)
        moved_own += tl.sum(tl.where(here, moved, 0.0), axis=1)
    if to.output is not None:
        if CHUNK:
            block = load(keys, to.output, None, along.v, j, rules.keys, d_k, d_v, DK, DV)
        output = mixed(output, moved, visible, block.y, True, PRECISION)
        if along.v is not None:
            output = mixed(output, p, visible, block.moved_y, True, PRECISION)
    return _Sums(mass, mean, logs, moved_logs, far, moved_far, own, moved_own, output)


@triton.jit
def rows(q, q_strides, k, k_strides, v, v_strides, along, steps, d_k, d_v, rules, logsumexp, known, to, per_key,
         per_value, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FLOAT: tl.constexpr,
         CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Program (tile of queries × batch · heads); `known` is the output, contiguous, in the statistics' dtype."""
    tiles = tl.cdiv(rules.queries, M)
    later, head = placed(tiles)
    tile = tiles - 1 - later  # last tiles first: under a causal mask they have the most keys
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    here = i < rules.queries
    line = head.to(tl.int64) * rules.queries + i
    nothing = along.output  # no upstream gradient here
    own = of_queries(q, q_strides, nothing, q_strides, along, steps, b, h)
    mine = held(own, nothing, along.q, nothing, i, rules.queries, d_k, d_v, DK, DV, CHUNK)
    keys = of_keys(k, k_strides, v, v_strides, along, steps, b, h, per_key, per_value)
    lse = tl.load(logsumexp + line, mask=here, other=-float("inf"))
    empty = lse == -float("inf")
    lse = tl.where(empty, float("inf"), lse * LOG2E)
    low, _, _, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    none = tl.zeros((M,), FLOAT)
    sums = _Sums(none, none, none, none, none, none, none, none, tl.zeros((M, DV), FLOAT))
    for start in range(low, high, N):
        if any_seen(rules, b, h, i[:, None], start + tl.arange(0, N)[None, :], start, N):
            sums = _absorb(sums, mine, keys, along, lse, rules, b, h, i, start, d_k, d_v, to, N, DK, DV, FLOAT,
                           CHUNK, PRECISION)  # fmt: skip
    middle = sums.mean
    if along.sinks is not None:
        share = tl.where(empty, 0.0, tl.exp2(tl.load(rules.sinks + h) * LOG2E - lse))
        middle += share * tl.load(along.sinks + h)
    tl.store(to.logsumexp + line, middle, mask=here)
    if to.entropy is not None:
        found = middle * sums.logs - sums.moved_logs - (sums.mean - middle * sums.mass)
        tl.store(to.entropy + line, found, mask=here)
    if to.distance is not None:
        tl.store(to.distance + line, sums.moved_far - middle * sums.far, mask=here)
    if to.own is not None:
        tl.store(to.own + line, sums.moved_own - middle * sums.own, mask=here)
    if to.output is not None:
        e = tl.arange(0, DV)[None, :]
        place = line[:, None] * d_v + e
        there = here[:, None] & (e < d_v)
        found = sums.output - middle[:, None] * tl.load(known + place, mask=there, other=0.0)
        tl.store(to.output + place, found.to(to.output.dtype.element_ty), mask=there)
