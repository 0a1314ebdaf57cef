"""Edits for `explain`, checked against the model and the text: layers, heads, words, whether they change anything."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from clearhead.changing.applying import Heads, check_layers, check_places
from clearhead.changing.edits import Boost, Cut, Edit, Off, Scaled, Share, Tempered, read_edits
from clearhead.changing.places import Text, find
from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.problem import describe
from clearhead.core.rules import Rules
from clearhead.errors import RuleError, SelectionError
from clearhead.explaining.editing import acting, choices
from clearhead.explaining.gpt2 import LayerRun, Token

_SHOWN = (Boost, Cut, Off, Scaled, Share, Tempered)


def checked(edits: Any, layers: int, heads: int, model: str) -> tuple[Edit, ...]:
    """The edits as a tuple, () for None. Raises for what is no edit, cannot be shown, or names no layer or head."""
    given = () if edits is None else read_edits(edits)
    for edit in given:
        if not isinstance(edit, _SHOWN) or (isinstance(edit, Off) and edit.to != "zero"):
            raise RuleError(
                f"{edit}: explain shows cut, boost, share, tempered, scaled and off(to='zero').", "ch.change runs it."
            )
    known = [(choices(layer, layers), heads) for layer in range(layers)]
    check_layers(given, known, f"model {model}", f"layers are 0 to {layers - 1}.")
    return given


def found_in(edits: Sequence[Edit], tokens: list[Token], text: str) -> tuple[Edit, ...]:
    """The same edits, their queries and keys as positions. Raises SelectionError for those that the text has not."""
    whole = Text(len(tokens), [_pieces(tokens, text)])
    found: list[Edit] = []
    for edit in edits:
        try:
            check_places(edit, whole, whole)
        except SelectionError as error:  # of a position it would say how to wait for a generated token
            hint = f"positions are 0 to {len(tokens) - 1}." if "position" in error.what else error.hint
            raise SelectionError(error.what, hint) from None
        own = {name: getattr(edit, name) for name in ("queries", "keys") if getattr(edit, name, None) is not None}
        places = {name: find(name, value, whole).members(range(len(tokens)))[0] for name, value in own.items()}
        empty = next((name for name, members in places.items() if not members.any()), None)
        if empty:
            raise SelectionError(f"{edit}: its {empty} are none of the text's {len(tokens)} tokens.")
        positions = {name: tuple(np.flatnonzero(members).tolist()) for name, members in places.items()}
        found.append(replace(edit, **cast("Any", positions)))
    return tuple(found)


def heads_of(edits: Sequence[Edit], layers: int, heads: int) -> Array:
    """Which heads an edit names, bool (layers, heads)."""
    found = np.zeros((layers, heads), bool)
    for layer in range(layers):
        for _, chosen in acting(edits, layer, layers):
            found[layer, slice(None) if chosen is None else list(chosen)] = True
    return found


def check_acts(given: Sequence[Edit], found: Sequence[Edit], runs: list[LayerRun]) -> None:
    """Raise SelectionError for an edit whose queries see none of its keys in any of its layers and heads."""
    for edit, places in zip(given, found, strict=True):
        if isinstance(places, (Cut, Boost, Share)) and not any(
            _sees(run, places, heads)
            for layer, run in enumerate(runs)
            for _, heads in acting([places], layer, len(runs))
        ):
            raise SelectionError(
                f"{edit}: it changes nothing, since these queries do not see these keys.",
                "where attention is causal, a query sees itself and what is before it: later>earlier.",
            )


def _sees(run: LayerRun, edit: Cut | Boost | Share, heads: Heads) -> bool:
    """Does any of the queries see any of the keys, by the rules that the layer has without edits?"""
    rules = {name: value for name, value in run.rules.items() if name != "spans"}
    problem = describe(run.q, run.k, run.v, cast("Rules", rules)).problem
    whole = slice(0, problem.queries), slice(0, problem.keys)
    chosen = tuple(slice(None) if x is None else list(cast("tuple[int, ...]", x)) for x in (edit.queries, edit.keys))
    shape = problem.queries, problem.keys
    for head in range(problem.heads) if heads is None else heads:
        seen = np.broadcast_to(visibility.tile(problem, 0, head, *whole), shape)
        if seen[chosen[0]][:, chosen[1]].any():
            return True
    return False


def _pieces(tokens: list[Token], text: str) -> list[str]:
    """Each token's part of the text, which follow one another; of a character's bytes, the last token has it."""
    last = [token.stop != after.stop for token, after in pairwise(tokens)] + [True]
    found, reached = [], 0
    for token, ends in zip(tokens, last, strict=True):
        if token.stop <= token.start:  # a special token
            found.append(token.text)
            continue
        found.append(text[reached : token.stop] if ends else "")
        reached = token.stop if ends else reached
    return found
