"""What keys receive from queries: sums over all queries that may see them, given the queries' final log-sum-exp."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clearhead.axes import Array
from clearhead.engines.base import Engine
from clearhead.observations import Wanted
from clearhead.problem import Problem

Find = Callable[[Problem, Array, Array, Sequence[Array]], Mapping[str, Array]]


@dataclass(frozen=True, eq=False, slots=True)
class PerKey:
    """A question about keys: `rows` are this rank's queries' arrays that it needs, (batch, heads, queries, …).

    `find(problem, q, k, rows)` answers for some queries and keys: each name an array (batch, heads, keys, *tail).
    """

    rows: list[Array]
    names: Sequence[str]
    tail: tuple[int, ...]
    find: Find

    def nothing(self, batch: int, heads: int, keys: int) -> list[Array]:
        """Sums of no queries, by name; in float64, so that no order of ranks costs accuracy."""
        return [np.zeros((batch, heads, keys, *self.tail)) for _ in self.names]

    def add(self, totals: Sequence[Array], here: slice, part: Mapping[str, Array]) -> None:
        """Add an answer about some keys; of peaks the largest stays."""
        for total, name in zip(totals, self.names, strict=True):
            own = total[:, :, here]
            own[...] = np.maximum(own, part[name]) if name == "peak" else own + part[name]

    def add_listed(self, totals: Sequence[Array], here: slice, parts: Sequence[Array]) -> None:
        """The same for answers in the order of the names."""
        self.add(totals, here, dict(zip(self.names, parts, strict=True)))


def statistics(engine: Engine, logsumexp: Array, want: Wanted) -> PerKey:
    """The column statistics received and peak, whichever is wanted."""
    names = [name for name in ("received", "peak") if getattr(want, name)]
    asked = Wanted(received=want.received, peak=want.peak)
    return PerKey([logsumexp], names, (), lambda problem, q, k, rows: engine.columns(problem, q, k, rows[0], asked))


def product(engine: Engine, logsumexp: Array, g: Array) -> PerKey:
    """Aᵀ·g for g (batch, heads, own queries, d)."""

    def find(problem: Problem, q: Array, k: Array, rows: Sequence[Array]) -> Mapping[str, Array]:
        return {"product": engine.transposed(problem, q, k, *rows)}

    return PerKey([logsumexp, g], ("product",), (g.shape[3],), find)
