"""Sums up what each head attends to in five numbers: means over all queries that are not padding."""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.arrays import as_host_array, on_cpu, to_device_of
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.state import State, share
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation

HeadSummary = dict[str, list[float]]  # five statistics by name, a number for each head, nan where undefined:
# sink      weight on the first key that is not padding
# previous  weight on the key before the query's own, over queries that have one
# diagonal  weight on the query's own key
# distance  Σ_j a_ij·|i - j|
# entropy   in nats


def summarise_heads(
    matrix: AttentionMatrix, seen: Observation, padding: Array | None = None, *, cross: bool = False
) -> HeadSummary:
    """Average five statistics of each head over the queries of a batch that are not padding.

    matrix     an AttentionMatrix (batch, heads, queries, keys)
    seen       an Observation with at least the log-sum-exp
    padding    (batch, queries), True at padding; None: there is none
    cross      queries and keys are different texts: previous, diagonal and distance are nan
    O(queries) where distance and entropy were observed, else O(queries·keys·d_k) for every head.
    """
    batch, heads, queries = as_host_array(seen.largest, "logsumexp")[0].shape
    real = np.ones((batch, queries), bool) if padding is None else ~padding
    distance, entropy = seen.distance, seen.entropy
    diagonal = None if cross or seen.diagonal is None else as_host_array(seen.diagonal, "diagonal")[0]
    if distance is None or entropy is None:
        more = matrix.observe(distance=True, entropy=True)
        distance, entropy = more.distance, more.entropy
    sink = np.stack([as_host_array(matrix[b, :, :, first_key(matrix, b)], "weights")[0] for b in range(batch)])
    previous = None
    if not cross:
        diagonal = _near(matrix, 0) if diagonal is None else diagonal
        previous = _near(matrix, 1) - diagonal
    return _means(heads, real, sink, previous, diagonal, None if cross else distance, entropy)


def even_heads(matrix: AttentionMatrix, padding: Array | None = None, *, cross: bool = False) -> HeadSummary:
    """Average the same five statistics for a head with equal weights on all keys that the matrix's first head may see.

    A head's difference from these is its preference: in a short causal text every head is near its own key and the
    first one. One number each. O(queries·keys·d_k).
    """
    problem = matrix.call.problem
    batch, queries, keys = problem.batch, problem.queries, problem.keys
    real = np.ones((batch, queries), bool) if padding is None else ~padding
    even = _even(matrix)
    seen, alone = even.observe(distance=True, entropy=True), []
    for b in range(batch):
        first = range(keys)[first_key(matrix, b) :][:1]
        alone.append(_part(even.with_call(even.call.take(keys=first)), even)[b])
    sink = np.stack(alone) if batch else np.zeros((0, 1, queries))
    diagonal = previous = None
    if not cross:
        diagonal = _near(even, 0)
        previous = _near(even, 1) - diagonal
    return _means(1, real, sink, previous, diagonal, None if cross else seen.distance, seen.entropy)


def _near(matrix: AttentionMatrix, left: int) -> Array:
    """Return each query's weight on its own key and the `left` keys before it, (batch, heads, queries)."""
    call = matrix.call
    problem = call.problem
    left, before = min(left, problem.keys), problem.window[0]
    window = (left if before is None else min(left, before), 0)
    near = Call(replace(problem, window=window, sinks=None), call.q, call.k)
    return _part(matrix.with_call(near), matrix)


def _part(inside: AttentionMatrix, matrix: AttentionMatrix) -> Array:
    """Return each query's weight on some of the keys, (batch, heads, queries): exp(L_part - L)."""
    within, whole = (State(*(on_cpu(x).astype(np.float64) for x in part.state)) for part in (inside, matrix))
    return np.asarray(share(np, within, whole))


def _even(matrix: AttentionMatrix) -> AttentionMatrix:
    """Make a head that sees what the first head sees, and whose scores are all 0."""
    first = matrix.call.problem.take(heads=range(1))
    unused: dict[str, Any] = {"softcap": None, "alibi_slopes": None, "sinks": None}
    for name in ("bias", "span_table"):
        value = getattr(first, name)
        if value is not None:
            forbids = np.isneginf(on_cpu(value))
            plain = np.where(forbids, np.array(-np.inf, value.dtype), np.array(0, value.dtype))
            unused[name] = to_device_of(plain, value)
    zeros = (np.zeros((first.batch, 1, size, first.d_k), first.dtype) for size in (first.queries, first.keys))
    q, k = (to_device_of(x, matrix.call.q) for x in zeros)
    return matrix.with_call(Call(replace(first, **unused), q, k))


def first_key(matrix: AttentionMatrix, batch: int) -> int:
    """Return the index of a batch item's first key that is not padding."""
    mask = matrix.call.problem.mask
    return 0 if mask is None else int(on_cpu(mask[batch, 0]).any(0).argmax())


def _means(
    heads: int, real: Array, sink: Any, previous: Any, diagonal: Any, distance: Any, entropy: Any
) -> HeadSummary:
    """Average over real queries; `previous` over those that have a key before their own."""
    behind = real & (np.cumsum(real, -1) > 1)
    each = {"sink": sink, "previous": previous, "diagonal": diagonal, "distance": distance, "entropy": entropy}
    return {name: _mean(values, behind if name == "previous" else real, heads) for name, values in each.items()}


def _mean(values: Any, which: Array, heads: int) -> list[float]:
    """Average over the queries selected by `which`, for each head."""
    if values is None or not which.any():
        return [np.nan] * heads
    numbers = as_host_array(values, "values")[0].astype(np.float64)
    return [float(x) for x in np.where(which[:, None], numbers, 0.0).sum((0, 2)) / which.sum()]
