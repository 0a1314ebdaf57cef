"""A text's tokens divided into spans: words, sentences, labels of tokens, or places by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import Array
from clearhead.core.rule_values import as_int64
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError, check_known, shown
from clearhead.watching.pieces import DIVISIONS, pieces_of, spaced
from clearhead.watching.places import Text, read_places, search

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
