"""The search: which mistake, alone or with another, gives the numbers in `theirs`.

Every candidate is compared on a few rows of one head first. Candidates that come near are compared on a dozen rows of
every head, and those that still fit on all rows, or on as many as the budget allows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import prod

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import Fit, coarser, largest
from clearhead.diagnosing.mistakes import Mistake, mistakes
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Recipe, Selection
from clearhead.diagnosing.verdict import BUDGET, Coverage, MistakeExplanation
from clearhead.textbook.computed import largest_difference

_SOFTMAX = {"axis", "softmax", "blocks", "overflow"}  # each replaces the whole softmax: no two of them go together
_PAIRED = 16  # keys of a block, below which it is tried alone
_WIDE = 2**19  # scores of a head, up to which mistakes that need them all are tried


class Search:
    """One case: the inputs, the rows to compare, and the candidates.

    `screen` is a few rows, of one head where heads are not joined, `sample` a dozen rows of every head, `everything`
    all rows that the budget allows. Where it does not allow all, only the first and the last batch entry count.
    """

    def __init__(self, inputs: Diagnosed, slack: float = 0.0) -> None:
        self.tried = 0  # candidates so far
        problem, ends = inputs.problem, sorted({0, inputs.problem.batch - 1})
        n, heads, whole = problem.queries, tuple(range(problem.heads)), prod(problem.shape) <= BUDGET
        batches, rows = tuple(range(problem.batch)) if whole else tuple(ends), tuple(range(n))
        if not whole:
            taken = problem.take(batches=np.array(ends))
            inputs = replace(inputs.mapped(lambda x: x[ends]), problem=taken, theirs=inputs.theirs[ends])
            most = max(16, BUDGET // max(1, len(batches) * problem.heads * problem.keys))
            rows = tuple(sorted({*_sample_rows(n), *np.linspace(0, n - 1, min(n, most)).astype(int).tolist()}))
        self.inputs, self.fit = inputs, Fit(inputs, coarser(problem.dtype, inputs.theirs.dtype), slack)
        self.everything, self.sample = Selection(heads, rows), Selection(heads, _sample_rows(n))
        few = {n // 2} if inputs.merged else {int(n > 2), n // 2, n - 1}
        some = heads if inputs.merged else heads[len(heads) // 2 :][:1]
        self.screen = Selection(some, tuple(sorted(few & set(range(n)))))
        self.coverage = Coverage(batches, problem.heads, rows, whole, problem.batch, n)

    @cached_property
    def _near(self) -> float:
        """How far a candidate may lie from theirs on the screen to be compared any further."""
        return max(1e-3 * largest(self.fit.theirs(self.screen)), 5 * self.fit.allowed(RIGHT, self.screen))

    def measured(self, candidate: MistakeExplanation) -> MistakeExplanation:
        """The candidate with its residual and tolerance; one that fails on the sample is not compared any further."""
        for selection in (self.sample, self.everything):
            residual, tolerance = self.fit.measure(candidate.recipe, selection)
            candidate = replace(candidate, residual=residual, tolerance=tolerance)
            if not candidate.fits:
                break
        return candidate

    def rounded(self, narrowings: list[MistakeExplanation]) -> list[MistakeExplanation]:
        """The narrow dtype that theirs were rounded to somewhere on the way, if nothing worse happened."""
        gap = self.fit.gap(RIGHT, self.sample)
        fitting = [(self.fit.rounded_to(n.recipe["half_dtype"], self.sample), n) for n in narrowings]
        surest = sorted((pair for pair in fitting if pair[0]), key=lambda pair: -pair[0])
        return [replace(narrowing, residual=gap, tolerance=gap) for _, narrowing in surest[:1]]

    def singles(self, only: Callable[[Mistake], bool] = bool) -> list[MistakeExplanation]:
        """Every single mistake that can be made with these inputs, and that shows at their stage."""
        return [
            MistakeExplanation((mistake,), (change,), Recipe(change))
            for mistake in filter(only, mistakes())
            for change in mistake.variants(self.inputs)
        ]

    @property
    def untried(self) -> bool:
        """Are mistakes that need every score of a head too costly here?"""
        return self.inputs.problem.queries * self.inputs.problem.keys > _WIDE

    def unseen(self) -> list[MistakeExplanation]:
        """Mistakes about the caller's own rules that give the right numbers here: these inputs do not show them."""
        right = self.fit.exact.answer(RIGHT, self.sample)
        allowed = self.fit.allowed(RIGHT, self.sample, right)
        hidden: dict[str, MistakeExplanation] = {}
        for single in self.singles(only=lambda mistake: bool(mistake.rule)):
            if not single.recipe.unfilled and single.entries[0].name not in hidden:
                computed = self.fit.exact.answer(single.recipe, self.sample)
                if largest_difference(computed, right) <= allowed:
                    hidden[single.entries[0].name] = single
        return list(hidden.values())

    def explanations(self) -> list[MistakeExplanation]:
        """Candidates that fit, the best first: one mistake before two, numbers before statistics."""
        every = [single for single in self.singles() if not (self.untried and single.recipe.wide)]
        singles, narrowings = ([s for s in every if s.entries[0].evidence == kind] for kind in ("numbers", "rounding"))
        fitting = self.fitting(singles)
        if fitting or not np.isfinite(self.fit.theirs(self.sample)).any():  # some two mistakes make anything NaN
            return fitting
        paired = [single for single in singles if self._paired(single)]
        return self.fitting(pairs(paired)) or self.rounded(narrowings)

    def fitting(self, candidates: Iterable[MistakeExplanation]) -> list[MistakeExplanation]:
        """Candidates that fit, the closest first.

        One whose number was solved counts only where no other fits: hidden scores of -c imitate a cap after the mask.
        """
        measured = map(self.measured, self._screened(candidates))
        single = self.inputs.problem.queries == 1  # a number that is solved beside another mistake fits it anyhow
        fitting = [c for c in measured if c.fits and not (single and c.solved and len(c.entries) > 1)]
        return closest([c for c in fitting if not c.solved] or fitting)

    def _screened(self, candidates: Iterable[MistakeExplanation]) -> Iterator[MistakeExplanation]:
        """Candidates that come near theirs on a few rows, the number that their mask fills with solved."""
        for candidate in candidates:
            self.tried += 1
            recipe: Recipe | None = candidate.recipe
            try:
                if candidate.recipe.unfilled:
                    recipe = self.fit.filled(candidate.recipe, self.sample)
                near = recipe is not None and self.fit.gap(recipe, self.screen) <= self._near
            except ValueError:  # of shapes: no program makes both mistakes
                continue
            if recipe is not None and near:
                yield replace(candidate, recipe=recipe)

    def _paired(self, single: MistakeExplanation) -> bool:
        """Is it tried in pairs: does it change these numbers at a cost that pairs can bear?"""
        _, size = single.recipe["tile"] or ("", 0)
        if 0 < size < _PAIRED:
            return False
        computed = None if single.recipe.unfilled else self.fit.exact.answer(single.recipe, self.sample)
        return computed is None or not np.array_equal(computed, self._right, equal_nan=True)

    @cached_property
    def _right(self) -> Array:
        return self.fit.exact.answer(RIGHT, self.sample)


def pairs(singles: list[MistakeExplanation]) -> Iterator[MistakeExplanation]:
    """Two mistakes that change different fields of the recipe."""
    for a, b in combinations(singles, 2):
        change_a, change_b = a.changes[0], b.changes[0]
        both_softmax = change_a.keys() & _SOFTMAX and change_b.keys() & _SOFTMAX
        independent = not change_a.keys() & change_b.keys() and not both_softmax
        apart = a.entries[0].alone or b.entries[0].alone or (a.entries[0].seldom and b.entries[0].seldom)
        if a.entries[0] is not b.entries[0] and independent and not apart:
            recipe = Recipe({**a.recipe, **change_b})
            yield MistakeExplanation(a.entries + b.entries, a.changes + b.changes, recipe)


def closest(candidates: Iterable[MistakeExplanation]) -> list[MistakeExplanation]:
    """The closest first."""
    return sorted(candidates, key=lambda candidate: candidate.residual)


def _sample_rows(n: int) -> tuple[int, ...]:
    """A dozen rows: the first, the last, and those around powers of two."""
    edges = {0, 1, n // 2, n - 2, n - 1}
    power = 1 << max(0, n - 1).bit_length()  # the first that is no less than n
    edges |= {size + by for size in (power // 2, power // 4, power // 8) for by in (-1, 0, 1)}
    return tuple(sorted(row for row in edges if 0 <= row < n))
