"""Tiles of a head's queries and upstream gradients, or of its keys and values, with their tangents; their products."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Head(NamedTuple):
    """The rows of one head: where they begin, and their strides."""

    start: Any
    row: Any
    column: Any


class Side(NamedTuple):
    """The q and g of one head, or its k and v, and their tangents, or tiles of them; what is not there is x again."""

    x: Any
    y: Any
    moved_x: Any
    moved_y: Any


class Block(NamedTuple):
    """Rows of a side, of `size` in all, with their tiles: or with the side again, where products read chunks."""

    side: Any
    tiles: Any
    first: Any
    index: Any  # of each row: first, first + 1 and so on
    size: Any


@triton.jit
def head_of(x, b, h):
    """The rows of a Strided that query head h reads."""
    start = x.tensor + b.to(tl.int64) * x.batch + (h // x.share).to(tl.int64) * x.head
    return Head(start, x.row, x.column)


@triton.jit
def _side(x, y, moved_x, moved_y, b, h):
    first = head_of(x, b, h)
    second, third, fourth = first, first, first
    if y is not None:
        second = head_of(y, b, h)
    if moved_x is not None:
        third = head_of(moved_x, b, h)
    if moved_y is not None:
        fourth = head_of(moved_y, b, h)
    return Side(first, second, third, fourth)


@triton.jit
def of_queries(inputs, b, h):
    """A head's queries and upstream gradients."""
    return _side(inputs.q, inputs.g, inputs.moved_q, inputs.moved_g, b, h)


@triton.jit
def of_keys(inputs, b, h):
    """The keys and values that a head attends to."""
    return _side(inputs.k, inputs.v, inputs.moved_k, inputs.moved_v, b, h)


@triton.jit
def rows_from(head, first):
    """The rows of a head from `first` on: within a loop, one scalar moves, and the places of a tile's rows stay."""
    return Head(head.start + tl.cast(first, tl.int64) * head.row, head.row, head.column)


@triton.jit
def load_rows(head, d, index, size, D: tl.constexpr):
    """Load rows of a head that has `size` rows of `d` elements; zeros past its end."""
    c = tl.arange(0, D)
    place = head.start + index.to(tl.int64)[:, None] * head.row + c.to(tl.int64)[None, :] * head.column
    return tl.load(place, mask=(index < size)[:, None] & (c < d)[None, :], other=0.0)


@triton.jit
def load_block(head, d, first, COUNT: tl.constexpr, size, D: tl.constexpr):
    """Load the COUNT rows from `first` on, likewise."""
    return load_rows(rows_from(head, first), d, tl.arange(0, COUNT), size - first, D)


@triton.jit
def _load(side, first, COUNT: tl.constexpr, size, there, sizes):
    """Tiles of these rows of a side."""
    x = load_block(side.x, sizes.d_k, first, COUNT, size, sizes.DK)
    y, moved_x, moved_y = x, x, x
    if there.y:
        y = load_block(side.y, sizes.d_v, first, COUNT, size, sizes.DV)
    if there.moved_x:
        moved_x = load_block(side.moved_x, sizes.d_k, first, COUNT, size, sizes.DK)
    if there.moved_y:
        moved_y = load_block(side.moved_y, sizes.d_v, first, COUNT, size, sizes.DV)
    return Side(x, y, moved_x, moved_y)


@triton.jit
def query_block(side, first, COUNT: tl.constexpr, rules, sizes):
    """The Block of the COUNT queries from `first` on."""
    tiles = side
    if sizes.CHUNK == 0:
        tiles = _load(side, first, COUNT, rules.queries, sizes.QUERIES, sizes)
    return Block(side, tiles, first, tl.cast(first, tl.int32) + tl.arange(0, COUNT), rules.queries)


@triton.jit
def key_block(side, first, COUNT: tl.constexpr, rules, sizes):
    """The Block of the COUNT keys from `first` on."""
    tiles = side
    if sizes.CHUNK == 0:
        tiles = _load(side, first, COUNT, rules.keys, sizes.KEYS, sizes)
    return Block(side, tiles, first, tl.cast(first, tl.int32) + tl.arange(0, COUNT), rules.keys)


@triton.jit
def whole(block, there, sizes):
    """The tiles of a Block, loaded where products read chunks."""
    tiles = block.tiles
    if sizes.CHUNK > 0:
        tiles = _load(block.side, block.first, block.index.shape[0], block.size, there, sizes)
    return tiles


@triton.jit
def store_rows(out, line, inside, rows, d):
    """Store rows of `d` elements into a contiguous array, as its rows `line`, where these are inside."""
    c = tl.arange(0, rows.shape[1])[None, :]
    tl.store(out + line[:, None] * d + c, rows.to(out.dtype.element_ty), mask=inside[:, None] & (c < d))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a·b, summed in float32 (float64 for float64); a is rounded to b's dtype first."""
    a = a.to(b.dtype)
    if INTERPRETED and b.dtype == tl.bfloat16:  # the interpreter would multiply their bit patterns
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def products(left, right, Y: tl.constexpr, BY_KEYS: tl.constexpr, sizes):
    """a·bᵀ and its tangent, of the x (Y = 0) or the y (Y = 1) of two Blocks; BY_KEYS: `left` are keys.

    Without tensor cores a product keeps its operands in registers, whole rows of them, as long as another product has
    the same operand; chunks bound how many these are.
    """
    if sizes.CHUNK > 0:
        scores, changed = in_chunks(left, right, Y, BY_KEYS, sizes.CHUNK, sizes)
    else:
        a, moved_a, b, moved_b = left.tiles[Y], left.tiles[2 + Y], right.tiles[Y], right.tiles[2 + Y]
        changed = tl.zeros((left.index.shape[0], right.index.shape[0]), sizes.FLOAT)
        scores = product(a, tl.trans(b), sizes.PRECISION)
        if (sizes.KEYS if BY_KEYS else sizes.QUERIES)[1 + Y]:
            changed += product(moved_a, tl.trans(b), sizes.PRECISION)
        if (sizes.QUERIES if BY_KEYS else sizes.KEYS)[1 + Y]:
            changed += product(a, tl.trans(moved_b), sizes.PRECISION)
    return scores, changed


@triton.jit
def in_chunks(left, right, Y: tl.constexpr, BY_KEYS: tl.constexpr, CHUNK: tl.constexpr, sizes):
    """The same, reading CHUNK columns at a time."""
    scores = tl.zeros((left.index.shape[0], right.index.shape[0]), sizes.FLOAT)
    changed = scores
    for start in range(0, sizes.d_v if Y else sizes.d_k, CHUNK):
        a, b = _chunk(left, Y, start, CHUNK, sizes), _chunk(right, Y, start, CHUNK, sizes)
        scores += product(a, tl.trans(b), sizes.PRECISION)
        if (sizes.KEYS if BY_KEYS else sizes.QUERIES)[1 + Y]:
            changed += product(_chunk(left, 2 + Y, start, CHUNK, sizes), tl.trans(b), sizes.PRECISION)
        if (sizes.QUERIES if BY_KEYS else sizes.KEYS)[1 + Y]:
            changed += product(a, tl.trans(_chunk(right, 2 + Y, start, CHUNK, sizes)), sizes.PRECISION)
    return scores, changed


@triton.jit
def _chunk(block, NUMBER: tl.constexpr, start, CHUNK: tl.constexpr, sizes):
    head = block.side[NUMBER]
    begin = head.start + tl.cast(start, tl.int64) * head.column
    d = (sizes.d_v if NUMBER % 2 else sizes.d_k) - start
    return load_block(Head(begin, head.row, head.column), d, block.first, block.index.shape[0], block.size, CHUNK)


@triton.jit
def _kinds(x):
    """Codes by which one product in float16 counts +inf, -inf and NaN, as a tile has under 256 of them in a row."""
    code = tl.where(x == float("inf"), 1.0, tl.where(x == -float("inf"), 256.0, 32768.0))
    return tl.where(tl.abs(x) < float("inf"), 0.0, code).to(tl.float16)


@triton.jit
def _counted(total, codes):
    """Add +inf, -inf and NaN to `total` where such codes were summed."""
    sums = codes.to(tl.int32)
    total += tl.where((sums & 255) > 0, float("inf"), 0.0)
    total += tl.where((sums & 32512) > 0, -float("inf"), 0.0)
    return total + tl.where(sums >= 32768, float("nan"), 0.0)


@triton.jit
def mixed(total, weights, visible, values, MASKED: tl.constexpr, SIGNED: tl.constexpr, PRECISION: tl.constexpr):
    """Add weights·values to `total`. If MASKED, a nonfinite value reaches only those that may see it.

    Its sign counts as it is, as weights have none; if SIGNED, they have, and 0·inf is NaN.
    """
    if not MASKED:
        return total + product(weights, values, PRECISION)
    wide = values.to(total.dtype)
    finite = tl.abs(wide) < float("inf")  # False for NaN
    total += product(weights, tl.where(finite, values, tl.zeros_like(values)), PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        if SIGNED:
            codes = tl.dot((visible & (weights > 0)).to(tl.float16), _kinds(wide))
            codes += tl.dot((visible & (weights < 0)).to(tl.float16), _kinds(-wide))
            unknown = tl.where(finite, 0.0, 32768.0).to(tl.float16)
            codes += tl.dot((visible & (weights == 0)).to(tl.float16), unknown)
        else:
            codes = tl.dot(visible.to(tl.float16), _kinds(wide))
        total = _counted(total, codes)
    return total


@triton.jit
def not_finite(sums):
    """Whether some of these sums, (rows, columns), is NaN or infinite."""
    return 1 - tl.min(tl.min((tl.abs(sums) < float("inf")).to(tl.int32), axis=1), axis=0)


@triton.jit
def shared_out(total, weights, shares, PRECISION: tl.constexpr):
    """Add weights·shares, of shares from 0 on; a nonfinite weight reaches only the columns with a share of it."""
    finite = tl.abs(weights) < float("inf")
    total += product(tl.where(finite, weights, 0.0), shares, PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        total = _counted(total, tl.dot(_kinds(weights), (shares > 0).to(tl.float16)))
    return total
