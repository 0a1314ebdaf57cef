"""How well a recipe's numbers fit theirs: the gap, what rounding allows, and numbers found from theirs."""

from typing import Any

import numpy as np

from clearhead.arrays import bfloat16
from clearhead.axes import Array
from clearhead.diagnosing.recipe import RIGHT, Inputs, Part, Recipe
from clearhead.diagnosing.workings import SEEN, Workings

FACTOR = 4.0  # a right result may lie this many times further from the truth than a plain run in its dtype
_DOUBT = 16.0  # within this many times what a plain run allows, others are asked: few rows may decide, by luck
_RUNS = 4
_NARROW = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, np.dtype(np.float16): 2, bfloat16: 3}


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two that rounds more."""
    return max(a, b, key=lambda dtype: _NARROW.get(dtype, 0))


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


class Fit:
    """Measures recipes against theirs on one part of the inputs."""

    def __init__(self, given: Inputs, dtype: np.dtype[Any], slack: float) -> None:
        self.given, self.dtype, self.slack = given, dtype, slack
        self.exact = Workings(given)
        self._theirs: dict[Part, Array] = {}
        single = dtype == np.float64
        self.plain = Workings(given, np.dtype(np.float32) if single else dtype)
        self._others: list[Workings] = []
        self.shrink = 2.0**-29 if single else 1.0  # float32's error, told in float64's

    def theirs(self, part: Part) -> Array:
        """Their numbers for these heads and rows."""
        found = self._theirs.get(part)
        if found is None:
            x = self.given.theirs[:, :, list(part.rows)].astype(np.float64)
            found = self._theirs[part] = x if self.given.merged else x[:, list(part.heads)]
        return found

    def gap(self, recipe: Recipe, part: Part, workings: Workings | None = None) -> float:
        """The largest difference between theirs and the recipe's numbers; infinite where shapes or NaNs differ."""
        made = (workings or self.exact).answer(recipe, part)
        return self.between(recipe, part, made)

    def between(self, recipe: Recipe, part: Part, made: Array) -> float:
        """The same for numbers that are there already."""
        theirs = self.theirs(part)
        if made.shape != theirs.shape:
            return float("inf")
        apart = differences(theirs, made)
        if not apart.size:
            return 0.0
        if recipe.tail[0] == "unknown":
            apart = apart[:, :, np.array(part.rows) < recipe.tail[1]]
            return float(apart.max()) if apart.size else float("inf")
        if recipe.overflow and not self.given.merged and recipe.axis == "keys":
            apart = self._at_the_edge(recipe, part, theirs, apart)
        worst = float(apart.max())
        if worst > 0 and recipe.empty == "zero" and SEEN(recipe) != SEEN(RIGHT):
            return self._excused(recipe, part, theirs, apart)
        return worst

    def _at_the_edge(self, recipe: Recipe, part: Part, theirs: Array, apart: Array) -> Array:
        """Whether a row's exp or its sum leaves the range hangs on a last digit near the edge: NaN, 0 or right then."""
        x, edge = self.exact.logits(recipe, part), np.log(float(np.finfo(recipe.overflow).max))
        tops = x.max(axis=-1, keepdims=True), np.logaddexp.reduce(x, axis=-1, keepdims=True)
        blur = 8 * max(eps(self.dtype), eps(np.dtype(recipe.overflow))) * edge
        near = np.logical_or(*(np.abs(top - edge) <= blur for top in tops))
        right = differences(theirs, self.exact.answer(recipe._replace(overflow=""), part))
        either = np.where((theirs == 0) | np.isnan(theirs), 0.0, np.minimum(apart, right))
        return np.where(near, either, apart)

    def _excused(self, recipe: Recipe, part: Part, theirs: Array, apart: Array) -> float:
        """A row that a wrong mask leaves without keys may be 0, NaN or a mean, as their library has it."""
        blind: Array = np.asarray(~self.exact.visible(recipe, part).any(axis=-1, keepdims=True))
        blind &= self.exact.visible(RIGHT, part).any(axis=-1, keepdims=True)
        if not bool(blind.any()) or self.given.stage not in ("weights", "output"):
            return float(apart.max())
        if self.given.merged:
            blind = np.asarray(blind.any(axis=1, keepdims=True))
            apart = np.where(blind & np.isnan(theirs), 0.0, apart)
            return float(apart.max())
        mean = self.exact.answer(recipe._replace(empty="mean"), part)
        apart = np.where(blind, np.minimum(apart, differences(theirs, mean)), apart)
        return float(np.where(blind & np.isnan(theirs), 0.0, apart).max())

    def measure(self, recipe: Recipe, part: Part, exact: Array | None = None) -> tuple[float, float]:
        """The gap, and what rounding allows."""
        exact = self.exact.answer(recipe, part) if exact is None else exact
        gap, allowed = self.between(recipe, part, exact), self.allowed(recipe, part, exact)
        if allowed < gap < _DOUBT * allowed and self.plain.precision == np.float32:
            self._others = self._others or [Workings(self.given, self.plain.precision, run) for run in range(_RUNS)]
            allowed = max(allowed, *(self.allowed(recipe, part, exact, run) for run in self._others))
        return gap, allowed

    def tolerance(self, recipe: Recipe, part: Part) -> float:
        """What rounding allows: a factor times the error of a plain run in their dtype, and their printed decimals."""
        return self.allowed(recipe, part, self.exact.answer(recipe, part))

    def allowed(self, recipe: Recipe, part: Part, exact: Array, run: Workings | None = None) -> float:
        """The same where the exact numbers are there already, by one plain run."""
        error = np.abs(exact - (run or self.plain).answer(recipe, part))
        worst = float(error[np.isfinite(error)].max(initial=0.0)) * self.shrink
        factor = 3 * FACTOR if self.dtype == np.float64 else FACTOR  # there the exact numbers are rounded as well
        return factor * (worst + eps(self.dtype) * largest(exact)) + self.slack

    def filled(
        self, recipe: Recipe, part: Part, workings: Workings | None = None, start: float | None = None
    ) -> Recipe | None:
        """The finite number in hidden places that comes nearest to theirs; None where there is none."""
        if recipe.fill is not None or recipe.masking not in ("fill", "add"):
            return recipe
        if recipe.blocks[0] or recipe.turned:
            return None
        if self.given.merged or recipe.axis != "keys":
            return self._descended(recipe, part, workings or self.exact, start)
        work = workings or self.exact
        found = _fill(work, recipe, part, self.theirs(part))
        return None if found is None else recipe._replace(fill=found)

    def _descended(self, recipe: Recipe, part: Part, work: Workings, start: float | None) -> Recipe | None:
        """The same where heads are joined: the best of a few numbers, then Newton's steps from there."""
        theirs = self.theirs(part)

        def off(fill: float) -> Array:
            return work.answer(recipe._replace(fill=fill), part) - theirs

        if off(0.0).shape != theirs.shape:
            return None
        starts = (0.0, -1.0, -2.0, -4.0, -7.0, -11.0) if start is None else (start,)
        fill = min(starts, key=lambda number: float((off(number) ** 2).sum()))
        step = 1e-2 if work.dtype == np.float32 else 1e-5
        for _ in range(6 if start is None else 3):
            slope = (off(fill + step) - off(fill - step)) / (2 * step)
            bottom = float((slope**2).sum())
            fill -= float((off(fill) * slope).sum()) / bottom if bottom else 0.0
            if not abs(fill) < 1e3:
                return None
        return recipe._replace(fill=_round(fill))


def _fill(work: Workings, recipe: Recipe, part: Part, theirs: Array) -> float | None:
    x = work.logits(recipe, part, "biased").astype(np.float64)
    hidden = ~np.broadcast_to(work.visible(recipe, part), x.shape)
    if not hidden.any():
        return None
    if work.given.stage == "masked":
        return _round(float(np.median((theirs - (x if recipe.masking == "add" else 0))[hidden])))
    peak = np.where(hidden, -np.inf, x).max(axis=-1, keepdims=True)
    peak = np.where(np.isneginf(peak), 0.0, peak)
    known = np.where(hidden, 0.0, np.exp(x - peak))
    asked = np.where(hidden, np.exp((x if recipe.masking == "add" else 0) - peak), 0.0)
    below, more = known.sum(axis=-1, keepdims=True), asked.sum(axis=-1, keepdims=True)
    if work.problem.sinks is not None and recipe.sinks == "given":
        below = below + np.exp(work.problem.sinks[list(part.heads), None, None] - peak)
    if work.given.stage == "output":
        values = work.serving(recipe, work.operand(recipe, recipe.values), part.heads).astype(np.float64)
        if not np.isfinite(values).all():
            return None
        known, asked = known @ values, asked @ values
    if known.shape != theirs.shape:
        return None
    a, b = theirs * below - known, asked - theirs * more  # theirs = (known + t·asked) / (below + t·more)
    use = np.isfinite(a) & np.isfinite(b)
    bottom = float((b[use] ** 2).sum())
    power = float((a[use] * b[use]).sum()) / bottom if bottom else 0.0
    return _round(float(np.log(power))) if power > 0 and abs(power - 1) > 1e-3 * (recipe.masking == "add") else None


def _round(x: float) -> float:
    """-9.99998 is -10."""
    near = float(f"{x:.2g}")
    return near if abs(x - near) <= 1e-3 * max(1.0, abs(x)) else x


def differences(a: Array, b: Array) -> Array:
    """|a - b|; NaN or infinity in both is no difference, in one an infinite one."""
    apart = np.abs(a - b)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)
    return np.where(np.isnan(apart), np.inf, apart)


def largest(x: Array) -> float:
    """The largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
