"""The numbers of a recipe: the definition's steps one by one, with the recipe's changes before, between and after them.

`Workings(inputs)` computes in float64. With a dtype it is a plain run in that dtype: every step is rounded to it.
Intermediates that several recipes share are computed once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.axes import Array, join_heads
from clearhead.core.block import Block
from clearhead.core.definition import STEPS, logits, mix, product, softmax, split
from clearhead.diagnosing import operands
from clearhead.diagnosing.operands import Operands
from clearhead.diagnosing.recipe import STAGES, Recipe, Selection, eps
from clearhead.diagnosing.rule_changes import SCORING, SEEING, changed_rules, selected, visible

_ORDERS = {  # of the steps before the mask, where the cap stands elsewhere
    "before scale": ("capped", "scaled", "biased"),
    "after bias": ("scaled", "biased", "capped"),
    "after mask": ("scaled", "biased"),
}
_OFF = 0.0025  # the most that rounding a log-sum-exp excuses: larger ones say nothing
_SCORED = operands.FIELDS | SCORING
_MASKED = _SCORED | SEEING | {"masking", "fill"}


class Workings(Operands):
    """Computes recipes on the same inputs, up to the stage of theirs."""

    def answer(self, recipe: Recipe, selection: Selection) -> Array:
        """The recipe's numbers at the stage of theirs, for these heads and rows."""
        stage = recipe["step"] or self.inputs.stage
        if stage == "weights":
            return self._of_heads(recipe, selection, self.weights)
        if stage != "output":
            return self.logits(recipe, selection, stage)
        return self.layer_output(recipe, selection) if self.inputs.merged else self.output(recipe, selection)

    # ── from queries and keys to the logits ──

    def logits(self, recipe: Recipe, selection: Selection, stage: str = "masked") -> Array:
        """The definition's steps up to `stage`, (batch, heads, rows, keys)."""
        fields = {"scores": operands.FIELDS, "masked": _MASKED}.get(stage, _SCORED)
        compute = {"scores": self._scores, "masked": self._masked}.get(stage)
        key = (stage, selection, recipe.key(fields))
        make = compute or (lambda recipe, selection: self._unmasked(recipe, selection, stage))
        result: Array = self.once(key, lambda: make(recipe, selection))
        return result

    def _scores(self, recipe: Recipe, selection: Selection) -> Array:
        q, k, _ = self.operands(recipe)
        q, k = take(self._served(q, selection), selection.rows, 2), self._served(k, selection)
        return self.rounded(product(q, k.swapaxes(-1, -2)))

    def _served(self, x: Array, selection: Selection) -> Array:
        """What serves each of these query heads, (batch, heads, tokens, width)."""
        many, every = x.shape[1], self.problem.heads
        if many == 1 or selection.heads == tuple(range(every)) == tuple(range(many)):
            return x
        return x[:, [head * many // every for head in selection.heads]]

    def _rules(self, recipe: Recipe, selection: Selection) -> Block:
        """The rules of the scores; what a bias of -inf forbids is masked like any other key."""
        ruled = changed_rules(self.problem, Recipe(recipe.key(SCORING)))
        x = selected(ruled, selection, self.dtype)
        bias, slopes = x.bias, x.alibi_slopes
        if bias is not None:
            factor = {"negated": -1.0, "twice": 2.0, "scaled": x.scale}.get(recipe["bias"], 1.0)
            bias = np.where(np.isneginf(bias), self.dtype.type(0), bias) * factor
        if slopes is not None:
            slopes = slopes * {"added": -1.0, "scaled": x.scale}.get(recipe["alibi"], 1.0)
        return replace(x, bias=bias, alibi_slopes=slopes)

    def _unmasked(self, recipe: Recipe, selection: Selection, stage: str) -> Array:
        block, x = self._rules(recipe, selection), self.logits(recipe, selection, "scores")
        for step in _ORDERS.get(recipe["softcap"], ("scaled", "capped", "biased")):
            late = step == "scaled" and recipe["scaling"] == "weights"
            if STAGES.index(step) <= STAGES.index(stage) and not late:
                x = self._step(recipe, step, block, x)
        return x

    def _step(self, recipe: Recipe, step: str, block: Block, x: Array) -> Array:
        cap = block.softcap if step == "capped" else None
        if cap is not None and recipe["softcap"] == "clipped":
            return np.clip(x, -cap, cap)
        x = self.rounded(STEPS[step](block, x))
        return x / cap if cap is not None and recipe["softcap"] == "not multiplied" else x

    def _masked(self, recipe: Recipe, selection: Selection) -> Array:
        x, how = self.logits(recipe, selection, "biased"), recipe["masking"]
        if how in ("after", "renormalised"):
            return x
        seen = self.visible(recipe, selection)
        if how in ("one seen", "one hidden"):
            return x + (seen if how == "one seen" else ~seen).astype(x.dtype)
        if how in ("fill", "add"):
            seen = seen | np.isneginf(x)  # what the table of spans forbids
            return np.where(seen, x, self.dtype.type(recipe["fill"]) + (x if how == "add" else 0))
        x = STEPS["masked"](Block(positions=None, places=None, seen=seen), x)
        late = recipe["softcap"] == "after mask"
        return self._step(recipe, "capped", self._rules(recipe, selection), x) if late else x

    def visible(self, recipe: Recipe, selection: Selection) -> Array:
        """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
        key = ("visible", selection, recipe.key(SEEING))
        result: Array = self.once(key, lambda: visible(self.problem, recipe, selection))
        return result

    # ── from the logits to the weights ──

    def weights(self, recipe: Recipe, selection: Selection) -> Array:
        """A, (batch, heads, rows, keys)."""
        every = tuple(range(self.problem.heads)), tuple(range(self.problem.queries))
        heads = every[0] if recipe["axis"] in ("heads", "all") else selection.heads
        wide = Selection(heads, every[1] if recipe.wide else selection.rows)
        if self.inputs.weights is None:
            result = self._weights(recipe, wide)
        else:
            result = self.rounded(take(take(self.inputs.weights, wide.rows, 2), wide.heads, 1))
        if recipe["turned"]:
            result = result.swapaxes(-1, -2)
        return take(take(result, selection.heads, 1), selection.rows, 2) if wide != selection else result

    def _weights(self, recipe: Recipe, selection: Selection) -> Array:
        x = self.logits(recipe, selection)
        result, again = self._softmax(recipe, selection, x), recipe["softmax"]
        asked = again == "twice" or recipe.keys() & {"masking", "empty"}
        seen = self.visible(recipe, selection) if asked else np.array(True)
        if again in ("twice", "twice, hidden keys too"):
            result = softmax(np.where(seen, result, -np.inf) if again == "twice" else result)[1]
        if recipe["masking"] in ("after", "renormalised"):
            result = result * seen
            if recipe["masking"] == "renormalised":
                result = _quotient(result, result.sum(axis=-1, keepdims=True))
        if recipe["empty"] is not None:
            empty_rows = ~seen.any(axis=-1, keepdims=True)
            result = np.where(empty_rows, np.nan if recipe["empty"] == "nan" else 1 / self.problem.keys, result)
        result = self.rounded(result)
        return STEPS["scaled"](self._rules(recipe, selection), result) if recipe["scaling"] == "weights" else result

    def _softmax(self, recipe: Recipe, selection: Selection, x: Array) -> Array:
        """What stands in the softmax's place, of the logits."""
        sinks = None
        if self.problem.sinks is not None:
            fields = frozenset({"sinks", "scale"})
            sinks = selected(changed_rules(self.problem, Recipe(recipe.key(fields))), selection, self.dtype).sinks
        how = recipe["softmax"]
        if recipe["powers"] == "2":
            x, sinks = x * np.log(2.0), sinks if sinks is None else sinks * np.log(2.0)
        if recipe["axis"] == "none":
            return np.where(np.isneginf(x), 0.0, x)
        if recipe["axis"] is not None:
            return _over(_AXES[recipe["axis"]], x)
        if recipe["blocks"] is not None:
            return _in_blocks(recipe["blocks"], x, sinks)
        if recipe["overflow"] is not None:
            return _overflowing(x, recipe["overflow"], sinks)
        if how == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-x)))
        if how == "logarithm":
            return np.asarray(x - softmax(x)[0].logsumexp[..., None])
        if how == "unkept sum and maximum":  # these, too, lie along the keys
            x = x - x.max(axis=-1, keepdims=True).swapaxes(-1, -2)
        if how in _DENOMINATORS:
            return _divided(x, _DENOMINATORS[how], sinks)
        if recipe["sinks"] == "unshifted":
            return _divided(x, lambda m, total: np.logaddexp(total, sinks + m))
        what, block = recipe["key_tail"] or ("", 1)
        if what == "zeros":  # a last block's padding, read as scores of 0
            more = np.log(float(-self.problem.keys % block))
            return _divided(x, lambda _, total: np.logaddexp(total, more), sinks)
        if self.perturbed == "logsumexp":
            single = eps(np.dtype(np.float32))
            return _divided(x, lambda _, total: total + np.minimum(single * np.abs(total), _OFF), sinks)
        return np.asarray(softmax(x, sinks)[1])

    # ── from the weights to the output ──

    def output(self, recipe: Recipe, selection: Selection) -> Array:
        """A·V per head, (batch, heads, rows, d_v)."""
        result = self._of_heads(recipe, selection, self._output)
        if recipe["added"] is not None and not self.inputs.merged:
            result = result + take(self._served(self.operands(recipe)[0], selection), selection.rows, 2)
        return result

    def _of_heads(self, recipe: Recipe, selection: Selection, compute: Callable[[Recipe, Selection], Array]) -> Array:
        """What each head gets: its own result, that of head 0, or the mean of all, perhaps with another softmax."""
        if recipe["heads"] is None:
            return compute(recipe, selection)
        meant = Selection((0,) if recipe["heads"] == "first" else tuple(range(self.problem.heads)), selection.rows)
        if recipe["heads"] == "softmax of the mean":
            mean = softmax(self.weights(recipe, meant).mean(axis=1, keepdims=True))[1]
            if compute == self.weights:
                return np.broadcast_to(mean, (len(mean), len(selection.heads), *mean.shape[2:]))
            return self.mixed(recipe, selection, np.repeat(mean, len(selection.heads), axis=1))
        result = compute(recipe, meant).mean(axis=1, keepdims=True)
        return np.broadcast_to(result, (len(result), len(selection.heads), *result.shape[2:]))

    def _output(self, recipe: Recipe, selection: Selection) -> Array:
        if recipe["across"] is not None:
            return self._across(recipe, selection)
        return self.mixed(recipe, selection, self.weights(recipe, selection))

    def mixed(self, recipe: Recipe, selection: Selection, weights: Array) -> Array:
        """The weights times the values; a value of weight 0 is not read."""
        values = self._served(self.operands(recipe)[2], selection)
        return self.rounded(mix(weights, split(values), lambda: weights == 0))

    def _across(self, recipe: Recipe, selection: Selection) -> Array:
        """Attention in which the heads of a token, or the batch entries, attend to each other; no rule but causal."""
        order = (0, 2, 1, 3) if recipe["across"] == "heads" else (2, 1, 0, 3)
        every = Selection(tuple(range(self.problem.heads)), selection.rows)
        served = (self._served(x, every) for x in self.operands(recipe))
        q, k, v = (take(x, every.rows, 2).transpose(order) for x in served)
        scale, places = changed_rules(self.problem, recipe).scale[0], np.arange(k.shape[2])
        late, right = recipe["scaling"] == "weights", 0 if changed_rules(self.problem, recipe).causal else None
        block = Block(
            q=q, k=k, positions=places[:, None], places=places, right=right, scale=1.0 if late else float(scale)
        )
        weights = softmax(logits(block))[1] * (scale if late else 1.0)
        return take(self.rounded(weights @ v).transpose(order), selection.heads, 1)

    def layer_output(self, recipe: Recipe, selection: Selection) -> Array:
        """U, (batch, 1, rows, d_out): the heads joined and projected."""
        layer, many, n = self.inputs.layer, self.problem.heads, self.problem.queries
        assert layer is not None
        heads = tuple(range(many))
        if recipe["merge"] == "flat":  # (heads·n, d_v) read as (n, heads·d_v)
            flat = np.array(selection.rows)[:, None] * many + np.arange(many)
            needed = sorted(set((flat % n).ravel().tolist()))
            joined = self.output(recipe, Selection(heads, tuple(needed)))
            joined = joined[:, flat // n, np.searchsorted(needed, flat % n)]
            joined = joined.reshape(*joined.shape[:2], joined.shape[2] * joined.shape[3])
        else:
            joined = self.output(recipe, Selection(heads, selection.rows))
            turned = np.swapaxes(joined, 1, 3) if recipe["merge"] == "interleaved" else joined
            joined = join_heads(turned)
        if "o" in layer.w and recipe["w_o"] not in ("missing", "on values"):
            joined = self.rounded(joined @ self.w_o(recipe))
        if "o" in layer.b and recipe["b_o"] is None and recipe["w_o"] != "missing":
            joined = self.rounded(joined + layer.b["o"].astype(self.dtype))
        if recipe["added"] is not None:
            joined = joined + take(layer.x.astype(self.dtype), selection.rows, 1)
        return np.asarray(joined[:, None])


def take(x: Array, chosen: tuple[int, ...], axis: int) -> Array:
    """The chosen heads (axis 1) or rows (axis 2); the array itself where these are all."""
    return x if len(chosen) == x.shape[axis] else x.take(chosen, axis)


# ── what stands in the softmax's place, of the logits, -inf where hidden ──

_AXES = {"queries": (-2,), "matrix": (-2, -1), "heads": (1,), "batch": (0,), "all": (0, 1, 2, 3)}


def _over(axes: tuple[int, ...], x: Array) -> Array:
    """The softmax along these axes together."""
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(x, axes, last)
    flat = moved.reshape(*moved.shape[: -len(axes)], -1) if len(axes) < x.ndim else moved.reshape(1, -1)
    return np.asarray(np.moveaxis(softmax(flat)[1].reshape(moved.shape), last, axes))


_Denominator = Callable[[Array, Array], Any]  # of a row's largest logit m and log-sum-exp L, (…, rows, 1)

_DENOMINATORS: dict[str, _Denominator] = {  # the logarithm of what each power is divided by
    "no sum": lambda m, _: m,
    "no sum, no maximum": lambda *_: 0.0,
    "one more": lambda _, total: np.logaddexp(total, 0.0),
    "one more, shifted": np.logaddexp,
    "unkept sum": lambda m, total: m + (total - m).swapaxes(-1, -2),  # they lie along the keys
    "unkept sum and maximum": lambda _, total: total.swapaxes(-1, -2),
}


def _divided(x: Array, denominator: _Denominator, sinks: Array | None = None) -> Array:
    """Powers of the logits by another denominator; m is the largest of the keys, the sinks count in L."""
    m = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    total = softmax(x, sinks)[0].logsumexp[..., None]
    return np.where(np.isneginf(x), 0.0, np.exp(x - denominator(m, total)))


def _overflowing(x: Array, dtype: str, sinks: Array | None) -> Array:
    """The softmax in this dtype without a row's maximum subtracted."""
    powers = np.exp(x.astype(dtype)).astype(x.dtype)
    total = powers.astype(dtype).sum(axis=-1, keepdims=True).astype(x.dtype)
    total = np.where((x > -np.inf).any(axis=-1, keepdims=True) & (total == 0), np.nan, total)
    return _quotient(powers, total if sinks is None else total + np.exp(sinks))


def _finite(peak: Array) -> Array:
    return np.where(np.isneginf(peak), peak.dtype.type(0), peak)


def _in_blocks(bug: tuple[str, int], x: Array, sinks: Array | None) -> Array:
    """An online softmax over blocks of keys of a size, with a bug."""
    what, size = bug
    block, starts = np.arange(x.shape[-1]) // size, np.arange(0, x.shape[-1], size)
    tops = np.maximum.reduceat(x, starts, axis=-1)
    running = _finite(np.maximum.accumulate(tops, axis=-1))
    final = running[..., -1:]
    powers = total = right = np.exp(x - final)
    if what in ("unshifted", "averaged"):  # each block by its own maximum
        powers = total = np.exp(x - _finite(tops)[..., block])
        if what == "averaged":
            sums = np.add.reduceat(powers, starts, axis=-1)[..., block]
            powers, total = _quotient(powers, sums), np.full_like(x[..., :1], len(starts))
    elif what == "nan":  # of exp(-inf - -inf) in the first block, which no later block mends
        total = np.where(np.isneginf(tops[..., :1]), np.nan, right)
    elif what.startswith("last"):
        last = np.where(np.isneginf(x), -1, block).max(axis=-1, keepdims=True)
        powers = np.where(block == last, right, x.dtype.type(0))
        total = right if what == "last values" else powers
    else:
        stale = np.exp(x - running[..., block])  # what each block adds, as if no later block raised the maximum
        powers, total = (right if what == kept else stale for kept in ("rescale sum", "rescale values"))
    sums = total.sum(axis=-1, keepdims=True)
    return _quotient(powers, sums if sinks is None else sums + np.exp(sinks - final))


def _quotient(powers: Array, total: Array) -> Array:
    """Powers / total, 0 where the total is 0."""
    return np.divide(powers, total, out=np.zeros_like(powers), where=total != 0)
