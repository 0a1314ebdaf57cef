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
from clearhead.core.rules import FIELDS, RULES, take
from clearhead.diagnosing.recipe import Recipe, Rows

# The rules that hide keys, those together that people write as one mask; a bias and spans hide keys as scores.
MASKS = ("causal", "window"), ("mask",), ("kv_lengths",), ("query_lengths",), ("query_segments", "kv_segments")


def without(problem: Problem, *names: str) -> Problem:
    """The problem without these rules."""
    unused: dict[str, Any] = {field: RULES[name].unused for name in names for field in RULES[name].fields}
    return replace(problem, **unused)


def changed_rules(problem: Problem, recipe: Recipe) -> Problem:
    """The problem with the recipe's rules."""
    problem = without(problem, *(field for field, value in recipe.items() if value == "missing" and field in RULES))
    for field, change in _CHANGES.items():
        if recipe[field] not in (None, "missing"):
            problem = replace(problem, **change(problem, recipe[field]))
    return problem


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
    """Each side by its name, or by how many keys it is wider."""
    if how == "without itself":  # no rule
        return {}
    left, right = p.window
    wide = -9 if left is None else left  # without a left side its half is no side
    sides = {"left": left, "W": wide + 1, "half": (wide + 1) // 2, "half, down": wide // 2, "right": right}
    sides |= {"0": 0, "open": None, "before": -1}
    pairs = zip(p.window, how, strict=True)
    window = tuple(sides[by] if isinstance(by, str) else None if side is None else side + by for side, by in pairs)
    if window == (None, None) or ("before" not in how and any(side is not None and side < 0 for side in window)):
        raise ValueError("no window at all is another mistake")
    return {"window": window}


def _mask(p: Problem, how: str) -> Fields:
    assert p.mask is not None
    if how == "tiled":
        batch, head = np.indices((p.batch, p.heads))
        return {"mask": p.mask[(batch * p.heads + head) % p.batch, head]}
    return {"mask": p.mask.swapaxes(-1, -2) if how == "transposed" else ~p.mask}


def _lengths(p: Problem, how: str | int) -> Fields:
    lengths = p.kv_lengths
    assert lengths is not None
    if isinstance(how, int):
        return {"kv_lengths": np.clip(lengths + how, 0, p.keys)}
    if how in ("shortest", "longest"):
        return {"kv_lengths": np.full_like(lengths, lengths.min() if how == "shortest" else lengths.max())}
    kept = lengths if how == "both" else None  # the others have no rule
    return {"kv_lengths": kept, "query_lengths": lengths if how in ("queries", "both") else p.query_lengths}


def _slopes(p: Problem, how: str) -> Fields:
    right = p.alibi_slopes
    assert right is not None
    every = {"reversed": right[::-1], "next head": np.roll(right, -1), "squared": right**2}
    every |= {"added": -right, "scaled": right * p.scale}
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
    "bias": lambda p, how: {"bias": p.bias if p.bias is None or how != "transposed" else p.bias.swapaxes(-1, -2)},
    "alibi_slopes": _slopes,
    "causal": _causal,
    "window": _window,
    "tile": lambda p, tile: {"causal": p.causal and not tile[0].startswith(("diagonal", "local"))},
    "mask": _mask,
    "kv_lengths": _lengths,
    "sinks": _sinks,
}
SCORING = frozenset({"scale", "softcap", "bias", "alibi_slopes", "spans", "scaling"})  # fields of the scores
SEEING = frozenset({  # the fields that change what is seen
    "causal", "window", "chunk", "mask", "kv_lengths", "query_lengths", "query_segments", "joined", "tile",
    "key_tail", "spans", "bias", "cache",
})  # fmt: skip


def selected(problem: Problem, rows: Rows, dtype: Any = np.float64) -> Block:
    """The rules of some queries, as the definition reads them."""
    chosen = {"queries": np.array(rows)} if len(rows) < problem.queries else {}
    fields = take({name: getattr(problem, name) for name in FIELDS}, chosen)
    part = replace(problem, rows=range(len(rows)), **fields)
    places, lengths = np.array(rows, dtype=np.int64)[:, None], problem.query_lengths
    there = None if lengths is None else places < lengths[:, None, None, None]
    (left, right), positions = problem.reach, places + problem.query_offset[:, None, None, None]
    block = block_of(part, everything(part), np.zeros(0, dtype))
    return replace(block, positions=positions, left=left, right=right, queries_there=there)


def visible(problem: Problem, recipe: Recipe, rows: Rows) -> Array:
    """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
    ruled = changed_rules(problem, recipe)
    every = [ruled]
    if recipe["joined"] == "or":
        rules = {name for names in MASKS for name in names}
        used = [names for names in MASKS if any(map(ruled.uses, names))]
        every = [without(ruled, *(rules - set(names))) for names in used] or every
    blocks = [selected(each, rows) for each in every]
    ones = np.ones((problem.batch, 1, len(rows), problem.keys), dtype=bool)
    seen = [ones if (some := visibility.visible(block)) is None else ones & some for block in blocks]
    for field in recipe.keys() & _BY_POSITION.keys():
        extra = _BY_POSITION[field](blocks[0], recipe[field], problem)
        seen = [each & extra for each in seen]
    return reduce(np.logical_or, seen)


# ── what the rules cannot say: which keys are seen, by position ──


def _of_lengths(x: Block, how: str | int, p: Problem) -> Array | bool:
    assert p.kv_lengths is not None
    lengths = p.kv_lengths[:, None, None, None]
    return {"inverted": x.places >= lengths, "left": x.places >= p.keys - lengths}.get(str(how), True)


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
    "kv_lengths": _of_lengths,
    "cache": lambda x, how, p: x.places >= p.keys - p.queries if how == "ignored" else True,
    "tile": _of_tile,
    "key_tail": lambda x, tail, p: tail[0] != "skipped" or x.places < p.keys // tail[1] * tail[1],
}
