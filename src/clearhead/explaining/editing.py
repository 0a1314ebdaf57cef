"""One layer's attention with the edits of `explain`, through the library's own rules."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.changing.applying import EditedCall, Heads, acting_in, edited
from clearhead.changing.edits import Edit, Off, Scaled
from clearhead.changing.places import Place, Text
from clearhead.core.axes import Array


def acting(edits: Sequence[Edit], layer: int, layers: int) -> list[tuple[Edit, Heads]]:
    """The edits of one layer of so many, each with its heads; None is all."""
    return acting_in(edits, str(layer), choices(layer, layers))


def call(q: Array, k: Array, v: Array, rules: dict[str, Any], own: list[tuple[Edit, Heads]], layer: int) -> EditedCall:
    """One layer's attention with its edits; q (heads, queries, d_k) of the last tokens, k, v (kv_heads, keys, …)."""
    queries, keys = q.shape[1], k.shape[1]
    text = Text(keys)
    place = Place(str(layer), range(keys - queries, keys), range(keys), text, text)
    return edited(q[None], k[None], v[None], rules, own, place)


def factors(own: list[tuple[Edit, Heads]], heads: int) -> Array | None:
    """What each head's output is multiplied by, (heads,); None where no edit changes outputs."""
    if not any(isinstance(edit, (Off, Scaled)) for edit, _ in own):
        return None
    numbers = np.ones(heads)
    for edit, chosen in own:
        if isinstance(edit, (Off, Scaled)):
            numbers[slice(None) if chosen is None else list(chosen)] *= edit.by if isinstance(edit, Scaled) else 0.0
    return numbers


def choices(layer: int, layers: int) -> set[str]:
    """All that chooses a layer in `layers=`: its number, and that from the end."""
    return {str(layer), str(layer - layers)}
