"""How well a recipe's numbers fit theirs: the gap, what rounding allows, and unknown numbers fitted to theirs.

Every candidate is compared first on one head and a few rows, in float32. A layer's output mixes all heads. So one head
of one row of theirs is recovered first: the output projection is undone, and the heads are split again in the way in
which the candidate joins them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.recipe import RIGHT, STAGES, VISIBILITY, Diagnosed, Recipe, Selection, changed
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
_TIMES = (*np.geomspace(1 / 256, 256, 65), *-np.geomspace(1 / 16, 16, 17))
_STARTS = {  # where the search for an unknown number begins
    "fill": (6.0, 2.0, 0.0, -3.0, -8.0),
    "scale_factor": _TIMES,
    "alibi_factor": _TIMES,
    "rotary_base": (1e4, 5e5, 1e6, *np.geomspace(10, 1e7, 140)),
    "rotary_factor": (*range(2, 65), *(1 / k for k in range(2, 65)), 1.25, 1.5, 2.5, 0.75),
}
_PLAIN = "softmax", "blocks", "heads", "turned", "across", "added"  # fields that keep a fill from being solved for
_LONG, _COLUMNS = 1024, 8  # from so many keys on, so many columns of an output are compared


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

    def filled(
        self, recipe: Recipe, selection: Selection, workings: Workings | None = None, start: float | None = None
    ) -> Recipe | None:
        """The recipe with its unknown number, such as that for hidden scores, found from theirs; None where none fits.

        It is the number whose result has the least squares, by Newton's steps from the best of many.

        start   the number, where it is nearly known
        """
        field, workings, theirs = recipe.unknown, workings or self.exact, self.theirs(selection)
        if not field:
            return recipe
        by_row = field == "fill" and not self.inputs.merged and recipe.axis == "keys"
        if by_row and any(getattr(recipe, name) != getattr(RIGHT, name) for name in _PLAIN):
            return None
        use = np.isfinite(theirs)

        def error(number: float) -> Array:
            return (workings.answer(changed(recipe, {field: number}), selection) - theirs)[use]

        def squared_error(number: float) -> float:
            total = float((error(number) ** 2).sum())
            return total if np.isfinite(total) else np.inf

        if workings.answer(changed(recipe, {field: _STARTS[field][0]}), selection).shape != theirs.shape:
            return None
        if by_row and self.inputs.stage == "masked":  # the number stands in hidden places, alone or added
            hidden = np.broadcast_to(~workings.visible(recipe, selection), theirs.shape)
            numbers = (theirs - workings.answer(changed(recipe, {field: 0.0}), selection))[hidden]
            return changed(recipe, {field: _round(float(np.median(numbers)))}) if numbers.size else None
        steps, by_power = 6 if start is None else 3, field == "fill"
        starts = sorted(_STARTS[field], key=squared_error)[: 1 if by_power else 3] if start is None else [start]
        relative = 1e-3 if workings.dtype == np.float32 else 1e-6
        ends = (_newton(error, number, steps, relative, by_power=by_power) for number in starts)
        best = min((end for end in ends if end is not None), key=squared_error, default=None)
        idle = field == "scale_factor" or recipe.masking == "add"  # near 0: all scores are lost, or no key is hidden
        if best is None or (idle and abs(best) <= 1e-3):
            return None
        return changed(recipe, {field: best if field in ("scale_factor", "alibi_factor") else _round(best)})


def _newton(
    error: Callable[[float], Array], number: float, steps: int, relative: float, *, by_power: bool
) -> float | None:
    """The number after Gauss and Newton's steps for the least squares; None where they leave all bounds.

    by_power   they are steps of exp(number), in which results are nearly linear where the number is a score
    """
    for _ in range(steps):
        step = relative * max(abs(number), 1.0 if number == 0 else 0.1)
        here = error(number)
        slope = (error(number + step) - here) / step
        squared = float((slope**2).sum())
        change = -float((here * slope).sum()) / squared if squared else 0.0
        number += float(np.log1p(max(change, -0.9))) if by_power else change
        if not abs(number) < 1e9:
            return None
    return number


def _round(x: float) -> float:
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


class Comparison(NamedTuple):
    """Theirs, the heads and rows compared, what computes a candidate there, and the gap that rules it out."""

    fit: Fit
    selection: Selection
    workings: Workings
    threshold: float


class Screen:
    """Rules out candidates that are far from theirs on a few rows."""

    def __init__(self, fit: Fit) -> None:
        if fit.inputs.stage == "output" and not fit.inputs.merged and fit.inputs.problem.keys >= _LONG:
            fit = Fit(replace(fit.inputs, theirs=fit.inputs.theirs[..., :_COLUMNS]), fit.dtype, fit.slack)
        inputs, n, heads = fit.inputs, fit.inputs.problem.queries, tuple(range(fit.inputs.problem.heads))
        self.row, self.head = n // 2, len(heads) // 2
        rows = {self.row} if inputs.merged else {int(n > 2), self.row, n - 1}
        single = np.dtype(np.float32)
        selection = Selection(heads if inputs.merged else heads[self.head :][:1], tuple(sorted(rows & set(range(n)))))
        workings = fit.plain if fit.plain.precision == single else Workings(inputs, single)
        self.allowed = fit.allowed(RIGHT, selection)
        threshold = max(1e-3 * largest(fit.theirs(selection)), 5 * self.allowed)
        self.whole = Comparison(fit, selection, workings, threshold)
        self._single_heads: dict[Any, Comparison] = {}
        self._per_head = Workings(replace(inputs, per_head=True), single) if inputs.merged else workings

    def filled_if_near(self, recipe: Recipe) -> Recipe | None:
        """The recipe, with the number that its mask fills with found; None where it is far from theirs."""
        fit, selection, workings, threshold = self.comparison(recipe)
        filled = fit.filled(recipe, selection, workings)
        if filled is None or not fit.gap(filled, selection, workings.answer(filled, selection), threshold) <= threshold:
            return None
        return filled

    def comparison(self, recipe: Recipe) -> Comparison:
        """What a recipe is compared on: one head of theirs, where a layer's output can be split into heads."""
        if not self.whole.fit.inputs.merged or not self.whole.selection.rows or recipe.added:
            return self.whole
        key = recipe.w_o, recipe.b_o, recipe.merge
        if key not in self._single_heads:
            self._single_heads[key] = self._single_head(recipe) or self.whole
        return self._single_heads[key]

    def _single_head(self, recipe: Recipe) -> Comparison | None:
        inputs, (whole, rows, _, threshold) = self.whole.fit.inputs, self.whole
        p = inputs.problem
        theirs = whole.theirs(rows)[:, 0, 0]
        perturbed = theirs + self.allowed * np.random.default_rng(0).choice([-1.0, 1.0], theirs.shape)
        joined, perturbed_joined = (_unprojected(whole.exact, recipe, row) for row in (theirs, perturbed))
        if joined is None or perturbed_joined is None or joined.shape[-1] % p.heads or not np.isfinite(joined).all():
            return None
        noise = 10 * float(np.abs(joined - perturbed_joined).max(initial=0.0))
        if not noise < 0.1 * largest(joined):
            return None
        d_v = joined.shape[-1] // p.heads
        head, row = self.head, self.row
        if recipe.merge == "flat":  # a joined row holds consecutive rows of one head: this is the first of them
            head, row = divmod(self.row * p.heads, p.queries)
            values = joined[:, :d_v]
        elif recipe.merge == "interleaved":
            values = joined.reshape(-1, d_v, p.heads)[:, :, head]
        else:
            values = joined.reshape(-1, p.heads, d_v)[:, head]
        theirs_per_head = np.zeros((len(theirs), p.heads, p.queries, d_v))
        theirs_per_head[:, head, row] = values
        fit = Fit(replace(inputs, theirs=theirs_per_head, per_head=True), whole.dtype, whole.slack)
        selection = Selection((head,), (row,))
        return Comparison(fit, selection, self._per_head, max(threshold, 1e-3 * largest(values), noise))


def _unprojected(workings: Workings, recipe: Recipe, row: Array) -> Array | None:
    """The joined heads that the output projection turned into this row; None where it cannot be undone."""
    layer = workings.inputs.layer
    assert layer is not None
    if "o" not in layer.w or recipe.w_o == "missing":
        return row
    if "o" in layer.b and recipe.b_o == "given":
        row = row - layer.b["o"].astype(np.float64)
    if recipe.w_o == "on values":
        return row
    w = workings.w_o(recipe)
    try:
        return np.asarray(np.linalg.solve(w.T, row.T).T)
    except np.linalg.LinAlgError:  # it is singular, or not square
        return None


def taken(inputs: Diagnosed, batches: tuple[int, ...]) -> Diagnosed:
    """The same inputs for some batch entries."""
    if len(batches) == inputs.problem.batch:
        return inputs
    index = list(batches)
    problem, theirs = inputs.problem.take(batches=np.array(index)), inputs.theirs[index]
    return replace(inputs.mapped(lambda x: x[index]), whole=inputs, entries=batches, problem=problem, theirs=theirs)


def generic(inputs: Diagnosed) -> Diagnosed:
    """Inputs of the same shapes, dtypes and rules, whose numbers are random."""
    rng = np.random.default_rng(0)

    def drawn(x: Array) -> Array:
        return np.asarray(rng.standard_normal(x.shape)).astype(x.dtype)

    def matrix(x: Array) -> Array:
        return drawn(x) / x.dtype.type(len(x) ** 0.5 if x.ndim > 1 else 1)

    return replace(inputs.mapped(drawn, matrix), weights=inputs.weights)
