"""The tables of a watched run: the edges and heads that did most, a line for each head, and what a cell shows."""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.effects import Rest, spearman
from clearhead.digits import fixed, significant
from clearhead.errors import RuleError
from clearhead.spelling import cut, spelled
from clearhead.tables import QUICK, Table, Tabular, aligned, html
from clearhead.view.head_summary import summarise_heads
from clearhead.watching.layer import Layer
from clearhead.words import Language, of_locale, say


class Edge(NamedTuple):
    """One edge of one head, and what cutting it changes g·o by."""

    layer: str
    batch: int
    head: int  # its number in the model
    query: int
    key: int
    value: float
    rest: Rest = "renormalise"  # where the edge's weight goes


One = TypeVar("One", bound=Any)  # such as an Edge


class Lines(Tabular, list[One]):
    """A list that prints as a table of at most 80 columns, and is the same table in a notebook."""

    about, bars = "", ""  # the key of its sentence, and what the bars show
    columns: ClassVar[dict[str, int]] = {}  # and their widths
    tokens: tuple[tuple[str, str], ...] = ()  # the texts of each line's query and key, where they are known

    def _cells(self, one: One) -> list[str]:
        """A line's numbers as they are printed."""
        return [significant(x, 4) if isinstance(x, float) else str(x) for x in map(partial(getattr, one), self.columns)]

    def _notes(self, language: Language) -> list[str]:
        """Sentences below the table."""
        del language
        return []

    def __str__(self) -> str:
        _, names, rows, _, notes = table_of(self, "en")
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
        return [table_of(self, language)]


class Edges(Lines[One]):
    """Edges by the magnitude of their effect, largest first; `str` makes a table, with the tokens where known."""

    about, bars = "edges table", "value"
    columns: ClassVar = {"head": 4, "batch": 5, "query": 6, "key": 6, "value": 11}

    def __init__(self, edges: Iterable[One] = (), tokens: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(edges)
        self.tokens = tuple(tokens)


class VerifiedEdge(NamedTuple):
    """One edge of one head, what cutting it was estimated to change, and what it does."""

    layer: str
    head: int
    query: int
    key: int
    estimate: float
    truth: float


class Verified(Edges[VerifiedEdge]):
    """Edges with estimate and truth; `str` makes a table, with the tokens where known, and their rank correlation."""

    about, bars = "verified table", "truth"
    columns: ClassVar = {"head": 4, "query": 6, "key": 6, "estimate": 11, "truth": 11}

    @property
    def agreement(self) -> float | None:
        """Spearman's rank correlation of estimates and truth; None for fewer than three edges or all equal ones."""
        return spearman([edge.estimate for edge in self], [edge.truth for edge in self])

    def _notes(self, language: Language) -> list[str]:
        return [] if self.agreement is None else [say(language, "verified rank", agreement=self.agreement)]


class HeadCause(NamedTuple):
    """One head's effect, added over queries and batch items."""

    layer: str
    head: int  # its number in the model
    contribution: float  # Σ g·o
    off: float  # -Σ g·o: what switching the head off changes the number by, to first order


class HeadEffects(Lines[HeadCause]):
    """Every head's effect, in the order in which the layers ran; `str` makes a table."""

    about, bars = "heads table", "off"
    columns: ClassVar = {"head": 4, "contribution": 12, "off": 13}


def table_of(lines: Lines[Any], language: Language) -> Table:
    """The same rows for a notebook."""
    ends = ["tokens"] if lines.tokens else []
    columns = [say(language, f"column {name}") for name in ("layer", *lines.columns, *ends)]
    rows = [[one.layer, *lines._cells(one)] for one in lines]
    for row, pair in zip(rows, lines.tokens, strict=False):
        row.append(" ← ".join(_spelled(pair)) if any(pair) else "")
    bars = [-getattr(one, lines.bars) for one in lines] if lines.bars else []
    return Table(say(language, lines.about), columns, rows, bars, lines._notes(language))


def _spelled(pair: tuple[str, str]) -> tuple[str, str]:
    query, key = (spelled(text) if text else "" for text in pair)  # unknown
    return query, key


_EDGES, _HEADS = 10, 8  # that did most, in a cell


class Head(NamedTuple):
    """Means over the batch's queries that are not padding; nan where a number is not known."""

    layer: str
    head: int
    sink: float  # weight on the first key that is not padding
    previous: float  # weight on the key before the query's own; queries that have one
    diagonal: float  # weight on the query's own key
    distance: float  # Σ_j a_ij·|i - j|
    entropy: float  # in nats


class Summary(Lines[Head]):
    """Every head that was seen; `str` makes a table of at most 80 columns, and below it lists what was not seen."""

    about = "summary table"
    columns: ClassVar = {"head": 4, "sink": 6, "previous": 9, "diagonal": 8, "distance": 10, "entropy": 8}

    def __init__(self, heads: Iterable[Head] = (), unseen: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(heads)
        self.unseen = tuple(unseen)

    def _cells(self, one: Head) -> list[str]:
        digits = [(3, 6)] * 3 + [(2, 8)] * 2
        numbers = zip(one[2:], digits, strict=True)
        return [str(one.head), *("-" if np.isnan(x) else fixed(x, *each) for x, each in numbers)]

    def _notes(self, language: Language) -> list[str]:
        return [say(language, "not seen", path=path, kind=kind) for path, kind in self.unseen]


def heads_of(layer: Layer) -> list[Head]:
    """A line for each head of a layer."""
    padding = None if layer.padding is None else as_host_array(layer.padding, "padding")[0]
    means = summarise_heads(None if layer.q is None else layer.matrix(), layer.observation, padding, cross=layer.cross)
    if layer.other_keys:  # which are near to no query
        means["distance"] = [np.nan] * len(layer.heads)
    return [Head(layer.name, head, *each) for head, *each in zip(layer.heads, *means.values(), strict=True)]


def cell(seen: Any) -> str:
    """The edges and heads that did most, else the sharpest heads: a few kB of HTML, at any length of the text."""
    language = of_locale()
    first, *lines = (line.strip() for line in repr(seen).splitlines())
    layers = [seen.layer(name) for name in seen.layers]
    tables = [Table(first, notes=lines)]
    if sum(len(x.heads) * x.observation.queries * x.observation.keys for x in layers) > QUICK:
        tables.append(Table("", notes=[say(language, "too many", hint=".summary(), .strongest(20), .heads()")]))
    elif layers:
        with suppress(RuleError):  # there are no causes, or no backward pass has run
            heads = sorted(seen.heads(), key=lambda head: -abs(head.off))[:_HEADS]
            tables += [table_of(x, language) for x in (seen.strongest(_EDGES), HeadEffects(heads))]
        if len(tables) == 1:
            sharpest = sorted(seen.summary(), key=lambda head: (head.sink > 0.5, head.entropy))[:_HEADS]
            tables.append(table_of(Summary(sharpest), language))
    if any(layer.q is not None for layer in layers):
        tables.append(Table("", notes=[say(language, "whole page")]))
    return html(language, tables)
