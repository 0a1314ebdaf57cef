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
from clearhead.core.definition import STEPS, logits, mix, over_heads, product, softmax, split
from clearhead.diagnosing import operands
from clearhead.diagnosing.operands import Operands
from clearhead.diagnosing.recipe import STAGES, Recipe, Rows, eps
from clearhead.diagnosing.rule_changes import SCORING, SEEING, changed_rules, selected, visible

_ORDERS = {  # of the steps before the mask, where the cap stands elsewhere
    "before scale": ("capped", "scaled", "biased"),
    "after bias": ("scaled", "biased", "capped"),
    "after mask": ("scaled", "biased"),
}
_AXES = {"queries": (-2,), "matrix": (-2, -1), "heads": (1,), "batch": (0,), "all": (0, 1, 2, 3)}
SOFTMAX = frozenset({"axis", "softmax", "blocks", "overflow"})  # each replaces the whole softmax
_OFF = 0.0025  # the most that rounding a log-sum-exp excuses: larger ones say nothing
_SCORED = operands.FIELDS | SCORING
_MASKED = _SCORED | SEEING | {"masking", "fill"}


class Workings(Operands):
    """Computes recipes on the same inputs, up to the stage of theirs."""

    def answer(self, recipe: Recipe, rows: Rows) -> Array:
        """The recipe's numbers at the stage of theirs, for these rows; q, k and v are whole."""
        stage = recipe["step"] or self.inputs.stage
        if stage in "qkv":
            return self.operands(recipe)["qkv".index(stage)]
        if stage == "weights":
            return self._of_heads(recipe, rows, self.weights)
        if STAGES.index(stage) < STAGES.index("weights"):  # what is done later does not show yet
            late = recipe["softcap"] == "after mask" and stage != "masked"
            recipe = recipe.but(scaling=None, softcap=None if late else recipe["softcap"])
            return self.logits(recipe, rows, stage)
        return self.layer_output(recipe, rows) if self.inputs.merged else self.output(recipe, rows)

    # ── from queries and keys to the logits ──

    def logits(self, recipe: Recipe, rows: Rows, stage: str = "masked") -> Array:
        """The definition's steps up to `stage`, (batch, heads, rows, keys)."""
        fields = {"scores": operands.FIELDS, "masked": _MASKED}.get(stage, _SCORED)
        compute = {"scores": self._scores, "masked": self._masked}.get(stage)
        make = compute or (lambda recipe, rows: self._unmasked(recipe, rows, stage))
        result: Array = self.once((stage, rows, recipe.key(fields)), lambda: make(recipe, rows))
        return result

    def _scores(self, recipe: Recipe, rows: Rows) -> Array:
        q, k, _ = self.operands(recipe)
        return self.rounded(product(take(q, rows), k.swapaxes(-1, -2)))

    def _rules(self, recipe: Recipe, rows: Rows) -> Block:
        """The rules of the scores; what a bias of -inf forbids is masked like any other key."""
        x = selected(changed_rules(self.problem, Recipe(recipe.key(SCORING))), rows, self.dtype)
        if x.bias is None:
            return x
        factor = {"negated": -1.0, "scaled": x.scale}.get(recipe["bias"], 1.0)
        return replace(x, bias=np.where(np.isneginf(x.bias), self.dtype.type(0), x.bias) * factor)

    def _unmasked(self, recipe: Recipe, rows: Rows, stage: str) -> Array:
        block, x = self._rules(recipe, rows), self.logits(recipe, rows, "scores")
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

    def _masked(self, recipe: Recipe, rows: Rows) -> Array:
        x, how = self.logits(recipe, rows, "biased"), recipe["masking"]
        if how in ("after", "renormalised"):
            return x
        seen = self.visible(recipe, rows)
        if how in ("one seen", "one hidden"):
            return x + (seen if how == "one seen" else ~seen).astype(x.dtype)
        if how in ("fill", "add"):
            seen = seen | np.isneginf(x)  # what the table of spans forbids
            return np.where(seen, x, self.dtype.type(recipe["fill"]) + (x if how == "add" else 0))
        x = STEPS["masked"](Block(positions=None, places=None, seen=seen), x)
        late = recipe["softcap"] == "after mask"
        return self._step(recipe, "capped", self._rules(recipe, rows), x) if late else x

    def visible(self, recipe: Recipe, rows: Rows) -> Array:
        """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
        key = ("visible", rows, recipe.key(SEEING))
        result: Array = self.once(key, lambda: visible(self.problem, recipe, rows))
        return result

    # ── from the logits to the weights ──

    def weights(self, recipe: Recipe, rows: Rows) -> Array:
        """A, (batch, heads, rows, keys)."""
        wide = tuple(range(self.problem.queries)) if recipe.wide else rows
        result = self._weights(recipe, wide)
        result = result.swapaxes(-1, -2) if recipe["turned"] else result
        return take(result, rows) if recipe.wide else result

    def _weights(self, recipe: Recipe, rows: Rows) -> Array:
        x, sinks, again = self.logits(recipe, rows), None, recipe["again"]
        if self.problem.sinks is not None:
            sinks = selected(changed_rules(self.problem, recipe), rows, self.dtype).sinks
        result = softmaxed(recipe, x, sinks)
        if self.rounded_sums:
            off = eps(np.dtype(np.float32)) * np.abs(log_sum(x, sinks))
            result = result * np.exp(-np.minimum(off, _OFF))
        if recipe["averaged"] is not None:
            result = np.broadcast_to(result.mean(axis=1, keepdims=True), result.shape)
        asked = again == "seen keys" or recipe.keys() & {"masking", "empty"}
        seen = self.visible(recipe, rows) if asked else np.array(True)
        if again is not None:
            result = softmax(np.where(seen, result, -np.inf))[1]
        if recipe["masking"] in ("after", "renormalised"):
            result = result * seen
        if recipe["masking"] == "renormalised":
            total = result.sum(axis=-1, keepdims=True)
            result = result / np.where(total == 0, 1, total)
        if recipe["empty"] is not None:
            empty_rows = ~seen.any(axis=-1, keepdims=True)
            result = np.where(empty_rows, np.nan if recipe["empty"] == "nan" else 1 / self.problem.keys, result)
        result = self.rounded(result)
        return STEPS["scaled"](self._rules(recipe, rows), result) if recipe["scaling"] == "weights" else result

    # ── from the weights to the output ──

    def output(self, recipe: Recipe, rows: Rows) -> Array:
        """A·V per head, (batch, heads, rows, d_v)."""
        result = self._of_heads(recipe, rows, self._output)
        if recipe["added"] is not None and not self.inputs.merged:
            result = result + take(self.operands(recipe)[0], rows)
        return result

    def _of_heads(self, recipe: Recipe, rows: Rows, compute: Callable[[Recipe, Rows], Array]) -> Array:
        """What each head gets: its own result, that of head 0, or the mean of all."""
        if recipe["heads"] is None:
            return compute(recipe, rows)
        result = compute(recipe, rows)
        some = result[:, :1] if recipe["heads"] == "first" else result.mean(axis=1, keepdims=True)
        return np.broadcast_to(some, result.shape)

    def _output(self, recipe: Recipe, rows: Rows) -> Array:
        if recipe["across"] is not None:
            return self._across(recipe, rows)
        return self.mixed(recipe, self.weights(recipe, rows))

    def mixed(self, recipe: Recipe, weights: Array) -> Array:
        """The weights times the values; a value of weight 0 is not read."""
        return self.rounded(mix(weights, split(self.operands(recipe)[2]), lambda: weights == 0))

    def _across(self, recipe: Recipe, rows: Rows) -> Array:
        """Attention in which the heads of a token, or the batch entries, attend to each other; no rule but causal."""
        order = (0, 2, 1, 3) if recipe["across"] == "heads" else (2, 1, 0, 3)
        q, k, v = (take(over_heads(x, self.problem.heads), rows).transpose(order) for x in self.operands(recipe))
        ruled, places, late = changed_rules(self.problem, recipe), np.arange(k.shape[2]), recipe["scaling"] == "weights"
        scale, right = float(ruled.scale[0]), 0 if ruled.causal else None
        block = Block(q=q, k=k, positions=places[:, None], places=places, right=right, scale=1.0 if late else scale)
        weights = softmax(logits(block))[1] * (scale if late else 1.0)
        return self.rounded(weights @ v).transpose(order)

    def layer_output(self, recipe: Recipe, rows: Rows) -> Array:
        """U, or the heads joined, (batch, 1, rows, d_out)."""
        layer, many, n = self.inputs.layer, self.problem.heads, self.problem.queries
        assert layer is not None
        if recipe["merge"] == "flat":  # (heads·n, d_v) read as (n, heads·d_v)
            flat = np.array(rows)[:, None] * many + np.arange(many)
            needed = sorted(set((flat % n).ravel().tolist()))
            joined = self.output(recipe, tuple(needed))[:, flat // n, np.searchsorted(needed, flat % n)]
            joined = joined.reshape(*joined.shape[:2], joined.shape[2] * joined.shape[3])
        else:
            joined = self.output(recipe, rows)
            joined = join_heads(np.swapaxes(joined, 1, 3) if recipe["merge"] == "interleaved" else joined)
        projects = self.inputs.stage == "output" and recipe["w_o"] != "missing"
        if "o" in layer.w and projects and recipe["w_o"] != "on values":
            joined = self.rounded(joined @ self.w_o(recipe))
        if "o" in layer.b and projects and recipe["b_o"] is None:
            joined = self.rounded(joined + layer.b["o"].astype(self.dtype))
        if recipe["added"] is not None:
            joined = joined + take(layer.x.astype(self.dtype)[:, None], rows)[:, 0]
        return np.asarray(joined[:, None])


def take(x: Array, rows: Rows) -> Array:
    """These rows of (batch, heads, rows, …); the array itself where these are all."""
    return x if len(rows) == x.shape[2] else x.take(rows, 2)


# ── what stands in the softmax's place, of logits (batch, heads, rows, keys), -inf where hidden ──


def softmaxed(recipe: Recipe, x: Array, sinks: Array | None) -> Array:
    """The weights that the recipe makes of these logits; the sinks are (heads, 1, 1)."""
    if recipe["powers"] == "2":
        x, sinks = x * np.log(2.0), None if sinks is None else sinks * np.log(2.0)
    if recipe["axis"] == "none":
        return np.where(np.isneginf(x), 0.0, x)
    if recipe["axis"] is not None:
        return _over(_AXES[recipe["axis"]], x)
    if recipe["softmax"] == "logarithm":
        return np.asarray(x - log_sum(x))
    if recipe["overflow"] is not None:
        return _overflowing(x, recipe["overflow"], sinks)
    if recipe["blocks"] is not None:
        return _powers(*_in_blocks(recipe["blocks"], x, sinks))
    what, block = recipe["key_tail"] or ("", 1)
    unshifted = recipe["sinks"] == "unshifted"
    if recipe["softmax"] is None and not unshifted and what != "zeros":
        return np.asarray(softmax(x, sinks)[1])
    m = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    total = log_sum(x, sinks + m if sinks is not None and unshifted else sinks)
    if what == "zeros":  # a last block's padding, read as scores of 0
        total = np.logaddexp(total, np.log(float(-x.shape[-1] % block)))
    return _powers(x, _denominator(recipe["softmax"], x, m, total))


def _denominator(how: str | None, x: Array, m: Array, total: Array) -> Any:
    """The logarithm of what each power is divided by, from a row's largest logit m and its log-sum-exp."""
    if how in ("no sum", "no sum, no maximum"):
        return m if how == "no sum" else 0.0
    if how in ("one more", "one more, shifted"):
        return np.logaddexp(total, m if how == "one more, shifted" else 0.0)
    if how in ("unkept sum", "unkept sum and maximum"):  # they lie along the keys
        return m + (total - m).mT if how == "unkept sum" else m.mT + log_sum(x - m.mT).mT
    return np.logaddexp(x, 0.0) if how == "sigmoid" else total


def log_sum(x: Array, sinks: Array | None = None) -> Array:
    """Each row's log-sum-exp, (…, rows, 1)."""
    return np.asarray(softmax(x, sinks)[0].logsumexp[..., None])


def _powers(numerator: Array, denominator: Any) -> Array:
    return np.asarray(np.exp(numerator - _finite(np.asarray(denominator))))


def _finite(x: Array) -> Array:
    """0 in the place of -inf, as a row has it that sees no key."""
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def _over(axes: tuple[int, ...], x: Array) -> Array:
    """The softmax along these axes together."""
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(x, axes, last)
    flat = moved.reshape(*moved.shape[: -len(axes)], -1) if len(axes) < x.ndim else moved.reshape(1, -1)
    return np.asarray(np.moveaxis(softmax(flat)[1].reshape(moved.shape), last, axes))


def _overflowing(x: Array, dtype: str, sinks: Array | None) -> Array:
    """The softmax in this dtype without a row's maximum subtracted."""
    powers = np.exp(x.astype(dtype)).astype(x.dtype)
    total = powers.astype(dtype).sum(axis=-1, keepdims=True).astype(x.dtype)
    total = total if sinks is None else total + np.exp(sinks)
    return np.where((x > -np.inf).any(axis=-1, keepdims=True), powers / total, 0.0)


def _in_blocks(bug: tuple[str, int], x: Array, sinks: Array | None) -> tuple[Array, Array]:
    """The numerators and denominators of an online softmax over blocks of keys of a size, with a bug."""
    what, size = bug
    block, starts = np.arange(x.shape[-1]) // size, np.arange(0, x.shape[-1], size)
    tops = np.maximum.reduceat(x, starts, axis=-1)
    if what == "averaged":  # of the blocks' softmaxes, each with its own sum
        own = _finite(np.logaddexp.reduceat(x, starts, axis=-1))
        return x - own[..., block], np.full_like(x[..., :1], np.log(len(starts)))
    if what == "nan":  # of exp(-inf - -inf) in the first block, which no later block mends
        return x, np.where(np.isneginf(tops[..., :1]), np.nan, log_sum(x, sinks))
    running = _finite(np.maximum.accumulate(tops, axis=-1))
    final = running[..., -1:]
    above = below = right = x - final
    if what == "unshifted":  # each block by its own maximum
        above = below = x - _finite(tops)[..., block]
    elif what.startswith("last"):
        last = np.where(np.isneginf(x), -1, block).max(axis=-1, keepdims=True)
        above = np.where(block == last, right, -np.inf)
        below = right if what == "last values" else above
    else:
        stale = x - running[..., block]  # what each block adds, as if no later block raised the maximum
        above, below = (right if what == kept else stale for kept in ("rescale sum", "rescale values"))
    return above, log_sum(below, None if sinks is None else sinks - final)
