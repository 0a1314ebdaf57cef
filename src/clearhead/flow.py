"""Attention rollout of one token: where a token's content comes from, through all layers, in O(n) memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.arrays import beside, read
from clearhead.errors import DtypeError, RuleError, ShapeError, shown
from clearhead.matrix import AttentionMatrix
from clearhead.values import read_number, read_place


def rollout(matrices: Sequence[AttentionMatrix], *, query: int, residual: float = 0.5) -> Any:
    """Follow one token's attention from the last layer back to the first.

    r ← residual·r + (1 - residual)·mean over heads of Aᵀ·r, from the last matrix to the first, starting at the query's
    unit vector: one row of Π_l (residual·I + (1 - residual)·mean_h A_l), without any product of matrices.

    matrices   one per layer, first layer first, each (…, heads, n, n) over the same tokens
    query      the token to follow, negative counts from the end
    residual   the share that passes by on the residual connection, 0 to 1

    Returns (…, n): how much of each input token arrives; it sums to 1 where all rows do.
    Raises ShapeError, RuleError or SelectionError. O(layers·heads·n²·d_k) time, O(n) memory.
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
    n = matrices[0].shape[-1]
    for layer, matrix in enumerate(matrices):
        if matrix.shape[-2:] != (n, n) or matrix.shape[:-3] != matrices[0].shape[:-3]:
            raise ShapeError(
                f"layer {layer} is {matrix!r}: rollout needs the same tokens as queries and keys in every layer.",
                f"the first layer has {n} keys.",
            )
    query = read_place("query", query, n)
    flow = np.zeros((*matrices[0].shape[:-3], 1, n, 1), matrices[0].dtype)
    flow[..., query, 0] = 1
    for matrix in reversed(matrices):
        shared = flow if matrix.ndim > 2 else flow[0]
        passed = read(matrix.T @ beside(shared, matrix._q), "product")[0].reshape(*flow.shape[:-3], -1, n, 1)
        flow = residual * flow + (1 - residual) * passed.mean(axis=-3, keepdims=True)
    return matrices[0]._restore_kind(beside(flow[..., 0, :, 0].copy(), matrices[0]._q))
