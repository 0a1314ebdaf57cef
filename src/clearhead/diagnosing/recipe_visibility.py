"""Which keys each query sees under a recipe: the visibility of the core, with the recipe's right or wrong changes."""

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import RULES
from clearhead.diagnosing.recipe import Recipe, Selection

_FORBIDDING = [name for name, rule in RULES.items() if rule.forbids]
# The rules that hide keys, those together that people write as one mask; a bias and spans hide keys as scores.
_MASKS = ("causal", "window"), ("mask",), ("kv_lengths",), ("query_lengths",), ("query_segments", "kv_segments")


def visible(problem: Problem, recipe: Recipe, selection: Selection) -> Array:
    """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
    ruled = _ruled(problem, recipe)
    position = _by_position(problem, recipe, selection) & read(problem, recipe)
    if not any(ruled.uses(name) for name in _FORBIDDING):
        return np.ones((problem.batch, 1, len(selection.rows), problem.keys), dtype=bool) & position
    if recipe.joined == "and":
        return _dense(ruled, selection) & position
    either = [_dense(_only(names, ruled), selection) for names in masks(problem, ruled)]
    return reduce(np.logical_or, either) & _dense(_only(("bias", "spans"), ruled), selection) & position


def masks(*problems: Problem) -> list[tuple[str, ...]]:
    """The masks that one of the problems has, each as the names of its rules."""
    return [names for names in _MASKS if any(problem.uses(name) for problem in problems for name in names)]


def _only(names: tuple[str, ...], problem: Problem) -> Problem:
    """The problem with no other rules that hide keys than these."""
    others = (RULES[name] for name in _FORBIDDING if name not in names)
    unused: dict[str, Any] = {field: rule.unused for rule in others for field in rule.fields}
    return replace(problem, **unused)


def _by_position(problem: Problem, recipe: Recipe, selection: Selection) -> Array:
    """What the rules of the core cannot say, bool (batch, 1, rows, keys) or fewer axes."""
    keys, blank = np.arange(problem.keys), np.ones((1, 1, 1, 1), dtype=bool)
    positions = (np.array(selection.rows) + problem.query_offset[:, None])[:, None, :, None]
    if recipe.causal in ("inverted", "upper"):
        blank = blank & (keys > positions if recipe.causal == "inverted" else keys >= positions)
    if problem.kv_lengths is not None and recipe.padding in ("inverted", "left"):
        lengths = problem.kv_lengths[:, None, None, None]
        blank = blank & (keys >= (lengths if recipe.padding == "inverted" else problem.keys - lengths))
    if problem.kv_lengths is not None and recipe.padding == "tiled":
        pairs = np.arange(problem.batch)[:, None] * problem.heads + np.array(selection.heads)
        blank = blank & (keys < problem.kv_lengths[pairs % problem.batch][:, :, None, None])
    if recipe.chunk:
        blank = blank & (positions // recipe.chunk == keys // recipe.chunk)
    if recipe.cache == "ignored":
        blank = blank & (keys >= problem.keys - problem.queries)
    what, block = recipe.tile
    if what in ("diagonal seen", "local indices"):
        blank = blank & (keys // block <= positions // block)
    if what == "diagonal skipped":
        blank = blank & (keys // block < positions // block)
    if what.startswith("local"):
        blank = blank & (keys % block <= positions % block)
    if what == "first missing":
        blank = blank & (keys >= block)
    return blank


def visited(problem: Problem, recipe: Recipe, selection: Selection) -> Array:
    """The keys of the blocks that a causal kernel visits, bool (batch, 1, rows, keys): all, where it has no blocks."""
    what, block = recipe.tile
    if what != "visited":
        return np.ones((1, 1, 1, problem.keys), dtype=bool)
    seen = recipe._replace(causal="missing", tile=("diagonal seen", block))
    return visible(problem, seen, selection)


def read(problem: Problem, recipe: Recipe) -> Array:
    """Which keys the code reads at all: all but those behind the last whole block where it skips them, bool (keys,)."""
    kind, block = recipe.key_tail
    return np.arange(problem.keys) < (problem.keys // block * block if kind == "skipped" else problem.keys)


def multiplicity(problem: Problem, recipe: Recipe) -> Array | None:
    """How often the code counts each key, (keys,); None where it counts each once."""
    keys, (what, block) = np.arange(problem.keys), recipe.tile
    if recipe.cache == "newest twice":
        return 1.0 + (keys >= problem.keys - problem.queries)
    if what == "overlapping":  # the last block is moved back, so that it is whole
        return 1.0 + ((keys >= problem.keys - block) & (keys < problem.keys // block * block))
    return None


def _ruled(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's visibility rules."""
    offset, missing = problem.query_offset, recipe.causal in ("missing", "inverted", "upper", "ahead")
    if recipe.causal in ("first corner", "last corner"):
        offset = np.full_like(offset, 0 if recipe.causal == "first corner" else problem.keys - problem.queries)
    left, right = windowed(problem.window, recipe)
    if recipe.causal == "strict":
        right = -1 if right is None else min(right, -1)
    if recipe.causal == "ahead":
        right = 1
    by_keys = recipe.padding in ("queries", "both")  # the lengths of the keys serve for the queries
    query_lengths = problem.query_lengths if recipe.query_padding == "given" else None
    return replace(
        spanned(problem, recipe),
        causal=problem.causal
        and not (missing or recipe.window == "both sides" or recipe.tile[0].startswith(("diagonal", "local"))),
        window=(left, right),
        query_offset=offset,
        bias=biased(problem, recipe),
        mask=_mask(problem, recipe),
        kv_lengths=_lengths(problem, recipe),
        query_lengths=problem.kv_lengths if by_keys else query_lengths,
        query_segments=problem.query_segments if recipe.segments == "given" else None,
    )


def windowed(window: tuple[int | None, int | None], recipe: Recipe) -> tuple[int | None, int | None]:
    """The window as the recipe changes it."""
    left, right = window
    if recipe.window == "missing":
        return None, None
    if isinstance(recipe.window, str):
        return left, left if recipe.window == "both sides" else 0
    return None if left is None else left + recipe.window[0], None if right is None else right + recipe.window[1]


def biased(problem: Problem, recipe: Recipe) -> Array | None:
    """The bias that the recipe reads, (batch, heads, queries, keys); a bias of -inf forbids."""
    bias = problem.bias
    if bias is None or recipe.bias == "missing":
        return None
    return bias.swapaxes(-1, -2) if recipe.bias == "transposed" else of_another_head(bias, recipe.bias, 1)


def of_another_head(values: Array, which: str, axis: int) -> Array:
    """The values of head 0, or of the next head, in place of each head's own; else the values as they are."""
    if which not in ("first head", "next head"):
        return values
    heads = values.shape[axis]
    return values.take([0] * heads if which == "first head" else [(h + 1) % heads for h in range(heads)], axis)


def _mask(problem: Problem, recipe: Recipe) -> Array | None:
    mask = problem.mask
    if mask is None or recipe.mask == "missing":
        return None
    if recipe.mask == "transposed":
        return mask.swapaxes(-1, -2)
    if recipe.mask == "tiled":
        batch, head = np.indices((problem.batch, problem.heads))
        return np.asarray(mask[(batch * problem.heads + head) % problem.batch, head])
    return ~mask if recipe.mask == "inverted" else mask


def _lengths(problem: Problem, recipe: Recipe) -> Array | None:
    lengths = problem.kv_lengths
    if lengths is None or recipe.padding in ("missing", "inverted", "queries", "left", "tiled"):
        return None
    if recipe.padding in ("shortest", "longest"):
        lengths = np.full_like(lengths, lengths.min() if recipe.padding == "shortest" else lengths.max())
    return np.clip(lengths + recipe.padding_shift, 0, problem.keys)


def spanned(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's spans."""
    of_queries, of_keys, table = problem.query_spans, problem.key_spans, problem.span_table
    if of_queries is None or of_keys is None or table is None or recipe.spans == "given":
        return problem
    if recipe.spans == "missing":
        return replace(problem, query_spans=None, key_spans=None, span_table=None)
    if recipe.spans == "transposed":
        return replace(problem, span_table=table.swapaxes(-1, -2))
    rows, cols = table.shape[-2:]
    return replace(problem, query_spans=of_queries % rows, key_spans=of_keys % cols)


def _dense(problem: Problem, selection: Selection) -> Array:
    """Which keys some rows see; one head where the rules are the same for all heads."""
    rules = problem.mask, problem.bias, problem.span_table
    same = all(x is None or x.strides[1] == 0 or x.shape[1] == 1 for x in rules)
    heads = selection.heads[:1] if same else selection.heads
    seen = np.empty((problem.batch, len(heads), len(selection.rows), problem.keys), dtype=bool)
    runs = np.split(np.arange(len(selection.rows)), np.flatnonzero(np.diff(selection.rows) != 1) + 1)
    for batch, index in np.ndindex(seen.shape[:2]):
        for run in runs if selection.rows else ():
            rows = slice(selection.rows[run[0]], selection.rows[run[-1]] + 1)
            seen[batch, index, run] = visibility.tile(problem, batch, heads[index], rows, slice(0, problem.keys))
    return seen
