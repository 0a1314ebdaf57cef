"""The search: which mistake, alone or with another, gives their numbers.

Every candidate is tried on a few rows of one head first; what comes near is tried on a dozen rows of every head, and
what still fits on everything, or on as much of it as the budget allows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import Any, NamedTuple

import numpy as np

from clearhead.diagnosing.fitting import Fit, coarser, differences, largest
from clearhead.diagnosing.mistakes import MISTAKES, Mistake
from clearhead.problem import Problem
from clearhead.diagnosing.recipe import RIGHT, Change, Inputs, Part, Recipe, changed, shown
from clearhead.diagnosing.workings import Workings

BUDGET = 2**22  # cells of the weights that are looked at, at most


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


class Looked(NamedTuple):
    """How much was looked at."""

    batches: tuple[int, ...]
    heads: int
    queries: tuple[int, ...]
    everything: bool


class Search:
    """One case: the inputs, the parts of them to look at, and the candidates."""

    def __init__(self, given: Inputs, slack: float = 0.0) -> None:
        dtype = coarser(given.problem.dtype, given.theirs.dtype)
        whole = given.problem
        cells = whole.batch * whole.heads * whole.queries * whole.keys
        batches = tuple(range(whole.batch)) if cells <= BUDGET else tuple(sorted({0, whole.batch - 1}))
        self.wide = Fit(_some_batches(given, batches), dtype, slack)
        few = tuple(sorted({0, whole.batch - 1}))
        self.near = self.wide if batches == few else Fit(_some_batches(given, few), dtype, slack)
        self.quick = self.near.plain if dtype in (np.float32, np.float64) else Workings(self.near.given, np.dtype("f4"))
        self._parts(whole, cells, batches)
        self.rough = max(1e-3 * largest(self.near.theirs(self.screen)), 5 * self.near.tolerance(RIGHT, self.screen))

    def _parts(self, whole: Problem, cells: int, batches: tuple[int, ...]) -> None:
        n, heads = whole.queries, tuple(range(whole.heads))
        rows = tuple(range(n))
        if cells > BUDGET:
            most = max(16, BUDGET // max(1, len(batches) * whole.heads * whole.keys))
            rows = tuple(sorted({*_telling(n), *np.linspace(0, n - 1, min(n, most)).astype(int).tolist()}))
        self.everything = Part(heads, rows)
        self.sample = Part(heads, _telling(n))
        middle = heads if self.near.given.merged else heads[whole.heads // 2 :][:1]
        self.screen = Part(middle, tuple(sorted({min(1, n - 1), n // 2, n - 1} & set(range(n)))))
        self.looked = Looked(batches, whole.heads, rows, cells <= BUDGET)

    def measured(self, found: Found) -> Found:
        """The gap and what rounding allows, on everything; what fails on the sample already is not looked at further."""
        for fit, part in ((self.near, self.sample), (self.wide, self.everything)):
            tolerance = fit.tolerance(found.recipe, part)
            found = replace(found, residual=fit.gap(found.recipe, part), tolerance=tolerance)
            if not found.fits:
                break
        return found

    def singles(self) -> list[Found]:
        """Every mistake that these inputs leave room for."""
        given = self.near.given
        return [
            Found((mistake,), (change,), changed(RIGHT, change))
            for mistake in MISTAKES
            for change in mistake.variants(given)
            if shown(change, given.stage)
        ]

    def explained(self, candidates: Iterable[Found]) -> list[Found]:
        """Those that fit, the closest first."""
        fitting = [found for found in map(self.measured, self.screened(candidates)) if found.fits]
        return sorted(fitting, key=lambda found: found.residual)

    def screened(self, candidates: Iterable[Found]) -> Iterator[Found]:
        """Those that come near on a few rows, with their free numbers found."""
        for candidate in candidates:
            recipe = self.near.filled(candidate.recipe, self.screen, self.quick)
            if recipe is None or self.near.gap(recipe, self.screen, self.quick) > self.rough:
                continue
            if recipe is not candidate.recipe:  # found roughly: find it well
                recipe = self.near.filled(candidate.recipe, self.sample)
            if recipe is not None:
                yield replace(candidate, recipe=recipe)

    def seen(self, singles: list[Found]) -> list[Found]:
        """Those that would change these numbers at all."""
        right = self.quick.answer(RIGHT, self.sample)
        slack = self.near.tolerance(RIGHT, self.sample)
        found = []
        for single in singles:
            if single.recipe.masking in ("fill", "add") and single.recipe.fill is None:
                found.append(single)
                continue
            made = self.quick.answer(single.recipe, self.sample)
            if made.shape != right.shape or differences(made, right).max(initial=0) > slack:
                found.append(single)
        return found


def pairs(singles: list[Found]) -> Iterator[Found]:
    """Two mistakes that change different things."""
    for a, b in combinations(singles, 2):
        one, other = a.changes[0], b.changes[0]
        if a.mistakes[0] is not b.mistakes[0] and not one.keys() & other.keys():
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


def _some_batches(given: Inputs, batches: tuple[int, ...]) -> Inputs:
    """The same inputs for some batch entries."""
    if len(batches) == given.problem.batch:
        return given
    at = list(batches)

    def some(x: Any) -> Any:
        return None if x is None else x[at]

    layer = given.layer
    return replace(
        given,
        problem=given.problem.take_heads(np.array(at), range(given.problem.heads)),
        q=given.q[at],
        k=given.k[at],
        v=some(given.v),
        theirs=given.theirs[at],
        layer=None if layer is None else replace(layer, x=layer.x[at], context=layer.context[at]),
    )
