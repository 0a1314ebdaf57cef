"""Which keys each query sees under a recipe: the visibility of the core, with the recipe's right or wrong changes."""

from dataclasses import replace

import numpy as np

from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.diagnosing.recipe import Recipe, Selection


def visible(problem: Problem, recipe: Recipe, selection: Selection) -> Array:
    """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
    keys = np.arange(problem.keys)
    seen = _dense(_ruled(problem, recipe), selection)
    if recipe.causal in ("inverted", "upper"):
        positions = (np.array(selection.rows) + problem.query_offset[:, None])[:, None, :, None]
        seen = seen & (keys > positions if recipe.causal == "inverted" else keys >= positions)
    if recipe.padding == "inverted" and problem.kv_lengths is not None:
        seen = seen & (keys >= problem.kv_lengths[:, None, None, None])
    return seen & read(problem, recipe)


def read(problem: Problem, recipe: Recipe) -> Array:
    """Which keys the code reads at all: all but those behind the last whole block where it skips them, bool (keys,)."""
    kind, block = recipe.key_tail
    return np.arange(problem.keys) < (problem.keys // block * block if kind == "skipped" else problem.keys)


def _ruled(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's visibility rules."""
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
        spanned(problem, recipe),
        causal=problem.causal and recipe.causal not in ("missing", "inverted", "upper"),
        window=(left, right),
        query_offset=offset,
        mask=mask,
        kv_lengths=problem.kv_lengths if recipe.padding == "given" else None,
        query_lengths=problem.kv_lengths if recipe.padding == "queries" else lengths,
        query_segments=problem.query_segments if recipe.segments == "given" else None,
    )


def spanned(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's spans."""
    mine, theirs, table = problem.query_spans, problem.key_spans, problem.span_table
    if mine is None or theirs is None or table is None or recipe.spans == "given":
        return problem
    if recipe.spans == "missing":
        return replace(problem, query_spans=None, key_spans=None, span_table=None)
    if recipe.spans == "transposed":
        return replace(problem, span_table=table.swapaxes(-1, -2))
    rows, cols = table.shape[-2:]
    return replace(problem, query_spans=mine % rows, key_spans=theirs % cols)


def _dense(problem: Problem, selection: Selection) -> Array:
    """Which keys some rows see; one head where the rules are the same for all heads."""
    rules = problem.mask, problem.bias, problem.span_table
    same = all(x is None or x.strides[1] == 0 or x.shape[1] == 1 for x in rules)
    heads = selection.heads[:1] if same else selection.heads
    keys = slice(0, problem.keys)
    seen = np.empty((problem.batch, len(heads), len(selection.rows), problem.keys), dtype=bool)
    runs = np.split(np.arange(len(selection.rows)), np.flatnonzero(np.diff(selection.rows) != 1) + 1)
    for batch in range(problem.batch):
        for index, head in enumerate(heads):
            for run in runs if selection.rows else ():
                rows = slice(selection.rows[run[0]], selection.rows[run[-1]] + 1)
                seen[batch, index, run] = visibility.tile(problem, batch, head, rows, keys)
    return seen
