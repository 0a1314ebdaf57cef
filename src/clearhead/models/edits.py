"""Edits of attention in one layer of a decoder: which of them act there, the edited call, and what they scale."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.changing.applying import EditedCall, Heads, acting_in, edited
from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.watching.places import Place, Text


def acting(edits: Sequence[Edit], layer: int, layers: int) -> list[tuple[Edit, Heads]]:
    """The edits of one layer of so many, each with its heads; None is all."""
    return acting_in(edits, str(layer), choices(layer, layers))


def call(
    q: Array, k: Array, v: Array, rules: dict[str, Any], edits: list[tuple[Edit, Heads]], layer: int
) -> EditedCall:
    """One layer's attention with its edits; q (heads, queries, d_k) of the last tokens, k, v (kv_heads, keys, …)."""
    return edited(q[None], k[None], v[None], rules, edits, place_of(layer, q, k))


def factors(edits: list[tuple[Edit, Heads]], heads: int) -> Array | None:
    """What each head's output is multiplied by, (heads,); None where no edit of the layer changes outputs."""
    changing = [(edit, chosen) for edit, chosen in edits if edit.kind in ("off", "scaled")]
    numbers = np.ones(heads)
    for edit, chosen in changing:
        numbers[slice(None) if chosen is None else list(chosen)] *= edit.by if edit.kind == "scaled" else 0.0
    return numbers if changing else None


def place_of(layer: int, q: Array, k: Array) -> Place:
    """Where a layer's attention is: q (heads, queries, d_k) are the last of the tokens of k (kv_heads, keys, d_k)."""
    queries, keys = q.shape[1], k.shape[1]
    text = Text(keys)
    return Place(str(layer), range(keys - queries, keys), range(keys), text, text)


def choices(layer: int, layers: int) -> set[str]:
    """All that chooses a layer in `layers=`: its number, and that from the end."""
    return {str(layer), str(layer - layers)}
