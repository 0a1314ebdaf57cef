"""The tables of a watched run: the strongest edges, and a line for each head."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.effects import Rest, spearman
from clearhead.digits import fixed, significant
from clearhead.errors import RuleError
from clearhead.spelling import cut, spelled
from clearhead.tables import Table, Tabular, aligned
from clearhead.view.head_summary import summarise_heads
from clearhead.watching.layer import Layer
from clearhead.words import Language, say


class Edge(NamedTuple):
    """One edge of one head: the estimated change of g·o when it is cut, and the measured change."""

    layer: str
    batch: int
    head: int
    query: int
    key: int
    value: float
    rest: Rest = "renormalise"  # where the edge's weight goes
    truth: float | None = None  # the measured change, once verified


class Head(NamedTuple):
    """One head's means over the batch's queries that are not padding; nan for an unknown number."""

    layer: str
    head: int
    sink: float  # weight on the first key that is not padding
    previous: float  # weight on the key before the query's position, over queries that have one
    diagonal: float  # weight on the key at the query's position
    distance: float  # Σ_j a_ij·|i - j|
    entropy: float  # in nats
    off: float = np.nan  # -Σ g·o: the change of the number when the head is switched off, to first order


EDGES = {"head": 4, "batch": 5, "query": 6, "key": 6, "value": 11}  # the columns of tables, and their widths
VERIFIED = {"head": 4, "query": 6, "key": 6, "value": 11, "truth": 11}
HEADS = {"head": 4, "sink": 6, "previous": 9, "diagonal": 8, "distance": 10, "entropy": 8}
_DIGITS = dict.fromkeys(("sink", "previous", "diagonal"), (3, 6)) | dict.fromkeys(("distance", "entropy"), (2, 8))
One = TypeVar("One", bound=Any)  # Edge or Head


class Lines(Tabular, list[One]):
    """A list of edges or heads that prints as a table of at most 80 columns, and is the same table in a notebook.

    about     the key of its heading in words/
    columns   the fields that are shown, and their widths; bars show the last one
    tokens    for edges: the texts of each edge's query and key, "" if unknown
    unseen    for heads: (path, class) of attention that was not seen
    """

    def __init__(
        self, lines: Iterable[One], about: str, columns: Mapping[str, int],
        tokens: Iterable[tuple[str, str]] = (), unseen: Iterable[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        super().__init__(lines)
        self.about, self.columns, self.tokens, self.unseen = about, dict(columns), tuple(tokens), tuple(unseen)

    @property
    def agreement(self) -> float | None:
        """Spearman's rank correlation of estimates and truth; None for fewer than three edges or all equal ones."""
        edges: list[Any] = [*self] if "truth" in self.columns else []
        return spearman([edge.value for edge in edges], [edge.truth for edge in edges])

    def __str__(self) -> str:
        (_, names, rows, _, notes), *_ = self._tables("en")
        width = min(max((len(row[0]) for row in rows), default=5), 24)  # of a layer's name only the end may be there
        widths = [width, *(-wide for wide in self.columns.values())]
        lines = [aligned(widths, names, " ")]
        for (name, *cells), words in zip(rows, self.tokens or [("", "")] * len(self), strict=True):
            line = aligned(widths, [name if len(name) <= width else "…" + name[1 - width :], *cells], " ")
            if any(words):
                query, key = _spelled(words)
                room = max(80 - len(line) - len("   ← "), 8)
                first = min(len(query), max(room // 2, room - len(key)))
                line += f"  {cut(query, first)} ← {cut(key, room - first)}".rstrip()
            lines.append(line)
        return "\n".join([*lines, *notes])

    def _tables(self, language: Language) -> list[Table]:
        named = ["estimate" if name == "value" and "truth" in self.columns else name for name in self.columns]
        columns = [say(language, f"column {name}") for name in ("layer", *named, *(["tokens"] if self.tokens else []))]
        rows = [[one.layer, *(_cell(name, getattr(one, name)) for name in self.columns)] for one in self]
        for row, pair in zip(rows, self.tokens, strict=False):
            row.append(" ← ".join(_spelled(pair)) if any(pair) else "")
        *_, last = self.columns
        bars = [] if last in _DIGITS else [-getattr(one, last) for one in self]
        notes = [say(language, "not seen", path=path, kind=kind) for path, kind in self.unseen]
        notes += [] if self.agreement is None else [say(language, "verified rank", agreement=self.agreement)]
        return [Table(say(language, self.about), columns, rows, bars, notes)]


def _cell(name: str, value: Any) -> str:
    """Format a table's cell."""
    if name in _DIGITS:
        return "-" if np.isnan(value) else fixed(value, *_DIGITS[name])
    return significant(value, 4) if isinstance(value, float) else str(value)


def _spelled(pair: tuple[str, str]) -> tuple[str, str]:
    query, key = (spelled(text) if text else "" for text in pair)  # unknown
    return query, key


def heads_of(layer: Layer) -> list[Head]:
    """A line for each head of a layer."""
    padding = None if layer.padding is None else as_host_array(layer.padding, "padding")[0]
    count, means = layer.q.shape[1], summarise_heads(layer.matrix(), layer.observation, padding, cross=layer.cross)
    if layer.other_keys:  # an encoder's keys have no distance
        means["distance"] = [np.nan] * count
    off = [np.nan] * count
    with suppress(RuleError):  # there are no causes, or no backward pass has run
        rows: Any = as_host_array(layer.matrix().contributions(layer.v, layer.g).by_query(), "by_query")[0]
        off = (-rows.sum(axis=(0, 2), dtype=np.float64)).tolist()
    return [Head(layer.name, head, *each) for head, *each in zip(range(count), *means.values(), off, strict=True)]
