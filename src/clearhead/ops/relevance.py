"""Relevance of every token for one: positive contributions carried back through all layers, in O(n) memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.rule_values import read_place
from clearhead.errors import ShapeError

if TYPE_CHECKING:
    from clearhead.ops.causes import CauseMatrix

_TILE = 1 << 19  # elements that are computed at once


def relevance(contributions: Sequence["CauseMatrix"], *, query: int) -> Any:
    """One row of Π_l (I + mean over heads of max(C_l, 0)), from the last layer to the first: r ← r + r·Ā_l.

    contributions   one per layer, first layer first, each (batch, heads, n, n) over the same tokens
    query           the token to start at, negative counts from the end

    Returns (batch, n) in the contributions' dtype and kind. Rows of C_l for which r is 0 are not computed.
    Raises ShapeError where there is no layer or the layers differ in tokens, SelectionError for a query outside them.
    O(layers·heads·n²·(d_k + d_v)) time, O(heads·n) memory.
    Source: Chefer, Gur & Wolf 2021 (arXiv 2103.15679), equations 5 and 6.
    """
    if not contributions:
        raise ShapeError("relevance needs at least one layer of self-attention.")
    batch, heads, _, n = contributions[0].shape
    for layer, matrix in enumerate(contributions):
        if tuple(matrix.shape[-2:]) != (n, n):
            raise ShapeError(
                f"layer {layer} is {matrix!r}: relevance needs the same tokens as queries and keys in every layer.",
                f"the first layer has {n} keys.",
            )
    flow = np.zeros((batch, n))
    flow[:, read_place("query", query, n)] = 1
    height = max(1, _TILE // max(1, heads * n))
    restore = as_host_array(contributions[0][:0, :0, :0, :0], "contributions")[1]
    for matrix in reversed(contributions):
        passed = flow.copy()
        for item in range(batch):
            for start in range(0, n, height):
                passed[item] += _passed(matrix, item, flow[item], start, min(n, start + height))
        flow = passed
    return restore(flow.astype(contributions[0].dtype))


def _passed(matrix: "CauseMatrix", item: int, flow: Any, start: int, stop: int) -> Any:
    """Σ over these rows of r_i·Ā_ij, (n,); rows before the first and behind the last with r_i ≠ 0 are left out."""
    rows = np.flatnonzero(flow[start:stop])
    if not len(rows):
        return 0.0
    start, stop = start + int(rows[0]), start + int(rows[-1]) + 1
    tile = as_host_array(matrix[item, :, start:stop], "contributions")[0]
    return np.einsum("i,hij->j", flow[start:stop], np.maximum(tile, 0)) / tile.shape[0]
