"""What the edges and heads of a watched model did: the tables of `seen.strongest` and `seen.heads`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.effects import Rest
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
    rest: Rest = "renormalise"  # where the edge's weight goes


One = TypeVar("One", bound=Any)  # an Edge, or a SpanEdge


class Edges(list[One]):
    """Edges by the magnitude of their effect, largest first; `str` makes a table, with the tokens where known."""

    def __init__(self, edges: Iterable[One] = (), tokens: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(edges)
        self.tokens = tuple(tokens)  # the texts of each edge's query and key

    def __str__(self) -> str:
        lines = [(x.layer, f"{x.head:>4} {x.batch:>5} {x.query:>6} {x.key:>6} {x.value:>11.4g}") for x in self]
        return table("head batch  query    key      effect", lines, self.tokens)


class HeadEffect(NamedTuple):
    """One head's effect, added over queries and batch items."""

    layer: str
    head: int  # its number in the model
    contribution: float  # Σ g·o
    off: float  # -Σ g·o: what switching the head off changes the number by, to first order


class HeadEffects(list[HeadEffect]):
    """Every head's effect, in the order in which the layers ran; `str` makes a table."""

    def __str__(self) -> str:
        lines = [(x.layer, f"{x.head:>4} {x.contribution:>12.4g} {x.off:>13.4g}") for x in self]
        return table("head contribution  switched off", lines)


def table(header: str, lines: Sequence[tuple[str, str]], tokens: Sequence[tuple[str, str]] = ()) -> str:
    """A table of at most 80 columns: layers' names, of which only the end may be there, and what is said of each.

    tokens   the texts of each line's query and key, where they are known
    """
    width = min(max((len(layer) for layer, _ in lines), default=5), 24)
    rows = [f"{'layer':<{width}} {header}"]
    for (layer, said), words in zip(lines, tokens or [("", "")] * len(lines), strict=True):
        name = layer if len(layer) <= width else "…" + layer[1 - width :]
        row = f"{name:<{width}} {said}"
        if any(words):
            query, key = (" ".join(text.split()) or repr(text)[1:-1] for text in words)
            room = max(80 - len(row) - len("   ← "), 8)
            first = min(len(query), max(room // 2, room - len(key)))
            row += f"  {_start(query, first)} ← {_start(key, room - first)}"
        rows.append(row.rstrip())
    return "\n".join(rows)


def _start(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def strongest_edges(layers: Iterable[Layer], k: int, rest: Rest) -> list[Edge]:
    """The k cuts of all layers with the largest effect; of equal ones the first by place. O(layers·k) memory."""
    results: list[Edge] = []
    for layer in layers:
        cuts = layer.cuts(rest).strongest(k)
        batch, head, query, key, value = (as_host_array(x, "strongest")[0].tolist() for x in cuts)
        heads = [layer.heads[place] for place in head]
        results += map(Edge, [layer.name] * len(head), batch, heads, query, key, value, [rest] * len(head))
        results = sorted(results, key=lambda edge: -abs(edge.value))[:k]
    return results


def sides_of(layer: Layer, *, has_source: bool) -> tuple[str, str]:
    """Which text a layer's queries and keys are of: the model's "own", its encoder's "source", or "" for none."""
    stack = ModulePath.of(layer.path).stack
    local = "source" if stack == "encoder" and has_source else "own" if stack == "encoder" or stack in _TEXT else ""
    return local, "source" if layer.cross else local


def words_of(edge: Edge, layer: Layer, tokens: list[list[Any]], sources: list[list[Any]]) -> tuple[str, str]:
    """The tokens of an edge's query and key; "" where they are not known."""
    texts = {"own": tokens, "source": sources, "": []}
    local, other = sides_of(layer, has_source=bool(sources))
    seen = layer.observation
    query = _word(texts[local], edge.batch, edge.query, seen.queries)
    return query, _word(texts[other], edge.batch, edge.key, seen.keys)


def _word(rows: list[list[Any]], batch: int, place: int, count: int) -> str:
    row = rows[batch] if batch < len(rows) else []
    return str(row[place]) if len(row) == count else ""


def head_effects(layer: Layer) -> list[HeadEffect]:
    """Each head's Σ g·o over queries and batch items."""
    rows = as_host_array(layer.contributions().by_query(), "by_query")[0]
    sums: Any = rows.sum(axis=(0, 2), dtype=np.float64)
    return [HeadEffect(layer.name, head, float(x), -float(x)) for head, x in zip(layer.heads, sums, strict=True)]
