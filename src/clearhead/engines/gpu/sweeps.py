"""The loops of every pass: a program owns a strip of queries or of keys, and goes through the blocks of the other side.

A kernel plugs in its step, step(state, job, rules, strip, start, MASKED, sizes), which answers the state after the
block that begins at `start`; `job` is whatever it reads besides. Without MASKED, every pair of the tile is visible.
Each result has one writer and no atomics, so it is deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import any_seen, key_range, query_range


class Strip(NamedTuple):
    """The queries or keys of one head whose results a program computes."""

    b: Any
    h: Any
    first: Any
    last: Any
    index: Any  # (M,), and beyond the end too
    inside: Any  # (M,): which are not
    line: Any  # (M,): their places in (batch, heads, queries or keys)


@triton.jit
def program_strip(rules, size, M: tl.constexpr):
    """The strip of a program of (strips of the `size` queries or keys × batch · heads).

    All programs are on the grid's first axis: others hold 65,535 at most.
    """
    strips = tl.cdiv(size, M)
    head, start = tl.program_id(0) // strips, tl.program_id(0) % strips * M
    index = start + tl.arange(0, M)
    line = head.to(tl.int64) * size + index
    return Strip(head // rules.heads, head % rules.heads, start, start + M - 1, index, index < size, line)


@triton.jit
def over_keys(step: tl.constexpr, state, job, rules, strip, sizes):
    """The state after all keys that the queries of a strip may see."""
    ranges = key_range(rules, strip.b, strip.first, strip.last, sizes.N)
    return _sweep(step, state, job, rules, strip, ranges, True, sizes)


@triton.jit
def over_queries(step: tl.constexpr, state, job, rules, strip, sizes):
    """The state after all queries that may see the keys of a strip."""
    ranges = query_range(rules, strip.b, strip.first, strip.last, sizes.N)
    return _sweep(step, state, job, rules, strip, ranges, False, sizes)


@triton.jit
def _sweep(step: tl.constexpr, state, job, rules, strip, ranges, KEYS: tl.constexpr, sizes):
    low, full_low, full_high, high = ranges
    for start in range(low, full_low, sizes.N):
        state = _masked(step, state, job, rules, strip, start, KEYS, sizes)
    for start in range(full_low.to(tl.int64), full_high.to(tl.int64), sizes.N):
        state = step(state, job, rules, strip, start, False, sizes)
    for start in range(full_high, high, sizes.N):
        state = _masked(step, state, job, rules, strip, start, KEYS, sizes)
    return state


@triton.jit
def _masked(step: tl.constexpr, state, job, rules, strip, start, KEYS: tl.constexpr, sizes):
    """The state after a block of which a part may be masked; where all of it is, it is skipped."""
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
