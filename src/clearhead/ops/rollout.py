"""One row carried back through all layers, in O(n) memory: attention rollout, and relevance by what edges brought."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from clearhead.core.arrays import as_host_array, to_device_of
from clearhead.core.axes import Array, blocks
from clearhead.core.rule_values import read_number, read_place
from clearhead.errors import DtypeError, RuleError, ShapeError, shown
from clearhead.ops.causes import EffectMatrix
from clearhead.ops.matrix import AttentionMatrix

_TILE, _LEAST = 1 << 21, 16  # elements that are computed at once, in at least so many rows


def rollout(matrices: Sequence[AttentionMatrix], *, query: int, residual: float = 0.5) -> Any:
    """Follow one token's attention from the last layer back to the first.

    r ← residual·r + (1 - residual)·mean over heads of Aᵀ·r, from the last matrix to the first, starting at the query's
    unit vector: one row of Π_l (residual·I + (1 - residual)·mean_h A_l), without any product of matrices.

    matrices   one per layer, first layer first, each (…, heads, n, n) over the same tokens
    query      the token to follow, negative counts from the end
    residual   the share that takes the residual connection past the attention, 0 to 1

    Returns (…, n), in the matrices' dtype and kind: each input token's share in the followed token; it sums to 1 if
    every row of every matrix does (a row without visible keys, or with a sink, does not).
    Raises DtypeError unless `matrices` is a list or tuple of AttentionMatrix; ShapeError when it is empty or the layers
    differ in tokens; SelectionError for a query outside them; RuleError for a residual outside 0 to 1.
    O(layers·heads·n²·d_k) time, O(n) memory.
    Source: Abnar & Zuidema 2020, section 3.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
    >>> ch.rollout([A], query=0)
    array([0.75, 0.25])
    """
    hint = "ch.rollout([A0, A1], query=-1)"
    if not isinstance(matrices, (list, tuple)) or not all(isinstance(one, AttentionMatrix) for one in matrices):
        raise DtypeError(f"matrices is {shown(matrices)}: expected a list of AttentionMatrix, one per layer.", hint)
    if not matrices:
        raise ShapeError("rollout needs at least one matrix.", hint)
    residual = read_number("residual", residual, 0.5)
    if not 0 <= residual <= 1:
        raise RuleError(f"residual is {residual}: expected a share between 0 and 1.")
    n = _tokens("rollout", matrices)
    query = read_place("query", query, n)
    flow = np.zeros((*matrices[0].shape[:-3], 1, n, 1), matrices[0].dtype)
    flow[..., query, 0] = 1
    for matrix in reversed(matrices):
        shared = flow if matrix.ndim > 2 else flow[0]
        passed = as_host_array(matrix.T @ to_device_of(shared, matrix.call.q), "product")[0].reshape(
            *flow.shape[:-3], -1, n, 1
        )
        flow = residual * flow + (1 - residual) * passed.mean(axis=-3, keepdims=True)
    first = matrices[0].call
    return first.restore(to_device_of(flow[..., 0, :, 0].copy(), first.q))


def relevance(contributions: Sequence[EffectMatrix], *, query: int) -> Any:
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
    batch, n = contributions[0].shape[0], _tokens("relevance", contributions)
    flow = np.zeros((batch, n))
    flow[:, read_place("query", query, n)] = 1
    restore = as_host_array(contributions[0][:0, :0, :0, :0], "contributions")[1]
    for matrix in reversed(contributions):
        flow = flow + np.stack([_passed(matrix, item, row) for item, row in enumerate(flow)])
    return restore(flow.astype(contributions[0].dtype))


def _passed(matrix: EffectMatrix, item: int, flow: Array) -> Array:
    """r·Ā, (n,): Σ_i r_i·max(c_ij, 0), mean over heads; rows outside the first and last r_i ≠ 0 are skipped."""
    rows, (heads, n) = np.flatnonzero(flow), (matrix.shape[1], len(flow))
    first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
    result = np.zeros(n)
    for head, part in product(range(heads), blocks(last + 1 - first, max(_LEAST, _TILE // n))):
        place = slice(first + part.start, first + part.stop)
        result += flow[place] @ np.maximum(as_host_array(matrix[item, head, place], "contributions")[0], 0)
    return result / heads


def _tokens(what: str, layers: Sequence[AttentionMatrix | EffectMatrix]) -> int:
    """How many tokens all layers have. Raises ShapeError where these differ, or are not both queries and keys."""
    n = layers[0].shape[-1]
    for layer, matrix in enumerate(layers):
        if matrix.shape[-2:] != (n, n) or matrix.shape[:-3] != layers[0].shape[:-3]:
            raise ShapeError(
                f"layer {layer} is {matrix!r}: {what} needs the same tokens as queries and keys in every layer.",
                f"the first layer has {n} keys.",
            )
    return n
