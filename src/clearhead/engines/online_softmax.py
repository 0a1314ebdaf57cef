"""Online softmax with row statistics, for one block of queries (Milakov & Gimelshein 2018)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.merging import entropy_of_part
from clearhead.core.statistics import Wanted
from clearhead.engines.products import pieces, product


@dataclass(frozen=True, slots=True)
class Values:
    """A block of value rows, split so that NaN and infinity reach only the queries that may see their key."""

    finite: Array  # the pieces of (keys, d_v), 0 where the value is not finite
    nonfinite: Array | None  # (keys, d_v), 0 where the value is finite; None if all are finite
    d_v: int

    @staticmethod
    def of(block: Array) -> "Values":
        finite = np.isfinite(block)
        if finite.all():
            return Values(pieces(block), None, block.shape[-1])
        return Values(pieces(np.where(finite, block, 0.0)), np.where(finite, 0.0, block), block.shape[-1])


def mix(weights: Array, visible: Array | None, values: Values) -> Array:
    """weights·values. A value that is not finite is added only where its key is visible, since 0·NaN is NaN."""
    total = product(weights, values.finite, values.d_v)
    if values.nonfinite is not None and visible is not None:
        for key in np.flatnonzero((values.nonfinite != 0).any(axis=-1)):
            touched = visible[:, key, None] & (values.nonfinite[key] != 0)
            total += np.where(touched, weights[:, key, None] * values.nonfinite[key], 0.0)
    return total


class OnlineSoftmax:
    """The state of a block of queries: maximum m, Σ exp(s - m), and every weighted sum, rescaled when m rises."""

    def __init__(self, queries: int, want: Wanted, d_v: int | None) -> None:
        self.want = want
        self.maximum = np.full(queries, -np.inf)
        self.total: Array = np.zeros(queries)
        self.output = None if d_v is None or not want.output else np.zeros((queries, d_v))
        self.centred = np.zeros(queries) if want.entropy else None  # Σ exp(s - m)·(s - m)
        self.far = np.zeros(queries) if want.distance else None
        self.diagonal = np.full(queries, -np.inf) if want.diagonal else None  # logit of the query's own position
        self.top_logits = np.full((queries, want.top or 0), -np.inf)
        self.top_indices = np.full((queries, want.top or 0), -1, np.int64)

    def add(self, logits: Array, first_key: int, values: Values | None, far: Array | None) -> None:
        """Add one block of logits (queries, keys), which is overwritten; `far` is |query position - key position|."""
        if self.want.top is not None:
            self._add_top(logits, first_key)
        if self.diagonal is not None and far is not None:
            self.diagonal = np.maximum(self.diagonal, np.where(far == 0, logits, -np.inf).max(axis=-1))
        visible = None if values is None or values.nonfinite is None else ~np.isneginf(logits)
        maximum = np.maximum(self.maximum, logits.max(axis=-1))
        safe = np.where(np.isneginf(maximum), 0.0, maximum)  # no visible key yet: exp(-inf - 0) is 0
        logits -= safe[:, None]
        weights = np.exp(logits)
        shrink = np.exp(self.maximum - safe)
        if self.centred is not None:
            drop = np.where(np.isneginf(self.maximum), 0.0, self.maximum - safe)
            here = np.sum(weights * np.maximum(logits, -1e300), axis=-1)  # 0·(-inf) is NaN, 0·(-1e300) is 0
            self.centred = shrink * (self.centred + self.total * drop) + here
        self.total = self.total * shrink + weights.sum(axis=-1)
        if self.far is not None and far is not None:
            self.far = self.far * shrink + np.sum(weights * far, axis=-1)
        if self.output is not None and values is not None:
            self.output = self.output * shrink[:, None] + mix(weights, visible, values)
        self.maximum = maximum

    def finish(self, sink: float | None, dtype: np.dtype[Any]) -> dict[str, Array]:
        """The results by name, with the sink in the denominator; a row without visible keys is all zeros."""
        empty = self.total == 0
        total = np.where(empty, 1.0, self.total)
        largest = self.maximum if sink is None else np.where(empty, -np.inf, np.maximum(self.maximum, sink))
        largest = largest.astype(dtype).astype(np.float64)  # as it is answered
        safe = np.where(np.isneginf(largest), 0.0, largest)
        of_keys = np.where(empty, 0.0, self.maximum - safe + np.log(total))  # relative to the largest logit
        log_sum = of_keys if sink is None else np.where(empty, 0.0, np.logaddexp(of_keys, sink - safe))
        share = np.where(empty, 0.0, np.exp(of_keys - log_sum))

        def weights(logits: Array) -> Array:
            return np.exp((logits - safe[:, None]) - log_sum[:, None])

        answers = {
            "largest": largest,
            "log_sum": log_sum,
            "max_logit": self.maximum,
            "top_weights": weights(self.top_logits),
            "top_indices": self.top_indices,
        }
        if self.output is not None:
            answers["output"] = self.output * (share / total)[:, None]
        if self.centred is not None:
            entropy = entropy_of_part(share, np.log(total) - self.centred / total, log_sum - of_keys)
            answers["entropy"] = np.where(share == 0, 0.0, entropy)
        if self.far is not None:
            answers["distance"] = self.far * share / total
        if self.diagonal is not None:
            answers["diagonal"] = np.where(np.isneginf(self.diagonal), 0.0, weights(self.diagonal[:, None])[:, 0])
        return answers

    def _add_top(self, logits: Array, first_key: int) -> None:
        """Insert the logits that exceed the smallest in the list; of equal logits the earlier key comes first."""
        left = logits.copy()
        while True:
            best = left.argmax(axis=-1)
            logits_of_best = np.take_along_axis(left, best[:, None], axis=-1)[:, 0]
            rows = np.flatnonzero(logits_of_best > self.top_logits[:, -1])
            if not len(rows):
                return
            logit = np.concatenate([self.top_logits[rows], logits_of_best[rows, None]], axis=-1)
            index = np.concatenate([self.top_indices[rows], best[rows, None] + first_key], axis=-1)
            order = np.argsort(-logit, axis=-1, kind="stable")[:, :-1]
            self.top_logits[rows] = np.take_along_axis(logit, order, axis=-1)
            self.top_indices[rows] = np.take_along_axis(index, order, axis=-1)
            left[rows, best[rows]] = -np.inf
