"""How sure an explanation can be: the reasons to doubt it. Without any it is sure, with one it is likely at most."""

from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.reason import Reason
from clearhead.diagnosing.recipe import Inputs, Recipe
from clearhead.diagnosing.search import Candidate, Search

_POSITIONS = 4  # fewer queries are no evidence: what is wrong with them could be wrong with these alone
_LENGTHS = 4  # fewer distinct lengths are no evidence: they may be right by luck, or rounded up alike
_CHANCE = 1e-3  # of any candidate fitting so well


def doubts(search: Search, candidate: Candidate, gaps: Array, tolerance: float) -> tuple[Reason, ...]:
    """What keeps the explanation from being sure, where no other explanation fits as well.

    gaps, tolerance   how far theirs lie from the right numbers, and what rounding allows
    """
    found = []
    if len(candidate.mistakes) > 1:
        found.append(Reason("a pair", {}))
    if any(mistake.evidence == "rounding" for mistake in candidate.mistakes):
        found.append(Reason("only rounding", {}))
    if candidate.shows is not None:
        found.append(candidate.shows)
    positions = int((gaps > tolerance).any(axis=(0, 1, 3)).sum())
    if positions < _POSITIONS:
        found.append(Reason("one position" if positions == 1 else "few positions", {"count": positions}))
    if candidate.rare or _by_count(candidate, search.full.inputs.problem.kv_lengths):
        found.append(Reason("a size", {}))
    special = _special_window(candidate.recipe, search.full.inputs.problem.window)
    if special:
        found.append(Reason(special, {}))
    same = degenerate(search.full.inputs)
    if same:
        found.append(Reason("same tokens", {"names": same}))
    difference = float(gaps.max(initial=0.0))
    by_chance = search.tried * min(1.0, 4 * tolerance / difference) ** (search.full.inputs.theirs.size / 2)
    if not by_chance < _CHANCE:
        found.append(Reason("small difference", {}))
    if not found and search.rare_rivals(candidate):
        found.append(Reason("rivals", {}))
    return tuple(found)


def _by_count(candidate: Candidate, lengths: Array | None) -> bool:
    """Is all that shows it how many keys or queries come last, or the lengths of a few batch entries?"""
    recipe = candidate.recipe
    if recipe.padding in ("shortest", "longest", "tiled") or recipe.padding_shift:
        return lengths is None or len(np.unique(lengths)) < _LENGTHS
    return bool(recipe.key_tail[0] or recipe.tail[0]) or recipe.blocks[0].startswith("last")


def _special_window(recipe: Recipe, window: tuple[int | None, int | None]) -> str:
    """What a window that is off by one may be as well: one width for both sides, or no right side; "" if neither."""
    if recipe.window in ((0, 0), "missing") or None in window:
        return ""
    left, right = (int(side or 0) for side in window)
    if isinstance(recipe.window, str):
        became = (left, left) if recipe.window == "both sides" else (left, 0)
    else:
        became = (left + recipe.window[0], right + recipe.window[1])
    if abs(became[0] - left) > 1 or abs(became[1] - right) > 1:
        return ""
    if became[0] == became[1] and left != right:
        return "equal sides"
    return "no right side" if became[1] == 0 and right else ""


def degenerate(inputs: Inputs) -> list[str]:
    """The inputs whose tokens are all the same, so that they cannot tell one key or query from another."""
    arrays: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.layer is not None:
        arrays = {"x": inputs.layer.x, "context": inputs.layer.context}
    if inputs.weights is not None:
        arrays = {"weights": inputs.weights, "v": inputs.v}
    return [
        name
        for name, x in arrays.items()
        if x is not None and x.size and x.shape[-2] > 1 and bool(np.all(x == x[..., :1, :]))
    ]
