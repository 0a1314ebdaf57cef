"""Applies a recipe's changes before the scores: to queries, keys and values, and to the rules.

A layer's projections come first, then one change after the other. Rules change by a Problem's fields or, where no rule
can express it, by visibility; "missing" leaves a rule out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.axes import Array, join_heads, split_heads
from clearhead.core.block import Block, block_of, everything
from clearhead.core.definition import over_heads
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS, RULES, take
from clearhead.diagnosing.recipe import Diagnosed, Recipe, Rows

_CACHE_BYTES = 2**26  # the most bytes of shared intermediates
Heads = tuple[Array, Array, Array]  # q, k and v, (batch, heads, tokens, width)


class Workings:
    """Computes recipes on the same inputs; `precision` is the dtype of a plain run, None the truth in float64.

    With `rounded_sums`, the rows' log-sum-exps are off by rounding. Steps in `given` are taken from there, for all
    rows, instead of computed. Intermediates that several recipes share are computed once.
    """

    def __init__(
        self,
        inputs: Diagnosed,
        precision: np.dtype[Any] | None = None,
        *,
        rounded_sums: bool = False,
        given: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        self.inputs, self.problem, self.given = inputs, inputs.problem, given
        self.precision, self.rounded_sums = precision, rounded_sums
        self.dtype = np.dtype(np.float64 if precision in (None, np.float64) else np.float32)
        self._made: dict[Any, Any] = {}
        self._bytes = 0  # of `_made`

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a shared intermediate, computed when first needed; if they exceed _CACHE_BYTES, all are dropped."""
        if key not in self._made:
            made = make()
            self._bytes += sum(x.nbytes for x in made) if isinstance(made, tuple) else made.nbytes
            if self._bytes > _CACHE_BYTES:
                self._made, self._bytes = {}, 0
            self._made[key] = made
        return self._made[key]

    def rounded(self, x: Array) -> Array:
        """Round a step's result to the dtype of the plain run."""
        if self.precision is None or self.precision.itemsize > 2:
            return x.astype(self.dtype, copy=False)
        return x.astype(self.precision).astype(np.float32)

    def operands(self, recipe: Recipe) -> Heads:
        """The arrays that serve as q, k and v, each (batch, its heads, tokens, width)."""
        key = recipe.key(OPERANDS)
        made: Heads = self.once(("operands", key), lambda: self._operands(recipe))
        return made

    def _operands(self, recipe: Recipe) -> Heads:
        heads = self._projected(recipe)
        for field in ("packing", "split", "rotary", "groups", "used", "product"):  # in the order of the computation
            if field == "rotary":
                heads = self._rotated(recipe, heads)
            elif recipe[field] is not None:
                heads = _CHANGES[field](heads, recipe[field], self.problem)
        q, k, v = (self.given.get(name, x) for name, x in zip("qkv", heads, strict=True))
        return q, k, v

    def _projected(self, recipe: Recipe) -> Heads:
        """Project X·W + b and split heads; or take the arrays as they were given."""
        names = recipe["order"] or "qkv"  # the arrays, or a layer's matrices, that serve as q, k and v
        given, layer = {name: getattr(self.inputs, name) for name in "qkv"}, self.inputs.layer
        if layer is None:
            q, k, v = (given[name].astype(self.dtype, copy=False) for name in names)
            return q, k, v
        sources = layer.x, layer.context, layer.context
        products = (self._product(recipe, name, x) for name, x in zip(names, sources, strict=True))
        q, k, v = (split_heads(x, given[name].shape[1]) for x, name in zip(products, names, strict=True))
        return q, k, v

    def _product(self, recipe: Recipe, name: str, tokens: Array) -> Array:
        """Project tokens by W and b of `name`: (batch, tokens, heads·width)."""
        layer, turned = self.inputs.layer, recipe[f"w_{name}"] is not None
        assert layer is not None

        def product() -> Array:
            w = layer.w[name].astype(self.dtype)
            return self.rounded(tokens.astype(self.dtype) @ (w.T if turned else w))

        result: Array = self.once((id(tokens), name, turned), product)
        if name in layer.b and recipe[f"b_{name}"] is None:
            result = self.rounded(result + layer.b[name].astype(self.dtype))
        return result

    def _rotated(self, recipe: Recipe, heads: Heads) -> Heads:
        """Rotate queries and keys by their positions, if the inputs have rotary positions."""
        if self.inputs.rotary is None or recipe["rotary"] == "missing":
            return heads
        turned = recipe["rotary_on"] or "qk"
        q, k, v = (self._turned(recipe, x, role) if role in turned else x for role, x in zip("qkv", heads, strict=True))
        return q, k, v

    def _turned(self, recipe: Recipe, x: Array, role: str) -> Array:
        assert self.inputs.rotary is not None
        (base, neighbours), half = self.inputs.rotary, x.shape[-1] // 2
        if x.shape[-1] % 2:
            return x
        places = np.arange(x.shape[2])[None, :, None]
        if role == "q":
            offset = 0 if recipe["rotary_from"] == "zero" else self.problem.query_offset[:, None, None]
            places = places + offset + (recipe["rotary_shift"] or 0)
        frequencies = base ** (-np.arange(half) / max(1, half))
        if self.precision is not None:  # most libraries compute angles in float32, which is no mistake
            places, frequencies = places.astype(np.float32), frequencies.astype(np.float32)
        angles = places * (frequencies * {"backwards": -1, "twice": 2}.get(recipe["rotary"], 1))
        cos, sin = (turn(angles)[:, None].astype(x.dtype) for turn in (np.cos, np.sin))
        by_two = neighbours != (recipe["rotary"] == "pairing")
        first, second = (np.s_[..., ::2], np.s_[..., 1::2]) if by_two else (np.s_[..., :half], np.s_[..., half:])
        result = x.copy()
        result[first], result[second] = x[first] * cos - x[second] * sin, x[first] * sin + x[second] * cos
        return self.rounded(result)


# ── the changes of queries, keys and values, by the field's value ──


def _repacked(heads: Heads, packing: tuple[int, int], _: Problem) -> Heads:
    """Read packed columns by a layout other than the one they were packed in.

    packing   the axis of Q, K and V in (batch, tokens, …) when packed, and when read: 2 for columns [Q|K|V], 3 for
              (heads, 3, d), 4 for (heads, d, 3)
    """
    written, read = packing
    packed = np.stack([x.swapaxes(1, 2) for x in heads], axis=written)
    sizes = np.insert(heads[0].shape[1::2], read - 2, 3)
    q, k, v = np.moveaxis(packed.reshape(*packed.shape[:2], *sizes), read, 0).swapaxes(2, 3)
    return q, k, v


def _resplit(heads: Heads, split: str, _: Problem) -> Heads:
    """Split joined heads wrongly: by a reshape without the transpose, interleaved, or (q and k) not at all."""

    def again(x: Array) -> Array:
        tokens, (batch, many, length, width) = join_heads(x), x.shape
        if split == "one":
            return np.broadcast_to(tokens[:, None], (batch, many, length, many * width))
        if split == "flat":
            return np.asarray(tokens.reshape(x.shape))
        return np.ascontiguousarray(np.moveaxis(tokens.reshape(batch, length, width, many), -1, 1))

    q, k, v = heads
    return again(q), again(k), v if split == "one" else again(v)


def _grouped(heads: Heads, groups: str, problem: Problem) -> Heads:
    """Give query head h the key head h % kv_heads, or all query heads the first key head."""
    every = np.arange(problem.heads) % heads[1].shape[1]
    chosen = every if groups == "tile" else 0 * every
    return heads[0], heads[1][:, chosen], heads[2][:, chosen]


def _mixed_up(heads: Heads, used: str, problem: Problem) -> Heads:
    """Permute queries, keys and values, as the letters in `used` say."""
    by_letter = dict(zip("qkv", heads, strict=True))
    queries, keys, values = (by_letter[letter] for letter in used)
    return over_heads(queries, problem.heads), keys, values


_CHANGES: dict[str, Callable[[Heads, Any, Problem], Heads]] = {
    "packing": _repacked,
    "split": _resplit,
    "groups": _grouped,
    "used": _mixed_up,
    "product": lambda heads, *_: (heads[0], heads[1].swapaxes(-1, -2), heads[2]),  # Q·K
}
_OF_LAYER = ("order", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
_ROTARY = ("rotary", "rotary_on", "rotary_shift", "rotary_from")
OPERANDS = frozenset((*_OF_LAYER, *_ROTARY, *_CHANGES))  # the fields that change q, k and v


# ── the changes of rules ──

# The rules that hide keys, grouped as people write them in one mask; a bias and spans hide keys through scores.
MASKS = ("causal", "window"), ("mask",), ("kv_lengths",), ("query_lengths",), ("query_segments", "kv_segments")


def without(problem: Problem, *names: str) -> Problem:
    """The problem without these rules."""
    unused: dict[str, Any] = {field: RULES[name].unused for name in names for field in RULES[name].fields}
    return replace(problem, **unused)


def changed_rules(problem: Problem, recipe: Recipe) -> Problem:
    """Apply the recipe's changes of rules to a problem."""
    problem = without(problem, *(field for field, value in recipe.items() if value == "missing" and field in RULES))
    for field, change in _OF_RULES.items():
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
    return {"causal": how == "strict", "window": (left, right)}  # no rule can express "inverted": see _BY_POSITION


def _window(p: Problem, how: Any) -> Fields:
    """Set each side by a name, or widen it by a number of keys."""
    if how == "without itself":  # no rule can express it: see _BY_POSITION
        return {}
    left, right = p.window
    wide = -9 if left is None else left  # negative, so that derived sides are refused below
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
    return {"kv_lengths": None, "query_lengths": lengths if how == "queries" else p.query_lengths}


def _slopes(p: Problem, how: str) -> Fields:
    right = p.alibi_slopes
    assert right is not None
    every = {"reversed": right[::-1], "next head": np.roll(right, -1), "squared": right**2}
    every |= {"added": -right, "scaled": right * p.scale}
    below = 1 << (max(1, p.heads).bit_length() - 1)  # the power of two below: its slopes, then some of the next
    some, more = (2.0 ** (-8 * np.arange(1, many + 1) / many) for many in (below, 2 * below))
    every["of a power of two"] = np.concatenate([some, more[::2]])[: p.heads]
    every["not interleaved"] = 2.0 ** (-8 * np.arange(1, p.heads + 1) / p.heads)
    return {"alibi_slopes": every[how]}


def _sinks(p: Problem, how: str) -> Fields:
    assert p.sinks is not None
    every = {"exp": np.exp(p.sinks), "log": np.log(p.sinks), "scaled": p.sinks * p.scale}
    return {"sinks": every.get(how, p.sinks)}


_OF_RULES: dict[str, Callable[[Problem, Any], Fields]] = {
    "scale": lambda p, scale: {"scale": np.full_like(p.scale, scale)},
    "bias": lambda p, how: {"bias": p.bias if p.bias is None or how != "transposed" else p.bias.swapaxes(-1, -2)},
    "alibi_slopes": _slopes,
    "causal": _causal,
    "window": _window,
    "mask": _mask,
    "kv_lengths": _lengths,
    "sinks": _sinks,
}
SCORING = frozenset({"scale", "softcap", "bias", "alibi_slopes", "spans"})  # the fields that change scores
SEEING = frozenset({  # the fields that change which keys are seen
    "causal", "window", "mask", "kv_lengths", "query_lengths", "query_segments", "joined", "spans", "bias",
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
    by_rules = (True if (some := visibility.visible(block)) is None else some for block in blocks)
    seen = np.ones((problem.batch, 1, len(rows), problem.keys), dtype=bool) & reduce(np.logical_or, by_rules)
    for field in recipe.keys() & _BY_POSITION.keys():
        seen = seen & _BY_POSITION[field](blocks[0], recipe[field], problem)
    return seen


# ── changes of which keys are seen that no rule can express, by position ──


def _of_lengths(x: Block, how: str | int, p: Problem) -> Array | bool:
    assert p.kv_lengths is not None
    lengths = p.kv_lengths[:, None, None, None]
    return {"inverted": x.places >= lengths, "left": x.places >= p.keys - lengths}.get(str(how), True)


_BY_POSITION: dict[str, Callable[[Block, Any, Problem], Any]] = {
    "causal": lambda x, how, _: {"inverted": x.places > x.positions, "upper": x.places >= x.positions}.get(how, True),
    "window": lambda x, how, _: how != "without itself" or x.places != x.positions,
    "kv_lengths": _of_lengths,
}
