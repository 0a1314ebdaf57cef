"""One line for each head: where its weight goes, in five numbers; and what a notebook's cell shows of a watched run."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.digits import fixed
from clearhead.errors import RuleError
from clearhead.tables import QUICK, Table, html
from clearhead.view.head_summary import summarise_heads
from clearhead.watching.effects import HeadEffects, Lines, table_of
from clearhead.watching.layer import Layer
from clearhead.words import Language, of_locale, say

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
