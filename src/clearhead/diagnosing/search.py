"""The search: which mistake, alone or with another, gives the numbers in `theirs`.

Every candidate is compared on a few rows of one head first. Candidates that come near are compared on a dozen rows of
every head, and those that still fit on all rows, or on as many as the budget allows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from clearhead.diagnosing.fitting import Fit, Screen, coarser, largest, largest_difference, taken
from clearhead.diagnosing.mistakes import Mistake, mistakes
from clearhead.diagnosing.recipe import RIGHT, Change, Diagnosed, Recipe, Selection, acts_after_weights, changed, shown

_SOFTMAX = {"axis", "softmax", "blocks", "overflow"}  # each replaces the whole softmax: no two of them go together
_PAIRED = 16  # keys of a block, below which it is tried alone
_WIDE, _WIDE_PAIRS = 2**20, 2**19  # scores of a head, up to which mistakes that need them all are tried, and in pairs
BUDGET = 2**21  # the most weights that are compared


@dataclass(frozen=True, slots=True)
class Candidate:
    """Mistakes together, their changes of the recipe, and how far the recipe's numbers lie from theirs."""

    mistakes: tuple[Mistake, ...]
    changes: tuple[Change, ...]
    recipe: Recipe
    residual: float = inf
    tolerance: float = 0.0

    @property
    def fits(self) -> bool:
        """Is the residual within what rounding allows?"""
        return self.residual <= self.tolerance

    @property
    def solved(self) -> bool:
        """Was the number that its mask fills with solved from theirs?"""
        return any(None in change.values() for change in self.changes)

    def beside(self, other: "Candidate", recipe: Recipe) -> "Candidate":
        """Both together, which make this recipe."""
        return Candidate(self.mistakes + other.mistakes, self.changes + other.changes, recipe)


class Coverage(NamedTuple):
    """Which batch entries, heads and queries were compared, and whether that is everything."""

    batches: tuple[int, ...]
    heads: int
    queries: tuple[int, ...]
    everything: bool
    all_batches: int
    all_queries: int


class Search:
    """One case: the inputs, the rows to compare, and the candidates.

    `quick` compares the first and the last batch entry, `full` every batch entry that the budget allows; `sample` is a
    dozen rows of every head, `everything` all rows that the budget allows.
    """

    def __init__(self, inputs: Diagnosed, slack: float = 0.0) -> None:
        self.tried = 0  # candidates so far
        dtype, problem = coarser(inputs.problem.dtype, inputs.theirs.dtype), inputs.problem
        n, heads = problem.queries, tuple(range(problem.heads))
        whole = prod(problem.shape) <= BUDGET
        ends, rows = tuple(sorted({0, problem.batch - 1})), tuple(range(n))
        batches = tuple(range(problem.batch)) if whole else ends
        if not whole:
            most = max(16, BUDGET // max(1, len(batches) * problem.heads * problem.keys))
            rows = tuple(sorted({*_sample_rows(n), *np.linspace(0, n - 1, min(n, most)).astype(int).tolist()}))
        self.full = Fit(taken(inputs, batches), dtype, slack)
        self.quick = self.full if batches == ends else Fit(taken(inputs, ends), dtype, slack)
        self.screen = Screen(self.quick)
        self.everything, self.sample = Selection(heads, rows), Selection(heads, _sample_rows(n))
        self.coverage = Coverage(batches, problem.heads, rows, whole, problem.batch, n)

    def measured(self, candidate: Candidate) -> Candidate:
        """The candidate with its residual and tolerance; one that fails on the sample is not compared any further."""
        for fit, selection in ((self.quick, self.sample), (self.full, self.everything)):
            residual, tolerance = fit.measure(candidate.recipe, selection)
            candidate = replace(candidate, residual=residual, tolerance=tolerance)
            if not candidate.fits:
                break
        unknown = candidate.recipe.tail[0] == "unknown" and candidate.fits
        return replace(candidate, residual=inf) if unknown and not self._unwritten(candidate.recipe) else candidate

    def _unwritten(self, recipe: Recipe) -> bool:
        """Are the rows of its tail no outputs at all, the first of them and most of them: far beyond all values?"""
        inputs, start = self.full.inputs, recipe.tail[1]
        right = self.full.exact.answer(RIGHT, self.sample)
        values = right if inputs.merged else self.full.exact.operand(recipe, "v")
        beyond = (10 if inputs.merged else 3) * largest(values)
        rows = tuple(row for row in self.everything.rows if row >= start)
        parts = (self.full.theirs(Selection(self.everything.heads, chosen)) for chosen in ((start,), rows))
        return all(np.mean((~(np.abs(theirs) <= beyond)).any(axis=-1)) >= 0.5 for theirs in parts)

    def rounded(self, narrowings: list[Candidate]) -> list[Candidate]:
        """The narrow dtype that theirs were rounded to somewhere on the way, if nothing worse happened."""
        gap, fit = self.quick.gap(RIGHT, self.sample), self.quick
        fitting = [(fit.rounded_to(n.recipe.half_dtype, self.sample), n) for n in narrowings]
        surest = sorted((pair for pair in fitting if pair[0]), key=lambda pair: -pair[0])
        return [replace(narrowing, residual=gap, tolerance=gap) for _, narrowing in surest[:1]]

    def singles(self, only: Callable[[Mistake], bool] = bool) -> list[Candidate]:
        """Every single mistake that can be made with these inputs, and that shows at their stage."""
        inputs = self.quick.inputs
        return [
            Candidate((mistake,), (change,), changed(RIGHT, change))
            for mistake in filter(only, mistakes())
            for change in mistake.variants(inputs)
            if shown(change, inputs.stage) and (inputs.weights is None or acts_after_weights(change))
        ]

    @property
    def untried(self) -> str:
        """Which mistakes that need every score of a head are too costly here: "" for none, "pairs" or "all"."""
        cells = self.full.inputs.problem.queries * self.full.inputs.problem.keys
        return "" if cells <= _WIDE_PAIRS else "pairs" if cells <= _WIDE else "all"

    def unseen(self) -> list[Candidate]:
        """Mistakes about the caller's own rules that give the right numbers here: these inputs do not show them."""
        right = self.quick.exact.answer(RIGHT, self.sample)
        allowed = self.quick.allowed(RIGHT, self.sample, right)
        hidden: dict[str, Candidate] = {}
        for single in self.singles(only=lambda mistake: bool(mistake.rule)):
            if not single.recipe.unfilled and single.mistakes[0].name not in hidden:
                computed = self.quick.exact.answer(single.recipe, self.sample)
                if largest_difference(computed, right) <= allowed:
                    hidden[single.mistakes[0].name] = single
        return list(hidden.values())

    def explanations(self) -> list[Candidate]:
        """Candidates that fit, the best first: one mistake before two, numbers before statistics."""
        by_evidence: dict[str, list[Candidate]] = {"numbers": [], "rounding": [], "unknown": []}
        for single in self.singles():
            if not (self.untried == "all" and single.recipe.wide):
                unknown = single.recipe.tail[0] == "unknown"
                by_evidence["unknown" if unknown else single.mistakes[0].evidence].append(single)
        singles, narrowings, tails = by_evidence.values()
        paired = [s for s in singles if not (self.untried and s.recipe.wide) and not 0 < s.recipe.tile[1] < _PAIRED]
        fitting = self.fitting(singles)
        if fitting or not np.isfinite(self.full.theirs(self.sample)).any():  # some two mistakes make anything NaN
            return fitting
        return (
            self.fitting(tails)
            or self.fitting(pairs(paired, paired))
            or self.fitting(pairs(tails, paired))
            or self.rounded(narrowings)
        )

    def fitting(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Candidates that fit, the closest first.

        One whose number was solved counts only where no other fits: hidden scores of -c imitate a cap after the mask.
        """
        measured = map(self.measured, self._screened(candidates))
        single = self.full.inputs.problem.queries == 1  # a number that is solved beside another mistake fits it anyhow
        fitting = [c for c in measured if c.fits and not (single and c.solved and len(c.mistakes) > 1)]
        return closest([c for c in fitting if not c.solved] or fitting)

    def _screened(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Candidates that come near theirs on a few rows, the number that their mask fills with solved."""
        for candidate in candidates:
            self.tried += 1
            recipe: Recipe | None = candidate.recipe
            if candidate.recipe.unfilled:
                recipe = self.quick.filled(candidate.recipe, self.sample)
            if recipe is not None and self.screen.near(recipe):
                yield replace(candidate, recipe=recipe)


def pairs(first: list[Candidate], second: list[Candidate]) -> Iterator[Candidate]:
    """Two mistakes that change different fields of the recipe."""
    for a, b in combinations(first, 2) if first is second else product(first, second):
        change_a, change_b = a.changes[0], b.changes[0]
        both_softmax = change_a.keys() & _SOFTMAX and change_b.keys() & _SOFTMAX
        independent = not change_a.keys() & change_b.keys() and not both_softmax
        apart = a.mistakes[0].alone or b.mistakes[0].alone or (a.mistakes[0].seldom and b.mistakes[0].seldom)
        if a.mistakes[0] is not b.mistakes[0] and independent and not apart:
            yield a.beside(b, changed(a.recipe, change_b))


def closest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The closest first."""
    return sorted(candidates, key=lambda candidate: candidate.residual)


def _sample_rows(n: int) -> tuple[int, ...]:
    """A dozen rows: the first, the last, and those around powers of two."""
    edges = {0, 1, n // 2, n - 2, n - 1}
    power = 1 << max(0, n - 1).bit_length()  # the first that is no less than n
    edges |= {size + by for size in (power // 2, power // 4, power // 8) for by in (-1, 0, 1)}
    return tuple(sorted(row for row in edges if 0 <= row < n))
