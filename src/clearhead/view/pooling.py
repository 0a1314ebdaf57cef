"""Weights pooled to pixels: the tiles that a page requests, and the small pictures of heads that it stores as bytes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view.head_summary import first_key

MASKED = -1.0  # stands for a masked weight; page/src/attention.js has the same number
LEVELS = 80  # the highest code of a finite pixel
NONFINITE = 255  # the code of a pixel that covers NaN or infinity


def tile(
    matrix: AttentionMatrix,
    head: int,
    rows: Sequence[int],
    cols: Sequence[int],
    step: int,
    rule: Literal["most", "mean"],
) -> Array:
    """Pixels of step × step units, float32; a unit's weight is summed over its keys and averaged over its queries.

    matrix      an AttentionMatrix (1, heads, queries, keys)
    rows, cols  the edges of the units of queries and of keys: unit u has the tokens edges[u]:edges[u + 1]
    rule        "most" takes the largest of a pixel's units, "mean" their mean
    A pixel whose weights are all masked is MASKED. O(rows·cols·d_k) time, in tokens.
    """
    queries, keys = slice(rows[0], rows[-1]), slice(cols[0], cols[-1])
    weights = as_host_array(matrix[0, head, queries, keys], "weights")[0].astype(np.float64)
    seen = np.zeros(weights.shape, bool)
    seen[...] = visibility.tile(matrix.call.problem, 0, head, queries, keys)
    starts, ends = (np.subtract(edges[:-1], edges[0]) for edges in (rows, cols))
    units = _pooled(np.add, np.where(seen, weights, 0.0), starts, ends) / np.diff(rows)[:, None]
    shown = _pooled(np.logical_or, seen, starts, ends)
    tall, wide = (np.arange(0, size, step) for size in units.shape)
    if rule == "most":
        pixels = _pooled(np.maximum, units, tall, wide)
    else:
        area = np.diff([*tall, units.shape[0]])[:, None] * np.diff([*wide, units.shape[1]])
        pixels = _pooled(np.add, units, tall, wide) / area
    return np.where(_pooled(np.logical_or, shown, tall, wide), pixels, MASKED).astype(np.float32)


def _pooled(operation: np.ufunc, cells: Array, rows: Array, cols: Array) -> Array:
    return operation.reduceat(operation.reduceat(cells, cols, 1), rows, 0)


def pictures(matrix: AttentionMatrix, side: int) -> dict[str, Array]:
    """The largest and the mean weight of each pixel of one layer, in at most side × side pixels.

    Returns most and mean, (heads, rows, columns) without the first key; first_most and first_mean, (heads, rows), of
    that key alone; received (heads, keys), all keys'. O(queries·keys·d_k) per head.
    """
    problem = matrix.call.problem
    n, m, first = problem.queries, problem.keys, first_key(matrix, 0)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    widths = np.diff(cols)
    parts = []
    received = np.zeros((problem.heads, m))
    for start, stop in pairwise(rows):
        seen = matrix.observe(peak=True, received=True, queries=slice(int(start), int(stop)))
        peak, mass = (as_host_array(x, "weights")[0][0].astype(np.float64) for x in (seen.peak, seen.received))
        received += mass
        alone = peak[:, first].copy(), mass[:, first] / (stop - start)
        peak[:, first] = mass[:, first] = 0.0
        mean = np.add.reduceat(mass, cols[:-1], 1) / (widths * (stop - start))
        parts.append((np.maximum.reduceat(peak, cols[:-1], 1), mean, *alone))
    names = ("most", "mean", "first_most", "first_mean")
    drawn = (np.stack(part, 1) for part in zip(*parts, strict=True))
    return {**dict(zip(names, drawn, strict=True)), "received": received}


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
