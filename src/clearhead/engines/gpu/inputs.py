"""Tiles of a head's queries and upstream gradients, or of its keys and values, with their tangents."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from clearhead.engines.gpu.rules import product


class Direction(NamedTuple):
    """The inputs' tangents; None is zero. Their strides along four axes are `steps`: q's, k's, v's, then dO's."""

    q: Any
    k: Any
    v: Any
    bias: Any  # (batch, heads, queries, keys), and its strides
    bias_b: Any
    bias_h: Any
    bias_i: Any
    bias_j: Any
    table: Any  # as in Rules
    table_b: Any
    table_h: Any
    table_i: Any
    sinks: Any  # (heads,)
    output: Any  # of dO


class Tiles(NamedTuple):
    """Tiles of q and dO, or of k and v, and of their tangents; what is not there is x again."""

    x: Any
    y: Any
    moved_x: Any
    moved_y: Any


@triton.jit
def load_rows(base, along, across, d, at, most, D: tl.constexpr):
    """Load rows `at` of a matrix with `most` rows of `d` elements; zeros past its end."""
    c = tl.arange(0, D)
    place = base + at.to(tl.int64)[:, None] * along + c.to(tl.int64)[None, :] * across
    return tl.load(place, mask=(at < most)[:, None] & (c < d)[None, :], other=0.0)


@triton.jit
def head_of(x, strides, b, h, FIRST: tl.constexpr):
    """Where the rows of a head begin, and their strides, which are those from FIRST on."""
    begin = x + b.to(tl.int64) * strides[FIRST] + h.to(tl.int64) * strides[FIRST + 1]
    return begin, strides[FIRST + 2], strides[FIRST + 3]


@triton.jit
def of_queries(q, q_strides, output, o_strides, along, steps, b, h):
    """Where a head's queries, its upstream gradients and the tangents of both begin, each with its strides.

    What is not there is the queries again: Triton 3.6 returns no None.
    """
    x, x_along, x_across = head_of(q, q_strides, b, h, 0)
    y, y_along, y_across = x, x_along, x_across
    moved_x, moved_x_along, moved_x_across = x, x_along, x_across
    moved_y, moved_y_along, moved_y_across = x, x_along, x_across
    if output is not None:
        y, y_along, y_across = head_of(output, o_strides, b, h, 0)
    if along.q is not None:
        moved_x, moved_x_along, moved_x_across = head_of(along.q, steps, b, h, 0)
    if along.output is not None:
        moved_y, moved_y_along, moved_y_across = head_of(along.output, steps, b, h, 12)
    return (x, x_along, x_across, y, y_along, y_across, moved_x, moved_x_along, moved_x_across, moved_y, moved_y_along,
            moved_y_across)  # fmt: skip


@triton.jit
def of_keys(k, k_strides, v, v_strides, along, steps, b, h, per_key, per_value):
    """The same for the keys and values that a head attends to."""
    x, x_along, x_across = head_of(k, k_strides, b, h // per_key, 0)
    y, y_along, y_across = x, x_along, x_across
    moved_x, moved_x_along, moved_x_across = x, x_along, x_across
    moved_y, moved_y_along, moved_y_across = x, x_along, x_across
    if v is not None:
        y, y_along, y_across = head_of(v, v_strides, b, h // per_value, 0)
    if along.k is not None:
        moved_x, moved_x_along, moved_x_across = head_of(along.k, steps, b, h // per_key, 4)
    if along.v is not None:
        moved_y, moved_y_along, moved_y_across = head_of(along.v, steps, b, h // per_value, 8)
    return (x, x_along, x_across, y, y_along, y_across, moved_x, moved_x_along, moved_x_across, moved_y, moved_y_along,
            moved_y_across)  # fmt: skip


@triton.jit
def load(rows, Y, MOVED_X, MOVED_Y, at, most, d_k, d_v, DK: tl.constexpr, DV: tl.constexpr):
    """The Tiles of rows `at`; Y, MOVED_X and MOVED_Y are None where there is no such tile."""
    (x, x_along, x_across, y, y_along, y_across, moved_x, moved_x_along, moved_x_across, moved_y, moved_y_along,
     moved_y_across) = rows  # fmt: skip
    tile = load_rows(x, x_along, x_across, d_k, at, most, DK)
    tile_y, moved_tile, moved_tile_y = tile, tile, tile
    if Y is not None:
        tile_y = load_rows(y, y_along, y_across, d_v, at, most, DV)
    if MOVED_X is not None:
        moved_tile = load_rows(moved_x, moved_x_along, moved_x_across, d_k, at, most, DK)
    if MOVED_Y is not None:
        moved_tile_y = load_rows(moved_y, moved_y_along, moved_y_across, d_v, at, most, DV)
    return Tiles(tile, tile_y, moved_tile, moved_tile_y)


@triton.jit
def held(rows, Y, MOVED_X, MOVED_Y, at, most, d_k, d_v, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr):
    """What `products` reads: the Tiles of rows `at`, or where they are loaded CHUNK columns at a time, `rows`."""
    found = rows
    if CHUNK == 0:
        found = load(rows, Y, MOVED_X, MOVED_Y, at, most, d_k, d_v, DK, DV)
    return found


@triton.jit
def products(mine, theirs, A, B, at, most, at_theirs, most_theirs, d, Y: tl.constexpr, FLOAT: tl.constexpr,
             CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """a·bᵀ and its tangent, for the x (Y = 0) or the y (Y = 1) of both sides, as `held` gives them.

    A or B is None where that side does not move. Without tensor cores a product keeps its operands in registers, whole
    rows of them, as long as another product has the same operand; chunks bound how many these are.
    """
    scores = tl.zeros((at.shape[0], at_theirs.shape[0]), FLOAT)
    changed = scores
    if CHUNK == 0:
        a, moved_a, b, moved_b = mine[Y], mine[2 + Y], theirs[Y], theirs[2 + Y]
        scores = product(a, tl.trans(b), PRECISION)
        if A is not None:
            changed += product(moved_a, tl.trans(b), PRECISION)
        if B is not None:
            changed += product(a, tl.trans(moved_b), PRECISION)
    else:
        for start in range(0, d, CHUNK):
            a = _chunk(mine, 3 * Y, start, d, at, most, CHUNK)
            b = _chunk(theirs, 3 * Y, start, d, at_theirs, most_theirs, CHUNK)
            scores += product(a, tl.trans(b), PRECISION)
            if A is not None:
                changed += product(_chunk(mine, 6 + 3 * Y, start, d, at, most, CHUNK), tl.trans(b), PRECISION)
            if B is not None:
                moved_b = _chunk(theirs, 6 + 3 * Y, start, d, at_theirs, most_theirs, CHUNK)
                changed += product(a, tl.trans(moved_b), PRECISION)
    return scores, changed


@triton.jit
def _chunk(rows, FIRST: tl.constexpr, start, d, at, most, CHUNK: tl.constexpr):
    base = rows[FIRST] + tl.cast(start, tl.int64) * rows[FIRST + 2]
    return load_rows(base, rows[FIRST + 1], rows[FIRST + 2], d - start, at, most, CHUNK)
