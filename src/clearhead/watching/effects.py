"""What the edges and heads of a watched model did: the tables of `seen.strongest` and `seen.heads`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.layers.layer import Layer
from clearhead.layers.naming import ModulePath

_TEXT = ("", "decoder", "text_model", "language_model")  # stacks whose positions are those of the text


class Edge(NamedTuple):
    """One edge of one head, and what cutting it changes g·o by."""

    layer: str
    batch: int
    head: int  # its number in the model
    query: int
    key: int
    value: float


class Edges(list[Edge]):
    """Edges by the magnitude of their effect, largest first; `str` makes a table, with the tokens where known."""

    def __init__(self, edges: Iterable[Edge] = (), tokens: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(edges)
        self.tokens = tuple(tokens)  # of each edge's query and key

    def __str__(self) -> str:
        width = min(max((len(edge.layer) for edge in self), default=5), 24)
        table = [f"{'layer':<{width}} head batch  query    key      effect"]
        for edge, words in zip(self, self.tokens or [("", "")] * len(self), strict=True):
            place = f"{edge.head:>4} {edge.batch:>5} {edge.query:>6} {edge.key:>6}"
            said = f"  {words[0]} ← {words[1]}" if any(words) else ""
            table.append(f"{_end(edge.layer, width):<{width}} {place} {edge.value:>11.4g}{said}".rstrip())
        return "\n".join(table)


class HeadEffect(NamedTuple):
    """One head's effect, added over queries and batch items."""

    layer: str
    head: int  # its number in the model
    contribution: float  # Σ g·o
    off: float  # -Σ g·o: what switching the head off changes the number by, to first order


class HeadEffects(list[HeadEffect]):
    """Every head's effect, in the order in which the layers ran; `str` makes a table."""

    def __str__(self) -> str:
        width = min(max((len(line.layer) for line in self), default=5), 24)
        table = [f"{'layer':<{width}} head contribution  switched off"]
        table += [
            f"{_end(line.layer, width):<{width}} {line.head:>4} {line.contribution:>12.4g} {line.off:>13.4g}"
            for line in self
        ]
        return "\n".join(table)


def strongest_edges(layers: Iterable[Layer], k: int) -> list[Edge]:
    """The k cuts of all layers with the largest effect; of equal ones the first by place. O(layers·k) memory."""
    found: list[Edge] = []
    for layer in layers:
        cuts = layer.cuts().strongest(k)
        batch, head, query, key, value = (as_host_array(x, "strongest")[0].tolist() for x in cuts)
        heads = [layer.heads[at] for at in head]
        found += map(Edge, [layer.name] * len(head), batch, heads, query, key, value)
        found = sorted(found, key=lambda edge: -abs(edge.value))[:k]
    return found


def words_of(edge: Edge, layer: Layer, tokens: list[list[Any]], sources: list[list[Any]]) -> tuple[str, str]:
    """The tokens of an edge's query and key; "" where they are not known."""
    stack = ModulePath.of(layer.path).stack
    own = sources or tokens if stack == "encoder" else tokens if stack in _TEXT else []
    seen = layer.observation
    sides = (own, edge.query, seen.queries), (sources if layer.cross else own, edge.key, seen.keys)
    query, key = (_word(rows, edge.batch, place, count) for rows, place, count in sides)
    return query, key


def _word(rows: list[list[Any]], batch: int, place: int, count: int) -> str:
    row = rows[batch] if batch < len(rows) else []
    return str(row[place]) if len(row) == count else ""


def head_effects(layer: Layer) -> list[HeadEffect]:
    """Each head's Σ g·o over queries and batch items."""
    rows = as_host_array(layer.contributions().by_query(), "by_query")[0]
    sums: Any = rows.sum(axis=(0, 2), dtype=np.float64)
    return [HeadEffect(layer.name, head, float(x), -float(x)) for head, x in zip(layer.heads, sums, strict=True)]


def _end(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]
