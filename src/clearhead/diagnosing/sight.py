"""Who sees whom under a recipe, right or wrong: visibility's one meaning, with the recipe's changes."""

from dataclasses import replace

import numpy as np

from clearhead import visibility
from clearhead.axes import Array
from clearhead.diagnosing.recipe import Part, Recipe
from clearhead.problem import Problem


def visible(problem: Problem, recipe: Recipe, part: Part) -> Array:
    """Bool (batch, heads or 1, rows, keys)."""
    keys = np.arange(problem.keys)
    seen = _dense(_ruled(problem, recipe), part)
    if recipe.causal in ("inverted", "upper"):
        places = (np.array(part.rows) + problem.query_offset[:, None])[:, None, :, None]
        seen = seen & (keys > places if recipe.causal == "inverted" else keys >= places)
    if recipe.padding == "inverted" and problem.kv_lengths is not None:
        seen = seen & (keys >= problem.kv_lengths[:, None, None, None])
    what, block = recipe.key_tail
    return seen & (keys < problem.keys // block * block) if what == "skipped" else seen


def _ruled(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's rules for who sees whom."""
    left, right = problem.window
    if recipe.window is None:
        left = right = None
    else:
        left = None if left is None else left + recipe.window[0]
        right = None if right is None else right + recipe.window[1]
    if recipe.causal == "strict":
        right = -1 if right is None else min(right, -1)
    offset = problem.query_offset
    if recipe.causal in ("first corner", "last corner"):
        offset = np.full_like(offset, 0 if recipe.causal == "first corner" else problem.keys - problem.queries)
    mask = problem.mask
    if mask is not None and recipe.mask != "given":
        mask = {"missing": None, "inverted": ~mask}.get(recipe.mask, mask.swapaxes(-1, -2))
    lengths = problem.query_lengths if recipe.query_padding == "given" else None
    return replace(
        problem,
        causal=problem.causal and recipe.causal not in ("missing", "inverted", "upper"),
        window=(left, right),
        query_offset=offset,
        mask=mask,
        kv_lengths=problem.kv_lengths if recipe.padding == "given" else None,
        query_lengths=problem.kv_lengths if recipe.padding == "queries" else lengths,
        query_segments=problem.query_segments if recipe.segments == "given" else None,
    )


def _dense(problem: Problem, part: Part) -> Array:
    """Who sees whom for some rows; one head where all heads are alike."""
    alike = all(x is None or x.strides[1] == 0 or x.shape[1] == 1 for x in (problem.mask, problem.bias))
    heads = part.heads[:1] if alike else part.heads
    keys = slice(0, problem.keys)
    seen = np.empty((problem.batch, len(heads), len(part.rows), problem.keys), dtype=bool)
    runs = np.split(np.arange(len(part.rows)), np.flatnonzero(np.diff(part.rows) != 1) + 1)
    for batch in range(problem.batch):
        for at, head in enumerate(heads):
            for run in runs if part.rows else ():
                rows = slice(part.rows[run[0]], part.rows[run[-1]] + 1)
                seen[batch, at, run] = visibility.tile(problem, batch, head, rows, keys)
    return seen
