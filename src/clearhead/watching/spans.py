"""Effects between words, sentences or speakers: whole spans of tokens cut, exactly, in every layer and head."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.effects import Rest
from clearhead.core.rule_values import layer_name, whole_number
from clearhead.errors import RuleError
from clearhead.tables import Table, Tabular
from clearhead.watching.dividing import Division, divide, joined, texts_of
from clearhead.watching.effects import Edges, sides_of, table_of
from clearhead.watching.layer import Layer
from clearhead.watching.places import Text
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.ops.causes import EffectMatrix


class SpanEdge(NamedTuple):
    """Two spans of tokens in one head, and what g·o changes by when the one may see nothing of the other."""

    layer: str
    batch: int
    head: int  # its number in the model
    query: int  # the number of the span
    key: int
    value: float
    queries: tuple[int, ...]  # the positions of the span's tokens
    keys: tuple[int, ...]
    rest: Rest = "renormalise"  # where the cut edges' weights go


class SpannedLayer(NamedTuple):
    """One layer: its cuts, the numbers of its heads, and how its queries and keys are divided."""

    matrix: "EffectMatrix"
    heads: tuple[int, ...]
    queries: Division
    keys: Division
    rest: Rest

    def effects(self) -> Any:
        """(batch, heads, query spans, key spans)."""
        rows, cols = (side.labels if len(side.labels) > 1 else side.labels[0] for side in (self.queries, self.keys))
        return self.matrix.spans(rows, cols)


class Spans(Tabular, Mapping[str, Any]):
    """What cutting whole spans of tokens changes: `spans[layer]`, (batch, heads, query spans, key spans).

    A layer is computed each time that it is asked for, and nothing of it is kept. `str` makes a table of the strongest.
    """

    def __init__(self, parts: Mapping[str, SpannedLayer]) -> None:
        self._parts = parts

    def __getitem__(self, layer: int | str) -> Any:
        """One layer by its name or number. Raises SelectionError for a layer that was not asked for."""
        return self._part(layer).effects()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def names(self, layer: int | str = 0, batch: int = 0) -> tuple[list[str], list[str]]:
        """The texts or names of the spans of one layer's queries and of its keys; "" where they are not known.

        Raises SelectionError for another layer, RuleError unless batch is a whole number from 0 up.
        """
        part, batch = self._part(layer), whole_number("batch", batch, 0)
        return part.queries.of_text(batch), part.keys.of_text(batch)

    def strongest(self, k: int = 20) -> Edges[SpanEdge]:
        """The k pairs of spans of all layers, heads and texts whose cut changes most; it prints as a table.

        The largest magnitude first; of equal ones the first by place. Pairs without any effect are not listed, nor NaN.
        Raises RuleError unless k is a positive integer. The time of all layers; the memory of one, and O(k).
        """
        k = whole_number("k", k, 1, hint="strongest(20)")
        results: list[tuple[SpanEdge, tuple[str, str]]] = []
        for name, part in self._parts.items():
            results = sorted(results + _strongest(name, part, k), key=lambda one: -abs(one[0].value))[:k]
        return Edges([edge for edge, _ in results], [names for _, names in results])

    def __str__(self) -> str:
        return str(self.strongest(20))

    def _tables(self, language: Language) -> list[Table]:
        return [table_of(self.strongest(20), language)]

    def __repr__(self) -> str:
        part = next(iter(self._parts.values()), None)
        first = "" if part is None else f"; the first has {part.queries.size} × {part.keys.size} spans"
        return f"Spans({len(self)} layers{first})"

    def _part(self, layer: int | str) -> SpannedLayer:
        return self._parts[layer_name(layer, list(self._parts))]


def spanned(layers: Iterable[Layer], groups: Any, source_groups: Any, run: Any, rest: Rest) -> dict[str, SpannedLayer]:
    """The layers with their tokens divided; `run` is the Seen that they are of. Raises as `Seen.spans`."""
    has_source = source_groups is not None or bool(run.source_tokens)
    if source_groups is None and isinstance(groups, str):
        source_groups = groups
    asked = {"own": ("groups", groups), "source": ("source_groups", source_groups)}
    known: dict[tuple[str, int], Division] = {}

    def divided(layer: Layer, side: str, what: str, length: int) -> Division:
        if (side, length) not in known:
            name, value = asked[side or "own"]
            if value is None and side == "source":
                raise RuleError(
                    f"the {what} of layer {layer.name} are of the source, and source_groups is not given.",
                    "seen.spans(groups, source_groups), or layers=[…] without it.",
                )
            pieces, why = texts_of(run, side) if side else None, "the tokens have no texts"
            if run.written is None and any(isinstance(row[0], str) for row in run.tokens[:1] if row):
                why = "the texts of the tokens do not say where words begin, and their tokenizer is not here"
            if not side or (pieces and len(pieces[0]) != length):
                pieces, why = None, f"the {length} {what} of layer {layer.name} are not the tokens of the text"
            known[side, length] = divide(name, value, Text(length, pieces, why), f"{what} of layer {layer.name}")
        return known[side, length]

    parts = {}
    for layer in layers:
        cuts = layer.cut_effects(rest)
        (local, other), (queries, keys) = sides_of(layer, has_source=has_source), cuts.shape[-2:]
        rows = divided(layer, local, "queries", queries)
        cols = divided(layer, other, "keys", keys - layer.other_keys)
        if layer.other_keys:
            cols = joined(cols, divided(layer, "source", "last keys", layer.other_keys))
        parts[layer.name] = SpannedLayer(cuts, layer.heads, rows, cols, rest)
    return parts


def _strongest(layer: str, part: SpannedLayer, k: int) -> list[tuple[SpanEdge, tuple[str, str]]]:
    effects = as_host_array(part.effects(), "spans")[0]
    size = np.abs(effects, dtype=np.float64).reshape(-1)
    size[np.isnan(size)] = 0
    least = np.partition(size, size.size - k)[size.size - k] if k < size.size else 0.0
    places = np.flatnonzero((size >= least) & (size > 0))
    places = places[np.argsort(-size[places], kind="stable")][:k]
    results = []
    for batch, head, query, key in zip(*(x.tolist() for x in np.unravel_index(places, effects.shape)), strict=True):
        value = float(effects[batch, head, query, key])
        positions = part.queries.positions(batch, query), part.keys.positions(batch, key)
        edge = SpanEdge(layer, batch, part.heads[head], query, key, value, *positions, part.rest)
        results.append((edge, (part.queries.of_text(batch)[query], part.keys.of_text(batch)[key])))
    return results
