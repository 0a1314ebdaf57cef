"""The score rules as the kernels read them, and the logits of one tile; core/visibility.py defines their meaning.

Indices of queries (i), keys (j) and heads (h) have shapes that broadcast to the tile's, so the same functions serve
tiles (queries, keys) and transposed tiles (keys, queries).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.labels import BLOCK

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SET_KEYS = tl.constexpr(BLOCK)


class Rules(NamedTuple):
    """A problem as the kernels read it; None for rules that it does not have."""

    heads: Any
    queries: Any
    keys: Any
    numbers: Any  # scale, softcap
    scales: Any  # (heads,) where heads have different scales
    softcap: Any  # whether there is one
    content: Any  # whether visibility depends on array values: mask, bias, segments, spans
    rows: Any  # first query and step of the whole matrix's queries
    row_step: Any
    cols: Any
    col_step: Any
    left: Any
    right: Any
    offset: Any  # (batch,)
    kv_lengths: Any  # (batch,)
    query_lengths: Any  # (batch,)
    query_segments: Any  # (batch, queries)
    kv_segments: Any  # (batch, keys)
    query_spans: Any  # (batch, queries): a row of the table
    key_spans: Any  # (batch, keys): a column of it
    key_sets: Any  # (batch, blocks of keys): the set of each block, where the table forbids pairs
    first_key: Any  # (batch, queries): by segments and spans, the first key that the query may see
    end_key: Any  # … and the end of these keys
    first_query: Any  # (batch, keys): the first query that may see the key, and the end
    end_query: Any
    table: Any  # (batch or 1, heads or 1, query labels, key labels), its columns contiguous
    table_b: Any
    table_h: Any
    table_i: Any
    sets: Any  # (sets, heads or 1, bytes): which query labels may see some key of a block
    sets_n: Any
    sets_h: Any
    slopes: Any  # (heads,)
    sinks: Any  # (heads,)
    bias: Any  # (batch, heads, queries, keys), and its strides: Triton 3.6 loses a 1 in a tuple within a tuple
    bias_b: Any
    bias_h: Any
    bias_i: Any
    bias_j: Any
    mask: Any
    mask_b: Any
    mask_h: Any
    mask_i: Any
    mask_j: Any


@triton.jit
def placed(tiles):
    """A program's tile and its index in batch · heads, both on the grid's first axis: others hold 65,535 at most."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def tanh(x):
    """tanh, by Cephes' rational function near 0, where 1 - 2/(exp(2x) + 1) loses digits by cancellation."""
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < 0.625, x + x * z * (p / q), tl.where(x < 0, -far, far))


@triton.jit
def query_positions(rules, b, i):
    """The positions of queries, counted in the keys of the whole matrix."""
    return tl.load(rules.offset + b) + rules.rows + rules.row_step * i


@triton.jit
def distances(rules, b, i, j):
    """|query position - key position|."""
    return tl.abs(query_positions(rules, b, i) - (rules.cols + rules.col_step * j))


@triton.jit
def seen(rules, b, h, i, j):
    """Which pairs of a tile are visible, apart from a bias of -inf."""
    at, key = query_positions(rules, b, i), rules.cols + rules.col_step * j
    visible = (i < rules.queries) & (j < rules.keys)
    if rules.right is not None:
        visible &= key <= at + rules.right
    if rules.left is not None:
        visible &= key >= at - rules.left
    if rules.kv_lengths is not None:
        visible &= key < tl.load(rules.kv_lengths + b)
    if rules.query_lengths is not None:
        visible &= rules.rows + rules.row_step * i < tl.load(rules.query_lengths + b)
    if rules.query_segments is not None:
        mine = tl.load(rules.query_segments + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=0)
        theirs = tl.load(rules.kv_segments + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=0)
        visible &= mine == theirs
    if rules.mask is not None:
        rows = b.to(tl.int64) * rules.mask_b + h.to(tl.int64) * rules.mask_h + i.to(tl.int64) * rules.mask_i
        place = rules.mask + rows + j.to(tl.int64) * rules.mask_j
        visible &= tl.load(place, mask=visible, other=0) != 0
    return visible


@triton.jit
def _bias(rules, b, h, i, j, visible):
    rows = b.to(tl.int64) * rules.bias_b + h.to(tl.int64) * rules.bias_h + i.to(tl.int64) * rules.bias_i
    return tl.load(rules.bias + rows + j.to(tl.int64) * rules.bias_j, mask=visible, other=0.0)


@triton.jit
def _query_labels(rules, b, i):
    return tl.load(rules.query_spans + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=0)


@triton.jit
def _spans(given, rules, b, h, i, j):
    """What a table of spans adds to the logits of a tile: that of the rules, or its tangent in a Direction."""
    mine = _query_labels(rules, b, i).to(tl.int64)
    theirs = tl.load(rules.key_spans + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=0)
    return tl.load(given.table + b.to(tl.int64) * given.table_b + h.to(tl.int64) * given.table_h
                   + mine * given.table_i + theirs)  # fmt: skip


@triton.jit
def _spans_meet(rules, b, h, i, start_j, KEYS: tl.constexpr):
    """Whether the table of spans allows any pair of these queries and the KEYS keys from start_j on."""
    label = _query_labels(rules, b, i)
    found = label * 0
    blocks = rules.key_sets + b.to(tl.int64) * tl.cdiv(rules.keys, SET_KEYS)
    for part in tl.static_range(0, KEYS, SET_KEYS):
        number = tl.load(blocks + tl.minimum(start_j + part, rules.keys - 1) // SET_KEYS).to(tl.int64)
        place = rules.sets + number * rules.sets_n + h.to(tl.int64) * rules.sets_h + (label >> 3)
        found |= (tl.load(place, mask=i < rules.queries, other=0).to(tl.int32) >> (label & 7)) & 1
    return tl.max(tl.max(found, axis=1), axis=0) > 0


@triton.jit
def any_seen(rules, b, h, i, j, start_j, KEYS: tl.constexpr):
    """Whether any pair of this tile, whose KEYS keys begin at start_j, is visible; otherwise it can be skipped.

    Spans are judged by the labels of whole blocks, apart from the other rules.
    """
    if rules.key_sets is None:
        found = _any_pair(rules, b, h, i, j)
    else:
        found = _spans_meet(rules, b, h, i, start_j, KEYS)
        if found:
            found = _any_pair(rules, b, h, i, j)
    return found


@triton.jit
def _any_pair(rules, b, h, i, j):
    visible = seen(rules, b, h, i, j)
    if rules.bias is not None:
        visible &= _bias(rules, b, h, i, j, visible) != -float("inf")
    return tl.max(tl.max(visible.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _scale(rules, h):
    return tl.load(rules.numbers) if rules.scales is None else tl.load(rules.scales + h)


@triton.jit
def logits(scores, rules, b, h, i, j, MASKED: tl.constexpr):
    """The logits from q·k, in units of ln 2; -inf where masked. Without MASKED, every pair must be visible."""
    scale = _scale(rules, h)
    if rules.softcap:
        cap = tl.load(rules.numbers + 1)
        found = tanh(scores * (scale / cap)) * (cap * LOG2E)
    else:
        found = scores * (scale * LOG2E)
    if rules.slopes is not None:
        slope = tl.load(rules.slopes + h) * LOG2E
        found -= slope * distances(rules, b, i, j).to(scores.dtype)
    if rules.table is not None:
        added = _spans(rules, rules, b, h, i, j)
        if rules.key_sets is None:
            found += added * LOG2E
        else:  # what the table forbids may have a score of NaN or infinity
            found = tl.where(added > -float("inf"), found + added * LOG2E, -float("inf"))
    if MASKED:
        visible = seen(rules, b, h, i, j)
        if rules.bias is not None:
            bias = _bias(rules, b, h, i, j, visible).to(scores.dtype)
            found += bias * LOG2E
            visible &= bias != -float("inf")
        found = tl.where(visible, found, -float("inf"))
    return found


@triton.jit
def logit_grad(scores, rules, h):
    """The derivative of the logit with respect to q·k: scale·(1 - tanh²)."""
    scale = _scale(rules, h)
    if rules.softcap:
        t = tanh(scores * (scale / tl.load(rules.numbers + 1)))
        return scale * (1.0 - t * t)
    return tl.zeros_like(scores) + scale


@triton.jit
def logit_tangents(scores, changed, along, rules, b, h, i, j, visible):
    """The tangents of a tile's logits, from those of q·k (`changed`) and a directions.Direction; 0 where masked."""
    found = changed * logit_grad(scores, rules, h)
    if along.bias is not None:
        found += _bias(along, b, h, i, j, visible).to(scores.dtype)
    if along.table is not None:
        found += _spans(along, rules, b, h, i, j)
    return tl.where(visible, found, 0.0)


@triton.jit
def logit_bend(scores, changed, rules, h):
    """The tangent of `logit_grad`: -2·scale²/softcap·tanh·(1 - tanh²)·changed."""
    scale, cap = _scale(rules, h), tl.load(rules.numbers + 1)
    t = tanh(scores * (scale / cap))
    return (-2.0 * scale * scale / cap) * t * (1.0 - t * t) * changed


@triton.jit
def _sorted(first, last):
    return tl.minimum(first, last), tl.maximum(first, last)


@triton.jit
def _within(low, high, firsts, ends, first, last, MOST: tl.constexpr):
    """The range low..high, narrowed to what the labels of first..last may see or be seen by."""
    at = first + tl.arange(0, MOST)
    low = tl.maximum(low, tl.min(tl.load(firsts + at, mask=at <= last, other=2147483647), axis=0))
    return tl.minimum(low, high), tl.minimum(high, tl.max(tl.load(ends + at, mask=at <= last, other=0), axis=0))


@triton.jit
def key_range(rules, b, first, last, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """(low, full_low, full_high, high): every key visible to a query in first..last is in low..high.

    Keys in full_low..full_high are visible to all these queries, at most MOST in number. All four are multiples of
    BLOCK; queries past the end do not count.
    """
    stop = tl.cdiv(rules.keys, BLOCK) * BLOCK
    low, high, full_low, full_high = stop * 0, stop, stop * 0, rules.keys // BLOCK * BLOCK
    last = tl.minimum(last, rules.queries - 1)
    if rules.col_step != 1:
        full_high = full_low
    if rules.col_step == 1:
        near, far = _sorted(query_positions(rules, b, first), query_positions(rules, b, last))
        if rules.right is not None:
            high = tl.minimum(high, tl.maximum(far + rules.right - rules.cols + 1, 0))
            full_high = tl.minimum(full_high, tl.maximum(near + rules.right - rules.cols + 1, 0))
        if rules.left is not None:
            low = tl.maximum(low, tl.minimum(near - rules.left - rules.cols, stop))
            full_low = tl.maximum(full_low, tl.minimum(far - rules.left - rules.cols, stop))
        if rules.kv_lengths is not None:
            length = tl.maximum(tl.load(rules.kv_lengths + b) - rules.cols, 0)
            high, full_high = tl.minimum(high, length), tl.minimum(full_high, length)
        if rules.query_lengths is not None:
            near, far = _sorted(rules.rows + rules.row_step * first, rules.rows + rules.row_step * last)
            length = tl.load(rules.query_lengths + b)
            high = tl.where(near < length, high, 0)
            full_high = tl.where(far < length, full_high, 0)
    if rules.first_key is not None:
        table = b.to(tl.int64) * rules.queries
        low, high = _within(low, high, rules.first_key + table, rules.end_key + table, first, last, MOST)
    return _in_blocks(rules, low, high, full_low, full_high, BLOCK)


@triton.jit
def query_range(rules, b, first, last, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """As key_range, for the queries that may see keys first..last; a block with queries past the end is never full."""
    stop = tl.cdiv(rules.queries, BLOCK) * BLOCK
    low, high, full_low, full_high = stop * 0, stop, stop * 0, rules.queries // BLOCK * BLOCK
    full_high = tl.where(last < rules.keys, full_high, 0)
    if rules.row_step != 1 or rules.col_step != 1:
        full_high = full_low
    last = tl.minimum(last, rules.keys - 1)
    if rules.row_step == 1:
        start = tl.load(rules.offset + b) + rules.rows
        near, far = _sorted(rules.cols + rules.col_step * first, rules.cols + rules.col_step * last)
        if rules.right is not None:
            low = tl.maximum(low, tl.minimum(near - rules.right - start, stop))
            full_low = tl.maximum(full_low, tl.minimum(far - rules.right - start, stop))
        if rules.left is not None:
            high = tl.minimum(high, tl.maximum(far + rules.left - start + 1, 0))
            full_high = tl.minimum(full_high, tl.maximum(near + rules.left - start + 1, 0))
        if rules.query_lengths is not None:
            length = tl.maximum(tl.load(rules.query_lengths + b) - rules.rows, 0)
            high, full_high = tl.minimum(high, length), tl.minimum(full_high, length)
        if rules.kv_lengths is not None:
            length = tl.load(rules.kv_lengths + b)
            high = tl.where(near < length, high, 0)
            full_high = tl.where(far < length, full_high, 0)
    if rules.first_query is not None:
        table = b.to(tl.int64) * rules.keys
        low, high = _within(low, high, rules.first_query + table, rules.end_query + table, first, last, MOST)
    return _in_blocks(rules, low, high, full_low, full_high, BLOCK)


@triton.jit
def _in_blocks(rules, low, high, full_low, full_high, BLOCK: tl.constexpr):
    """The ranges in whole blocks, low ≤ full_low ≤ full_high ≤ high; none is full where content decides."""
    low, high = (low // BLOCK * BLOCK).to(tl.int32), (tl.cdiv(high, BLOCK) * BLOCK).to(tl.int32)
    high = tl.maximum(low, high)
    if rules.content:
        return low, low, low, high
    full_low = tl.maximum(tl.minimum((tl.cdiv(full_low, BLOCK) * BLOCK).to(tl.int32), high), low)
    full_high = tl.maximum(tl.minimum((full_high // BLOCK * BLOCK).to(tl.int32), high), full_low)
    return low, full_low, full_high, high


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a·b, summed in float32 (float64 for float64); a is rounded to b's dtype first."""
    a = a.to(b.dtype)
    if INTERPRETED and b.dtype == tl.bfloat16:  # the interpreter would multiply their bit patterns
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _kinds(x):
    """Codes by which one product in float16 counts +inf, -inf and NaN, as a tile has under 256 of them in a row."""
    code = tl.where(x == float("inf"), 1.0, tl.where(x == -float("inf"), 256.0, 32768.0))
    return tl.where(tl.abs(x) < float("inf"), 0.0, code).to(tl.float16)


@triton.jit
def _counted(total, codes):
    """Add +inf, -inf and NaN to `total` where such codes were summed."""
    found = codes.to(tl.int32)
    total += tl.where((found & 255) > 0, float("inf"), 0.0)
    total += tl.where((found & 32512) > 0, -float("inf"), 0.0)
    return total + tl.where(found >= 32768, float("nan"), 0.0)


@triton.jit
def mixed(total, weights, visible, values, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add weights·values to `total`. If MASKED, a nonfinite value reaches only the queries that may see its key."""
    if not MASKED:
        return total + product(weights, values, PRECISION)
    size = tl.abs(values.to(total.dtype))
    finite = size < float("inf")  # False for NaN
    clean = tl.where(finite, values, tl.zeros_like(values))
    total += product(weights, clean, PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        total = _counted(total, tl.dot(visible.to(tl.float16), _kinds(values.to(total.dtype))))
    return total


@triton.jit
def shared_out(total, weights, shares, PRECISION: tl.constexpr):
    """Add weights·shares, of shares from 0 on; a nonfinite weight reaches only the columns with a share of it."""
    finite = tl.abs(weights) < float("inf")
    total += product(tl.where(finite, weights, 0.0), shares, PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        total = _counted(total, tl.dot(_kinds(weights), (shares > 0).to(tl.float16)))
    return total
