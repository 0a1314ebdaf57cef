"""The search: which mistake, alone or with another, gives their numbers.

Every candidate is tried on a few rows of one head first; what comes near is tried on a dozen rows of every head, and
what still fits on everything, or on as much of it as the budget allows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from typing import NamedTuple

import numpy as np

from clearhead.diagnosing import evidence
from clearhead.diagnosing.fitting import Fit, coarser, differences, largest
from clearhead.diagnosing.mistakes import MISTAKES, Mistake
from clearhead.diagnosing.recipe import RIGHT, Change, Inputs, Part, Recipe, changed, shown
from clearhead.diagnosing.screening import Screen, taken
from clearhead.problem import Problem

_SOFTMAX = {"axis", "blocks", "overflow"}  # each replaces the whole softmax: no code does two of them
_ROWS = 64  # among fewer, dropout beside another mistake explains almost anything
BUDGET = 2**21  # cells of the weights that are looked at, at most


@dataclass(frozen=True, slots=True)
class Found:
    """Mistakes together with their changes of the recipe, and how far what they give lies from theirs."""

    mistakes: tuple[Mistake, ...]
    changes: tuple[Change, ...]
    recipe: Recipe
    residual: float = inf
    tolerance: float = 0.0

    @property
    def fits(self) -> bool:
        return self.residual <= self.tolerance

    @property
    def unknown(self) -> bool:
        """Is one of its numbers still to be found?"""
        return self.recipe.masking in ("fill", "add") and self.recipe.fill is None

    @property
    def fitted(self) -> bool:
        """Was one of its numbers found from theirs?"""
        return any(change.get("masking") in ("fill", "add") for change in self.changes)


class Looked(NamedTuple):
    """How much was looked at."""

    batches: tuple[int, ...]
    heads: int
    queries: tuple[int, ...]
    everything: bool


class Search:
    """One case: the inputs, the parts of them to look at, and the candidates."""

    def __init__(self, given: Inputs, slack: float = 0.0) -> None:
        self.tried = 0  # candidates so far
        dtype = coarser(given.problem.dtype, given.theirs.dtype)
        whole = given.problem
        cells = whole.batch * whole.heads * whole.queries * whole.keys
        batches = tuple(range(whole.batch)) if cells <= BUDGET else tuple(sorted({0, whole.batch - 1}))
        self.wide = Fit(taken(given, batches), dtype, slack)
        few = tuple(sorted({0, whole.batch - 1}))
        self.near = self.wide if batches == few else Fit(taken(given, few), dtype, slack)
        self.screen = Screen(self.near)
        self._parts(whole, cells, batches)

    def _parts(self, whole: Problem, cells: int, batches: tuple[int, ...]) -> None:
        n, heads = whole.queries, tuple(range(whole.heads))
        rows = tuple(range(n))
        if cells > BUDGET:
            most = max(16, BUDGET // max(1, len(batches) * whole.heads * whole.keys))
            rows = tuple(sorted({*_telling(n), *np.linspace(0, n - 1, min(n, most)).astype(int).tolist()}))
        self.everything = Part(heads, rows)
        self.sample = Part(heads, _telling(n))
        self.looked = Looked(batches, whole.heads, rows, cells <= BUDGET)

    def measured(self, found: Found) -> Found:
        """The gap and what rounding allows, on everything; what fails on the sample already is looked at no further."""
        for fit, part in ((self.near, self.sample), (self.wide, self.everything)):
            residual, tolerance = fit.measure(found.recipe, part)
            found = replace(found, residual=residual, tolerance=tolerance)
            if not found.fits:
                break
        what, start = found.recipe.tail
        if what == "unknown" and found.fits and not self._unwritten(found.recipe, start):
            return replace(found, residual=inf)
        return found

    def _unwritten(self, recipe: Recipe, start: int) -> bool:
        """Are the rows from here on, and the very first of them, wrong beyond all rounding?"""
        whole, gross = recipe._replace(tail=("", 0)), 0.01 * largest(self.wide.theirs(self.sample))
        rows = tuple(row for row in self.everything.rows if row >= start)
        for part in (self.wide.exact.part(self.everything.heads, some) for some in ((start,), rows)):
            for other in (whole, RIGHT):
                made, theirs = self.wide.exact.answer(other, part), self.wide.theirs(part)
                if made.shape != theirs.shape or np.mean(differences(theirs, made).max(axis=-1) > gross) < 0.5:
                    return False
        return True

    def rounded(self, bases: list[Found], halves: list[Found]) -> list[Found]:
        """Bases with one step in a narrow dtype; told by how much of the difference that takes away."""
        found = []
        for base in self._close(bases):
            for half in halves:
                if half.recipe.half == "somewhere" or base.recipe.half:
                    continue
                recipe = changed(base.recipe, half.changes[0])
                left = evidence.rounding(self.near, base.recipe, recipe, self.sample)
                if left is not None:
                    both = (base.mistakes + half.mistakes, base.changes + half.changes)
                    found.append(Found(*both, recipe, residual=left[0], tolerance=left[1]))
        return sorted(found, key=lambda one: one.residual)

    def blurred(self, right: list[Found], halves: list[Found]) -> list[Found]:
        """As far off as a narrow dtype rounds, somewhere: the dtype whose plain run is off by most nearly as much."""
        found = {}
        for half in [half for _ in self._close(right) for half in halves if half.recipe.half == "somewhere"]:
            unlike = evidence.somewhere(self.near, RIGHT, half.recipe.half_dtype, self.sample)
            if unlike is not None:
                found[unlike] = half
        off = self.near.gap(RIGHT, self.sample)
        return [replace(found[min(found)], residual=off, tolerance=off)] if found else []

    def dropped(self, bases: list[Found], chances: list[Found]) -> list[Found]:
        """Bases with weights dropped at random; the one with the least left over."""
        found, most = [], evidence.off(self.near, RIGHT, self.sample)
        rows = len(self.looked.batches) * self.looked.heads * len(self.looked.queries)
        for chance, base in product(chances, bases):
            if base.mistakes and rows < _ROWS:
                continue
            if base.unknown or not evidence.around(self.near, base.recipe, self.sample, self.screen.work):
                continue
            if not evidence.off(self.near, base.recipe, self.sample) <= 1.02 * most:  # further than the right numbers
                continue
            rate = evidence.dropout(self.wide, base.recipe, self.everything, strict=bool(base.mistakes))
            if rate is not None:
                off = self.near.gap(base.recipe, self.sample)
                recipe = base.recipe._replace(dropout=rate)
                both = (base.mistakes + chance.mistakes, base.changes + chance.changes)
                found.append(Found(*both, recipe, residual=off, tolerance=off))
        return sorted(found, key=lambda one: one.recipe.dropout)[:1]

    def _close(self, bases: list[Found]) -> Iterator[Found]:
        for base in bases:
            if base.unknown or not evidence.near(self.near, base.recipe, self.screen.part, self.screen.work):
                continue
            if self.wide.gap(base.recipe, self.everything) <= 30 * self.near.gap(base.recipe, self.sample):
                yield base  # no place stands out: so it is with rounding

    def singles(self, *, rare: bool = False, only: Callable[[Mistake], bool] = bool) -> list[Found]:
        """Every mistake that these inputs leave room for."""
        given = self.near.given
        return [
            Found((mistake,), (change,), changed(RIGHT, change))
            for mistake in filter(only, MISTAKES)
            for change in (mistake.rare if rare else mistake.variants)(given)
            if shown(change, given.stage)
        ]

    def unseen(self) -> list[Found]:
        """Mistakes about the caller's own rules that would give the right numbers here: not shown by these inputs."""
        right = self.near.exact.answer(RIGHT, self.sample)
        allowed = self.near.allowed(RIGHT, self.sample, right)
        alike: dict[str, list[Found]] = {}
        for single in self.singles(only=lambda mistake: bool(mistake.rule)):
            if not single.unknown:
                made = self.near.exact.answer(single.recipe, self.sample)
                same = made.shape == right.shape and differences(made, right).max(initial=0) <= allowed
                alike.setdefault(single.mistakes[0].name, []).extend([single] if same else [])
        return [found[0] for found in alike.values() if found]

    def explanations(self) -> list[Found]:
        """What fits, the best first: one mistake before two, numbers before statistics."""
        every = self.singles()
        singles = [s for s in every if s.mistakes[0].evidence == "numbers" and s.recipe.tail[0] != "unknown"]
        tails = [s for s in every if s.recipe.tail[0] == "unknown"]
        halves = [s for s in every if s.mistakes[0].evidence == "rounding"]
        chances = [s for s in every if s.mistakes[0].evidence == "chance"]
        right = [Found((), (), RIGHT)]
        found = self.explained(singles) or self.rounded(right, halves) or self.explained(self.singles(rare=True))
        if found:
            return found
        return (
            self.explained(tails)
            or self.explained(pairs(singles, singles))
            or self.explained(pairs(tails, singles))
            or self.rounded(singles, halves)
            or self.blurred(right, halves)
            or self.dropped(right, chances)
            or self.dropped(singles, chances)
        )

    def explained(self, candidates: Iterable[Found]) -> list[Found]:
        """Those that fit, the closest first."""
        fitting = [found for found in map(self.measured, self.screened(candidates)) if found.fits]
        plain = [found for found in fitting if not found.fitted]  # a number found from theirs can mimic other mistakes
        return sorted(plain or fitting, key=lambda found: found.residual)

    def screened(self, candidates: Iterable[Found]) -> Iterator[Found]:
        """Those that come near on a few rows, with their free numbers found."""
        for candidate in candidates:
            self.tried += 1
            recipe = self.screen.near(candidate.recipe)
            if recipe is not None and recipe is not candidate.recipe:  # found roughly: find it well
                recipe = self.near.filled(candidate.recipe, self.sample, start=recipe.fill)
            if recipe is not None:
                yield replace(candidate, recipe=recipe)


def pairs(some: list[Found], others: list[Found]) -> Iterator[Found]:
    """Two mistakes that change different things."""
    for a, b in combinations(some, 2) if some is others else product(some, others):
        one, other = a.changes[0], b.changes[0]
        apart = not one.keys() & other.keys() and not (one.keys() & _SOFTMAX and other.keys() & _SOFTMAX)
        if a.mistakes[0] is not b.mistakes[0] and apart and not (a.mistakes[0].alone or b.mistakes[0].alone):
            recipe = changed(a.recipe, other)
            yield Found(a.mistakes + b.mistakes, a.changes + b.changes, recipe)


def _telling(n: int) -> tuple[int, ...]:
    """A dozen rows: the first, the last, and those around powers of two."""
    edges = {0, 1, n // 2, n - 2, n - 1}
    power = 1
    while power < n:
        power *= 2
    for size in (power // 2, power // 4, power // 8):
        edges |= {size - 1, size, size + 1}
    return tuple(sorted(row for row in edges if 0 <= row < n))
