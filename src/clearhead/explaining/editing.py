"""Edits for `explain`: checked against the model and the text, in force in one layer, and what they moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clearhead.changing.applying import check_layers, placed
from clearhead.changing.edits import Edit, read_edits
from clearhead.core.axes import Array
from clearhead.errors import RuleError, SelectionError
from clearhead.explaining.texts import pieces
from clearhead.models.decoder import acting_edits, choices, may_act
from clearhead.models.protocol import ForwardPass, LanguageModel, LayerRun, Token, probabilities
from clearhead.watching.places import Text

SHOWN = 8  # next tokens that edits moved, in the terminal and on a page
_SHOWABLE = ("boost", "cut", "off", "scaled", "tempered")


def checked(edits: Any, layers: int, heads: int, model: str) -> tuple[Edit, ...]:
    """The edits as a tuple, () for None. Raises for what is no edit, cannot be shown, or names no layer or head."""
    read = () if edits is None else read_edits(edits)
    for edit in read:
        if edit.kind not in _SHOWABLE or edit.to == "mean":
            raise RuleError(
                f"{edit}: explain shows cut, boost, tempered, scaled and off(to='zero').", "ch.change runs it."
            )
    known = [(choices(layer, layers), heads) for layer in range(layers)]
    check_layers(read, known, f"model {model}", f"layers are 0 to {layers - 1}.")
    return read


def check_derivatives(edits: Sequence[Edit]) -> None:
    """Raise RuleError for an edit that no derivative is taken through."""
    for edit in edits:
        if edit.rest:
            raise RuleError(
                f"{edit}: no derivative is taken through this edit.",
                "cut, boost, tempered, scaled and off(to='zero') have one.",
            )


def by_position(edits: Sequence[Edit], tokens: list[Token], text: str) -> tuple[Edit, ...]:
    """The same edits, their queries and keys as positions. Raises SelectionError for those that the text has not."""
    return placed(edits, Text(len(tokens), [pieces(tokens, text)]))


def heads_of(edits: Sequence[Edit], layers: int, heads: int) -> Array:
    """Which heads an edit names, bool (layers, heads)."""
    named = np.zeros((layers, heads), bool)
    for layer in range(layers):
        for _, chosen in acting_edits(edits, layer, layers):
            named[layer, slice(None) if chosen is None else list(chosen)] = True
    return named


def check_acts(edits: Sequence[Edit], placed: Sequence[Edit], runs: Sequence[LayerRun]) -> None:
    """Raise SelectionError for an edit whose queries see none of its keys in any of its layers and heads.

    placed   the edits by position
    """
    for edit, places in zip(edits, placed, strict=True):
        if not may_act(places, runs):
            raise SelectionError(
                f"{edit}: it changes nothing, since these queries do not see these keys.",
                "where attention is causal, a query sees itself and what is before it: later>earlier.",
            )


class MovedToken(NamedTuple):
    """A token that may come next, and its probability without and with the edits."""

    id: int
    text: str
    before: float
    after: float


class MovedHead(NamedTuple):
    """A head, how far its output for the token moved, |o after − o before|, and how long it was, |o before|."""

    layer: int
    head: int
    distance: float
    length: float


@dataclass(frozen=True, eq=False, slots=True)
class Moved:
    """What edits moved, for one token."""

    next: list[MovedToken]  # the likeliest of both runs and those that moved most, by how far they moved
    distance: Array  # (layers, heads): |o after − o before| of the token
    length: Array  # (layers, heads): |o before|

    def heads(self, count: int) -> list[MovedHead]:
        """The heads whose output moved furthest; none that did not move."""
        order = np.argsort(-self.distance, axis=None, kind="stable")[:count]
        places = [divmod(int(place), self.distance.shape[1]) for place in order]
        heads = [
            MovedHead(layer, head, float(self.distance[layer, head]), float(self.length[layer, head]))
            for layer, head in places
        ]
        return [head for head in heads if head.distance > 0]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers and lists."""
        arrays = {"head_distance": self.distance.tolist(), "head_length": self.length.tolist()}
        return {"next": [token._asdict() for token in self.next], **arrays}


def moved(model: LanguageModel, before: ForwardPass, after: ForwardPass, token: int, count: int) -> Moved:
    """What moved from one run to the other: `count` next tokens of each kind, and the outputs of one token."""
    pairs = zip(before.layers, after.layers, strict=True)
    outputs = [[run.heads[:, token].astype(np.float64) for run in pair] for pair in pairs]
    distance = np.stack([np.linalg.norm(second - first, axis=-1) for first, second in outputs])
    length = np.stack([np.linalg.norm(first, axis=-1) for first, _ in outputs])
    if before.logits is None or after.logits is None:
        return Moved([], distance, length)
    shares = [probabilities(logits[-1]) for logits in (before.logits, after.logits)]
    change = np.abs(shares[1] - shares[0])
    orders = [np.argsort(-x, kind="stable")[:count] for x in (*shares, change)]
    chosen = sorted({int(i) for order in orders for i in order}, key=lambda i: (-change[i], i))
    tokens = [MovedToken(i, model.tokenizer.text(i), float(shares[0][i]), float(shares[1][i])) for i in chosen]
    return Moved(tokens, distance, length)
