"""Weights by the tile, as the page asks for them: units of tokens, pooled into pixels."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from clearhead import visibility
from clearhead.arrays import read
from clearhead.axes import Array

MASKED = -1.0  # where a weight would stand; page/src/attention.js says the same


def tile(
    matrix: Any, head: int, rows: Sequence[int], cols: Sequence[int], step: int, rule: Literal["most", "mean"]
) -> Array:
    """Pixels of step × step units, float32; a unit's weight is the sum over its keys, the mean over its queries.

    matrix      an AttentionMatrix (1, heads, queries, keys)
    rows, cols  where units begin, and where the last one ends: unit u is the tokens edges[u]…edges[u + 1]
    rule        the largest or the mean of a pixel's units
    A pixel whose weights are all forbidden is MASKED.
    """
    queries, keys = slice(rows[0], rows[-1]), slice(cols[0], cols[-1])
    weights = read(matrix[0, head, queries, keys], "weights")[0].astype(np.float64)
    seen = np.zeros(weights.shape, bool)
    seen[...] = visibility.tile(matrix._problem, 0, head, queries, keys)
    starts, ends = (np.subtract(edges[:-1], edges[0]) for edges in (rows, cols))
    sizes = np.diff(rows)
    units = np.add.reduceat(np.add.reduceat(np.where(seen, weights, 0.0), ends, 1), starts, 0) / sizes[:, None]
    shown = np.logical_or.reduceat(np.logical_or.reduceat(seen, ends, 1), starts, 0)
    tall, wide = (np.arange(0, size, step) for size in units.shape)
    if rule == "most":
        pixels = np.maximum.reduceat(np.maximum.reduceat(units, wide, 1), tall, 0)
    else:
        area = np.diff([*tall, units.shape[0]])[:, None] * np.diff([*wide, units.shape[1]])
        pixels = np.add.reduceat(np.add.reduceat(units, wide, 1), tall, 0) / area
    any_seen = np.logical_or.reduceat(np.logical_or.reduceat(shown, wide, 1), tall, 0)
    return np.where(any_seen, pixels, MASKED).astype(np.float32)
