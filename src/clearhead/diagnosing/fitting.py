"""How well a recipe's numbers fit theirs: the gap, what rounding allows, and the number in hidden places, solved."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from clearhead.core.axes import Array, split_heads
from clearhead.diagnosing.recipe import RIGHT, STAGES, VISIBILITY, Diagnosed, Recipe, Selection
from clearhead.diagnosing.softmaxes import eps
from clearhead.diagnosing.workings import Workings

FACTOR = 4.0  # a right result may lie this many times further from the truth than a plain run in its dtype
_TYPICAL = 2.0  # the same for the root mean square of all numbers, where rounding decides which key wins
_DOUBT = 16.0  # a gap of up to this many tolerances is judged by more plain runs: one run may have been lucky
_RUNS = 4
_WIDEST = 1e-2  # of a number: what a rounded log-sum-exp excuses at most; for scores up to some ten thousand
_WIDEST_NARROW = 0.1  # the same where the log-sum-exp is in a narrow dtype as well
_FEW = 64  # numbers whose root mean square says little
_CLEAR = 0.3  # a correlation that is no chance
_ALTERING = "axis", "softmax", "blocks", "across", "added"  # fields whose rows are no such quotients


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two that rounds more."""
    return max(a, b, key=eps)


class Fit:
    """Measures recipes against theirs on one part of the inputs."""

    def __init__(self, inputs: Diagnosed, dtype: np.dtype[Any], slack: float) -> None:
        self.inputs, self.dtype, self.slack = inputs, dtype, slack
        self.exact = Workings(inputs)
        single = dtype == np.float64
        self.plain = Workings(inputs, np.dtype(np.float32) if single else dtype)
        self.shrink = 2.0**-29 if single else 1.0  # from float32's rounding error to float64's

    def theirs(self, selection: Selection) -> Array:
        """Their numbers for these heads and rows."""
        heads = slice(None) if self.inputs.merged else list(selection.heads)
        theirs, key = self.inputs.theirs, ("theirs", selection)
        return self.exact.once(key, lambda: theirs[:, :, list(selection.rows)][:, heads].astype(np.float64), keep=True)

    def gap(self, recipe: Recipe, selection: Selection, computed: Array | None = None, most: float = np.inf) -> float:
        """The largest difference between theirs and the recipe's numbers; infinite where shapes or NaNs differ.

        computed   the recipe's numbers, where they are known already
        most       a gap beyond this need not be exact
        """
        theirs = self.theirs(selection)
        computed = self.exact.answer(recipe, selection) if computed is None else computed
        if computed.shape != theirs.shape:
            return float("inf")
        gaps = differences(theirs, computed)
        if not gaps.size:
            return 0.0
        if recipe.tail[0] == "unknown":
            gaps = gaps[:, :, np.array(selection.rows) < recipe.tail[1]]
            return float(gaps.max()) if gaps.size else float("inf")
        if recipe.overflow and not self.inputs.merged and recipe.axis == "keys":
            gaps = self._at_the_edge(recipe, selection, theirs, gaps)
        worst = float(gaps.max())
        if worst > 0 and recipe.empty == "zero" and VISIBILITY(recipe) != VISIBILITY(RIGHT):
            return self._excused(recipe, selection, theirs, gaps, most)
        return worst

    def _at_the_edge(self, recipe: Recipe, selection: Selection, theirs: Array, gaps: Array) -> Array:
        """The gaps, where rows near the edge of exp's range may be NaN, 0 or right: rounding decides which."""
        x, edge = self.exact.logits(recipe, selection), np.log(float(np.finfo(recipe.overflow).max))
        tops = x.max(axis=-1, keepdims=True), np.logaddexp.reduce(x, axis=-1, keepdims=True)
        blur = 8 * max(eps(self.dtype), eps(np.dtype(recipe.overflow))) * edge
        near_edge = np.logical_or(*(np.abs(top - edge) <= blur for top in tops))
        right = differences(theirs, self.exact.answer(recipe._replace(overflow=""), selection))
        either = np.where((theirs == 0) | np.isnan(theirs), 0.0, np.minimum(gaps, right))
        return np.where(near_edge, either, gaps)

    def _excused(self, recipe: Recipe, selection: Selection, theirs: Array, gaps: Array, most: float) -> float:
        """The largest gap, where a row that only the wrong mask leaves without keys may be 0, NaN or a mean."""
        emptied: Array = np.asarray(~self.exact.visible(recipe, selection).any(axis=-1, keepdims=True))
        emptied = emptied & self.exact.visible(RIGHT, selection).any(axis=-1, keepdims=True)
        if not bool(emptied.any()) or self.inputs.stage not in ("weights", "output"):
            return float(gaps.max())
        if self.inputs.merged:
            emptied = np.asarray(emptied.any(axis=1, keepdims=True))
            return float(np.where(emptied & np.isnan(theirs), 0.0, gaps).max())
        elsewhere = float(np.where(emptied, 0.0, gaps).max())
        if elsewhere > most:
            return elsewhere
        mean = self.exact.answer(recipe._replace(empty="mean"), selection)
        gaps = np.where(emptied, np.minimum(gaps, differences(theirs, mean)), gaps)
        return float(np.where(emptied & np.isnan(theirs), 0.0, gaps).max())

    def measure(self, recipe: Recipe, selection: Selection, exact: Array | None = None) -> tuple[float, float]:
        """The gap, and what rounding allows."""
        exact = self.exact.answer(recipe, selection) if exact is None else exact
        gap, allowed = self.gap(recipe, selection, exact), self.allowed(recipe, selection, exact)
        if allowed < gap < _DOUBT * allowed:
            allowed = max(allowed, *(self.allowed(recipe, selection, exact, run) for run in self._other_runs))
        if gap <= allowed and allowed > _WIDEST * largest(exact):
            allowed = min(allowed, self._typical(recipe, selection, exact))
        by_logsumexp = recipe == RIGHT and self.inputs.weights is None and self.inputs.stage in STAGES[-2:]
        if allowed < gap and by_logsumexp:
            allowed = max(allowed, self._by_logsumexp(selection, exact, allowed))
        return gap, allowed

    @cached_property
    def _other_runs(self) -> list[Workings]:
        return [Workings(self.inputs, self.plain.precision, run) for run in range(_RUNS)]

    def _typical(self, recipe: Recipe, selection: Selection, exact: Array, scaled: Array | None = None) -> float:
        """What rounding allows where it turns single numbers into others: the root mean square must agree as well.

        Where scores are huge, rounding decides which of two keys gets all the weight. A plain run is then wrong by as
        much as the values are large, but in a few rows. Infinite where theirs are not further off on the whole than
        such runs; else a limit that theirs exceed.

        scaled   the exact numbers with each row's factor, where theirs are compared with these
        """
        theirs = self.theirs(selection)
        if not (np.isfinite(theirs).all() and np.isfinite(exact).all()) or theirs.size < _FEW:
            return float("inf")
        errors = [run.answer(recipe, selection) - exact for run in (self.plain, *self._other_runs)]
        worst = max(rms(error[np.isfinite(error)]) for error in errors) * self.shrink
        limit = _TYPICAL * (worst + eps(self.dtype) * largest(exact)) + self.slack
        return limit if rms(theirs - (exact if scaled is None else scaled)) > limit else float("inf")

    def _by_logsumexp(self, selection: Selection, exact: Array, allowed: float) -> float:
        """What exp(s - L) may be off by: L is rounded, so that all weights of a row have one factor in common.

        0 where theirs are no such rows: beside the factor, no number may be off by more than is allowed, and where
        that is much, nor may all of them together.
        """
        wide = allowed > _WIDEST * largest(exact)
        sums = np.abs(np.logaddexp.reduce(self.exact.logits(RIGHT, selection), axis=-1, keepdims=True))
        sums = np.where(np.isfinite(sums), sums, 0.0)
        statistics = min(eps(self.dtype), eps(np.dtype(np.float32)))  # their dtype: float32, or float64 for float64
        if self.inputs.merged:  # each head has its own factors
            if wide and np.isfinite(self._typical(RIGHT, selection, exact)):
                return 0.0
            rounding = FACTOR * statistics * largest(sums) * largest(exact)
            return allowed + min(rounding, _WIDEST * largest(exact))
        theirs = self.theirs(selection)
        for rounded, widest in ((statistics, _WIDEST), (eps(self.dtype), _WIDEST_NARROW)):
            most = np.minimum(FACTOR * rounded * sums, widest)
            squared = (exact**2).sum(axis=-1, keepdims=True)
            shares = (theirs * exact).sum(axis=-1, keepdims=True)
            factors = np.divide(shares, squared, out=np.ones_like(squared), where=squared > 0)
            scaled = np.clip(factors, 1 - most, 1 + most) * exact
            close = float(differences(theirs, scaled).max(initial=0.0)) <= allowed
            if close and not (wide and np.isfinite(self._typical(RIGHT, selection, exact, scaled))):
                return allowed + largest(most * exact)
        return 0.0

    def allowed(
        self, recipe: Recipe, selection: Selection, exact: Array | None = None, run: Workings | None = None
    ) -> float:
        """What rounding allows: a factor times the error of a plain run in their dtype, and their printed decimals."""
        exact = self.exact.answer(recipe, selection) if exact is None else exact
        error = np.abs(exact - (run or self.plain).answer(recipe, selection))
        worst = float(error[np.isfinite(error)].max(initial=0.0)) * self.shrink
        factor = 3 * FACTOR if self.dtype == np.float64 else FACTOR  # in float64 the exact numbers are rounded too
        return factor * (worst + eps(self.dtype) * largest(exact)) + self.slack

    def rounded_to(self, narrow: str, selection: Selection) -> float:
        """How surely theirs are the right numbers but for rounding to a narrow dtype on the way; 0 where they are not.

        The error goes with that of a run whose inputs, weights, output or every step is rounded, or each number is one
        of the dtype's; it is not much larger than in such a run, and does not go with the right numbers themselves.
        """
        exact, theirs, dtype = self.exact.answer(RIGHT, selection), self.theirs(selection), np.dtype(narrow)
        error, clear = theirs - exact, max(_CLEAR, 6 / max(1, theirs.size) ** 0.5)
        if error.size < _FEW or not np.isfinite(error).all() or abs(correlated(error, exact)) > clear:
            return 0.0

        def rounded(x: Array) -> Array:
            return x.astype(dtype).astype(x.dtype)

        runs = [
            work.answer(RIGHT, selection)
            for work in (Workings(self.inputs, dtype), Workings(self.inputs.mapped(rounded, rounded)))
        ]
        runs.append(rounded(exact))
        if self.inputs.stage == "output" and not self.inputs.merged:
            runs.append(rounded(self.exact.weights(RIGHT, selection)) @ self.exact.values(RIGHT, selection))
        errors = [run - exact for run in runs]
        alike = [correlated(error, other) for other in errors if rms(error) <= _TYPICAL * rms(other) < np.inf]
        best = max(alike, default=0.0)
        written = bool(alike) and bool((rounded(theirs) == theirs).all())
        return best if best > clear else clear * written

    def filled(self, recipe: Recipe, selection: Selection) -> Recipe | None:
        """The recipe with the number f that stands in hidden places, or is added there, solved from theirs.

        With o_v and o_h the outputs of the visible and of the hidden keys alone, and r = Σ exp(hidden) / Σ exp(visible)
        for f = 0, a row's output is (o_v + r·e^f·o_h) / (1 + r·e^f). So o_v - theirs = r·e^f·(theirs - o_h) in each
        row; all rows together give f, each weighed by how much it shows.
        """
        if recipe.merge == "flat" or any(getattr(recipe, name) != getattr(RIGHT, name) for name in _ALTERING):
            return None
        merged, stage = self.inputs.merged, self.inputs.stage
        exact = self._per_head if merged else self.exact
        theirs = self._by_head(recipe, selection) if merged else self.theirs(selection)
        x, seen = exact.logits(recipe._replace(fill=0.0), selection), exact.visible(recipe, selection)
        if stage == "masked":
            numbers = (theirs - x)[np.broadcast_to(~seen, x.shape)]
            return recipe._replace(fill=_short(float(np.median(numbers)))) if numbers.size else None
        visible = x[np.broadcast_to(seen, x.shape)]
        near = float(visible.mean()) if visible.size and recipe.masking == "fill" else 0.0  # from where f is counted
        powers, total = exact.powers(recipe, selection, np.where(seen, x, x + near))
        powers = np.where(seen, 0.0, powers)
        hidden = powers.sum(axis=-1, keepdims=True)
        of_visible, of_hidden = exact.answer(recipe._replace(masking="forbid"), selection), powers / hidden
        if stage == "output":
            of_hidden = of_hidden @ exact.values(recipe, selection)
        if not theirs.shape == of_visible.shape == of_hidden.shape or total.shape != hidden.shape:
            return None
        r = hidden / (total - hidden)
        use = np.isfinite(r) & np.isfinite(theirs + of_hidden).all(axis=-1, keepdims=True)
        left, right, shown = (
            np.where(use, side, 0.0)
            for side in (of_visible - theirs, r * (theirs - of_hidden), r * (of_visible - of_hidden))
        )
        power = 1.0
        for _ in range(4):
            weight = shown / (1 + np.where(use, r, 0.0) * power) ** 2
            power = max(0.0, float((left * weight).sum() / (right * weight).sum()))
        if not 0 < power < np.inf:
            return None
        number = float(np.log(power)) + near
        idle = recipe.masking == "add" and abs(number) <= 1e-3  # no key is hidden then
        return None if idle else recipe._replace(fill=_short(number))

    @cached_property
    def _per_head(self) -> Workings:
        return Workings(replace(self.inputs, per_head=True))

    def _by_head(self, recipe: Recipe, selection: Selection) -> Array:
        """A layer's output with an axis of heads: W^O is undone, as far as it can be, and the heads are split again."""
        layer, heads, joined = self.inputs.layer, self.inputs.problem.heads, self.theirs(selection)[:, 0]
        assert layer is not None
        if "o" in layer.w and recipe.w_o not in ("missing", "on values"):
            if "o" in layer.b and recipe.b_o == "given":
                joined = joined - layer.b["o"]
            flat = joined.reshape(-1, joined.shape[-1])
            joined = np.linalg.lstsq(self.exact.w_o(recipe).T, flat.T, rcond=None)[0].T.reshape(*joined.shape[:-1], -1)
        if recipe.merge == "interleaved":
            return np.moveaxis(joined.reshape(*joined.shape[:-1], -1, heads), -1, 1)
        return np.asarray(split_heads(joined, heads))


def _short(x: float) -> float:
    """A number of two digits where `x` lies very near to one: -9.99998 is -10, 2.2e-16 is 0."""
    short = float(f"{x:.2g}") if abs(x) > 1e-3 else 0.0
    return short if abs(x - short) <= 1e-3 * max(1.0, abs(x)) else x


@np.errstate(invalid="ignore", over="ignore")
def differences(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one is."""
    gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gaps), np.inf, gaps)


def largest_difference(a: Array, b: Array) -> float:
    """The largest of them; infinite where the shapes differ."""
    return float(differences(a, b).max(initial=0.0)) if a.shape == b.shape else float("inf")


def rms(x: Array) -> float:
    """Root mean square; infinite where a number is NaN or infinite."""
    size = float(np.sqrt(np.mean(x**2))) if x.size else 0.0
    return size if np.isfinite(size) else float("inf")


def correlated(a: Array, b: Array) -> float:
    """Σ a·b / (|a|·|b|), 0 where one of them is 0 or not finite."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / size if size and np.isfinite(size) else 0.0


def largest(x: Array) -> float:
    """The largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


class Screen:
    """Rules out candidates that are far from theirs on a few rows, of one head where heads are not joined."""

    def __init__(self, fit: Fit) -> None:
        inputs, n, heads = fit.inputs, fit.inputs.problem.queries, tuple(range(fit.inputs.problem.heads))
        rows = {n // 2} if inputs.merged else {int(n > 2), n // 2, n - 1}
        self.fit, single = fit, np.dtype(np.float32)
        chosen = heads if inputs.merged else heads[len(heads) // 2 :][:1]
        self.selection = Selection(chosen, tuple(sorted(rows & set(range(n)))))
        self.workings = fit.plain if fit.plain.precision == single else Workings(inputs, single)
        allowed = fit.allowed(RIGHT, self.selection)
        self.threshold = max(1e-3 * largest(fit.theirs(self.selection)), 5 * allowed)

    def near(self, recipe: Recipe) -> bool:
        """Is it near theirs?"""
        computed = self.workings.answer(recipe, self.selection)
        return self.fit.gap(recipe, self.selection, computed, self.threshold) <= self.threshold


def taken(inputs: Diagnosed, batches: tuple[int, ...]) -> Diagnosed:
    """The same inputs for some batch entries."""
    if len(batches) == inputs.problem.batch:
        return inputs
    index = list(batches)
    problem, theirs = inputs.problem.take(batches=np.array(index)), inputs.theirs[index]
    return replace(inputs.mapped(lambda x: x[index]), whole=inputs, entries=batches, problem=problem, theirs=theirs)
