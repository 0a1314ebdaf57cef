"""Tiles of weights as the page requests them: tokens are grouped into units, units are pooled into pixels."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.view.protocols import Weights

MASKED = -1.0  # stands for a masked weight; page/src/attention.js has the same number


def tile(
    matrix: Weights, head: int, rows: Sequence[int], cols: Sequence[int], step: int, rule: Literal["most", "mean"]
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
    seen[...] = visibility.tile(matrix.factors.problem, 0, head, queries, keys)
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
