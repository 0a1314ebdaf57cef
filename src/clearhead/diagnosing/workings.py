"""The numbers of a recipe: the textbook's steps one by one, each according to the recipe's fields, right or wrong.

`Workings(inputs)` computes in float64. With a dtype it is a plain run in that dtype: every step is rounded to it.
Intermediates that several recipes share are computed once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.block import block_of, everything
from clearhead.core.spans import added
from clearhead.diagnosing import recipe_visibility as sight
from clearhead.diagnosing import softmaxes
from clearhead.diagnosing.operands import PROJECTING, Operands, take, weighted, with_more
from clearhead.diagnosing.recipe import RIGHT, VISIBILITY, Recipe, Selection, between

_SCORES = attrgetter(*PROJECTING, *between("cache", "groups"), "tile")
_LOGITS = attrgetter(*between("scale", "spans"), "scaling")


class Workings(Operands):
    """Computes recipes on the same inputs, up to the stage of theirs."""

    def answer(self, recipe: Recipe, selection: Selection) -> Array:
        """The recipe's numbers at the stage of theirs, for these heads and rows."""
        if self.inputs.whole is not None and _mixes_batch(recipe):
            return self._of_whole.answer(recipe, selection)[list(self.inputs.entries)]
        stage = recipe.step or self.inputs.stage
        if stage == "scores":
            return self.scores(recipe, selection)
        if stage == "weights":
            return self._of_heads(recipe, selection, self._turned_weights if recipe.turned else self.weights)
        if stage != "output":
            return self.logits(recipe, selection, stage)
        return self.layer_output(recipe, selection) if self.inputs.merged else self.output(recipe, selection)

    @cached_property
    def _of_whole(self) -> "Workings":
        """The same for all batch entries, of which these inputs are some."""
        assert self.inputs.whole is not None
        return Workings(replace(self.inputs.whole, per_head=self.inputs.per_head), self.precision, self.perturbed)

    # ── scores and logits ──

    def scores(self, recipe: Recipe, selection: Selection) -> Array:
        """Q·Kᵀ, (batch, heads, rows, keys)."""
        return self.once(("scores", selection, _SCORES(recipe)), lambda: self._scores(recipe, selection))

    def _scores(self, recipe: Recipe, selection: Selection) -> Array:
        if self.long and recipe.split == "one" and recipe.product == "q·kᵀ" and recipe.keys != "v":
            every = Selection(tuple(range(self.problem.heads)), selection.rows)  # not split: the sum of all heads' own
            split, total = recipe._replace(split="heads"), np.zeros((), self.dtype)
            for one in self._each_head(every):
                total = total + self._scores(split, one)
            return np.repeat(total, len(selection.heads), axis=1)
        if self.long and len(selection.heads) > 1:
            return np.concatenate([self._scores(recipe, one) for one in self._each_head(selection)], axis=1)
        q = self.served(recipe, recipe.queries, selection.heads)
        k = self.served(recipe, recipe.keys, selection.heads)
        if recipe.product == "k·qᵀ":
            q, k = k, q
        if recipe.product == "cosine":
            q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        q = take(q, selection.rows, 2)
        return self.rounded(q @ (k if recipe.product == "q·k" else k.swapaxes(-1, -2)))

    def _each_head(self, selection: Selection) -> list[Selection]:
        return [Selection((head,), selection.rows) for head in selection.heads]

    def logits(self, recipe: Recipe, selection: Selection, stage: str = "masked") -> Array:
        """Scores, then scale, cap, bias, ALiBi, mask, up to `stage`."""
        key = (stage, selection, _SCORES(recipe), _LOGITS(recipe))
        if stage == "masked":
            acts = (VISIBILITY(recipe), recipe.key_tail, recipe.masking, recipe.fill)
            return self.once((*key, acts), lambda: self._masked(recipe, selection))
        return self.once(key, lambda: self._unmasked(recipe, selection, stage))

    def scale(self, recipe: Recipe, selection: Selection) -> Array:
        """What scores are multiplied by, (heads, 1, 1)."""
        scale = self.problem.scale[list(selection.heads), None, None]
        return (scale if recipe.scale is None else np.full_like(scale, recipe.scale)).astype(self.dtype)

    def _unmasked(self, recipe: Recipe, selection: Selection, stage: str) -> Array:
        problem = self.problem
        x = self.scores(recipe, selection)
        bias = None if problem.bias is None or recipe.bias == "missing" else self._bias(recipe, selection)
        slopes = None if problem.alibi_slopes is None or recipe.alibi == "missing" else self._alibi(recipe, selection)
        if bias is not None and recipe.bias == "scaled":
            x = x + bias
        if slopes is not None and recipe.alibi == "scaled":
            x = x - slopes
        if recipe.softcap == "before scale":
            x = self._capped(recipe, x)
        if recipe.scaling == "logits":
            x = self.rounded(x * self.scale(recipe, selection))
        if stage != "scaled" and recipe.softcap in ("given", "not multiplied", "clipped"):
            x = self._capped(recipe, x)
        if stage == "biased":
            if bias is not None and recipe.bias != "scaled":
                x = self.rounded(x + bias)
            if slopes is not None and recipe.alibi != "scaled":
                x = self.rounded(x + slopes if recipe.alibi == "added" else x - slopes)
            if problem.span_table is not None and recipe.spans != "missing":
                x = self.rounded(x + self._spans(recipe, selection))
            if recipe.softcap == "after bias":
                x = self._capped(recipe, x)
        return x

    def _capped(self, recipe: Recipe, x: Array) -> Array:
        cap = self.problem.softcap
        if cap is None:
            return x
        if recipe.softcap == "clipped":
            return np.clip(x, -cap, cap)
        return self.rounded((1 if recipe.softcap == "not multiplied" else cap) * np.tanh(x / cap))

    def _bias(self, recipe: Recipe, selection: Selection) -> Array:
        bias = sight.biased(self.problem, recipe)
        assert bias is not None
        bias = take(take(bias, selection.heads, 1), selection.rows, 2).astype(self.dtype)
        bias = np.where(np.isneginf(bias), self.dtype.type(0), bias)  # a forbidden key is masked like any other
        return bias * self.dtype.type({"negated": -1, "twice": 2}.get(recipe.bias, 1))

    def _alibi(self, recipe: Recipe, selection: Selection) -> Array:
        assert self.problem.alibi_slopes is not None
        positions = np.array(selection.rows) + self.problem.query_offset[:, None]
        distances = np.abs(positions[:, None, :, None] - np.arange(self.problem.keys))
        right = self.problem.alibi_slopes
        every = {"given": right, "reversed": right[::-1], "all alike": np.full_like(right, right[0])}
        every |= {"next head": np.roll(right, -1), "square root": np.sqrt(right), "squared": right**2}
        slopes = every[recipe.alibi_slopes][list(selection.heads), None, None]
        return (slopes * distances).astype(self.dtype)

    def _spans(self, recipe: Recipe, selection: Selection) -> Array:
        """What the table adds, (batch, heads, rows, keys)."""
        problem = sight.spanned(self.problem, recipe)
        block = block_of(problem, everything(problem))
        rows, table = block.query_spans[:, :, list(selection.rows)], block.span_table[:, list(selection.heads)]
        result: Array = added(rows, block.key_spans, table).astype(self.dtype)
        return result

    def _masked(self, recipe: Recipe, selection: Selection) -> Array:
        x = self.logits(recipe, selection, "biased")
        if recipe.masking in ("after", "renormalised"):
            return np.where(sight.visited(self.problem, recipe, selection), x, self.dtype.type(-np.inf))
        seen = self.visible(recipe, selection)
        if recipe.softcap == "after mask":
            assert self.problem.softcap is not None
            return np.where(seen, self._capped(recipe, x), self.dtype.type(-self.problem.softcap))
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
        key = ("visible", selection, VISIBILITY(recipe), recipe.key_tail)
        return self.once(key, lambda: sight.visible(self.problem, recipe, selection))

    # ── softmax ──

    def weights(self, recipe: Recipe, selection: Selection) -> Array:
        """A, (batch, heads, rows, keys)."""
        if self.inputs.weights is not None:
            weights = take(take(self.inputs.weights, selection.heads, 1), selection.rows, 2)
            return self.rounded(weights.astype(self.dtype))
        heads = tuple(range(self.problem.heads)) if recipe.axis in ("heads", "all") else selection.heads
        wide = Selection(heads, tuple(range(self.problem.queries)) if recipe.wide else selection.rows)
        x = self.logits(recipe, wide)
        if recipe.axis.startswith("none"):
            used = sight.read(self.problem, recipe) if recipe.axis == "none" else self.visible(recipe, selection)
            return self._scaled_late(recipe, selection, np.where(used, x, self.dtype.type(0)))
        if recipe.softmax in ("sigmoid", "logarithm"):
            return self._scaled_late(recipe, selection, softmaxes.scored(recipe.softmax, x))
        result = self.rounded(_quotient(*self.powers(recipe, wide, x)))
        result = take(take(result, selection.heads, 1), selection.rows, 2)
        if recipe.softmax.startswith("twice"):
            hidden = recipe.softmax == "twice, hidden keys too"
            seen = True if hidden else self.visible(recipe, selection)
            powers = np.where(seen, np.exp(result), self.dtype.type(0))
            result = _quotient(powers, powers.sum(axis=-1, keepdims=True))
        if recipe.masking in ("after", "renormalised"):
            result = result * self.visible(recipe, selection)
            if recipe.masking == "renormalised":
                result = _quotient(result, result.sum(axis=-1, keepdims=True))
        if recipe.empty != "zero":
            empty_rows = ~self.visible(recipe, selection).any(axis=-1, keepdims=True)
            result = np.where(empty_rows, np.nan if recipe.empty == "nan" else 1 / self.problem.keys, result)
        return self._scaled_late(recipe, selection, result)

    def _scaled_late(self, recipe: Recipe, selection: Selection, result: Array) -> Array:
        return result if recipe.scaling == "logits" else result * self.scale(recipe, selection)

    def powers(self, recipe: Recipe, selection: Selection, x: Array) -> tuple[Array, Array]:
        """The softmax's numerators and denominator, up to a common factor of each row."""
        counts = sight.multiplicity(self.problem, recipe)
        x = x if counts is None else x + np.log(counts).astype(x.dtype)
        # Logits in the denominator that belong to no key, and how often: sinks, a last block's padding read as 0.
        extras: list[tuple[Array, int]] = []
        if self.problem.sinks is not None and recipe.sinks != "missing" and recipe.axis == "keys":
            sinks = sight.of_another_head(self.problem.sinks, recipe.sinks, 0)
            sinks = sinks[list(selection.heads), None, None].astype(self.dtype)
            extras.append((sinks * self.scale(recipe, selection) if recipe.sinks == "scaled" else sinks, 1))
        what, block = recipe.key_tail
        if what == "zeros" and recipe.axis == "keys":
            extras.append((np.zeros((1, 1, 1), self.dtype), -self.problem.keys % block))
        if recipe.softmax == "one more":
            extras.append((np.zeros((1, 1, 1), self.dtype), 1))
        return softmaxes.powers(recipe, x, extras, self.rounded)

    def _turned_weights(self, recipe: Recipe, selection: Selection) -> Array:
        """Aᵀ."""
        whole = Selection(selection.heads, tuple(range(self.problem.queries)))
        return take(self.weights(recipe, whole).swapaxes(-1, -2), selection.rows, 2)

    # ── output ──

    def output(self, recipe: Recipe, selection: Selection) -> Array:
        """A·V per head, (batch, heads, rows, d_v)."""
        result = self._of_heads(recipe, selection, self._output)
        if recipe.added and not self.inputs.merged:
            residual = take(self.served(recipe, "q", selection.heads), selection.rows, 2)
            result = with_more(recipe, result, residual)[..., : self.inputs.theirs.shape[-1]]
        what, start = recipe.tail
        if what == "zero":
            result = np.where(np.array(selection.rows)[:, None] >= start, self.dtype.type(0), result)
        return result

    def _of_heads(self, recipe: Recipe, selection: Selection, compute: Callable[[Recipe, Selection], Array]) -> Array:
        """What each head gets: its own result, that of head 0, or the mean of all."""
        if recipe.heads == "each":
            return compute(recipe, selection)
        meant = (0,) if recipe.heads == "first" else tuple(range(self.problem.heads))
        result = compute(recipe, Selection(meant, selection.rows)).mean(axis=1, keepdims=True)
        return np.broadcast_to(result, (result.shape[0], len(selection.heads), *result.shape[2:]))

    def _output(self, recipe: Recipe, selection: Selection) -> Array:
        if recipe.across != "tokens":
            return self._across(recipe, selection)
        split = recipe._replace(split="heads") if recipe.split == "one" else recipe  # only q and k are that wide
        if recipe.turned:
            return self.rounded(self._turned_weights(recipe, selection) @ self.values(split, selection))
        weights = self.weights(recipe, selection)
        if not self.long:
            return self.rounded(weighted(weights, self.values(split, selection)))
        each = enumerate(self._each_head(selection))
        parts = [weighted(weights[:, [i]], self.values(split, head)) for i, head in each]
        return self.rounded(np.concatenate(parts, axis=1))

    def values(self, recipe: Recipe, selection: Selection) -> Array:
        """What the weights are multiplied by, (batch, heads, keys, columns)."""
        return self.served(recipe, recipe.values, selection.heads)

    def _across(self, recipe: Recipe, selection: Selection) -> Array:
        """Attention in which the heads of a token, or the batch entries, attend to each other; no rule but causal."""
        every = Selection(tuple(range(self.problem.heads)), selection.rows)
        order = (0, 2, 1, 3) if recipe.across == "heads" else (2, 1, 0, 3)
        served = (self.served(recipe, name, every.heads) for name in (recipe.queries, recipe.keys, recipe.values))
        q, k, v = (take(x, every.rows, 2).transpose(order) for x in served)
        x = self.rounded(q @ k.swapaxes(-1, -2))
        x = self.rounded(x * self.scale(recipe, every)[0]) if recipe.scaling == "logits" else x
        if self.problem.causal and recipe.causal != "missing":
            x = np.where(np.tri(x.shape[-1], dtype=bool), x, self.dtype.type(-np.inf))
        powers, total = softmaxes.powers(RIGHT, x, [], self.rounded)
        weights = self.rounded(powers / total)
        weights = weights if recipe.scaling == "logits" else weights * self.scale(recipe, every)[0]
        return take(self.rounded(weights @ v).transpose(order), selection.heads, 1)

    def layer_output(self, recipe: Recipe, selection: Selection) -> Array:
        """U, (batch, 1, rows, d_out): the heads joined and projected."""
        layer = self.inputs.layer
        assert layer is not None
        many, n, heads = self.problem.heads, self.problem.queries, tuple(range(self.problem.heads))
        if recipe.merge == "flat":  # (heads·n, d_v) read as (n, heads·d_v)
            flat = np.array(selection.rows)[:, None] * many + np.arange(many)
            needed = sorted(set((flat % n).ravel().tolist()))
            joined = self.output(recipe, Selection(heads, tuple(needed)))
            joined = joined[:, flat // n, np.searchsorted(needed, flat % n)]
        else:
            order = (0, 2, 3, 1) if recipe.merge == "interleaved" else (0, 2, 1, 3)
            joined = self.output(recipe, Selection(heads, selection.rows)).transpose(order)
        joined = joined.reshape(*joined.shape[:2], joined.shape[2] * joined.shape[3])
        if "o" in layer.w and recipe.w_o not in ("missing", "on values"):
            joined = self.rounded(joined @ self.w_o(recipe))
        if "o" in layer.b and recipe.b_o == "given" and recipe.w_o != "missing":
            joined = self.rounded(joined + layer.b["o"].astype(self.dtype))
        if recipe.added:
            joined = with_more(recipe, joined, take(layer.x.astype(self.dtype)[:, None], selection.rows, 2)[:, 0])
        return joined[:, None]


def _mixes_batch(recipe: Recipe) -> bool:
    """Does it bring batch entries together?"""
    whole = recipe.axis in ("batch", "all") or recipe.across == "batch" or recipe.cache == "another batch"
    return whole or recipe.mask == "tiled" or recipe.padding in ("tiled", "shortest", "longest")


def _quotient(powers: Array, total: Array) -> Array:
    """Powers / total, 0 where the total is 0."""
    return np.divide(powers, total, out=np.zeros_like(powers), where=total != 0)
