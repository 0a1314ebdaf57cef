"""Queries, keys and values as a recipe has them: a layer's projections, then one change after the other."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.axes import Array, join_heads, split_heads
from clearhead.core.definition import over_heads
from clearhead.diagnosing.recipe import Diagnosed, Recipe

_CACHE_BYTES = 2**26  # of shared intermediates
Heads = tuple[Array, Array, Array]  # q, k and v, (batch, heads, tokens, width)


class Operands:
    """Computes the operands of recipes; `precision` is the dtype of a plain run, None the truth in float64.

    With `rounded_sums` its rows' log-sum-exps are off by rounding.
    """

    def __init__(
        self, inputs: Diagnosed, precision: np.dtype[Any] | None = None, *, rounded_sums: bool = False
    ) -> None:
        self.inputs, self.problem = inputs, inputs.problem
        self.precision, self.rounded_sums = precision, rounded_sums
        self.dtype = np.dtype(np.float64 if precision in (None, np.float64) else np.float32)
        self._made: dict[Any, Any] = {}
        self._bytes = 0  # of these

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A shared intermediate, computed when it is first needed; all are dropped where they become too many."""
        if key not in self._made:
            made = make()
            self._bytes += sum(x.nbytes for x in made) if isinstance(made, tuple) else made.nbytes
            if self._bytes > _CACHE_BYTES:
                self._made, self._bytes = {}, 0
            self._made[key] = made
        return self._made[key]

    def rounded(self, x: Array) -> Array:
        """A step's result, rounded to the dtype of the plain run."""
        if self.precision is None or self.precision.itemsize > 2:
            return x.astype(self.dtype, copy=False)
        return x.astype(self.precision).astype(np.float32)

    def operands(self, recipe: Recipe) -> Heads:
        """What serves as q, k and v, each (batch, its heads, tokens, width)."""
        key = recipe.key(FIELDS)
        made: Heads = self.once(("operands", key), lambda: self._operands(recipe))
        return made

    def _operands(self, recipe: Recipe) -> Heads:
        heads = self._projected(recipe)
        for field, change in BEFORE_ROTATION.items():
            if recipe[field] is not None:
                heads = change(heads, recipe[field], self)
        heads = self._rotated(recipe, heads)
        for field, change in AFTER_ROTATION.items():
            if recipe[field] is not None:
                heads = change(heads, recipe[field], self)
        return heads

    def _projected(self, recipe: Recipe) -> Heads:
        """X·W + b of each, its heads split; or the arrays as they were given."""
        names = recipe["order"] or "qkv"  # which array, or which of a layer's matrices, serves as each
        given, layer = {name: getattr(self.inputs, name) for name in "qkv"}, self.inputs.layer
        if layer is None:
            q, k, v = (given[name].astype(self.dtype, copy=False) for name in names)
            return q, k, v
        first, other = (layer.context, layer.x) if recipe["source"] == "swapped" else (layer.x, layer.context)
        sources = first, *(first if recipe["source"] == "x only" else other for _ in "kv")
        products = (self._product(recipe, name, x) for name, x in zip(names, sources, strict=True))
        q, k, v = (split_heads(x, given[name].shape[1]) for x, name in zip(products, names, strict=True))
        return q, k, v

    def _product(self, recipe: Recipe, name: str, tokens: Array) -> Array:
        """What W and b of `name` make of tokens, (batch, tokens, heads·width)."""
        layer, turned = self.inputs.layer, recipe[f"w_{name}"] is not None
        assert layer is not None

        def product() -> Array:
            w = layer.w[name].astype(self.dtype)
            return self.rounded(tokens.astype(self.dtype) @ (w.T if turned else w))

        result: Array = self.once((id(tokens), name, turned), product)
        if name in layer.b and recipe[f"b_{name}"] is None:
            result = self.rounded(result + layer.b[name].astype(self.dtype))
        return result

    def w_o(self, recipe: Recipe) -> Array:
        """The layer's output projection: also transposed, or with the columns of each head for its own rows only."""
        layer, heads = self.inputs.layer, self.problem.heads
        assert layer is not None
        w: Array = self.once("W^O", lambda: layer.w["o"].astype(self.dtype))
        if recipe["w_o"] == "per head":
            width = len(w) // heads
            w = w * np.kron(np.eye(heads, dtype=self.dtype), np.ones((width, width), self.dtype))
        return w.T if recipe["w_o"] == "transposed" else w

    def _rotated(self, recipe: Recipe, heads: Heads) -> Heads:
        """Queries and keys turned to their positions, where they have any."""
        if self.inputs.rotary is None or recipe["rotary"] == "missing":
            return heads
        turned = recipe["rotary_on"] or "qk"
        q, k, v = (self._turned(recipe, x, role) if role in turned else x for role, x in zip("qkv", heads, strict=True))
        return q, k, v

    def _turned(self, recipe: Recipe, x: Array, role: str) -> Array:
        if self.inputs.rotary is None or x.shape[-1] % 2:
            return x
        base, neighbours = self.inputs.rotary
        kind = recipe["rotary"] or ""
        half = int(x.shape[-1] * (recipe["rotary_part"] or 1)) // 2
        if not half:
            raise ValueError("a part without a pair of columns turns nothing")
        places = np.arange(x.shape[2])[None, :, None]
        if role == "q":
            offset = 0 if recipe["rotary_from"] == "zero" else self.problem.query_offset[:, None, None]
            places = places + offset + (recipe["rotary_shift"] or 0)
        frequencies = base ** (-np.arange(half) / max(1, half))
        if self.precision is not None:  # no code is told off for angles in float32, as most libraries have them
            places, frequencies = places.astype(np.float32), frequencies.astype(np.float32)
        angles = places * (-frequencies if kind == "backwards" else frequencies)
        neighbours = neighbours != kind.endswith("pairing")
        every = np.arange(2 * half)
        first, second = (every[::2], every[1::2]) if neighbours else (every[:half], every[half:])
        a, b, laid = x[..., first], x[..., second], np.empty((*angles.shape[:-1], 2 * half))
        laid[..., first] = laid[..., second] = angles
        if kind.startswith("mixed"):  # the angles are laid out for the other pairs
            laid = np.concatenate([angles, angles], axis=-1) if neighbours else np.repeat(angles, 2, axis=-1)
        cos, sin = (turn(laid)[:, None].astype(x.dtype) for turn in (np.cos, np.sin))
        result = x.copy()
        result[..., first] = a * cos[..., first] - b * sin[..., first]
        result[..., second] = a * sin[..., second] + b * cos[..., second]
        return self.rounded(result)


# ── the changes: of the heads, with the field's value ──


def _repacked(heads: Heads, packing: str, _: Operands) -> Heads:
    """Read packed columns by another layout than they were packed in.

    Columns [Q|K|V] are read as (heads, 3, d) or (heads, d, 3); or columns so packed are read as [Q|K|V].
    """
    many, d = heads[0].shape[1], heads[0].shape[-1]
    thirds = [join_heads(x) for x in heads]
    batch, length, width = thirds[0].shape
    axis, split = (3, (many, 3, d)) if packing.endswith("per head") else (4, (many, d, 3))
    if packing.startswith("read"):
        read = np.moveaxis(np.concatenate(thirds, axis=-1).reshape(batch, length, *split), axis, 0)
        thirds = list(read.reshape(3, batch, length, width))
    else:
        packed = np.stack([third.reshape(batch, length, many, d) for third in thirds], axis=axis)
        thirds = np.split(packed.reshape(batch, length, 3 * width), 3, axis=-1)
    q, k, v = (split_heads(third, many) for third in thirds)
    return q, k, v


def _resplit(heads: Heads, split: str, _: Operands) -> Heads:
    """Split joined heads wrongly: by a reshape without the transpose, interleaved, or, of q and k, not at all."""

    def again(x: Array) -> Array:
        tokens, (batch, many, length, width) = join_heads(x), x.shape
        if split == "one":
            return np.broadcast_to(tokens[:, None], (batch, many, length, many * width))
        if split == "flat":
            return np.asarray(tokens.reshape(x.shape))
        return np.ascontiguousarray(np.moveaxis(tokens.reshape(batch, length, width, many), -1, 1))

    q, k, v = heads
    return again(q), again(k), v if split == "one" else again(v)


def _projected_early(heads: Heads, w_o: str, work: Operands) -> Heads:
    """Multiply the values by W^O, before attention."""
    if w_o != "on values":
        return heads
    joined = work.rounded(join_heads(heads[2]) @ work.w_o(Recipe()))
    return heads[0], heads[1], split_heads(joined, heads[2].shape[1])


def _multiplied(heads: Heads, product: str, _: Operands) -> Heads:
    """Let q·kᵀ be another product: of K without its transpose, or of what is divided by its length."""
    q, k, v = heads
    if product == "q·k":
        return q, k.swapaxes(-1, -2), v
    return q / np.linalg.norm(q, axis=-1, keepdims=True), k / np.linalg.norm(k, axis=-1, keepdims=True), v


def _cached(heads: Heads, cache: str, work: Operands) -> Heads:
    """Hold keys and values in a faulty cache; the newest are as many as there are queries."""
    empty = {"newest empty": "kv", "newest keys empty": "k", "newest values empty": "v"}.get(cache, "")

    def held(x: Array, role: str) -> Array:
        new = x.shape[2] - work.problem.queries  # the first new key
        if cache == "another batch":
            return np.concatenate([np.roll(x[:, :, :new], 1, axis=0), x[:, :, new:]], axis=2)
        return np.concatenate([x[:, :, :new], np.zeros_like(x[:, :, new:])], axis=2) if role in empty else x

    return heads[0], held(heads[1], "k"), held(heads[2], "v")


def _grouped(heads: Heads, groups: str, work: Operands) -> Heads:
    """Give query head h the key head h % kv_heads, or all of them the first."""
    every = np.arange(work.problem.heads) % heads[1].shape[1]
    chosen = every if groups == "tile" else 0 * every
    return heads[0], heads[1][:, chosen], heads[2][:, chosen]


def _mixed_up(heads: Heads, used: str, work: Operands) -> Heads:
    """Use others of the three as queries, keys and values, each named by its letter."""
    by_letter = dict(zip("qkv", heads, strict=True))
    queries, keys, values = (by_letter[letter] for letter in used)
    return over_heads(queries, work.problem.heads), keys, values


Changes = dict[str, Callable[[Heads, Any, Operands], Heads]]
BEFORE_ROTATION: Changes = {"packing": _repacked, "split": _resplit, "w_o": _projected_early}
AFTER_ROTATION: Changes = {
    "cache": _cached,
    "groups": _grouped,
    "used": _mixed_up,
    "product": _multiplied,
}
_OF_LAYER = ("source", "order", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
_ROTARY = ("rotary", "rotary_on", "rotary_part", "rotary_shift", "rotary_from")
FIELDS = frozenset((*_OF_LAYER, *BEFORE_ROTATION, *_ROTARY, *AFTER_ROTATION))  # that change the operands
