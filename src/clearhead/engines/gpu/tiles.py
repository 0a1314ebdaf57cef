"""A tile of weights, of their tangents or of effects, recomputed from the log-sum-exp."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.inputs import in_chunks, products
from clearhead.engines.gpu.rules import LOG2E, logit_tangents, logits


class RowTerms(NamedTuple):
    """What a tile needs of its rows: contiguous (batch, heads, queries), None where it does not.

    With `tangent`, that of the log-sum-exp, a tile holds the tangents of weights along a direction; in a pass over
    values and g it holds what core/effects.py calls contributions, or cuts where there are the terms of these.
    """

    logsumexp: Any
    tangent: Any = None
    whole: Any = None
    others: Any = None
    strongest: Any = None  # int32


@triton.jit
def indices(left, right, BY_KEYS: tl.constexpr):
    """The queries and the keys of a tile as they broadcast to it; BY_KEYS: its rows, `left`, are keys."""
    if BY_KEYS:
        i, j = right.index[None, :], left.index[:, None]
    else:
        i, j = left.index[:, None], right.index[None, :]
    return i, j


@triton.jit
def row_lse(logsumexp, line, inside):
    """The log-sum-exp of rows `line` in units of ln 2, +inf where it is -inf: without visible keys weights are 0."""
    lse = tl.load(logsumexp + line, mask=inside, other=float("inf")) * LOG2E
    return tl.where(lse == -float("inf"), float("inf"), lse)


@triton.jit
def values(left, right, terms, along, rules, b, h, BY_KEYS: tl.constexpr, MASKED: tl.constexpr, sizes):
    """What `terms` makes of a tile of two Blocks, 0 where masked, and which pairs are visible."""
    scores, changed = products(left, right, 0, BY_KEYS, sizes)
    i, j = indices(left, right, BY_KEYS)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    inside = i < rules.queries
    s = logits(scores, rules, b, h, i, j, MASKED)
    p = tl.exp2(s - row_lse(terms.logsumexp, line, inside))
    visible = (s > -float("inf")) | (s != s)
    if sizes.QUERIES.y:
        here = inside & (j < rules.keys)
        visible = visible & here if MASKED else here
        p = tl.where(visible, _effects(p, left, right, terms, line, inside, j, BY_KEYS, sizes), 0.0)
    elif MASKED:
        p = tl.where(s > -float("inf"), p, tl.where(s != s, s, 0.0))
    if terms.tangent is not None:
        tangents = logit_tangents(scores, changed, along, rules, b, h, i, j, visible)
        p = tl.where(p == 0, 0.0, p * (tangents - tl.load(terms.tangent + line, mask=inside, other=0.0)))
    return p, visible


@triton.jit
def inner_products(left, right, BY_KEYS: tl.constexpr, sizes):
    """g·v of a tile."""
    if sizes.WIDE:
        inner, _ = in_chunks(left, right, 1, BY_KEYS, sizes.DV, sizes)
    else:
        inner, _ = products(left, right, 1, BY_KEYS, sizes)
    return inner


@triton.jit
def _effects(p, left, right, terms, line, inside, j, BY_KEYS: tl.constexpr, sizes):
    inner = inner_products(left, right, BY_KEYS, sizes)
    if terms.strongest is None:
        e = p * inner
    else:
        whole, others = tl.load(terms.whole + line, mask=inside, other=0.0), tl.load(terms.others + line, mask=inside)
        alone = j == tl.load(terms.strongest + line, mask=inside, other=-1)
        r = tl.rsqrt(tl.where(alone, 1.0, 1.0 - p))  # p·r² is p/(1 - p), by half the instructions of a division
        e = p * (r * r) * (tl.where(alone, others, whole) - inner)
    return e
