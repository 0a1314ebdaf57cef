"""What a recipe gives: the textbook's steps one by one, each reading the recipe's fields, right or wrong.

`Workings(inputs)` computes in float64; with a dtype it is a plain run in that dtype, every step rounded to it. What
several recipes share is computed once.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from clearhead.axes import Array
from clearhead.diagnosing.recipe import Inputs, Part, Recipe
from clearhead.diagnosing.sight import visible
from clearhead.diagnosing.tiles import halved, product_in_half, sum_in_half, tiled

_KEPT = 2**27  # bytes of shared work
_OPERANDS = {
    "q": attrgetter("w_q", "b_q", "split", "rotary", "rotary_shift"),
    "k": attrgetter("w_k", "b_k", "split", "rotary"),
    "v": attrgetter("w_v", "b_v", "split", "rotary", "rotary_values", "w_o"),
}
SEEN = attrgetter("causal", "window", "mask", "padding", "query_padding", "segments")
_SCORES = attrgetter(
    *("w_q", "b_q", "w_k", "b_k", "split", "rotary", "rotary_shift", "product", "groups", "half", "half_dtype")
)
_LOGITS = attrgetter("scale", "softcap", "bias", "alibi")


class Workings:
    """Computes recipes on the same inputs; `precision` is the dtype of a plain run, None the truth in float64.

    `shaken` is the seed of a run whose queries and keys are moved within float32's rounding: another plain run's luck.
    """

    def __init__(self, given: Inputs, precision: np.dtype[Any] | None = None, shaken: int | None = None) -> None:
        self.given, self.problem = given, given.problem
        self.precision, self.shaken = precision, shaken
        self.dtype = np.dtype(np.float64 if precision in (None, np.float64) else np.float32)
        self._memo: dict[Any, Array] = {}
        self._kept: dict[Any, Array] = {}
        self._bytes = 0
        self._whole: dict[tuple[Any, ...], Part] = {}

    def once(self, key: Any, make: Callable[[], Array]) -> Array:
        """Shared work; what is oldest is forgotten when it grows large."""
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = make()
            self._bytes += found.nbytes
            while self._bytes > _KEPT and len(self._memo) > 1:
                self._bytes -= self._memo.pop(next(iter(self._memo))).nbytes
        return found

    def kept(self, key: Any, make: Callable[[], Array]) -> Array:
        """Shared work that is asked for all the time: projections and heads."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found

    def rounded(self, x: Array) -> Array:
        """What a plain run keeps of a step's result."""
        if self.precision is None or self.precision.itemsize > 2:
            return x
        return x.astype(self.precision).astype(np.float32)

    def part(self, heads: tuple[int, ...], rows: tuple[int, ...]) -> Part:
        """One Part for one choice, so that it can serve as a key."""
        return self._whole.setdefault((heads, rows), Part(heads, rows))

    def answer(self, recipe: Recipe, part: Part) -> Array:
        """What the recipe gives at the stage that theirs is at, for these heads and rows."""
        stage = recipe.step or self.given.stage
        if stage == "scores":
            return self.scores(recipe, part)
        if stage == "weights":
            return self.weights(recipe, part)
        if stage != "output":
            return self.logits(recipe, part, stage)
        return self.layer_output(recipe, part) if self.given.merged else self.output(recipe, part)

    # ── projections, heads, positions ──

    def operand(self, recipe: Recipe, name: str) -> Array:
        """Q, K or V as (batch, its heads, tokens, width)."""
        return self.kept((name, _OPERANDS[name](recipe)), lambda: self._operand(recipe, name))

    def _operand(self, recipe: Recipe, name: str) -> Array:
        right: Array = getattr(self.given, name)
        heads = right.shape[1]
        tokens = self._tokens(recipe, name, right)
        batch, length, width = tokens.shape
        if recipe.split == "heads":
            x = tokens.reshape(batch, length, heads, width // heads).swapaxes(1, 2)
        elif recipe.split == "flat":
            x = tokens.reshape(batch, heads, length, width // heads)
        else:
            x = tokens.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2)
        turns = self.given.rotary is not None and recipe.rotary != "missing" and x.shape[-1] % 2 == 0
        if turns and (name != "v" or recipe.rotary_values):
            x = self.rounded(self._rotated(recipe, x, shift=name == "q"))
        if self.shaken is not None and name != "v":
            luck = np.random.default_rng(self.shaken).uniform(-1, 1, x.shape)
            x = (x * (1 + np.finfo(np.float32).eps * luck)).astype(self.dtype)
        return np.ascontiguousarray(x)

    def _tokens(self, recipe: Recipe, name: str, right: Array) -> Array:
        """(batch, tokens, heads·width): X·W + b, or the given heads side by side."""
        layer = self.given.layer
        if layer is None:
            x = right.astype(self.dtype).swapaxes(1, 2)
            return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
        made = self._product(name, turned=getattr(recipe, f"w_{name}") == "transposed")
        if name in layer.b and getattr(recipe, f"b_{name}") == "given":
            made = self.rounded(made + layer.b[name].astype(self.dtype))
        if name == "v" and recipe.w_o == "on values":
            made = self.rounded(made @ self._w_o)
        return made

    def _product(self, name: str, *, turned: bool) -> Array:
        """X·W or X·Wᵀ."""
        layer = self.given.layer
        assert layer is not None
        x, w = layer.x if name == "q" else layer.context, layer.w[name].T if turned else layer.w[name]
        return self.kept((name, turned), lambda: self.rounded(x.astype(self.dtype) @ w.astype(self.dtype)))

    @property
    def _w_o(self) -> Array:
        layer = self.given.layer
        assert layer is not None
        return self.kept("W^O", lambda: layer.w["o"].astype(self.dtype))

    def _rotated(self, recipe: Recipe, x: Array, *, shift: bool) -> Array:
        assert self.given.rotary is not None
        base, interleaved = self.given.rotary
        half = x.shape[-1] // 2
        places = np.arange(x.shape[2])[None, :]
        if shift:
            places = places + self.problem.query_offset[:, None] + recipe.rotary_shift
        angles = places[..., None] * base ** (-np.arange(half) / half)
        cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
        if interleaved != (recipe.rotary == "pairing"):
            a, b = x[..., 0::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def serving(self, recipe: Recipe, x: Array, heads: tuple[int, ...]) -> Array:
        """The key heads that serve these query heads, one for each."""
        if x.shape[1] == len(heads) == self.problem.heads:
            return x
        kv = x.shape[1]
        group = max(1, self.problem.heads // max(1, kv))
        return x[:, [h % kv if recipe.groups == "tile" else h // group for h in heads]]

    # ── scores and logits ──

    def scores(self, recipe: Recipe, part: Part) -> Array:
        """Q·Kᵀ, (batch, heads, rows, keys)."""
        return self.once(("scores", part, _SCORES(recipe)), lambda: self._scores(recipe, part))

    def _scores(self, recipe: Recipe, part: Part) -> Array:
        q = _some(self.operand(recipe, "q"), part.heads, 1)
        k = self.serving(recipe, self.operand(recipe, "k"), part.heads)
        if recipe.product == "k·qᵀ":
            q, k = k, q
        q = _some(q, part.rows, 2)
        made = self.rounded(q @ (k if recipe.product == "q·k" else k.swapaxes(-1, -2)))
        return halved(made, recipe.half_dtype) if recipe.half in ("scores", "logits") else made

    def logits(self, recipe: Recipe, part: Part, stage: str = "masked") -> Array:
        """Scores, then scale, cap, bias, ALiBi, mask, up to `stage`."""
        fields = (_SCORES(recipe), _LOGITS(recipe), stage)
        if stage == "masked":
            acts = (SEEN(recipe), recipe.key_tail, recipe.masking, recipe.fill)
            return self.once(("masked", part, *fields, *acts), lambda: self._masked(recipe, part))
        return self.once(("logits", part, fields), lambda: self._unmasked(recipe, part, stage))

    def _unmasked(self, recipe: Recipe, part: Part, stage: str) -> Array:
        problem = self.problem
        x = self.scores(recipe, part)
        bias = None if problem.bias is None or recipe.bias == "missing" else self._bias(part)
        if bias is not None and recipe.bias == "scaled":
            x = x + bias
        x = self.rounded(x * (problem.scale if recipe.scale is None else recipe.scale))
        if recipe.half == "logits":
            x = halved(x, recipe.half_dtype)
        if stage != "scaled" and problem.softcap is not None and recipe.softcap == "given":
            x = self.rounded(problem.softcap * np.tanh(x / problem.softcap))
        if stage == "biased":
            if bias is not None and recipe.bias == "given":
                x = self.rounded(x + bias)
            if problem.alibi_slopes is not None and recipe.alibi != "missing":
                x = self.rounded(x + (1 if recipe.alibi == "added" else -1) * self._alibi(part))
        return x

    def _bias(self, part: Part) -> Array:
        assert self.problem.bias is not None
        bias = _some(_some(self.problem.bias, part.heads, 1), part.rows, 2).astype(self.dtype)
        return np.where(np.isneginf(bias), self.dtype.type(0), bias)  # what it forbids is visibility's

    def _alibi(self, part: Part) -> Array:
        assert self.problem.alibi_slopes is not None
        places = np.array(part.rows) + self.problem.query_offset[:, None]
        distances = np.abs(places[:, None, :, None] - np.arange(self.problem.keys))
        slopes = self.problem.alibi_slopes[list(part.heads), None, None]
        return (slopes * distances).astype(self.dtype)

    def _masked(self, recipe: Recipe, part: Part) -> Array:
        x = self.logits(recipe, part, "biased")
        seen = self.visible(recipe, part)
        if recipe.softcap == "after mask":
            assert self.problem.softcap is not None
            cap = self.problem.softcap
            return np.where(seen, cap * np.tanh(x / cap), self.dtype.type(-cap))
        if recipe.masking in ("after", "renormalised"):
            return x
        if recipe.masking.startswith("one"):
            return x + (seen if recipe.masking == "one seen" else ~seen).astype(x.dtype)
        if recipe.masking == "forbid":
            return np.where(seen, x, self.dtype.type(-np.inf))
        assert recipe.fill is not None
        return np.where(seen, x, self.dtype.type(recipe.fill) + (x if recipe.masking == "add" else 0))

    # ── who sees whom ──

    def visible(self, recipe: Recipe, part: Part) -> Array:
        """Bool (batch, heads or 1, rows, keys)."""
        return self.once(("visible", part, SEEN(recipe), recipe.key_tail), lambda: visible(self.problem, recipe, part))

    # ── softmax ──

    def weights(self, recipe: Recipe, part: Part) -> Array:
        """A, (batch, heads, rows, keys)."""
        wide = part
        if recipe.axis in ("queries", "matrix"):
            wide = self.part(part.heads, tuple(range(self.problem.queries)))
        elif recipe.axis == "heads":
            wide = self.part(tuple(range(self.problem.heads)), part.rows)
        x = self.logits(recipe, wide)
        if recipe.axis.startswith("none"):
            return x if recipe.axis == "none" else np.where(self.visible(recipe, part), x, self.dtype.type(0))
        powers, total = self._powers(recipe, wide, x)
        made = self.rounded(np.divide(powers, total, out=np.zeros_like(powers), where=total != 0))
        if wide is not part:
            heads = range(len(part.heads)) if recipe.axis != "heads" else part.heads
            made = made[:, list(heads)]
            made = made[:, :, list(part.rows)] if recipe.axis != "heads" else made
        if recipe.masking in ("after", "renormalised"):
            made = made * self.visible(recipe, part)
            if recipe.masking == "renormalised":
                left = made.sum(axis=-1, keepdims=True)
                made = np.divide(made, left, out=np.zeros_like(made), where=left != 0)
        if recipe.empty != "zero":
            blind = ~self.visible(recipe, part).any(axis=-1, keepdims=True)
            made = np.where(blind, np.nan if recipe.empty == "nan" else 1 / self.problem.keys, made)
        return halved(made, recipe.half_dtype) if recipe.half == "weights" else made

    def _powers(self, recipe: Recipe, part: Part, x: Array) -> tuple[Array, Array]:
        """What stands above and below the softmax's line, up to a common factor."""
        if recipe.blocks[0]:
            powers, total, final = tiled(*recipe.blocks, x)
            for extra, count in self._extras(recipe, part):
                total = total + count * np.exp(extra - final)
            return powers, total
        axis: Any = {"keys": -1, "queries": -2, "matrix": (-2, -1), "heads": 1}[recipe.axis]
        extras = self._extras(recipe, part)
        peak = x.max(axis=axis, keepdims=True, initial=-np.inf)
        for extra, _ in extras:
            peak = np.maximum(peak, extra)
        peak = np.where(np.isneginf(peak), self.dtype.type(0), peak)
        if recipe.overflow:
            powers = np.exp(x.astype(recipe.overflow)).astype(x.dtype)
            total = powers.astype(recipe.overflow).sum(axis=axis, keepdims=True).astype(x.dtype)
            live = x.max(axis=axis, keepdims=True, initial=-np.inf) > -np.inf
            return powers, np.where(live & (total == 0), np.nan, total)
        powers = self.rounded(np.exp(x - peak))
        if recipe.half == "powers":
            powers = halved(powers, recipe.half_dtype)
        total = sum_in_half(powers, recipe.half_dtype) if recipe.half == "sum" else powers.sum(axis=axis, keepdims=True)
        for extra, count in extras:
            total = total + count * np.exp(extra - peak)
        return powers, self.rounded(total)

    def _extras(self, recipe: Recipe, part: Part) -> list[tuple[Array, int]]:
        """Logits in the denominator that are no keys: sinks, and a last block's padding read as zeros."""
        extras: list[tuple[Array, int]] = []
        if self.problem.sinks is not None and recipe.sinks == "given" and recipe.axis == "keys":
            extras.append((self.problem.sinks[list(part.heads), None, None].astype(self.dtype), 1))
        what, block = recipe.key_tail
        if what == "zeros" and recipe.axis == "keys":
            extras.append((np.zeros((1, 1, 1), self.dtype), -self.problem.keys % block))
        return extras

    # ── output ──

    def output(self, recipe: Recipe, part: Part) -> Array:
        """A·V per head, (batch, heads, rows, d_v)."""
        values = (
            self.serving(recipe, self.operand(recipe, recipe.values), part.heads)
            if recipe.values != "q"
            else (_some(self.operand(recipe, "q"), part.heads, 1))
        )
        if recipe.turned:
            whole = self.part(part.heads, tuple(range(self.problem.queries)))
            made = _some(self.weights(recipe, whole).swapaxes(-1, -2), part.rows, 2) @ values
        elif recipe.half == "sum" and recipe.axis == "keys":
            powers, total = self._powers(recipe, part, self.logits(recipe, part))
            made = product_in_half(powers, values, recipe.half_dtype) / total
        else:
            weights = self.weights(recipe, part)
            made = weights @ values
            if not np.isfinite(made).all() and not np.isfinite(values).all():
                made = _careful(weights, values)
        made = self.rounded(made)
        what, start = recipe.tail
        if what == "zero":
            made = np.where(np.array(part.rows)[:, None] >= start, self.dtype.type(0), made)
        return made

    def layer_output(self, recipe: Recipe, part: Part) -> Array:
        """U, (batch, 1, rows, d_out): the heads joined and projected."""
        layer = self.given.layer
        assert layer is not None
        all_heads, n = self.problem.heads, self.problem.queries
        heads = tuple(range(all_heads))
        if recipe.merge == "flat":  # row i of (heads·n, d_v) read as (n, heads·d_v)
            flat = np.array(part.rows)[:, None] * all_heads + np.arange(all_heads)
            needed = sorted(set((flat % n).ravel().tolist()))
            made = self.output(recipe, self.part(heads, tuple(needed)))
            at = np.searchsorted(needed, flat % n)
            joined = made[:, flat // n, at].reshape(made.shape[0], len(part.rows), all_heads * made.shape[-1])
        else:
            made = self.output(recipe, self.part(heads, part.rows))
            order = (0, 2, 3, 1) if recipe.merge == "interleaved" else (0, 2, 1, 3)
            joined = made.transpose(order).reshape(made.shape[0], len(part.rows), all_heads * made.shape[-1])
        if "o" in layer.w and recipe.w_o not in ("missing", "on values"):
            w = self._w_o
            if recipe.w_o == "per head":
                width = w.shape[0] // all_heads
                w = w * np.kron(np.eye(all_heads, dtype=self.dtype), np.ones((width, width), self.dtype))
            joined = self.rounded(joined @ (w.T if recipe.w_o == "transposed" else w))
        if "o" in layer.b and recipe.b_o == "given" and recipe.w_o != "missing":
            joined = self.rounded(joined + layer.b["o"].astype(self.dtype))
        return joined[:, None]


def _some(x: Array, chosen: tuple[int, ...], axis: int) -> Array:
    if len(chosen) == x.shape[axis]:
        return x
    return x[:, list(chosen)] if axis == 1 else x[:, :, list(chosen)]


def _careful(weights: Array, values: Array) -> Array:
    """weights·values, where a value with weight 0 is not read (0·NaN would be NaN)."""
    made = weights @ np.where(np.isfinite(values), values, values.dtype.type(0))
    for key in np.flatnonzero(~np.isfinite(values).all(axis=(0, 1, 3))):
        weight, value = weights[..., key, None], values[:, :, None, key]
        made = made + np.where((weight != 0) & ~np.isfinite(value), weight * value, values.dtype.type(0))
    return made
