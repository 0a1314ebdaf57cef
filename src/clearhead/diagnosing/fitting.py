"""How well a recipe's numbers fit theirs: the gap, what rounding allows, and unknown numbers fitted to theirs."""

from typing import Any

import numpy as np

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.diagnosing.recipe import RIGHT, Inputs, Recipe, Selection
from clearhead.diagnosing.workings import VISIBILITY, Workings

FACTOR = 4.0  # a right result may lie this many times further from the truth than a plain run in its dtype
_DOUBT = 16.0  # a gap of up to this many tolerances is judged by more plain runs: one run may have been lucky
_RUNS = 4
_WIDEST = 1e-2  # of the largest number: what rounding of large scores excuses at most
_NARROW = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, np.dtype(np.float16): 2, bfloat16: 3}


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two that rounds more."""
    return max(a, b, key=lambda dtype: _NARROW.get(dtype, 0))


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


class Fit:
    """Measures recipes against theirs on one part of the inputs."""

    def __init__(self, inputs: Inputs, dtype: np.dtype[Any], slack: float) -> None:
        self.inputs, self.dtype, self.slack = inputs, dtype, slack
        self.exact = Workings(inputs)
        self._theirs: dict[Selection, Array] = {}
        single = dtype == np.float64
        self.plain = Workings(inputs, np.dtype(np.float32) if single else dtype)
        self._others: list[Workings] = []
        self.shrink = 2.0**-29 if single else 1.0  # from float32's rounding error to float64's

    def theirs(self, selection: Selection) -> Array:
        """Their numbers for these heads and rows."""
        theirs = self._theirs.get(selection)
        if theirs is None:
            x = self.inputs.theirs[:, :, list(selection.rows)].astype(np.float64)
            theirs = self._theirs[selection] = x if self.inputs.merged else x[:, list(selection.heads)]
        return theirs

    def gap(self, recipe: Recipe, selection: Selection, workings: Workings | None = None) -> float:
        """The largest difference between theirs and the recipe's numbers; infinite where shapes or NaNs differ."""
        computed = (workings or self.exact).answer(recipe, selection)
        return self.between(recipe, selection, computed)

    def between(self, recipe: Recipe, selection: Selection, computed: Array) -> float:
        """The same where the recipe's numbers are computed already."""
        theirs = self.theirs(selection)
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
            return self._excused(recipe, selection, theirs, gaps)
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

    def _excused(self, recipe: Recipe, selection: Selection, theirs: Array, gaps: Array) -> float:
        """The largest gap, where a row that only the wrong mask leaves without keys may be 0, NaN or a mean."""
        emptied: Array = np.asarray(~self.exact.visible(recipe, selection).any(axis=-1, keepdims=True))
        emptied = emptied & self.exact.visible(RIGHT, selection).any(axis=-1, keepdims=True)
        if not bool(emptied.any()) or self.inputs.stage not in ("weights", "output"):
            return float(gaps.max())
        if self.inputs.merged:
            emptied = np.asarray(emptied.any(axis=1, keepdims=True))
            gaps = np.where(emptied & np.isnan(theirs), 0.0, gaps)
            return float(gaps.max())
        mean = self.exact.answer(recipe._replace(empty="mean"), selection)
        gaps = np.where(emptied, np.minimum(gaps, differences(theirs, mean)), gaps)
        return float(np.where(emptied & np.isnan(theirs), 0.0, gaps).max())

    def measure(self, recipe: Recipe, selection: Selection, exact: Array | None = None) -> tuple[float, float]:
        """The gap, and what rounding allows."""
        exact = self.exact.answer(recipe, selection) if exact is None else exact
        gap, allowed = self.between(recipe, selection, exact), self.allowed(recipe, selection, exact)
        excused = max(_DOUBT * allowed, _WIDEST * largest(exact))
        if allowed < gap < _DOUBT * allowed and self.plain.precision == np.float32:
            self._others = self._others or [Workings(self.inputs, self.plain.precision, run) for run in range(_RUNS)]
            allowed = max(allowed, *(self.allowed(recipe, selection, exact, run) for run in self._others))
        if allowed < gap and recipe == RIGHT and self.inputs.weights is None:
            size = largest(self.exact.logits(recipe, selection))  # exp(s - L) rounds s - L, where s - max may be exact
            allowed = max(allowed, min(FACTOR * eps(self.dtype) * size * largest(exact), excused))
        return gap, allowed

    def tolerance(self, recipe: Recipe, selection: Selection) -> float:
        """What rounding allows: a factor times the error of a plain run in their dtype, and their printed decimals."""
        return self.allowed(recipe, selection, self.exact.answer(recipe, selection))

    def allowed(self, recipe: Recipe, selection: Selection, exact: Array, run: Workings | None = None) -> float:
        """The same by one plain run, where the exact numbers are computed already."""
        error = np.abs(exact - (run or self.plain).answer(recipe, selection))
        worst = float(error[np.isfinite(error)].max(initial=0.0)) * self.shrink
        factor = 3 * FACTOR if self.dtype == np.float64 else FACTOR  # in float64 the exact numbers are rounded too
        return factor * (worst + eps(self.dtype) * largest(exact)) + self.slack

    def filled(
        self, recipe: Recipe, selection: Selection, workings: Workings | None = None, start: float | None = None
    ) -> Recipe | None:
        """The recipe with the finite number for hidden scores that fits theirs best; None where none fits."""
        if recipe.fill is not None or recipe.masking not in ("fill", "add"):
            return recipe
        if recipe.blocks[0] or recipe.turned:
            return None
        if self.inputs.merged or recipe.axis != "keys":
            return self._descended(recipe, selection, workings or self.exact, start)
        workings = workings or self.exact
        fill = _fill(workings, recipe, selection, self.theirs(selection))
        return None if fill is None else recipe._replace(fill=fill)

    def _descended(
        self, recipe: Recipe, selection: Selection, workings: Workings, start: float | None
    ) -> Recipe | None:
        """The same where heads are joined: Newton's steps from the best of a few numbers."""
        theirs = self.theirs(selection)

        def error(fill: float) -> Array:
            return workings.answer(recipe._replace(fill=fill), selection) - theirs

        if error(0.0).shape != theirs.shape:
            return None
        starts = (0.0, -1.0, -2.0, -4.0, -7.0, -11.0) if start is None else (start,)
        fill = min(starts, key=lambda number: float((error(number) ** 2).sum()))
        step = 1e-2 if workings.dtype == np.float32 else 1e-5
        for _ in range(6 if start is None else 3):
            slope = (error(fill + step) - error(fill - step)) / (2 * step)
            squared = float((slope**2).sum())
            fill -= float((error(fill) * slope).sum()) / squared if squared else 0.0
            if not abs(fill) < 1e3:
                return None
        return recipe._replace(fill=_round(fill))


def _fill(workings: Workings, recipe: Recipe, selection: Selection, theirs: Array) -> float | None:
    """The number in hidden places, by least squares for its power t = exp(fill); None where there is none.

    theirs = (visible powers + t·filled powers) / (their total + t·the filled ones' total), powers times values.
    """
    x = workings.logits(recipe, selection, "biased").astype(np.float64)
    hidden = ~np.broadcast_to(workings.visible(recipe, selection), x.shape)
    if not hidden.any():
        return None
    if workings.inputs.stage == "masked":
        return _round(float(np.median((theirs - (x if recipe.masking == "add" else 0))[hidden])))
    peak = np.where(hidden, -np.inf, x).max(axis=-1, keepdims=True)
    peak = np.where(np.isneginf(peak), 0.0, peak)
    visible_powers = np.where(hidden, 0.0, np.exp(x - peak))
    filled_powers = np.where(hidden, np.exp((x if recipe.masking == "add" else 0) - peak), 0.0)
    visible_total, filled_total = visible_powers.sum(axis=-1, keepdims=True), filled_powers.sum(axis=-1, keepdims=True)
    if workings.problem.sinks is not None and recipe.sinks == "given":
        visible_total = visible_total + np.exp(workings.problem.sinks[list(selection.heads), None, None] - peak)
    if workings.inputs.stage == "output":
        values = workings.serving(recipe, workings.operand(recipe, recipe.values), selection.heads).astype(np.float64)
        if not np.isfinite(values).all():
            return None
        visible_powers, filled_powers = visible_powers @ values, filled_powers @ values
    if visible_powers.shape != theirs.shape:
        return None
    a, b = theirs * visible_total - visible_powers, filled_powers - theirs * filled_total
    use = np.isfinite(a) & np.isfinite(b)
    squared = float((b[use] ** 2).sum())
    power = float((a[use] * b[use]).sum()) / squared if squared else 0.0
    return _round(float(np.log(power))) if power > 0 and abs(power - 1) > 1e-3 * (recipe.masking == "add") else None


def _round(x: float) -> float:
    """A number of two digits where `x` lies very near to one: -9.99998 is -10."""
    short = float(f"{x:.2g}")
    return short if abs(x - short) <= 1e-3 * max(1.0, abs(x)) else x


def differences(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one is."""
    gaps = np.abs(a - b)
    gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, gaps)
    return np.where(np.isnan(gaps), np.inf, gaps)


def largest(x: Array) -> float:
    """The largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
