"""What heads look at, in five numbers each: means over the queries that count."""

from typing import Any, NamedTuple

import numpy as np

from clearhead.arrays import on_cpu, read
from clearhead.axes import Array
from clearhead.observations import Observation


class Glance(NamedTuple):
    """One number for each head, nan where it cannot be said."""

    sink: list[float]  # weight on the first key that is not padding
    previous: list[float]  # weight on the key before the query's own; queries that have one
    own: list[float]  # weight on the query's own key
    distance: list[float]  # Σ_j a_ij·|i - j|
    entropy: list[float]  # in nats


def glance(matrix: Any, seen: Observation, padding: Array | None = None, *, cross: bool = False) -> Glance:
    """Means over a batch's queries that are not padding, (batch, queries) True where they are.

    matrix     an AttentionMatrix (batch, heads, queries, keys); None: only what was observed is said
    cross      queries and keys are different texts: nothing is near
    O(queries) where distance and entropy were observed, else O(queries·keys).
    """
    batch, heads, queries = read(seen.logsumexp, "logsumexp")[0].shape
    real = np.ones((batch, queries), bool) if padding is None else ~padding
    distance, entropy = seen.distance, seen.entropy
    sink = previous = own = None
    if matrix is not None:
        if distance is None or entropy is None:
            more = matrix.observe(distance=True, entropy=True)
            distance, entropy = more.distance, more.entropy
        sink = np.stack([read(matrix[b, :, :, first_key(matrix, b)], "weights")[0] for b in range(batch)])
        if not cross:
            near, own = (matrix.near(left) for left in (1, 0))
            previous = near - own
    behind = real & (np.cumsum(real, -1) > 1)
    means = (
        _mean(values, which, heads)
        for values, which in (
            (sink, real), (previous, behind), (own, real), (None if cross else distance, real), (entropy, real)
        )
    )  # fmt: skip
    return Glance(*means)


def first_key(matrix: Any, batch: int) -> int:
    """The first key that is not padding."""
    mask = matrix._problem.mask
    return 0 if mask is None else int(on_cpu(mask[batch, 0]).any(0).argmax())


def _mean(values: Any, which: Array, heads: int) -> list[float]:
    """The mean over the batch's queries that count, one for each head."""
    if values is None or not which.any():
        return [np.nan] * heads
    found = read(values, "values")[0].astype(np.float64)
    return [float(x) for x in np.where(which[:, None], found, 0.0).sum((0, 2)) / which.sum()]
