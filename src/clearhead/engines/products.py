"""Matrix products in small pieces, so that no bit depends on the number of BLAS threads.

BLAS splits a large product among its threads, and where it splits decides how sums are rounded. A product of
64×64×64 is small enough to be computed by one thread (OpenBLAS: up to 262,144 multiply-adds).
"""

import numpy as np

from clearhead.core.axes import Array

PIECE = 64


def pieces(x: Array) -> Array:
    """Cut a right-hand matrix (depth, width) into (columns, layers, deep, wide), zero-padded; deep, wide ≤ PIECE."""
    (layers, deep), (columns, wide) = (_parts(size) for size in x.shape)
    return _padded(x, layers * deep, columns * wide).reshape(layers, deep, columns, wide).transpose(2, 0, 1, 3)


def product(left: Array, right: Array, width: int) -> Array:
    """Multiply left (rows, depth) by a matrix (depth, width) that was cut by `pieces`: (rows, width)."""
    columns, layers, deep, wide = right.shape
    rows = len(left)
    bands, high = _parts(rows)
    full = _padded(left, bands * high, layers * deep).reshape(bands, high, layers, deep).transpose(0, 2, 1, 3)
    result = np.empty((bands * high, columns * wide), np.result_type(left, right, np.float64))
    target = result.reshape(bands, high, columns, wide).transpose(0, 2, 1, 3)
    if layers == 1:
        np.matmul(full, right[:, 0], out=target)
    else:
        np.sum(full[:, None] @ right, axis=2, out=target)
    return result[:rows, :width]


def _parts(size: int) -> tuple[int, int]:
    """How many pieces cover `size`, and the size of each, at most PIECE."""
    count = max(1, -(-size // PIECE))
    return count, -(-size // count)


def _padded(x: Array, rows: int, columns: int) -> Array:
    if x.shape == (rows, columns):
        return np.ascontiguousarray(x)  # BLAS has another order of sums for other strides
    full = np.zeros((rows, columns), np.result_type(x, np.float64))
    full[: x.shape[0], : x.shape[1]] = x
    return full
