"""Attention rollout: carries one row back through all layers in O(n) memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.arrays import as_host_array, to_device_of
from clearhead.core.rule_values import read_place
from clearhead.errors import DtypeError, ShapeError, shown
from clearhead.ops.matrix import AttentionMatrix


def rollout(matrices: Sequence[AttentionMatrix], *, query: int) -> Any:
    """Follow one token's attention from the last layer back to the first.

    r ← (r + mean over heads of Aᵀ·r)/2, from the last matrix to the first, starting at the query's unit vector: one row
    of Π_l (I + mean_h A_l)/2, without multiplying matrices. The identity stands for the residual connection.

    matrices   one per layer, first layer first, each (…, heads, n, n) over the same tokens; for a watched run
               [seen.matrix(layer) for layer in seen.layers]
    query      the token to follow, negative counts from the end

    Returns (…, n), in the matrices' dtype and kind: each input token's share in the followed token; it sums to 1 if
    every row of every matrix does (a row without visible keys, or with a sink, does not).
    Raises DtypeError unless `matrices` is a list or tuple of AttentionMatrix; ShapeError when it is empty or layers
    differ in tokens; SelectionError for a query that is not one of the tokens.
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
        passed = as_host_array(matrix.T @ to_device_of(shared, matrix.call.q), "product")[0].reshape(
            *flow.shape[:-3], -1, n, 1
        )
        flow = (flow + passed.mean(axis=-3, keepdims=True)) / 2
    first = matrices[0].call
    return first.restore(to_device_of(flow[..., 0, :, 0].copy(), first.q))
