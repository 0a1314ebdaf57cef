"""What each head attends to, in five numbers: means over all queries that are not padding."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array, on_cpu
from clearhead.core.axes import Array
from clearhead.core.rule_values import whole_number
from clearhead.core.statistics import Answers
from clearhead.view.protocols import Weights


class HeadSummary(NamedTuple):
    """Five statistics with one number per head, nan where undefined."""

    sink: list[float]  # weight on the first key that is not padding
    previous: list[float]  # weight on the key before the query's own, over queries that have one
    own: list[float]  # weight on the query's own key
    distance: list[float]  # Σ_j a_ij·|i - j|
    entropy: list[float]  # in nats


def summarise_heads(
    matrix: Weights | None, seen: Answers, padding: Array | None = None, *, cross: bool = False
) -> HeadSummary:
    """Means over the queries of a batch that are not padding.

    matrix     an AttentionMatrix (batch, heads, queries, keys); None: statistics that `seen` lacks are nan
    seen       an Observation with at least the log-sum-exp
    padding    (batch, queries), True at padding; None: there is none
    cross      queries and keys are different texts: previous, own and distance are nan
    O(queries) where distance and entropy were observed, else O(queries·keys·d_k) for every head.
    """
    batch, heads, queries = as_host_array(seen.logsumexp, "logsumexp")[0].shape
    real = np.ones((batch, queries), bool) if padding is None else ~padding
    distance, entropy = seen.distance, seen.entropy
    own = None if cross or seen.own is None else as_host_array(seen.own, "own")[0]
    sink = previous = None
    if matrix is not None:
        if distance is None or entropy is None:
            more = matrix.observe(distance=True, entropy=True)
            distance, entropy = more.distance, more.entropy
        sink = np.stack([as_host_array(matrix[b, :, :, first_key(matrix, b)], "weights")[0] for b in range(batch)])
        if not cross:
            own = near(matrix, 0) if own is None else own
            previous = near(matrix, 1) - own
    behind = real & (np.cumsum(real, -1) > 1)
    means = (
        _mean(values, which, heads)
        for values, which in (
            (sink, real), (previous, behind), (own, real), (None if cross else distance, real), (entropy, real)
        )
    )  # fmt: skip
    return HeadSummary(*means)


def near(matrix: Weights, left: int) -> Array:
    """The mass each query gives its own key and the `left` before it, (batch, heads, queries): exp(L_window - L)."""
    factors = matrix.factors
    problem = factors.problem
    left, before = min(whole_number("left", left, 0), problem.keys), problem.window[0]
    window = (left if before is None else min(left, before), 0)
    inside = factors.changed(replace(problem, window=window, sinks=None), factors.q, factors.k)
    with np.errstate(invalid="ignore"):
        within, whole = (on_cpu(part.logsumexp).astype(np.float64) for part in (inside, factors))
        return np.where(np.isneginf(within), 0.0, np.exp(within - whole))


def first_key(matrix: Weights, batch: int) -> int:
    """The index of a batch item's first key that is not padding."""
    mask = matrix.factors.problem.mask
    return 0 if mask is None else int(on_cpu(mask[batch, 0]).any(0).argmax())


def _mean(values: Any, which: Array, heads: int) -> list[float]:
    """The mean over the queries selected by `which`, one for each head."""
    if values is None or not which.any():
        return [np.nan] * heads
    found = as_host_array(values, "values")[0].astype(np.float64)
    return [float(x) for x in np.where(which[:, None], found, 0.0).sum((0, 2)) / which.sum()]
