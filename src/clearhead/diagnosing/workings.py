"""The numbers of a recipe: the textbook's steps one by one, each according to the recipe's fields, right or wrong.

`Workings(inputs)` computes in float64. With a dtype it is a plain run in that dtype: every step is rounded to it.
Intermediates that several recipes share are computed once.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.axes import Array, group_size
from clearhead.diagnosing.recipe import Inputs, Recipe, Selection
from clearhead.diagnosing.recipe_visibility import read, spanned, visible
from clearhead.diagnosing.tiles import product_in_half, rounded_to, sum_in_half, tiled

_CACHE_BYTES = 2**27  # of shared intermediates
_OPERANDS = {
    "q": attrgetter("w_q", "b_q", "split", "rotary", "rotary_shift"),
    "k": attrgetter("w_k", "b_k", "split", "rotary"),
    "v": attrgetter("w_v", "b_v", "split", "rotary", "rotary_values", "w_o"),
}
VISIBILITY = attrgetter("causal", "window", "mask", "padding", "query_padding", "segments", "spans")
_SCORES = attrgetter(
    *("w_q", "b_q", "w_k", "b_k", "split", "rotary", "rotary_shift", "product", "groups", "half", "half_dtype")
)
_LOGITS = attrgetter("scale", "softcap", "bias", "alibi", "spans")


class Workings:
    """Computes recipes on the same inputs; `precision` is the dtype of a plain run, None the truth in float64.

    `perturbed` is the seed of another plain run, whose queries and keys are moved within float32's rounding.
    """

    def __init__(self, inputs: Inputs, precision: np.dtype[Any] | None = None, perturbed: int | None = None) -> None:
        self.inputs, self.problem = inputs, inputs.problem
        self.precision, self.perturbed = precision, perturbed
        self.dtype = np.dtype(np.float64 if precision in (None, np.float64) else np.float32)
        self._memo: dict[Any, Array] = {}
        self._kept: dict[Any, Array] = {}
        self._bytes = 0
        self._selections: dict[tuple[Any, ...], Selection] = {}

    def once(self, key: Any, make: Callable[[], Array]) -> Array:
        """A shared intermediate, computed when it is first needed; the oldest are dropped when the cache is full."""
        array = self._memo.get(key)
        if array is None:
            array = self._memo[key] = make()
            self._bytes += array.nbytes
            while self._bytes > _CACHE_BYTES and len(self._memo) > 1:
                self._bytes -= self._memo.pop(next(iter(self._memo))).nbytes
        return array

    def kept(self, key: Any, make: Callable[[], Array]) -> Array:
        """A shared intermediate that nearly every recipe needs, and that is never dropped: projections and heads."""
        array = self._kept.get(key)
        if array is None:
            array = self._kept[key] = make()
        return array

    def rounded(self, x: Array) -> Array:
        """A step's result, rounded to the dtype of the plain run."""
        if self.precision is None or self.precision.itemsize > 2:
            return x
        return x.astype(self.precision).astype(np.float32)

    def selection(self, heads: tuple[int, ...], rows: tuple[int, ...]) -> Selection:
        """The Selection of these heads and rows, one object for each, so that it can be a key of the cache."""
        return self._selections.setdefault((heads, rows), Selection(heads, rows))

    def answer(self, recipe: Recipe, selection: Selection) -> Array:
        """The recipe's numbers at the stage of theirs, for these heads and rows."""
        stage = recipe.step or self.inputs.stage
        if stage == "scores":
            return self.scores(recipe, selection)
        if stage == "weights":
            return self.weights(recipe, selection)
        if stage != "output":
            return self.logits(recipe, selection, stage)
        return self.layer_output(recipe, selection) if self.inputs.merged else self.output(recipe, selection)

    # ── projections, heads, positions ──

    def operand(self, recipe: Recipe, name: str) -> Array:
        """Q, K or V as (batch, its heads, tokens, width)."""
        return self.kept((name, _OPERANDS[name](recipe)), lambda: self._operand(recipe, name))

    def _operand(self, recipe: Recipe, name: str) -> Array:
        right: Array = getattr(self.inputs, name)
        heads = right.shape[1]
        tokens = self._tokens(recipe, name, right)
        batch, length, width = tokens.shape
        if recipe.split == "heads":
            x = tokens.reshape(batch, length, heads, width // heads).swapaxes(1, 2)
        elif recipe.split == "flat":
            x = tokens.reshape(batch, heads, length, width // heads)
        else:
            x = tokens.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2)
        turns = self.inputs.rotary is not None and recipe.rotary != "missing" and x.shape[-1] % 2 == 0
        if turns and (name != "v" or recipe.rotary_values):
            x = self.rounded(self._rotated(recipe, x, shift=name == "q"))
        if self.perturbed is not None and name != "v":
            noise = np.random.default_rng(self.perturbed).uniform(-1, 1, x.shape)
            x = (x * (1 + np.finfo(np.float32).eps * noise)).astype(self.dtype)
        return np.ascontiguousarray(x)

    def _tokens(self, recipe: Recipe, name: str, right: Array) -> Array:
        """(batch, tokens, heads·width): X·W + b, or the given heads side by side."""
        layer = self.inputs.layer
        if layer is None:
            x = right.astype(self.dtype).swapaxes(1, 2)
            return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
        result = self._product(name, turned=getattr(recipe, f"w_{name}") == "transposed")
        if name in layer.b and getattr(recipe, f"b_{name}") == "given":
            result = self.rounded(result + layer.b[name].astype(self.dtype))
        if name == "v" and recipe.w_o == "on values":
            result = self.rounded(result @ self._w_o)
        return result

    def _product(self, name: str, *, turned: bool) -> Array:
        """X·W or X·Wᵀ."""
        layer = self.inputs.layer
        assert layer is not None
        x, w = layer.x if name == "q" else layer.context, layer.w[name].T if turned else layer.w[name]
        return self.kept((name, turned), lambda: self.rounded(x.astype(self.dtype) @ w.astype(self.dtype)))

    @property
    def _w_o(self) -> Array:
        layer = self.inputs.layer
        assert layer is not None
        return self.kept("W^O", lambda: layer.w["o"].astype(self.dtype))

    def _rotated(self, recipe: Recipe, x: Array, *, shift: bool) -> Array:
        assert self.inputs.rotary is not None
        base, interleaved = self.inputs.rotary
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
        """For each of these query heads its key head, (batch, heads, keys, width)."""
        if x.shape[1] == len(heads) == self.problem.heads:
            return x
        kv = x.shape[1]
        group = max(1, group_size(self.problem.heads, kv))
        return x[:, [h % kv if recipe.groups == "tile" else h // group for h in heads]]

    # ── scores and logits ──

    def scores(self, recipe: Recipe, selection: Selection) -> Array:
        """Q·Kᵀ, (batch, heads, rows, keys)."""
        return self.once(("scores", selection, _SCORES(recipe)), lambda: self._scores(recipe, selection))

    def _scores(self, recipe: Recipe, selection: Selection) -> Array:
        q = _take(self.operand(recipe, "q"), selection.heads, 1)
        k = self.serving(recipe, self.operand(recipe, "k"), selection.heads)
        if recipe.product == "k·qᵀ":
            q, k = k, q
        q = _take(q, selection.rows, 2)
        result = self.rounded(q @ (k if recipe.product == "q·k" else k.swapaxes(-1, -2)))
        return rounded_to(result, recipe.half_dtype) if recipe.half in ("scores", "logits") else result

    def logits(self, recipe: Recipe, selection: Selection, stage: str = "masked") -> Array:
        """Scores, then scale, cap, bias, ALiBi, mask, up to `stage`."""
        fields = (_SCORES(recipe), _LOGITS(recipe), stage)
        if stage == "masked":
            acts = (VISIBILITY(recipe), recipe.key_tail, recipe.masking, recipe.fill)
            return self.once(("masked", selection, *fields, *acts), lambda: self._masked(recipe, selection))
        return self.once(("logits", selection, fields), lambda: self._unmasked(recipe, selection, stage))

    def _unmasked(self, recipe: Recipe, selection: Selection, stage: str) -> Array:
        problem = self.problem
        x = self.scores(recipe, selection)
        bias = None if problem.bias is None or recipe.bias == "missing" else self._bias(selection)
        if bias is not None and recipe.bias == "scaled":
            x = x + bias
        own = problem.scale[list(selection.heads), None, None].astype(x.dtype)
        x = self.rounded(x * (own if recipe.scale is None else recipe.scale))
        if recipe.half == "logits":
            x = rounded_to(x, recipe.half_dtype)
        if stage != "scaled" and problem.softcap is not None and recipe.softcap == "given":
            x = self.rounded(problem.softcap * np.tanh(x / problem.softcap))
        if stage == "biased":
            if bias is not None and recipe.bias == "given":
                x = self.rounded(x + bias)
            if problem.alibi_slopes is not None and recipe.alibi != "missing":
                x = self.rounded(x + (1 if recipe.alibi == "added" else -1) * self._alibi(selection))
            if problem.span_table is not None and recipe.spans != "missing":
                x = self.rounded(x + self._spans(recipe, selection))
        return x

    def _bias(self, selection: Selection) -> Array:
        assert self.problem.bias is not None
        bias = _take(_take(self.problem.bias, selection.heads, 1), selection.rows, 2).astype(self.dtype)
        return np.where(np.isneginf(bias), self.dtype.type(0), bias)  # a forbidden key is masked like any other

    def _alibi(self, selection: Selection) -> Array:
        assert self.problem.alibi_slopes is not None
        positions = np.array(selection.rows) + self.problem.query_offset[:, None]
        distances = np.abs(positions[:, None, :, None] - np.arange(self.problem.keys))
        slopes = self.problem.alibi_slopes[list(selection.heads), None, None]
        return (slopes * distances).astype(self.dtype)

    def _spans(self, recipe: Recipe, selection: Selection) -> Array:
        """What the table adds, (batch, heads, rows, keys)."""
        problem = spanned(self.problem, recipe)
        found = np.empty((problem.batch, len(selection.heads), len(selection.rows), problem.keys), self.dtype)
        for batch, place in np.ndindex(found.shape[:2]):
            head, keys = selection.heads[place], slice(0, problem.keys)
            mine, theirs, table = visibility.spans_of(problem, batch, head, slice(0, problem.queries), keys)
            found[batch, place] = spans.added(mine[list(selection.rows)], theirs, table)
        return found

    def _masked(self, recipe: Recipe, selection: Selection) -> Array:
        x = self.logits(recipe, selection, "biased")
        seen = self.visible(recipe, selection)
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
        seen = seen | np.isneginf(x)  # what the table of spans forbids
        return np.where(seen, x, self.dtype.type(recipe.fill) + (x if recipe.masking == "add" else 0))

    # ── visibility ──

    def visible(self, recipe: Recipe, selection: Selection) -> Array:
        """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
        return self.once(
            ("visible", selection, VISIBILITY(recipe), recipe.key_tail),
            lambda: visible(self.problem, recipe, selection),
        )

    # ── softmax ──

    def weights(self, recipe: Recipe, selection: Selection) -> Array:
        """A, (batch, heads, rows, keys)."""
        if self.inputs.weights is not None:
            given = _take(_take(self.inputs.weights, selection.heads, 1), selection.rows, 2)
            return self.rounded(given.astype(self.dtype))
        wide = selection
        if recipe.axis in ("queries", "matrix"):
            wide = self.selection(selection.heads, tuple(range(self.problem.queries)))
        elif recipe.axis == "heads":
            wide = self.selection(tuple(range(self.problem.heads)), selection.rows)
        x = self.logits(recipe, wide)
        if recipe.axis.startswith("none"):
            used = read(self.problem, recipe) if recipe.axis == "none" else self.visible(recipe, selection)
            return np.where(used, x, self.dtype.type(0))
        powers, total = self._powers(recipe, wide, x)
        result = self.rounded(np.divide(powers, total, out=np.zeros_like(powers), where=total != 0))
        if wide is not selection:
            heads = range(len(selection.heads)) if recipe.axis != "heads" else selection.heads
            result = result[:, list(heads)]
            result = result[:, :, list(selection.rows)] if recipe.axis != "heads" else result
        if recipe.masking in ("after", "renormalised"):
            result = result * self.visible(recipe, selection)
            if recipe.masking == "renormalised":
                left = result.sum(axis=-1, keepdims=True)
                result = np.divide(result, left, out=np.zeros_like(result), where=left != 0)
        if recipe.empty != "zero":
            empty_rows = ~self.visible(recipe, selection).any(axis=-1, keepdims=True)
            result = np.where(empty_rows, np.nan if recipe.empty == "nan" else 1 / self.problem.keys, result)
        return rounded_to(result, recipe.half_dtype) if recipe.half == "weights" else result

    def _powers(self, recipe: Recipe, selection: Selection, x: Array) -> tuple[Array, Array]:
        """The softmax's numerators and denominator, up to a common factor of each row."""
        if recipe.blocks[0]:
            powers, total, final = tiled(*recipe.blocks, x)
            for extra, count in self._extras(recipe, selection):
                total = total + count * np.exp(extra - final)
            return powers, total
        axis: Any = {"keys": -1, "queries": -2, "matrix": (-2, -1), "heads": 1}[recipe.axis]
        extras = self._extras(recipe, selection)
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
            powers = rounded_to(powers, recipe.half_dtype)
        total = sum_in_half(powers, recipe.half_dtype) if recipe.half == "sum" else powers.sum(axis=axis, keepdims=True)
        for extra, count in extras:
            total = total + count * np.exp(extra - peak)
        return powers, self.rounded(total)

    def _extras(self, recipe: Recipe, selection: Selection) -> list[tuple[Array, int]]:
        """Logits in the denominator that belong to no key, and how often: sinks, a last block's padding read as 0."""
        extras: list[tuple[Array, int]] = []
        if self.problem.sinks is not None and recipe.sinks == "given" and recipe.axis == "keys":
            extras.append((self.problem.sinks[list(selection.heads), None, None].astype(self.dtype), 1))
        what, block = recipe.key_tail
        if what == "zeros" and recipe.axis == "keys":
            extras.append((np.zeros((1, 1, 1), self.dtype), -self.problem.keys % block))
        return extras

    # ── output ──

    def output(self, recipe: Recipe, selection: Selection) -> Array:
        """A·V per head, (batch, heads, rows, d_v)."""
        values = (
            self.serving(recipe, self.operand(recipe, recipe.values), selection.heads)
            if recipe.values != "q"
            else (_take(self.operand(recipe, "q"), selection.heads, 1))
        )
        if recipe.turned:
            whole = self.selection(selection.heads, tuple(range(self.problem.queries)))
            result = _take(self.weights(recipe, whole).swapaxes(-1, -2), selection.rows, 2) @ values
        elif recipe.half == "sum" and recipe.axis == "keys":
            powers, total = self._powers(recipe, selection, self.logits(recipe, selection))
            result = product_in_half(powers, values, recipe.half_dtype) / total
        else:
            weights = self.weights(recipe, selection)
            result = weights @ values
            if not np.isfinite(result).all() and not np.isfinite(values).all():
                result = _product_of_nonfinite(weights, values)
        result = self.rounded(result)
        what, start = recipe.tail
        if what == "zero":
            result = np.where(np.array(selection.rows)[:, None] >= start, self.dtype.type(0), result)
        return result

    def layer_output(self, recipe: Recipe, selection: Selection) -> Array:
        """U, (batch, 1, rows, d_out): the heads joined and projected."""
        layer = self.inputs.layer
        assert layer is not None
        all_heads, n = self.problem.heads, self.problem.queries
        heads = tuple(range(all_heads))
        if recipe.merge == "flat":  # (heads·n, d_v) read as (n, heads·d_v)
            flat = np.array(selection.rows)[:, None] * all_heads + np.arange(all_heads)
            needed = sorted(set((flat % n).ravel().tolist()))
            result = self.output(recipe, self.selection(heads, tuple(needed)))
            index = np.searchsorted(needed, flat % n)
            joined = result[:, flat // n, index].reshape(
                result.shape[0], len(selection.rows), all_heads * result.shape[-1]
            )
        else:
            result = self.output(recipe, self.selection(heads, selection.rows))
            order = (0, 2, 3, 1) if recipe.merge == "interleaved" else (0, 2, 1, 3)
            joined = result.transpose(order).reshape(result.shape[0], len(selection.rows), all_heads * result.shape[-1])
        if "o" in layer.w and recipe.w_o not in ("missing", "on values"):
            w = self._w_o
            if recipe.w_o == "per head":
                width = w.shape[0] // all_heads
                w = w * np.kron(np.eye(all_heads, dtype=self.dtype), np.ones((width, width), self.dtype))
            joined = self.rounded(joined @ (w.T if recipe.w_o == "transposed" else w))
        if "o" in layer.b and recipe.b_o == "given" and recipe.w_o != "missing":
            joined = self.rounded(joined + layer.b["o"].astype(self.dtype))
        return joined[:, None]


def _take(x: Array, chosen: tuple[int, ...], axis: int) -> Array:
    if len(chosen) == x.shape[axis]:
        return x
    return x[:, list(chosen)] if axis == 1 else x[:, :, list(chosen)]


def _product_of_nonfinite(weights: Array, values: Array) -> Array:
    """weights·values, where a value of weight 0 is not read: 0·NaN would be NaN."""
    result = weights @ np.where(np.isfinite(values), values, values.dtype.type(0))
    for key in np.flatnonzero(~np.isfinite(values).all(axis=(0, 1, 3))):
        weight, value = weights[..., key, None], values[:, :, None, key]
        result = result + np.where((weight != 0) & ~np.isfinite(value), weight * value, values.dtype.type(0))
    return result
