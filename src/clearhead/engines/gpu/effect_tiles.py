"""A tile of effects, recomputed from the log-sum-exp; core/effects.py has the formulas."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import load_rows
from clearhead.engines.gpu.rules import LOG2E, logits, product


class RowTerms(NamedTuple):
    """core/effects.Terms as the kernels read it: contiguous (batch, heads, queries); None for contributions."""

    logsumexp: Any
    whole: Any
    others: Any
    strongest: Any  # int32


@triton.jit
def of_queries(q, q_strides, g, g_strides, d_k, d_v, b, h):
    """The rows of q and g of one head, as `load` and `_rest` read them."""
    q += b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    g += b.to(tl.int64) * g_strides[0] + h.to(tl.int64) * g_strides[1]
    return q, q_strides[2], q_strides[3], d_k, g, g_strides[2], g_strides[3], d_v


@triton.jit
def of_keys(k, k_strides, v, v_strides, d_k, d_v, b, h, per_key, per_value):
    """The rows of k and v that this head reads, likewise."""
    k += b.to(tl.int64) * k_strides[0] + (h // per_key).to(tl.int64) * k_strides[1]
    v += b.to(tl.int64) * v_strides[0] + (h // per_value).to(tl.int64) * v_strides[1]
    return k, k_strides[2], k_strides[3], d_k, v, v_strides[2], v_strides[3], d_v


@triton.jit
def load(side, at, most, DK: tl.constexpr, DV: tl.constexpr):
    """Tiles of q and g, or of k and v; of the latter the first DV columns."""
    first, along, across, d_k, second, along_too, across_too, d_v = side
    return load_rows(first, along, across, d_k, at, most, DK), load_rows(
        second, along_too, across_too, d_v, at, most, DV
    )


@triton.jit
def _rest(side, at, most, start, DV: tl.constexpr):
    """A tile of the next DV columns of g or v."""
    _, _, _, _, base, along, across, d_v = side
    return load_rows(base + tl.cast(start, tl.int64) * across, along, across, d_v - start, at, most, DV)


@triton.jit
def products(left, right, queries, keys, rules, i, j, DV: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """q·k and t = g·v of a tile (queries, keys)."""
    q, g = left
    k, v = right
    scores = product(q, tl.trans(k), PRECISION)
    along = product(g, tl.trans(v), PRECISION)
    if WIDE:
        for start in range(DV, queries[7], DV):
            more = tl.trans(_rest(keys, j, rules.keys, start, DV))
            along += product(_rest(queries, i, rules.queries, start, DV), more, PRECISION)
    return scores, along


@triton.jit
def effects(scores, along, terms, rules, b, h, i, j, MASKED: tl.constexpr):
    """The effects of a tile (queries, keys), 0 where masked, and which pairs are visible."""
    i, j = i[:, None], j[None, :]
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    lse = tl.load(terms.logsumexp + line, mask=inside, other=float("inf")) * LOG2E
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    s = logits(scores, rules, b, h, i, j, MASKED)
    visible = inside & (j < rules.keys)
    if MASKED:
        visible &= (s > -float("inf")) | (s != s)
    p = tl.exp2(s - lse)
    if terms.strongest is None:
        found = p * along
    else:
        whole, others = tl.load(terms.whole + line, mask=inside, other=0.0), tl.load(terms.others + line, mask=inside)
        alone = j == tl.load(terms.strongest + line, mask=inside, other=-1)
        found = tl.where(alone, p * (others - along), p / tl.where(alone, 1.0, 1.0 - p) * (whole - along))
    return tl.where(visible, found, 0.0), visible


@triton.jit
def within(split, low, full_low, full_high, high):
    """The ranges of keys narrowed to this program's split."""
    at = tl.program_id(1)
    low, high = tl.maximum(low, at * split), tl.minimum(high, (at + 1) * split)
    full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
    return low, full_low, tl.maximum(tl.minimum(full_high, high), full_low), high
