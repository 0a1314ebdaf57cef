"""What edits moved: next tokens' probabilities, and each head's output for one token, without and with them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array

if TYPE_CHECKING:
    from clearhead.explaining.gpt2 import ForwardPass, Model
    from clearhead.explaining.hub import HubModel


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
        places = [(int(place) // self.distance.shape[1], int(place) % self.distance.shape[1]) for place in order]
        found = [MovedHead(*place, float(self.distance[place]), float(self.length[place])) for place in places]
        return [each for each in found if each.distance > 0]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers and lists."""
        return {
            "next": [token._asdict() for token in self.next],
            "head_distance": self.distance.tolist(),
            "head_length": self.length.tolist(),
        }


def moved(model: "Model | HubModel", before: "ForwardPass", after: "ForwardPass", token: int, count: int) -> Moved:
    """What moved from one run to the other: `count` next tokens of each kind, and the outputs of one token."""
    pairs = [
        (first.heads[:, token].astype(np.float64), second.heads[:, token].astype(np.float64))
        for first, second in zip(before.layers, after.layers, strict=True)
    ]
    distance = np.stack([np.linalg.norm(second - first, axis=-1) for first, second in pairs])
    length = np.stack([np.linalg.norm(first, axis=-1) for first, _ in pairs])
    if before.logits is None or after.logits is None:
        return Moved([], distance, length)
    shares = [probabilities(run.logits[-1]) for run in (before, after) if run.logits is not None]
    change = np.abs(shares[1] - shares[0])
    orders = [np.argsort(-x, kind="stable")[:count] for x in (*shares, change)]
    chosen = sorted({int(i) for order in orders for i in order}, key=lambda i: (-change[i], i))
    tokens = [MovedToken(i, model.text(i), float(shares[0][i]), float(shares[1][i])) for i in chosen]
    return Moved(tokens, distance, length)


def probabilities(logits: Array) -> Array:
    """softmax(logits) in float64."""
    exact = logits.astype(np.float64)
    shares = np.exp(exact - exact.max())
    return np.asarray(shares / shares.sum())
