"""Questions about keys: sums or maxima over all queries that may attend to them, given the final log-sum-exp."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.statistics import PER_KEY, STATISTICS, Wanted, listed
from clearhead.engines.base import Engine

Find = Callable[[Problem, Array, Array, Sequence[Array]], Mapping[str, Array]]


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSums:
    """One such question, which every method answers in `columns`.

    rows     what it needs of this rank's queries: arrays (batch, heads, own queries, …)
    names    its answers
    tail     their axes after (batch, heads, keys)
    find     find(problem, q, k, rows) answers for some queries and keys, by name: (batch, heads, keys, *tail)
    """

    rows: list[Array]
    names: Sequence[str]
    tail: tuple[int, ...]
    find: Find

    def nothing(self, batch: int, heads: int, keys: int) -> list[Array]:
        """Zeros to accumulate into, one array for each name; in float64, so that adding rank by rank keeps accuracy."""
        return [np.zeros((batch, heads, keys, *self.tail)) for _ in self.names]

    def add(self, totals: Sequence[Array], here: slice, part: Mapping[str, Array]) -> None:
        """Accumulate an answer for the keys `here`: add it, or take the larger where the statistic is a maximum."""
        for total, name in zip(totals, self.names, strict=True):
            own = total[:, :, here]
            larger = name in STATISTICS and STATISTICS[name].over_queries == "larger"
            own[...] = np.maximum(own, part[name]) if larger else own + part[name]

    def add_arrays(self, totals: Sequence[Array], here: slice, parts: Sequence[Array]) -> None:
        """As `add`, for answers that come as a list in the order of `names`."""
        self.add(totals, here, dict(zip(self.names, parts, strict=True)))


def statistics(engine: Engine, logsumexp: Array, want: Wanted) -> ColumnSums:
    """The question for the statistics per key in `want`; logsumexp is (batch, heads, own queries)."""
    names = [name for name in listed(axes=PER_KEY) if name in want.names()]
    asked = want.only(names)
    return ColumnSums([logsumexp], names, (), lambda problem, q, k, rows: engine.columns(problem, q, k, rows[0], asked))


def product(engine: Engine, logsumexp: Array, g: Array) -> ColumnSums:
    """The question for Aᵀ·g, with g (batch, heads, own queries, d) and logsumexp (batch, heads, own queries)."""

    def find(problem: Problem, q: Array, k: Array, rows: Sequence[Array]) -> Mapping[str, Array]:
        return {"product": engine.transposed(problem, q, k, *rows)}

    return ColumnSums([logsumexp, g], ("product",), (g.shape[3],), find)
