"""A text divided into words, sentences, speakers: spans of tokens, cut whole and exactly in every layer and head."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array, as_rule_array
from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.core.rule_values import as_int64, layer_name, whole_number
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError, check_known, shown
from clearhead.tables import Table, Tabular
from clearhead.watching.effects import Edge, Edges, sides_of, table_of
from clearhead.watching.layer import Layer
from clearhead.watching.pieces import DIVISIONS, pieces_of, spaced
from clearhead.watching.places import Text, read_places, search
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.ops.causes import EffectMatrix

_WANTED = '"words", "sentences", "paragraphs", a label for each token, or slices: a list of them, or by name'


class Division(NamedTuple):
    """The spans that the tokens of a sequence are divided into."""

    labels: Array  # (batch or 1, tokens): the number of each token's span, -1 for none
    names: list[list[str]]  # (batch or 1, spans), "" where they are not known

    @property
    def size(self) -> int:
        """How many spans the text with most of them has."""
        return int(self.labels.max(initial=-1)) + 1

    def of_text(self, batch: int) -> list[str]:
        """The names of one text's spans, as many as `size`."""
        names = self.names[batch % len(self.names)]
        return names + [""] * (self.size - len(names))

    def positions(self, batch: int, span: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.labels[batch % len(self.labels)] == span).tolist())


@dataclass(eq=False)
class Written:
    """The ids that a model was given, (batch, tokens), and the tokenizer that reads them."""

    tokenizer: Any
    tokens: list[list[int]] = field(default_factory=list)
    source: list[list[int]] = field(default_factory=list)  # of the encoder, where there is one


def texts_of(run: Any, side: str) -> list[list[str]] | None:
    """The texts of a run's tokens, (batch, tokens), of "own" or "source"; None where they are not known.

    run   a Seen: its tokens as they are shown, and the ids that they were made of, where they are known
    """
    tokens = run.source_tokens if side == "source" else run.tokens
    if run.written is not None:
        rows = run.written.source if side == "source" else run.written.tokens
        return [pieces_of(row, run.written.tokenizer.decode) for row in rows] or None
    if not tokens or not all(isinstance(token, str) for row in tokens for token in row):
        return None
    results = [spaced(row) for row in tokens]
    return None if any(row is None for row in results) else [row for row in results if row is not None]


def divide(name: str, groups: Any, text: Text, what: str) -> Division:
    """Divide a text as it was asked for; `what` is the tokens' name in errors. Raises as `Seen.spans`."""
    if isinstance(groups, str):
        check_known(name, [groups], DIVISIONS)
        if text.pieces is None:
            raise RuleError(
                f"{name} is {groups!r}, and {text.why}.", "ch.watch(model, causes=True, tokenizer=…), or labels."
            )
        rows = [DIVISIONS[groups](row) for row in text.pieces]
        labels = np.array([row + [-1] * (text.length - len(row)) for row in rows])
        return Division(labels, _texts(labels, text))
    if isinstance(groups, Mapping):
        return Division(_labels_of_places(name, groups, text), [list(map(str, groups))])
    if isinstance(groups, (list, tuple)) and any(isinstance(one, (slice, range)) for one in groups):
        labels = _labels_of_places(name, dict(enumerate(groups)), text)
    else:
        labels = _read_labels(name, groups, text.length, what)
    return Division(labels, _texts(labels, text))


def _read_labels(name: str, groups: Any, length: int, what: str) -> Array:
    if isinstance(groups, range):
        groups = list(groups)
    try:
        labels = np.atleast_1d(as_rule_array(groups, name))
    except TypeError:
        raise DtypeError(f"{name} is {shown(groups)}: expected {_WANTED}.") from None
    if labels.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {shown(groups)}: expected {_WANTED}.", f'{name}="words"')
    if labels.ndim > 2 or labels.shape[-1] != length:
        raise ShapeError(
            f"{name} has shape {labels.shape}, and there are {length} {what}: expected one label for each.",
            "layers=[…] chooses the layers that it fits.",
        )
    return np.atleast_2d(as_int64(name, labels))


def _labels_of_places(name: str, groups: Mapping[Any, Any], text: Text) -> Array:
    """(batch or 1, tokens) from places by name, which `ch.cut` takes too."""
    if not groups:
        raise SelectionError(f"{name} is empty: it has no spans.", f"{name}={{'user': slice(0, 9)}}")
    labels = np.full((1, text.length), -1)
    for number, (key, inputs) in enumerate(groups.items()):
        which = f"{name}[{key!r}]"
        if isinstance(inputs, (list, tuple)) and any(isinstance(one, range) for one in inputs):
            inputs = [place for one in inputs for place in (one if isinstance(one, range) else [one])]
        places = read_places(which, inputs)
        if places is None:
            raise DtypeError(f"{which} is None: expected positions, slices or words.", f"{which}=slice(0, 5)")
        chosen = search(which, places, text).members(range(text.length))
        if not chosen.any():
            raise SelectionError(f"{which} is {shown(inputs)}: none of the {text.length} tokens are there.")
        labels = np.repeat(labels, max(1, len(chosen) // len(labels)), axis=0)
        taken = np.argwhere(chosen & (labels >= 0))
        if len(taken):
            other = list(groups)[labels[tuple(taken[0])]]
            raise RuleError(f"token {taken[0][1]} is in {which} and in {name}[{other!r}]: spans do not overlap.")
        labels = np.where(chosen, number, labels)
    return labels


def _texts(labels: Array, text: Text) -> list[list[str]]:
    """The texts of each row's spans; runs of tokens that are apart have … between them."""
    if text.pieces is None:
        return [[""] * (int(labels.max(initial=-1)) + 1)]
    results = []
    for row, pieces in enumerate(text.pieces):
        names = [""] * (int(labels.max(initial=-1)) + 1)
        local = labels[row % len(labels)]
        edges = [0, *(np.flatnonzero(np.diff(local)) + 1).tolist(), len(local)]
        for first, last in pairwise(edges):
            if last > first and local[first] >= 0:
                before = names[local[first]]
                names[local[first]] = before + (" … " if before else "") + "".join(pieces[first:last])
        results.append([name.strip() or name for name in names])
    return results


def joined(local: Division, other: Division) -> Division:
    """The spans of merged attention's keys: those of the sequence, and behind them the source's."""
    batch = max(len(local.labels), len(other.labels))
    moved = np.where(other.labels < 0, -1, other.labels + local.size)
    labels = np.concatenate([np.broadcast_to(x, (batch, x.shape[1])) for x in (local.labels, moved)], axis=1)
    rows = max(len(local.names), len(other.names))
    return Division(labels, [local.of_text(row) + other.of_text(row) for row in range(rows)])


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

    def strongest(self, k: int = 20) -> Edges[Edge]:
        """The k pairs of spans of all layers, heads and texts whose cut changes most; it prints as a table.

        The largest magnitude first; of equal ones the first by place. Pairs without any effect are not listed, nor NaN.
        Raises RuleError unless k is a positive integer. The time of all layers; the memory of one, and O(k).
        """
        k = whole_number("k", k, 1, hint="strongest(20)")
        results: list[tuple[Edge, tuple[str, str]]] = []
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


def _strongest(layer: str, part: SpannedLayer, k: int) -> list[tuple[Edge, tuple[str, str]]]:
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
        edge = Edge(layer, batch, part.heads[head], query, key, value, part.rest, *positions)
        results.append((edge, (part.queries.of_text(batch)[query], part.keys.of_text(batch)[key])))
    return results
