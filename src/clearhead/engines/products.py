"""Matrix products in small pieces, so that no bit depends on how many threads BLAS has.

BLAS divides a large product among its threads, and where it divides decides how the edges are rounded. A piece of
64×64×64 is small enough to stay on one thread (OpenBLAS: up to 262,144 multiply-adds).
"""

import numpy as np

from clearhead.axes import Array

PIECE = 64


def pieces(x: Array) -> Array:
    """A right side (depth, width) as (columns, layers, at most PIECE, at most PIECE), zeros at its ends."""
    (layers, deep), (columns, wide) = (_parts(size) for size in x.shape)
    return _padded(x, layers * deep, columns * wide).reshape(layers, deep, columns, wide).transpose(2, 0, 1, 3)


def product(left: Array, right: Array, width: int) -> Array:
    """The product of left (rows, depth) and what `pieces` made of a (depth, width) array: (rows, width)."""
    columns, layers, deep, wide = right.shape
    rows = len(left)
    bands, high = _parts(rows)
    full = _padded(left, bands * high, layers * deep).reshape(bands, high, layers, deep).transpose(0, 2, 1, 3)
    result = np.empty((bands * high, columns * wide))
    target = result.reshape(bands, high, columns, wide).transpose(0, 2, 1, 3)
    if layers == 1:
        np.matmul(full, right[:, 0], out=target)
    else:
        np.sum(full[:, None] @ right, axis=2, out=target)
    return result[:rows, :width]


def _parts(size: int) -> tuple[int, int]:
    """How many pieces, and how large, cover `size`."""
    count = max(1, -(-size // PIECE))
    return count, -(-size // count)


def _padded(x: Array, rows: int, columns: int) -> Array:
    if x.shape == (rows, columns):
        return x
    full = np.zeros((rows, columns))
    full[: x.shape[0], : x.shape[1]] = x
    return full
