"""Relevance of every token for one: positive contributions carried back through all layers, in O(n) memory."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array, blocks
from clearhead.core.rule_values import read_place
from clearhead.errors import ShapeError

if TYPE_CHECKING:
    from clearhead.ops.causes import CauseMatrix

_TILE, _LEAST = 1 << 21, 16  # elements that are computed at once, in at least so many rows


def relevance(contributions: Sequence["CauseMatrix"], *, query: int) -> Any:
    """One row of Π_l (I + mean over heads of max(C_l, 0)), from the last layer to the first: r ← r + r·Ā_l.

    contributions   one per layer, first layer first, each (batch, heads, n, n) over the same tokens
    query           the token to start at, negative counts from the end

    Returns (batch, n) in the contributions' dtype and kind. Rows of C_l for which r is 0 are not computed.
    Raises ShapeError where there is no layer or the layers differ in tokens, SelectionError for a query outside them.
    O(layers·heads·n²·(d_k + d_v)) time, O(n) memory.
    Source: Chefer, Gur & Wolf 2021 (arXiv 2103.15679), equations 5 and 6.
    """
    if not contributions:
        raise ShapeError("relevance needs at least one layer of self-attention.")
    batch, _, _, n = contributions[0].shape
    for layer, matrix in enumerate(contributions):
        if tuple(matrix.shape[-2:]) != (n, n):
            raise ShapeError(
                f"layer {layer} is {matrix!r}: relevance needs the same tokens as queries and keys in every layer.",
                f"the first layer has {n} keys.",
            )
    flow = np.zeros((batch, n))
    flow[:, read_place("query", query, n)] = 1
    restore = as_host_array(contributions[0][:0, :0, :0, :0], "contributions")[1]
    for matrix in reversed(contributions):
        flow = flow + np.stack([_passed(matrix, item, row) for item, row in enumerate(flow)])
    return restore(flow.astype(contributions[0].dtype))


def _passed(matrix: "CauseMatrix", item: int, flow: Array) -> Array:
    """r·Ā, (n,): Σ_i r_i·max(c_ij, 0), mean over heads; rows outside the first and last r_i ≠ 0 are skipped."""
    rows, (heads, n) = np.flatnonzero(flow), (matrix.shape[1], len(flow))
    first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
    result = np.zeros(n)
    for head, part in product(range(heads), blocks(last + 1 - first, max(_LEAST, _TILE // n))):
        place = slice(first + part.start, first + part.stop)
        result += flow[place] @ np.maximum(as_host_array(matrix[item, head, place], "contributions")[0], 0)
    return result / heads
