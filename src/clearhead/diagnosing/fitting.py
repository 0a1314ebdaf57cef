"""How well a recipe's numbers fit theirs: the gap, what rounding allows, and the number in hidden places, solved."""

from functools import cached_property
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.recipe import RIGHT, STAGES, Diagnosed, Recipe, Selection, eps
from clearhead.diagnosing.rule_changes import SEEING
from clearhead.diagnosing.workings import Workings
from clearhead.textbook.computed import differences

FACTOR = 4.0  # a right result may lie this many times further from the truth than a plain run in its dtype
_TYPICAL = 2.0  # the same for the root mean square of all numbers, where rounding decides which key wins
_DOUBT = 16.0  # a gap of up to this many tolerances is judged by more plain runs: one run may have been lucky
_RUNS = 4
_WIDEST = 1e-2  # of a number: beyond that, the root mean square of all must agree as well
_FEW = 64  # numbers whose root mean square says little
_CLEAR = 0.3  # a correlation that is no chance
_STEPS = 60  # the most in the search for a number


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two that rounds more."""
    return max(a, b, key=eps)


class Fit:
    """Measures recipes against theirs."""

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
        make = lambda: theirs[:, :, list(selection.rows)][:, heads].astype(np.float64)  # noqa: E731
        result: Array = self.exact.once(key, make, keep=True)
        return result

    def gap(self, recipe: Recipe, selection: Selection, computed: Array | None = None) -> float:
        """The largest difference between theirs and the recipe's numbers; infinite where shapes or NaNs differ.

        computed   the recipe's numbers, where they are known already
        """
        theirs = self.theirs(selection)
        computed = self.exact.answer(recipe, selection) if computed is None else computed
        if computed.shape != theirs.shape:
            return float("inf")
        gaps = differences(theirs, computed)
        if recipe["overflow"] is not None and not self.inputs.merged and recipe["axis"] is None:
            gaps = np.where(self._at_the_edge(recipe, selection), 0.0, gaps)
        if gaps.size and gaps.max() > 0 and recipe["empty"] is None and recipe.key(SEEING):
            gaps = self._excused(recipe, selection, gaps)
        return float(gaps.max(initial=0.0))

    def _at_the_edge(self, recipe: Recipe, selection: Selection) -> Array:
        """The rows near the edge of exp's range, which may be NaN, 0 or right: rounding decides which."""
        x, edge = self.exact.logits(recipe, selection), np.log(float(np.finfo(recipe["overflow"]).max))
        tops = x.max(axis=-1, keepdims=True), np.logaddexp.reduce(x, axis=-1, keepdims=True)
        blur = 8 * max(eps(self.dtype), eps(np.dtype(recipe["overflow"]))) * edge
        return np.asarray(np.logical_or(*(np.abs(top - edge) <= blur for top in tops)))

    def _excused(self, recipe: Recipe, selection: Selection, gaps: Array) -> Array:
        """The gaps, where a row that only the wrong mask leaves without keys may be 0, NaN or a mean."""
        emptied: Array = np.asarray(~self.exact.visible(recipe, selection).any(axis=-1, keepdims=True))
        emptied = emptied & self.exact.visible(RIGHT, selection).any(axis=-1, keepdims=True)
        if not emptied.any() or self.inputs.stage not in STAGES[-2:]:
            return gaps
        if self.inputs.merged:
            emptied = np.asarray(emptied.any(axis=1, keepdims=True))
        for empty in ("nan", "mean"):
            computed = self.exact.answer(recipe.but(empty=empty), selection)
            gaps = np.where(emptied, np.minimum(gaps, differences(self.theirs(selection), computed)), gaps)
        return gaps

    def measure(self, recipe: Recipe, selection: Selection, exact: Array | None = None) -> tuple[float, float]:
        """The gap, and what rounding allows."""
        exact = self.exact.answer(recipe, selection) if exact is None else exact
        gap, allowed = self.gap(recipe, selection, exact), self.allowed(recipe, selection, exact)
        if allowed < gap < _DOUBT * allowed:
            allowed = max(allowed, *(self.allowed(recipe, selection, exact, run) for run in self._other_runs))
        if allowed < gap and recipe == RIGHT:
            run = Workings(self.inputs, self.plain.precision, "logsumexp")
            allowed = max(allowed, self.allowed(recipe, selection, exact, run))
        if gap <= allowed and allowed > _WIDEST * largest(exact):
            allowed = min(allowed, self._typical(recipe, selection, exact))
        return gap, allowed

    @cached_property
    def _other_runs(self) -> list[Workings]:
        return [Workings(self.inputs, self.plain.precision, run) for run in range(_RUNS)]

    def _typical(self, recipe: Recipe, selection: Selection, exact: Array) -> float:
        """What rounding allows where it turns single numbers into others: the root mean square must agree as well.

        Where scores are huge, rounding decides which of two keys gets all the weight. A plain run is then wrong by as
        much as the values are large, but in a few rows. Infinite where theirs are not further off on the whole than
        such runs; else a limit that theirs exceed.
        """
        theirs = self.theirs(selection)
        if not (np.isfinite(theirs).all() and np.isfinite(exact).all()) or theirs.size < _FEW:
            return float("inf")
        errors = [run.answer(recipe, selection) - exact for run in (self.plain, *self._other_runs)]
        worst = max(rms(error[np.isfinite(error)]) for error in errors) * self.shrink
        limit = _TYPICAL * (worst + eps(self.dtype) * largest(exact)) + self.slack
        return limit if rms(theirs - exact) > limit else float("inf")

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
        theirs, exact, dtype = self.theirs(selection), self.exact.answer(RIGHT, selection), np.dtype(narrow)
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
            runs.append(self.exact.mixed(RIGHT, selection, rounded(self.exact.weights(RIGHT, selection))))
        errors = [run - exact for run in runs]
        alike = [correlated(error, other) for other in errors if rms(error) <= _TYPICAL * rms(other) < np.inf]
        best = max(alike, default=0.0)
        written = bool(alike) and bool((rounded(theirs) == theirs).all())
        return best if best > clear else clear * written

    def filled(self, recipe: Recipe, selection: Selection) -> Recipe | None:
        """The recipe with the number that stands in hidden places, or is added there, solved from theirs.

        The numbers go from those of the visible keys alone to those of the hidden keys alone as it grows. None where
        theirs are all but one of the two: any number further on that side gives the same.
        """
        theirs = self.theirs(selection)
        alone, full = self.exact.answer(recipe.but(masking=None), selection), self._with(recipe, selection, 1e9)
        if self.inputs.stage == "masked":
            hidden = ~np.broadcast_to(self.exact.visible(recipe, selection), theirs.shape)
            zero = self._with(recipe, selection, 0.0)
            numbers = (theirs - zero)[hidden & np.isfinite(zero)]
            return recipe.but(fill=_short(float(np.median(numbers)))) if numbers.size else None
        if not theirs.shape == alone.shape == full.shape or not np.isfinite(theirs).any():
            return None
        use = np.isfinite(theirs) & np.isfinite(alone) & np.isfinite(full)
        toward, gone = np.where(use, full - alone, 0.0), np.where(use, theirs - alone, 0.0)
        apart, tolerance = toward - gone, self.allowed(RIGHT, selection)
        if not (largest(gone) > tolerance < largest(apart) and (toward * gone).sum() > 0 < (toward * apart).sum()):
            return None

        def beyond(number: float) -> float:
            """How much further on the way than theirs the recipe's numbers are with this number."""
            return float((np.where(use, self._with(recipe, selection, number) - theirs, 0.0) * toward).sum())

        x = self.exact.logits(recipe.but(masking="after"), selection)
        low, high = (0.0, 0.0) if recipe["masking"] == "add" else (float(x.min()), float(x.max()))
        number = _root(beyond, low - 40.0, high + 40.0)
        idle = recipe["masking"] == "add" and abs(number) <= 1e-3  # no key is hidden then
        return None if idle else recipe.but(fill=_short(number))

    def _with(self, recipe: Recipe, selection: Selection, number: float) -> Array:
        return self.exact.answer(recipe.but(fill=number), selection)


def _root(f: Any, low: float, high: float) -> float:
    """Where an increasing function is 0, between two places: false position, and halving where that is slow."""
    at_low, at_high = f(low), f(high)
    for step in range(_STEPS):
        falls = at_high > at_low and step % 3 < 2
        middle = low - at_low * (high - low) / (at_high - at_low) if falls else (low + high) / 2
        value = f(middle)
        if value == 0 or high - low < 1e-13 * max(1.0, abs(middle)):
            return middle
        low, at_low, high, at_high = (middle, value, high, at_high) if value < 0 else (low, at_low, middle, value)
    return (low + high) / 2


def _short(x: float) -> float:
    """A number of two digits where `x` lies very near to one: -9.99998 is -10, 2.2e-16 is 0."""
    short = float(f"{x:.2g}") if abs(x) > 1e-3 else 0.0
    return short if abs(x - short) <= 1e-3 * max(1.0, abs(x)) else x


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
