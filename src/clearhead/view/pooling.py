"""Weights pooled to pixels: the tiles that a page requests, and the small pictures of heads that it stores as bytes."""

from itertools import pairwise

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view.head_summary import first_key

MASKED = -1.0  # stands for a masked weight; page/src/attention.js has the same number
LEVELS = 80  # the highest code of a finite pixel
NONFINITE = 255  # the code of a pixel that covers NaN or infinity


def tile(matrix: AttentionMatrix, head: int, rows: slice, cols: slice, step: int) -> Array:
    """The largest of each step × step weights of (1, heads, queries, keys), float32; MASKED where all are masked.

    O(rows·cols·d_k) time.
    """
    rows, cols = (slice(*part.indices(size)) for part, size in zip((rows, cols), matrix.shape[2:], strict=True))
    weights = as_host_array(matrix[0, head, rows, cols], "weights")[0].astype(np.float32)
    shown = np.where(visibility.tile(matrix.call.problem, 0, head, rows, cols), weights, np.float32(MASKED))
    tall, wide = (np.arange(0, size, step) for size in shown.shape)
    return np.maximum.reduceat(np.maximum.reduceat(shown, wide, 1), tall, 0)


def pictures(matrix: AttentionMatrix, side: int) -> dict[str, Array]:
    """The largest weight of each pixel of one layer, in at most side × side pixels.

    Returns most (heads, rows, columns), without the first key; first_most (heads, rows), of that key alone; received
    (heads, keys), what each key receives. O(queries·keys·d_k) per head.
    """
    problem = matrix.call.problem
    n, m, first = problem.queries, problem.keys, first_key(matrix, 0)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    most, alone = [], []
    received = np.zeros((problem.heads, m))
    for start, stop in pairwise(rows):
        seen = matrix.observe(peak=True, received=True, queries=slice(int(start), int(stop)))
        peak, mass = (as_host_array(x, "weights")[0][0].astype(np.float64) for x in (seen.peak, seen.received))
        received += mass
        alone.append(peak[:, first].copy())
        peak[:, first] = 0.0
        most.append(np.maximum.reduceat(peak, cols[:-1], 1))
    return {"most": np.stack(most, 1), "first_most": np.stack(alone, 1), "received": received}


def coded(pixels: Array, first: Array) -> tuple[Array, Array, list[float]]:
    """Encode both as bytes, the square root of the share in each head's largest; returns the largest too."""
    finite = [np.where(np.isfinite(x), x, 0.0) for x in (pixels, first)]
    largest = np.maximum(finite[0].max((1, 2), initial=0.0), finite[1].max(1, initial=0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [np.nan_to_num(x / largest.reshape(-1, *(1,) * (x.ndim - 1))) for x in finite]
    codes = [np.rint(np.sqrt(np.clip(x, 0.0, 1.0)) * LEVELS).astype(np.uint8) for x in shares]
    for code, x in zip(codes, (pixels, first), strict=True):
        code[~np.isfinite(x)] = NONFINITE
    return codes[0], codes[1], [float(x) for x in largest]
