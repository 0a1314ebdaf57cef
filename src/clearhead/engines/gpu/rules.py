"""The score rules as the kernels read them, and the logits of one tile; core/visibility.py defines their meaning.

Indices of queries (i), keys (j) and heads (h) have shapes that broadcast to the tile's, so the same functions serve
tiles (queries, keys) and transposed tiles (keys, queries).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MOST = tl.constexpr(2.0**127)  # as MOST_ADDED in core/rule_values.py
LN2 = tl.constexpr(0.6931471805599453)


class Strided(NamedTuple):
    """A tensor with four axes and its strides in elements, 0 along those that are broadcast."""

    tensor: Any
    batch: Any
    head: Any
    row: Any
    column: Any
    share: Any = 1  # how many query heads share each of its heads


class Inputs(NamedTuple):
    """The arrays that a pass reads, each Strided, or None where it has none."""

    q: Any
    k: Any
    v: Any = None
    g: Any = None  # (batch, heads, queries, d_v): the upstream gradient of the output, or what Aᵀ is multiplied with
    end: Any = None  # keeps v or g from being the last element: see `content` in RuleArguments


class TileSizes(NamedTuple):
    """The sizes of a pass; all but d_k and d_v are constants of the compiled kernel."""

    d_k: Any
    d_v: Any
    M: Any  # queries or keys whose results one program computes
    N: Any  # how many of the other side it reads at a time
    DK: Any  # d_k and d_v, padded to powers of two
    DV: Any
    FLOAT: Any  # the dtype of sums
    PRECISION: Any  # of products of float32: "ieee", "tf32", or "tf32x3", whose errors are not much above float32's
    STAGES: Any  # in which its loops are pipelined


class Results(NamedTuple):
    """Where results are written: contiguous (batch, heads, …); None where not requested."""

    output: Any = None
    largest: Any = None  # (batch, heads, queries), as all below but for the last three
    log_sum: Any = None
    max_logit: Any = None
    entropy: Any = None
    distance: Any = None
    diagonal: Any = None
    top_weights: Any = None
    top_indices: Any = None
    received: Any = None  # (batch, heads, keys)
    peak: Any = None
    weights: Any = None  # (batch, heads, queries, keys)


class RuleArguments(NamedTuple):
    """A problem as the kernels read it; None for rules that it does not have."""

    heads: Any
    queries: Any
    keys: Any
    scales: Any  # (heads,)
    softcap: Any  # (1,)
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
    table: Any  # (batch or 1, heads or 1, query labels, key labels), Strided
    slopes: Any  # (heads,)
    sinks: Any  # (heads,)
    bias: Any  # (batch, heads, queries, keys), Strided
    mask: Any  # likewise
    # A number has to be last: in a loop, Triton 3.6 loses strides of 1 in a tuple that ends another tuple
    content: Any  # whether visibility depends on values of arrays: a mask, a bias, forbidding spans, segments


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
    """The addresses of a Strided's elements."""
    rows = b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + i.to(tl.int64) * x.row
    return x.tensor + rows + j.to(tl.int64) * x.column


@triton.jit
def _spans(rules, b, h, i, j):
    """What the table of spans adds to the logits of a tile."""
    rows = tl.load(rules.query_spans + b.to(tl.int64) * rules.queries + i, mask=i < rules.queries, other=0)
    columns = tl.load(rules.key_spans + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=0)
    return tl.load(_cell(rules.table, b, h, rows, columns))


@triton.jit
def any_seen(rules, b, h, i, j):
    """Whether any pair of this tile is visible; otherwise it can be skipped."""
    visible = seen(rules, b, h, i, j)
    if rules.bias is not None:
        visible &= _bias(rules, b, h, i, j, visible) != -float("inf")
    if rules.table is not None:
        visible &= _spans(rules, b, h, i, j) != -float("inf")
    return tl.max(tl.max(visible.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def logits(scores, rules, b, h, i, j, MASKED: tl.constexpr):
    """The logits from q·k, in nats; -inf where masked. Without MASKED, every pair must be visible."""
    scale = tl.load(rules.scales + h)
    if rules.softcap is not None:
        cap = tl.load(rules.softcap)
        s = tanh(scores * (scale / cap)) * cap
    else:
        s = scores * scale
    if rules.slopes is not None:
        slope = tl.load(rules.slopes + h)
        s -= slope * distances(rules, b, i, j).to(scores.dtype)
    if rules.table is not None:  # a forbidden score may be NaN or infinite, so it is replaced, not added to
        added = _spans(rules, b, h, i, j)
        s = tl.where(added == -float("inf"), -float("inf"), s + added)
    if MASKED:
        visible = seen(rules, b, h, i, j)
        if rules.bias is not None:
            bias = _bias(rules, b, h, i, j, visible)
            visible &= bias != -float("inf")
            bias = tl.where((bias > MOST) & (bias < float("inf")), MOST, tl.where(bias < -MOST, -MOST, bias))
            s += bias.to(scores.dtype)
        s = tl.where(visible, s, -float("inf"))
    return s


@triton.jit
def score_grad(by_logit, scores, rules, h):
    """Derivatives by scale·q·k, from those by logits: times 1 - tanh² under a softcap."""
    if rules.softcap is not None:
        t = tanh(scores * (tl.load(rules.scales + h) / tl.load(rules.softcap)))
        by_logit = tl.where(by_logit == 0, 0.0, by_logit * (1.0 - t * t))
    return by_logit


@triton.jit
def visible_range(rules, b, first, last, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """(low, full_low, full_high, high): every key that queries first..last may see lies in low..high.

    All of these queries may see the keys full_low..full_high. All four are multiples of BLOCK; queries past the end do
    not count. Without KEYS, queries and keys change places. If rules.content is set, full_low..full_high is empty.
    """
    queries = rules.queries, rules.rows, rules.row_step, rules.query_lengths
    keys = rules.keys, rules.cols, rules.col_step, rules.kv_lengths
    offset = tl.load(rules.offset + b)
    # adding `shift` turns the strip's positions into the other side's, visible from `before` them to `after` them
    if KEYS:
        strip, other, shift, before, after = queries, keys, offset - rules.cols, rules.left, rules.right
    else:
        strip, other, shift, before, after = keys, queries, -offset - rules.rows, rules.right, rules.left
    strip_size, strip_start, strip_step, strip_lengths = strip
    size, start, step, lengths = other
    stop = tl.cdiv(size, BLOCK) * BLOCK
    low, high, full_low, full_high = stop * 0, stop, stop * 0, size // BLOCK * BLOCK
    last = tl.minimum(last, strip_size - 1)
    ends = strip_start + strip_step * first, strip_start + strip_step * last
    near, far = tl.minimum(ends[0], ends[1]), tl.maximum(ends[0], ends[1])
    if step == 1:
        if after is not None:
            high = tl.minimum(high, tl.maximum(far + shift + after + 1, 0))
            full_high = tl.minimum(full_high, tl.maximum(near + shift + after + 1, 0))
        if before is not None:
            low = tl.maximum(low, tl.minimum(near + shift - before, stop))
            full_low = tl.maximum(full_low, tl.minimum(far + shift - before, stop))
        if lengths is not None:
            length = tl.maximum(tl.load(lengths + b) - start, 0)
            high, full_high = tl.minimum(high, length), tl.minimum(full_high, length)
    if strip_lengths is not None:
        length = tl.load(strip_lengths + b)
        high = tl.where(near < length, high, 0)
        full_high = tl.where(far < length, full_high, 0)
    low, high = (low // BLOCK * BLOCK).to(tl.int32), (tl.cdiv(high, BLOCK) * BLOCK).to(tl.int32)
    high = tl.maximum(low, high)
    if rules.content or step != 1:
        return low, low, low, high
    full_low = tl.maximum(tl.minimum((tl.cdiv(full_low, BLOCK) * BLOCK).to(tl.int32), high), low)
    full_high = tl.maximum(tl.minimum((full_high // BLOCK * BLOCK).to(tl.int32), high), full_low)
    return low, full_low, full_high, high
