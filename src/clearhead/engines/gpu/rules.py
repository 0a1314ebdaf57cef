"""The score rules as the kernels read them, and the logits of one tile; core/visibility.py defines their meaning.

Indices of queries (i), keys (j) and heads (h) have shapes that broadcast to the tile's, so the same functions serve
tiles (queries, keys) and transposed tiles (keys, queries).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.labels import BLOCK

LOG2E = tl.constexpr(1.4426950408889634)
MOST = tl.constexpr(2.0**127)  # as MOST_ADDED in core/rule_values.py
LN2 = tl.constexpr(0.6931471805599453)
SET_KEYS = tl.constexpr(BLOCK)


class Rules(NamedTuple):
    """A problem as the kernels read it; None for rules that it does not have."""

    heads: Any
    queries: Any
    keys: Any
    numbers: Any  # scale, softcap
    scales: Any  # (heads,) where heads have different scales
    softcap: Any  # whether there is one
    plain: Any  # whether the logits are the products times one scale, and that is above 0
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
    table: Any  # (batch or 1, heads or 1, query labels, key labels), Strided
    sets: Any  # (sets, heads or 1, 1, bytes), Strided: which query labels may see some key of a block
    slopes: Any  # (heads,)
    sinks: Any  # (heads,)
    bias: Any  # (batch, heads, queries, keys), Strided
    mask: Any  # likewise
    # Last, as in a loop Triton 3.6 loses the strides of 1 of a tuple that is the last of a tuple:
    content: Any  # whether visibility depends on values of arrays: a mask, a bias, spans, scattered segments


@triton.jit
def _bias(rules, b, h, i, j, visible):
    """The bias of a tile; Triton's interpreter compares bfloat16 numbers wrongly, so they are widened first."""
    bias = tl.load(_cell(rules.bias, b, h, i, j), mask=visible, other=0.0)
    if bias.dtype == tl.bfloat16:
        bias = bias.to(tl.float32)
    return bias


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
    query, key = query_positions(rules, b, i), rules.cols + rules.col_step * j
    visible = (i < rules.queries) & (j < rules.keys)
    if rules.right is not None:
        visible &= key <= query + rules.right
    if rules.left is not None:
        visible &= key >= query - rules.left
    if rules.kv_lengths is not None:
        visible &= key < tl.load(rules.kv_lengths + b)
    if rules.query_lengths is not None:
        visible &= rules.rows + rules.row_step * i < tl.load(rules.query_lengths + b)
    if rules.query_segments is not None:
        segment = tl.load(rules.query_segments + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=0)
        visible &= segment == tl.load(rules.kv_segments + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=0)
    if rules.mask is not None:
        visible &= tl.load(_cell(rules.mask, b, h, i, j), mask=visible, other=0) != 0
    return visible


@triton.jit
def _cell(x, b, h, i, j):
    """Where the elements of a Strided lie."""
    rows = b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + i.to(tl.int64) * x.row
    return x.tensor + rows + j.to(tl.int64) * x.column


@triton.jit
def _query_labels(rules, b, i):
    return tl.load(rules.query_spans + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=0)


@triton.jit
def _spans(table, rules, b, h, i, j):
    """What a table of spans adds to the logits of a tile: that of the rules, or its tangent in a Direction."""
    keys = tl.load(rules.key_spans + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=0)
    return tl.load(_cell(table, b, h, _query_labels(rules, b, i), keys))


@triton.jit
def _spans_meet(rules, b, h, i, start_j, KEYS: tl.constexpr):
    """Whether the table of spans allows any pair of these queries and the KEYS keys from start_j on."""
    label = _query_labels(rules, b, i)
    allowed = label * 0
    blocks = rules.key_sets + b.to(tl.int64) * tl.cdiv(rules.keys, SET_KEYS)
    for part in tl.static_range(0, KEYS, SET_KEYS):
        number = tl.load(blocks + tl.minimum(start_j + part, rules.keys - 1) // SET_KEYS).to(tl.int64)
        place = rules.sets.tensor + number * rules.sets.batch + h.to(tl.int64) * rules.sets.head + (label >> 3)
        allowed |= (tl.load(place, mask=i < rules.queries, other=0).to(tl.int32) >> (label & 7)) & 1
    return tl.max(tl.max(allowed, axis=1), axis=0) > 0


@triton.jit
def any_seen(rules, b, h, i, j, start_j, KEYS: tl.constexpr):
    """Whether any pair of this tile, whose KEYS keys begin at start_j, is visible; otherwise it can be skipped.

    Spans are judged by the labels of whole blocks, apart from the other rules.
    """
    if rules.key_sets is None:
        some = _any_pair(rules, b, h, i, j)
    else:
        some = _spans_meet(rules, b, h, i, start_j, KEYS)
        if some:
            some = _any_pair(rules, b, h, i, j)
    return some


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
        s = tanh(scores * (scale / cap)) * (cap * LOG2E)
    else:
        s = scores * (scale * LOG2E)
    if rules.slopes is not None:
        slope = tl.load(rules.slopes + h) * LOG2E
        s -= slope * distances(rules, b, i, j).to(scores.dtype)
    if rules.table is not None:
        added = _spans(rules.table, rules, b, h, i, j)
        if rules.key_sets is None:
            s += added * LOG2E
        else:  # what the table forbids may have a score of NaN or infinity
            s = tl.where(added > -float("inf"), s + added * LOG2E, -float("inf"))
    if MASKED:
        visible = seen(rules, b, h, i, j)
        if rules.bias is not None:
            bias = _bias(rules, b, h, i, j, visible)
            visible &= bias != -float("inf")
            bias = tl.where((bias > MOST) & (bias < float("inf")), MOST, tl.where(bias < -MOST, -MOST, bias))
            s += bias.to(scores.dtype) * LOG2E
        s = tl.where(visible, s, -float("inf"))
    return s


@triton.jit
def largest(s, scores, rules, h, MASKED: tl.constexpr):
    """The largest of a tile's logits `s` in each row; of plain ones that of the scores, which takes no product more."""
    return tl.max(scores, axis=1) * (_scale(rules, h) * LOG2E) if rules.plain and not MASKED else tl.max(s, axis=1)


@triton.jit
def logit_grad(scores, rules, h):
    """The derivative of the logit with respect to q·k: scale·(1 - tanh²)."""
    scale = _scale(rules, h)
    if rules.softcap:
        t = tanh(scores * (scale / tl.load(rules.numbers + 1)))
        return scale * (1.0 - t * t)
    return tl.zeros_like(scores) + scale


@triton.jit
def score_grad(by_logit, scores, rules, h):
    """Derivatives by q·k, from those by logits; a scale that all heads share is left to `scaled`."""
    if not rules.softcap and rules.scales is None:
        return by_logit
    return tl.where(by_logit == 0, 0.0, by_logit * logit_grad(scores, rules, h))


@triton.jit
def scaled(sums, rules):
    """Sums over derivatives by q·k, with the scale that `score_grad` left out."""
    return sums * tl.load(rules.numbers) if not rules.softcap and rules.scales is None else sums


@triton.jit
def logit_tangents(scores, changed, along, rules, b, h, i, j, visible):
    """The tangents of a tile's logits, from those of q·k (`changed`) and a Direction; 0 where masked."""
    tangents = changed * logit_grad(scores, rules, h)
    if along.bias is not None:  # not masked by `visible`: a pipelined load must not wait for a product
        inside = (i < rules.queries) & (j < rules.keys)
        tangents += tl.load(_cell(along.bias, b, h, i, j), mask=inside, other=0.0).to(scores.dtype)
    if along.table is not None:
        tangents += _spans(along.table, rules, b, h, i, j)
    return tl.where(visible, tangents, 0.0)


@triton.jit
def logit_grad_tangent(scores, changed, rules, h):
    """The tangent of `logit_grad`: -2·scale²/softcap·tanh·(1 - tanh²)·changed."""
    scale, cap = _scale(rules, h), tl.load(rules.numbers + 1)
    t = tanh(scores * (scale / cap))
    return (-2.0 * scale * scale / cap) * t * (1.0 - t * t) * changed


@triton.jit
def _sorted(first, last):
    return tl.minimum(first, last), tl.maximum(first, last)


@triton.jit
def _within(low, full_low, full_high, high, firsts, ends, table, first, last, MOST: tl.constexpr):
    """The ranges, narrowed to what some and to what all of the labels of first..last may see or be seen by."""
    index, here = table + first + tl.arange(0, MOST), first + tl.arange(0, MOST) <= last
    starts, stops = tl.load(firsts + index, mask=here, other=0), tl.load(ends + index, mask=here, other=0)
    full_low = tl.maximum(full_low, tl.max(starts, axis=0))
    full_high = tl.minimum(full_high, tl.min(tl.where(here, stops, 2147483647), axis=0))
    low = tl.maximum(low, tl.min(tl.where(here, starts, 2147483647), axis=0))
    return tl.minimum(low, high), full_low, full_high, tl.minimum(high, tl.max(stops, axis=0))


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
        low, full_low, full_high, high = _within(
            low, full_low, full_high, high, rules.first_key, rules.end_key, table, first, last, MOST
        )
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
        low, full_low, full_high, high = _within(
            low, full_low, full_high, high, rules.first_query, rules.end_query, table, first, last, MOST
        )
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
