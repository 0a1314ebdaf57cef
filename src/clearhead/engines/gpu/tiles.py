"""Tiles of q and g or of k and v, their products, the weights recomputed from them, and the loops of every pass.

A program owns a strip of queries or of keys, and goes through the blocks of the other side. A kernel passes its step,
step(state, job, rules, strip, start, MASKED, sizes), which returns the state after the block that begins at `start`;
`job` is all else that it reads. Without MASKED, every pair of the tile is visible. Each result has one writer and no
atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import LOG2E, any_seen, logits, visible_range

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tokens(NamedTuple):
    """Some queries of a head, or some keys: their tiles of q and g, or of k and v, and their indices."""

    x: Any
    y: Any  # x again in a pass without g or v
    index: Any  # goes on beyond the end


@triton.jit
def load_rows(x, b, h, index, size, d, D: tl.constexpr):
    """Load the rows `index` that query head h reads of a Strided with `size` rows of `d` elements; zeros beyond."""
    c = tl.arange(0, D)
    start = x.tensor + b.to(tl.int64) * x.batch + (h // x.share).to(tl.int64) * x.head
    place = start + index.to(tl.int64)[:, None] * x.row + c.to(tl.int64)[None, :] * x.column
    return tl.load(place, mask=(index < size)[:, None] & (c < d)[None, :], other=0.0)


@triton.jit
def tokens(one, other, b, h, first, size, COUNT: tl.constexpr, sizes):
    """Load COUNT of `size` queries or keys, from `first` on; `one` is q or k, `other` is g or v, or None."""
    index = tl.cast(first, tl.int32) + tl.arange(0, COUNT)
    x = load_rows(one, b, h, index, size, sizes.d_k, sizes.DK)
    y = x
    if other is not None:
        y = load_rows(other, b, h, index, size, sizes.d_v, sizes.DV)
    return Tokens(x, y, index)


@triton.jit
def store_rows(out, line, inside, rows, d):
    """Store rows of `d` elements as rows `line` of a contiguous array, where `inside` is True."""
    c = tl.arange(0, rows.shape[1])[None, :]
    tl.store(out + line[:, None] * d + c, rows.to(out.dtype.element_ty), mask=inside[:, None] & (c < d))


@triton.jit
def indices(left, right, BY_KEYS: tl.constexpr):
    """The indices of queries and keys, broadcasting to the tile of two Tokens; BY_KEYS: its rows, `left`, are keys."""
    if BY_KEYS:
        i, j = right.index[None, :], left.index[:, None]
    else:
        i, j = left.index[:, None], right.index[None, :]
    return i, j


@triton.jit
def log_weights(s, state, line, inside):
    """Log-weights (s - m) - l in units of ln 2, from logits in nats; -inf in rows without visible keys."""
    largest = tl.load(state.largest + line, mask=inside, other=float("inf"))
    log_sum = tl.load(state.log_sum + line, mask=inside, other=0.0)
    largest = tl.where(largest == -float("inf"), float("inf"), largest)
    return ((s - largest) - log_sum) * LOG2E


@triton.jit
def weights(left, right, state, rules, b, h, BY_KEYS: tl.constexpr, MASKED: tl.constexpr, sizes):
    """The weights of the tile of two Tokens, 0 where masked."""
    i, j = indices(left, right, BY_KEYS)
    s = logits(product(left.x, tl.trans(right.x), sizes.PRECISION), rules, b, h, i, j, MASKED)
    line = (b * rules.heads + h).to(tl.int64) * rules.queries + i
    p = tl.exp2(log_weights(s, state, line, i < rules.queries))
    return tl.where(s > -float("inf"), p, tl.where(s != s, s, 0.0)) if MASKED else p


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a·b, summed in float32 (float64 for float64); a is rounded to b's dtype first."""
    a = a.to(b.dtype)
    if INTERPRETED and b.dtype == tl.bfloat16:  # the interpreter would multiply their bit patterns
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def mixed(total, weights, visible, values, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add weights·values to `total`. If MASKED, a nonfinite value reaches only the rows that may see it."""
    if not MASKED:
        return total + product(weights, values, PRECISION)
    wide = values.to(total.dtype)
    finite = tl.abs(wide) < float("inf")  # False for NaN
    total += product(weights, tl.where(finite, values, tl.zeros_like(values)), PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:  # rare, hence row by row
        bad, places = tl.where(finite, 0.0, wide), tl.arange(0, values.shape[0])
        for row in range(values.shape[0]):
            added = tl.sum(tl.where(places[:, None] == row, bad, 0.0), axis=0)
            sees = tl.max(tl.where(places[None, :] == row, visible.to(tl.int32), 0), axis=1) > 0
            total += tl.where(sees[:, None], added[None, :], 0.0)
    return total


class Strip(NamedTuple):
    """The queries or keys of one head whose results a program computes."""

    b: Any
    h: Any
    first: Any
    last: Any
    index: Any  # (M,), goes on beyond the end
    inside: Any  # (M,), bool: is the index not beyond the end?
    line: Any  # (M,): the places in (batch, heads, queries or keys)


@triton.jit
def program_strip(rules, size, M: tl.constexpr):
    """The strip of this program, out of (strips of the `size` queries or keys × batch · heads).

    All programs lie on the grid's first axis, since the other axes hold 65,535 at most.
    """
    strips = tl.cdiv(size, M)
    head, start = tl.program_id(0) // strips, tl.program_id(0) % strips * M
    index = start + tl.arange(0, M)
    line = head.to(tl.int64) * size + index
    return Strip(head // rules.heads, head % rules.heads, start, start + M - 1, index, index < size, line)


@triton.jit
def over(step: tl.constexpr, state, job, rules, strip, KEYS: tl.constexpr, sizes):
    """The state after all keys that a strip's queries may see; without KEYS, all queries that may see its keys."""
    low, full_low, full_high, high = visible_range(rules, strip.b, strip.first, strip.last, KEYS, sizes.N)
    for start in range(low, full_low, sizes.N):
        state = _masked(step, state, job, rules, strip, start, KEYS, sizes)
    for start in range(full_low.to(tl.int64), full_high.to(tl.int64), sizes.N):
        state = step(state, job, rules, strip, start, False, sizes)
    for start in range(full_high, high, sizes.N):
        state = _masked(step, state, job, rules, strip, start, KEYS, sizes)
    return state


@triton.jit
def _masked(step: tl.constexpr, state, job, rules, strip, start, KEYS: tl.constexpr, sizes):
    """The state after a block that may be partly masked; a fully masked block is skipped."""
    if rules.content:
        other = start + tl.arange(0, sizes.N)
        if KEYS:
            some = any_seen(rules, strip.b, strip.h, strip.index[:, None], other[None, :])
        else:
            some = any_seen(rules, strip.b, strip.h, other[None, :], strip.index[:, None])
        if some:
            state = step(state, job, rules, strip, start, True, sizes)
    else:
        state = step(state, job, rules, strip, start, True, sizes)
    return state
