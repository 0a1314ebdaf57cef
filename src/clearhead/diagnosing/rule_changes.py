"""The rules as a recipe has them: changes of a Problem's fields, and what no rule can say, as more visibility.

"missing" leaves any rule out, by the table of rules.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.block import Block, block_of, everything
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS, RULES
from clearhead.diagnosing.recipe import Recipe, Selection

# The rules of fields that have another name than their rule.
NAMED = {"alibi": "alibi_slopes", "padding": "kv_lengths", "query_padding": "query_lengths"}
NAMED |= {"segments": "query_segments", "padding_shift": "kv_lengths"}
# The rules that hide keys, those together that people write as one mask; a bias and spans hide keys as scores.
_MASKS = ("causal", "window"), ("mask",), ("kv_lengths",), ("query_lengths",), ("query_segments", "kv_segments")


def masks(problem: Problem) -> list[tuple[str, ...]]:
    """The masks of a problem, each as the names of its rules."""
    return [names for names in _MASKS if any(map(problem.uses, names))]


def without(problem: Problem, *names: str) -> Problem:
    """The problem without these rules."""
    unused: dict[str, Any] = {field: RULES[name].unused for name in names for field in RULES[name].fields}
    return replace(problem, **unused)


def changed_rules(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's rules."""
    missing = [rule_of(field) for field, value in recipe.items() if value == "missing" and rule_of(field) in RULES]
    problem = without(problem, *missing)
    for field in (field for field in _CHANGES if field in recipe and rule_of(field) not in missing):
        problem = replace(problem, **_CHANGES[field](problem, recipe[field]))
    return problem


def rule_of(field: str) -> str:
    """The rule that a field changes; the field itself where there is none."""
    return "rotary" if field.startswith("rotary") else NAMED.get(field, field)


Fields = dict[str, Any]  # the fields of a Problem that change


def _causal(p: Problem, how: str) -> Fields:
    if how in ("first corner", "last corner"):
        return {"query_offset": np.full_like(p.query_offset, 0 if how == "first corner" else p.keys - p.queries)}
    if how == "clamped":
        return {"query_offset": np.maximum(p.query_offset, 0)}
    left, right = p.window
    if how in ("strict", "ahead"):
        right = {"strict": -1, "ahead": 1}[how] if right is None else min(right, {"strict": -1, "ahead": 1}[how])
    return {"causal": how == "strict", "window": (left, right)}  # what is inverted has no rule


def _window(p: Problem, how: Any) -> Fields:
    left, right = p.window
    if isinstance(how, tuple):
        return {"window": tuple(None if side is None else side + by for side, by in zip(p.window, how, strict=True))}
    wide = 0 if left is None else left
    sides = {"both sides": (left, left), "both sides of W": (wide + 1, wide + 1), "right width": (right, right)}
    sides |= {"left only": (left, 0), "open": (left, None), "before itself": (wide + 1, -1)}
    half = (wide + 1) // 2
    sides |= {"half": (half, half), "half, down": (wide // 2, wide // 2), "half of the left": (half, right)}
    free = how in ("both sides", "both sides of W", "open", "half", "half, down")
    return {"window": sides.get(how, p.window), "causal": p.causal and not free}


def _mask(p: Problem, how: str) -> Fields:
    assert p.mask is not None
    if how == "tiled":
        batch, head = np.indices((p.batch, p.heads))
        return {"mask": p.mask[(batch * p.heads + head) % p.batch, head]}
    return {"mask": p.mask.swapaxes(-1, -2) if how == "transposed" else ~p.mask}


def _padding(p: Problem, how: str) -> Fields:
    lengths = p.kv_lengths
    assert lengths is not None
    if how in ("shortest", "longest"):
        return {"kv_lengths": np.full_like(lengths, lengths.min() if how == "shortest" else lengths.max())}
    kept = lengths if how == "both" else None  # the others have no rule
    return {"kv_lengths": kept, "query_lengths": lengths if how in ("queries", "both") else p.query_lengths}


def _shifted(p: Problem, by: int) -> Fields:
    """Lengths off by one; beside padding that is ignored there are none."""
    return {} if p.kv_lengths is None else {"kv_lengths": np.clip(p.kv_lengths + by, 0, p.keys)}


def _bias(p: Problem, how: str) -> Fields:
    assert p.bias is not None
    return {"bias": p.bias.swapaxes(-1, -2) if how == "transposed" else p.bias}


def _slopes(p: Problem, how: str) -> Fields:
    right = p.alibi_slopes
    assert right is not None
    every = {"reversed": right[::-1], "next head": np.roll(right, -1), "squared": right**2}
    below = 1 << (max(1, p.heads).bit_length() - 1)  # the power of two below the heads, and every other one above
    some, more = (2.0 ** (-8 * np.arange(1, many + 1) / many) for many in (below, 2 * below))
    every["of a power of two"] = np.concatenate([some, more[::2]])[: p.heads]
    every["not interleaved"] = 2.0 ** (-8 * np.arange(1, p.heads + 1) / p.heads)
    return {"alibi_slopes": every[how]}


def _sinks(p: Problem, how: str) -> Fields:
    assert p.sinks is not None
    every = {"exp": np.exp(p.sinks), "log": np.log(p.sinks), "scaled": p.sinks * p.scale}
    return {"sinks": every.get(how, p.sinks)}


_CHANGES: dict[str, Callable[[Problem, Any], Fields]] = {
    "scale": lambda p, scale: {"scale": np.full_like(p.scale, scale)},
    "bias": _bias,
    "alibi_slopes": _slopes,
    "causal": _causal,
    "window": _window,
    "tile": lambda p, tile: {"causal": p.causal and not tile[0].startswith(("diagonal", "local"))},
    "mask": _mask,
    "padding": _padding,
    "padding_shift": _shifted,
    "sinks": _sinks,
}
SCORING = frozenset({"scale", "softcap", "bias", "alibi", "alibi_slopes", "spans", "scaling"})  # fields of the scores
SEEING = frozenset({  # the fields that change what is seen
    "causal", "window", "chunk", "mask", "padding", "padding_shift", "query_padding", "segments", "joined", "tile",
    "key_tail", "spans", "bias", "cache",
})  # fmt: skip


def selected(problem: Problem, selection: Selection, dtype: Any = np.float64) -> Block:
    """The rules of some heads and queries, as the definition reads them."""
    fields: Fields = {}
    for name, axes in FIELDS.items():
        x = getattr(problem, name)
        for axis, places in (("queries", selection.rows), ("heads", selection.heads)):
            if isinstance(x, np.ndarray) and axis in axes and len(places) < x.shape[axes.index(axis)]:
                x = x.take(places, axes.index(axis))
        fields[name] = x
    part = replace(problem, heads=len(selection.heads), rows=range(len(selection.rows)), **fields)
    rows, lengths = np.array(selection.rows, dtype=np.int64)[:, None], problem.query_lengths
    positions = rows + problem.query_offset[:, None, None, None]
    there = None if lengths is None else rows < lengths[:, None, None, None]
    block = block_of(part, everything(part), np.zeros(0, dtype))
    left, right = problem.reach
    return replace(block, positions=positions, left=left, right=right, queries_there=there)


def visible(problem: Problem, recipe: Recipe, selection: Selection) -> Array:
    """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
    ruled = changed_rules(problem, recipe)
    every = [ruled]
    if recipe["joined"] == "or":
        rules = {name for names in _MASKS for name in names}
        every = [without(ruled, *(rules - set(names))) for names in masks(ruled)] or every
    blocks = [selected(each, selection) for each in every]
    ones = np.ones((problem.batch, 1, len(selection.rows), problem.keys), dtype=bool)
    seen = [ones if (some := visibility.visible(block)) is None else ones & some for block in blocks]
    for field in recipe.keys() & _BY_POSITION.keys():
        extra = _BY_POSITION[field](blocks[0], recipe[field], problem)
        seen = [each & extra for each in seen]
    return reduce(np.logical_or, seen)


# ── what the rules cannot say: which keys are seen, by position ──


def _of_padding(x: Block, how: str, p: Problem) -> Array | bool:
    assert p.kv_lengths is not None
    lengths = p.kv_lengths[:, None, None, None]
    return {"inverted": x.places >= lengths, "left": x.places >= p.keys - lengths}.get(how, True)


def _of_tile(x: Block, tile: tuple[str, int], _: Problem) -> Array | bool:
    what, block = tile
    seen: Any = True
    if what in ("diagonal seen", "local indices"):
        seen = x.places // block <= x.positions // block
    if what == "diagonal skipped":
        seen = x.places // block < x.positions // block
    if what.startswith("local"):
        seen = seen & (x.places % block <= x.positions % block)
    return x.places >= block if what == "first missing" else seen


_BY_POSITION: dict[str, Callable[[Block, Any, Problem], Any]] = {
    "causal": lambda x, how, _: {"inverted": x.places > x.positions, "upper": x.places >= x.positions}.get(how, True),
    "window": lambda x, how, _: how != "without itself" or x.places != x.positions,
    "chunk": lambda x, size, _: x.positions // size == x.places // size,
    "padding": _of_padding,
    "cache": lambda x, how, p: x.places >= p.keys - p.queries if how == "ignored" else True,
    "tile": _of_tile,
    "key_tail": lambda x, tail, p: tail[0] != "skipped" or x.places < p.keys // tail[1] * tail[1],
}
