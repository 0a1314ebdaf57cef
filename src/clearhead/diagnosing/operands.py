"""Q, K and V as a recipe makes them, right or wrong: projections, heads, rotary positions, the cache and its tiles."""

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from clearhead.core.axes import Array, group_size, join_heads, split_heads
from clearhead.core.definition import mix, split
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Recipe, between
from clearhead.diagnosing.softmaxes import eps

_CACHE_BYTES = 2**26  # of shared intermediates
_LONG = 2**20  # the most numbers in an input that is converted as a whole, and kept; longer ones go head by head
PROJECTING = (*between("source", "rotary_from"), "w_v", "b_v", "w_o")  # the fields that change what is projected
PROJECTED = attrgetter(*PROJECTING)


class Operands:
    """Computes the operands of recipes; `precision` is the dtype of a plain run, None the truth in float64.

    `perturbed` is the seed of another plain run, whose queries and keys are moved within the rounding of its dtype, or
    of float32 where that is wider.
    """

    def __init__(self, inputs: Diagnosed, precision: np.dtype[Any] | None = None, perturbed: int | None = None) -> None:
        self.inputs, self.problem = inputs, inputs.problem
        self.precision, self.perturbed = precision, perturbed
        self.dtype = np.dtype(np.float64 if precision in (None, np.float64) else np.float32)
        self._memo: dict[Any, Array] = {}
        self._droppable: deque[Any] = deque()  # the keys of those that may be dropped, the oldest first
        self._bytes = 0  # of these

    def once(self, key: Any, make: Callable[[], Array], *, keep: bool = False) -> Array:
        """A shared intermediate, computed when it is first needed; the oldest are dropped when the cache is full.

        keep   never drop it: a projection or head that nearly every recipe needs
        """
        array = self._memo.get(key)
        if array is None:
            array = self._memo[key] = make()
            if not keep:
                self._droppable.append(key)
                self._bytes += array.nbytes
            while self._bytes > _CACHE_BYTES and len(self._droppable) > 1:
                self._bytes -= self._memo.pop(self._droppable.popleft()).nbytes
        return array

    def rounded(self, x: Array) -> Array:
        """A step's result, rounded to the dtype of the plain run."""
        if self.precision is None or self.precision.itemsize > 2:
            return x
        return x.astype(self.precision).astype(np.float32)

    @property
    def long(self) -> bool:
        """Are the inputs so long that heads are converted one by one where they are used, to save memory?"""
        plain = self.inputs.layer is None and self.inputs.rotary is None and self.perturbed is None
        return plain and max(self.inputs.q.size, self.inputs.k.size) > _LONG

    def operand(self, recipe: Recipe, role: str) -> Array:
        """What serves as "q", "k" or "v", as (batch, its heads, tokens, width)."""
        return self.held(recipe, self._projection(recipe, role), role)

    def served(self, recipe: Recipe, role: str, heads: tuple[int, ...]) -> Array:
        """The same for each of these query heads, (batch, heads, tokens, width)."""
        return self.held(recipe, self._projections(recipe, role, heads), role)

    def _projections(self, recipe: Recipe, role: str, heads: tuple[int, ...]) -> Array:
        """The same before a cache or tiles hold it."""
        name = recipe.order["qkv".index(role)]
        kv = getattr(self.inputs, name).shape[1]
        if kv == self.problem.heads:
            chosen = list(heads)
        else:
            group = max(1, group_size(self.problem.heads, kv))
            by_groups = {"repeat": [h // group for h in heads], "tile": [h % kv for h in heads]}
            chosen = by_groups.get(recipe.groups, [0] * len(heads))
        if self.long and len(chosen) < kv:
            each = [self._one_head(recipe, role, head) for head in chosen]
            return each[0] if len(each) == 1 else np.concatenate(each, axis=1)
        x = self._projection(recipe, role)
        if chosen == list(range(kv)):
            return x
        return x[:, chosen[0] : chosen[0] + 1] if len(chosen) == 1 else x[:, chosen]

    def _one_head(self, recipe: Recipe, role: str, head: int) -> Array:
        """One head of a projection of long inputs: only this one is converted, and kept where its split is wrong."""
        one = slice(head, head + 1)
        if recipe.split == "heads":
            return self._operand(recipe, role, one)
        return self.once(("head", head, role, PROJECTED(recipe)), lambda: self._operand(recipe, role, one))

    def held(self, recipe: Recipe, x: Array, role: str) -> Array:
        """Keys or values, (batch, heads, keys, width), as a faulty cache or stale tiles hold them; else x itself."""
        if role == "q":
            return x
        kind, new = recipe.cache, x.shape[2] - self.problem.queries  # the first new key
        zero = {"newest empty": "kv", "newest keys empty": "k", "newest values empty": "v"}.get(kind, "")
        if role in zero:
            return np.concatenate([x[:, :, :new], np.zeros_like(x[:, :, new:])], axis=2)
        if kind == "another batch":
            return np.concatenate([np.roll(x[:, :, :new], 1, axis=0), x[:, :, new:]], axis=2)
        if kind == "newest early":  # one slot before its own, which stays empty
            return np.concatenate([x[:, :, : new - 1], x[:, :, new:], np.zeros_like(x[:, :, :1])], axis=2)
        (what, block), name = recipe.tile, "keys" if role == "k" else "values"
        if what not in (f"stale {name}", f"first {name}"):
            return x
        keys = np.arange(x.shape[2])
        source = keys % block if what.startswith("first") else np.where(keys < block, keys, keys - block)
        return x[:, :, source]

    def _projection(self, recipe: Recipe, role: str) -> Array:
        """What serves as "q", "k" or "v" before a cache or tiles hold it: computed for all heads, and once."""
        plain = self.inputs.layer is None and self.inputs.rotary is None and recipe.split == "heads"  # as it was given
        if plain and self.long:
            return self._operand(recipe, role)
        name, fields = recipe.order["qkv".index(role)], PROJECTED(recipe)
        often = plain or fields == PROJECTED(RIGHT) or self.inputs.layer is not None
        key = (name, role if self.perturbed is not None else "") if plain else (role, fields)
        return self.once(key, lambda: self._operand(recipe, role), keep=often)

    def _operand(self, recipe: Recipe, role: str, chosen: slice = slice(None)) -> Array:
        """The projection of the chosen heads, computed."""
        name = recipe.order["qkv".index(role)]
        right: Array = getattr(self.inputs, name)
        heads = right.shape[1]
        if self.inputs.layer is None and recipe.split == "heads":
            return self._turned(recipe, np.asarray(right[:, chosen], self.dtype), role)
        if self.long and recipe.split in ("flat", "interleaved") and chosen != slice(None):
            return resplit(right, recipe.split, chosen.start).astype(self.dtype)
        tokens = self._tokens(recipe, role, name, right)
        batch, length, width = tokens.shape
        if recipe.split == "one" and role != "v":
            x = np.broadcast_to(tokens[:, None], (batch, heads, length, width))
        elif recipe.split in ("heads", "one"):
            x = split_heads(tokens, heads)
        elif recipe.split == "flat":
            x = tokens.reshape(batch, heads, length, width // heads)
        else:
            x = tokens.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2)
        return self._turned(recipe, np.asarray(x[:, chosen], self.dtype), role)

    def _turned(self, recipe: Recipe, x: Array, role: str) -> Array:
        """Heads with their rotary positions, where they have any; moved a little in a perturbed run."""
        turns = self.inputs.rotary is not None and recipe.rotary != "missing" and role in recipe.rotary_on
        if turns and x.shape[-1] % 2 == 0:
            x = self.rounded(self._rotated(recipe, x, shift=role == "q"))
        if self.perturbed is not None and role != "v":
            noise = np.random.default_rng(self.perturbed).uniform(-1, 1, x.shape)
            narrow = self.precision if self.precision is not None and self.precision.itemsize == 2 else None
            size = eps(narrow or np.dtype(np.float32))
            if narrow is None:  # what one sum after the other may add to the rounding of d_k products
                size *= max(1.0, x.shape[-1] ** 0.5 / 4)
            x = (x * (1 + size * noise)).astype(self.dtype)
        return np.ascontiguousarray(x)

    def _tokens(self, recipe: Recipe, role: str, name: str, right: Array) -> Array:
        """(batch, tokens, heads·width): X·W + b, or the given heads side by side."""
        layer = self.inputs.layer
        if layer is None:
            return np.asarray(join_heads(right))  # still in the dtype of the inputs, which takes less room
        if recipe.packing == "thirds":
            result = self._projected(recipe, role, name)
        else:
            thirds = [self._projected(recipe, "q", each) for each in "qkv"]
            result = unpacked(recipe.packing, thirds, self.problem.heads)["qkv".index(name)]
        if role == "v" and recipe.w_o == "on values":
            result = self.rounded(result @ self.w_o(recipe))
        return result

    def _projected(self, recipe: Recipe, role: str, name: str) -> Array:
        """What W and b of `name` make of the tokens that `role` reads."""
        layer = self.inputs.layer
        assert layer is not None
        first, other = (layer.context, layer.x) if recipe.source == "swapped" else (layer.x, layer.context)
        x = first if role == "q" or recipe.source == "x only" else other
        normal, turned = recipe.source == "normalised", getattr(recipe, f"w_{name}") == "transposed"

        def product() -> Array:
            read, w = x.astype(self.dtype), layer.w[name].astype(self.dtype)
            return self.rounded((normalised(read) if normal else read) @ (w.T if turned else w))

        result = self.once((id(x), normal, name, turned), product, keep=True)
        if name in layer.b and getattr(recipe, f"b_{name}") == "given":
            result = self.rounded(result + layer.b[name].astype(self.dtype))
        return result

    def w_o(self, recipe: Recipe) -> Array:
        """The layer's output projection: also transposed, or with the columns of each head for its own rows only."""
        layer, heads = self.inputs.layer, self.problem.heads
        assert layer is not None
        w = self.once("W^O", lambda: layer.w["o"].astype(self.dtype), keep=True)
        if recipe.w_o == "per head":
            width = len(w) // heads
            w = w * np.kron(np.eye(heads, dtype=self.dtype), np.ones((width, width), self.dtype))
        return w.T if recipe.w_o == "transposed" else w

    def _rotated(self, recipe: Recipe, x: Array, *, shift: bool) -> Array:
        assert self.inputs.rotary is not None
        base, interleaved = self.inputs.rotary
        part = int(x.shape[-1] * recipe.rotary_part) // 2 * 2
        half = part // 2
        places = np.arange(x.shape[2])[None, :]
        if shift:
            offset = self.problem.query_offset[:, None] if recipe.rotary_from == "offset" else 0
            places = places + offset + recipe.rotary_shift
        places = places[..., None]
        frequencies = base ** (-np.arange(half) / max(1, half))
        if self.precision is not None:  # no code is told off for angles in float32, as most libraries have them
            places, frequencies = places.astype(np.float32), frequencies.astype(np.float32)
        angles = places * (-frequencies if recipe.rotary == "backwards" else frequencies)
        neighbours = interleaved != (recipe.rotary in ("pairing", "mixed, pairing"))
        turned, rest = x[..., :part], x[..., part:]
        if neighbours:
            a, b = turned[..., 0::2], turned[..., 1::2]
            other = np.stack([-b, a], axis=-1).reshape(turned.shape)
        else:
            other = np.concatenate([-turned[..., half:], turned[..., :half]], axis=-1)
        repeated = neighbours != recipe.rotary.startswith("mixed")
        angles = np.repeat(angles, 2, axis=-1) if repeated else np.concatenate([angles, angles], axis=-1)
        cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
        return np.concatenate([turned * cos + other * sin, rest], axis=-1)


def resplit(x: Array, split: str, head: int) -> Array:
    """One head, (batch, 1, tokens, width), of (batch, heads, tokens, width) joined and then split in a wrong way."""
    heads, tokens, width = x.shape[1:]
    if split == "flat":  # rows of width numbers, all heads of a token and then the next token
        rows = head * tokens + np.arange(tokens)
        return x[:, None, rows % heads, rows // heads]
    columns = np.arange(width) * heads + head
    return np.moveaxis(x[:, columns // width, :, columns % width], 0, -1)[:, None]


def normalised(x: Array) -> Array:
    """Layer norm without weights: mean 0 and variance 1 along the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + x.dtype.type(1e-5)))


def with_more(recipe: Recipe, result: Array, residual: Array) -> Array:
    """The result with the residual added, or normalised."""
    if recipe.added != "norm":
        result = result + residual
    return result if recipe.added == "residual" else normalised(result)


def unpacked(packing: str, thirds: list[Array], heads: int) -> list[Array]:
    """Q, K and V, (batch, tokens, heads·d), read from packed columns by another layout than they were packed in."""
    batch, length, width = thirds[0].shape
    d = width // heads
    axis, split = (3, (heads, 3, d)) if packing.endswith("per head") else (4, (heads, d, 3))
    if packing.startswith("read"):
        read = np.moveaxis(np.concatenate(thirds, axis=-1).reshape(batch, length, *split), axis, 0)
        return list(read.reshape(3, batch, length, width))
    each = [third.reshape(batch, length, heads, d) for third in thirds]
    return np.split(np.stack(each, axis=axis).reshape(batch, length, 3 * width), 3, axis=-1)


def weighted(weights: Array, values: Array) -> Array:
    """weights·values; a value of weight 0 is not read."""
    result = np.asarray(weights @ values)
    if not np.isfinite(result).all() and not np.isfinite(values).all():
        return np.asarray(mix(weights, split(values), lambda: weights == 0))
    return result


def take(x: Array, chosen: tuple[int, ...], axis: int) -> Array:
    """The chosen heads (axis 1) or rows (axis 2); the array itself where these are all."""
    return x if len(chosen) == x.shape[axis] else x.take(chosen, axis)
