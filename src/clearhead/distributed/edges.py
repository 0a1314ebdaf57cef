"""Questions about edges: answered wherever a piece of queries meets a piece of keys, and merged over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clearhead.core.axes import Array
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.partials import Meeting
from clearhead.distributed.shards import Shards

Find = Callable[[Meeting, Sequence[Array]], tuple[list[Array], list[Array]]]


def _add(totals: Sequence[Array], here: slice, parts: Sequence[Array]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total[:, :, here] += part


def _nothing(_count: int) -> list[Array]:
    return []


@dataclass(frozen=True, eq=False, slots=True)
class EdgeQuestion:
    """One such question, which `ring.meet` and `merge.meet` answer in one pass.

    rows        what it needs of this rank's queries: arrays (batch, heads or 1, own queries, …)
    find        find(meeting, rows) answers for one piece of queries and one of keys: arrays per query, arrays per key
    per_query   per_query(n): the answers of n queries that see no key, (batch, heads, n, …)
    merged      merges answers per query over disjoint keys
    per_key     per_key(n): what the answers of n keys are accumulated in, (batch, heads, n, …)
    add         add(totals, here, parts) accumulates answers per key into the keys `here`
    """

    rows: list[Array]
    find: Find
    per_query: Callable[[int], list[Array]] = _nothing
    merged: Callable[[list[Array], list[Array]], list[Array]] = lambda a, _: a
    per_key: Callable[[int], list[Array]] = _nothing
    add: Callable[[Sequence[Array], slice, Sequence[Array]], None] = _add

    def meet(self, one: Meeting, rows: Sequence[Array], found: list[Array], totals: list[Array]) -> None:
        """Ask about one meeting, and merge its answers into those per query and per key."""
        per_query, per_key = self.find(one, [x[:, :, one.at] for x in rows])
        self.merge(found, one.at, per_query)
        self.add(totals, one.here, per_key)

    def merge(self, found: list[Array], at: slice, part: list[Array]) -> None:
        """Merge answers per query into those of the queries `at`."""
        before = [x[:, :, at] for x in found]
        for into, x in zip(before, self.merged(before, part), strict=True):
            into[...] = x


def of_columns(shards: Shards, ask: ColumnSums) -> EdgeQuestion:
    """A question about keys, whose answers do not need values."""
    lead = shards.whole.batch, shards.whole.heads

    def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        part = ask.find(one.problem, *one.arrays[:2], rows)
        return [], [part[name] for name in ask.names]

    return EdgeQuestion(ask.rows, find, per_key=lambda n: ask.nothing(*lead, n), add=ask.add_arrays)
