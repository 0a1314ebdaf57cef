"""The search for the mistake, or the two mistakes, that give the numbers in `theirs`.

Every candidate is compared on one or two rows first. Those that come near are compared on a dozen rows, and those that
still fit on all rows, or on as many as the budget allows.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.changes import SEEING, Workings
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Recipe, Rows, eps
from clearhead.diagnosing.verdict import BUDGET, MistakeExplanation
from clearhead.diagnosing.workings import SOFTMAX, answer, scores, seen_by, take, weights
from clearhead.textbook.computed import differences

FACTOR = 4.0  # a right result may lie this many times further from the truth than a plain run in its dtype
_TYPICAL = 2.0  # the same factor for the root mean square of all numbers, where rounding decides which key wins
_DOUBT = 16.0  # a gap of up to this many tolerances is judged by more plain runs, since one run may be lucky
_RUNS = 4
_WIDEST = 1e-2  # relative tolerance above which the root mean square of all numbers must agree as well
_FEW = 64  # the root mean square of fewer numbers says little
_CLEAR = 0.3  # a correlation above this is not chance
_SOFTMAXED = ("weights", "heads", "concat", "output")  # stages from the weights on
_HALVINGS = 5  # steps that halve the range of an unknown number, before those along a line
_MUCH = 2**11  # with more scores than this in a row (over all heads), only one row is compared first
_WIDE = 2**19  # with more scores than this per head, mistakes that need all of them are not tried


class Search:
    """One case: the inputs, the rows to compare, and the candidates.

    `screen` is one or two rows, `sample` a dozen, `everything` all rows that the budget allows. If it does not allow
    all, only the first and the last batch entry are compared.
    """

    def __init__(self, inputs: Diagnosed, slack: float = 0.0) -> None:
        self.tried = 0  # candidates so far
        problem, ends = inputs.problem, sorted({0, inputs.problem.batch - 1})
        n, whole = inputs.theirs.shape[2], inputs.stage in "qkv" or prod(problem.shape) <= BUDGET
        batches, rows = tuple(range(problem.batch)) if whole else tuple(ends), tuple(range(n))
        some = {0, 1, n - 2, n - 1, *np.linspace(0, n - 1, 9).astype(int).tolist()}
        self.sample: Rows = tuple(sorted(row for row in some if 0 <= row < n))
        if not whole:
            taken = problem.take(batches=np.array(ends))
            inputs = replace(inputs.mapped(lambda x: x[ends]), problem=taken, theirs=inputs.theirs[ends])
            most = max(16, BUDGET // max(1, len(batches) * problem.heads * problem.keys))
            rows = tuple(sorted({*self.sample, *np.linspace(0, n - 1, min(n, most)).astype(int).tolist()}))
        self.inputs, self.slack, self.everything, self.exact = inputs, slack, rows, Workings(inputs)
        self.dtype = max(problem.dtype, inputs.theirs.dtype, key=eps)
        single = self.dtype == np.float64
        self.plain = Workings(inputs, np.dtype(np.float32) if single else self.dtype)
        self.shrink = 2.0**-29 if single else 1.0  # from float32's rounding error to float64's
        self.untried = problem.queries * problem.keys > _WIDE  # are mistakes that need all scores of a head too costly?
        few = {n // 2} if inputs.merged or prod(problem.shape) > _MUCH * problem.queries else {n // 2, n - 1}
        self.screen: Rows = tuple(sorted(few & set(range(n))))
        sizes = {"all_batches": problem.batch, "all_queries": n}
        self.looked = {"batches": batches, "heads": problem.heads, "queries": rows, "everything": whole, **sizes}

    def theirs(self, rows: Rows) -> Array:
        """Their numbers for these rows; q, k and v are not cut."""
        theirs = self.inputs.theirs if self.inputs.stage in "qkv" else take(self.inputs.theirs, rows)
        return theirs.astype(np.float64)

    def gap(self, recipe: Recipe, rows: Rows) -> float:
        """The largest difference between theirs and the recipe's numbers; infinite if shapes or NaNs differ."""
        theirs, computed = self.theirs(rows), answer(self.exact, recipe, rows)
        if computed.shape != theirs.shape:
            return float("inf")
        gaps = differences(theirs, computed)
        softmaxed = self.inputs.stage in _SOFTMAXED
        if softmaxed and gaps.size and gaps.max() > 0 and recipe["empty"] is None and recipe.key(SEEING):
            gaps = self._excused(recipe, rows, gaps)
        return float(gaps.max(initial=0.0))

    def _excused(self, recipe: Recipe, rows: Rows, gaps: Array) -> Array:
        """Lower the gaps of rows that only the wrong mask leaves without keys: these may be 0, NaN or a mean."""
        emptied: Array = np.asarray(~seen_by(self.exact, recipe, rows).any(axis=-1, keepdims=True))
        emptied = emptied & seen_by(self.exact, RIGHT, rows).any(axis=-1, keepdims=True)
        if not emptied.any():
            return gaps
        if self.inputs.merged:
            emptied = np.asarray(emptied.any(axis=1, keepdims=True))
        for empty in ("nan", "mean"):
            computed = answer(self.exact, recipe.but(empty=empty), rows)
            gaps = np.where(emptied, np.minimum(gaps, differences(self.theirs(rows), computed)), gaps)
        return gaps

    def measure(self, recipe: Recipe, rows: Rows) -> tuple[float, float]:
        """Measure the gap, and what rounding allows.

        With huge scores, rounding decides which of two keys gets all the weight. A plain run is then off by as much as
        the values are large, but only in a few rows, so the root mean square of all numbers must agree as well.
        """
        theirs, exact = self.theirs(rows), answer(self.exact, recipe, rows)
        gap, allowed = self.gap(recipe, rows), self.allowed(recipe, rows)
        runs = self._other_runs if allowed < gap < _DOUBT * allowed else []
        if allowed < gap and recipe == RIGHT:
            runs = [*runs, Workings(self.inputs, self.plain.precision, rounded_sums=True)]
        allowed = max([allowed, *(self.allowed(recipe, rows, run) for run in runs)])
        wide = gap <= allowed and allowed > _WIDEST * largest(exact) and theirs.size >= _FEW
        if wide and np.isfinite(theirs).all() and np.isfinite(exact).all():
            errors = [answer(run, recipe, rows) - exact for run in (self.plain, *self._other_runs)]
            worst = max(rms(error[np.isfinite(error)]) for error in errors) * self.shrink
            typical = _TYPICAL * (worst + eps(self.dtype) * largest(exact)) + self.slack
            allowed = min(allowed, typical) if rms(theirs - exact) > typical else allowed
        return gap, allowed

    @cached_property
    def _other_runs(self) -> list[Workings]:
        """Plain runs of inputs perturbed within the rounding of their dtype (of float32, if that is coarser)."""
        narrow, rng = self.plain.precision, np.random.default_rng(0)
        size = eps(max(narrow or self.dtype, np.dtype(np.float32), key=eps))
        if size < 2.0**-12:  # a sequential sum may add this much to the rounding of d_k products
            size *= max(1.0, self.inputs.problem.d_k**0.5 / 4)
        moved = [self.inputs.mapped(lambda x: x * (1 + size * rng.uniform(-1, 1, x.shape))) for _ in range(_RUNS)]
        return [Workings(replace(inputs, v=self.inputs.v), narrow) for inputs in moved]

    def allowed(self, recipe: Recipe, rows: Rows, run: Workings | None = None) -> float:
        """The tolerance: a factor times the error of a plain run in their dtype, plus half of their last decimal."""
        exact = answer(self.exact, recipe, rows)
        error = np.abs(exact - answer(run or self.plain, recipe, rows))
        worst = float(error[np.isfinite(error)].max(initial=0.0)) * self.shrink
        factor = 3 * FACTOR if self.dtype == np.float64 else FACTOR  # the exact numbers are themselves float64
        return factor * (worst + eps(self.dtype) * largest(exact)) + self.slack

    def narrowed(self, narrow: np.dtype[Any], rows: Rows) -> float:
        """Score how surely theirs differs from the right numbers only by rounding to a narrow dtype; 0 if it does not.

        Either the error correlates with that of a run that rounds inputs, weights, output or every step, or theirs are
        numbers of that dtype. It must not be much larger than in such a run, nor correlate with the right numbers.
        """
        theirs, exact = self.theirs(rows), answer(self.exact, RIGHT, rows)
        error, clear = theirs - exact, max(_CLEAR, 6 / max(1, theirs.size) ** 0.5)
        if error.size < _FEW or not np.isfinite(error).all() or abs(correlated(error, exact)) > clear:
            return 0.0

        def rounded(x: Array) -> Array:
            return x.astype(narrow).astype(x.dtype)

        plain = Workings(self.inputs, narrow), Workings(self.inputs.mapped(rounded, rounded))
        runs = [*(answer(work, RIGHT, rows) for work in plain), rounded(exact)]
        if self.inputs.stage in ("heads", "output"):
            given = {"weights": rounded(weights(self.exact, RIGHT, rows))}
            runs.append(answer(Workings(self.inputs, given=given), RIGHT, rows))
        errors = [run - exact for run in runs if largest(error) <= 2 * FACTOR * largest(run - exact)]
        alike = [correlated(error, other) for other in errors if rms(error) <= _TYPICAL * rms(other) < np.inf]
        best = max(alike, default=0.0)
        return best if best > clear else clear * (bool(alike) and bool((rounded(theirs) == theirs).all()))

    def filled(self, recipe: Recipe, rows: Rows) -> Recipe | None:
        """Solve for the number that a mask puts in hidden places, or adds there, and return the recipe with it.

        As the number grows, the results move from those of the visible keys alone to those of the hidden keys alone.
        None if theirs nearly equals one of these two, where any number further on that side gives the same.
        """

        def at(number: float) -> Array:
            return answer(self.exact, recipe.but(fill=number), rows)

        theirs, alone, full = self.theirs(rows), answer(self.exact, recipe.but(masking=None), rows), at(1e9)
        if self.inputs.stage == "masked":
            hidden = ~np.broadcast_to(seen_by(self.exact, recipe, rows), theirs.shape)
            zero = at(0.0)
            numbers = (theirs - zero)[hidden & np.isfinite(zero)]
            return recipe.but(fill=float(np.median(numbers))) if numbers.size else None
        if not theirs.shape == alone.shape == full.shape or not np.isfinite(theirs).any():
            return None
        use = np.isfinite(theirs) & np.isfinite(alone) & np.isfinite(full)
        toward, gone = np.where(use, full - alone, 0.0), np.where(use, theirs - alone, 0.0)
        apart, tolerance = toward - gone, self.allowed(RIGHT, rows)
        if not (largest(gone) > tolerance < largest(apart) and (toward * gone).sum() > 0 < (toward * apart).sum()):
            return None

        x = scores(self.exact, recipe.but(masking="after"), rows)
        low, high = (0.0, 0.0) if recipe["masking"] == "add" else (float(x.min()), float(x.max()))
        low, high, side = low - 40.0, high + 40.0, 0
        under, over = -(toward * gone).sum(), (toward * apart).sum()  # how far it has gone at each end
        close = 2.0**-52 * (over - under)
        for step in range(30):  # a few halvings, then regula falsi (Illinois): a dozen, if rounding hides no crossing
            along = step >= _HALVINGS
            number = high - over * (high - low) / (over - under) if along else (low + high) / 2
            further = (toward * np.where(use, at(number) - theirs, 0.0)).sum()  # has the number gone too far?
            if abs(further) <= close:
                break
            if further > 0:
                high, over, under, side = number, further, under / (2 if side > 0 else 1), int(along)
            else:
                low, under, over, side = number, further, over / (2 if side < 0 else 1), -int(along)
        idle = recipe["masking"] == "add" and abs(number) <= 1e-3  # then the mask hides no key
        far = self.gap(recipe.but(fill=number), self.screen) > self._near
        return None if idle or far else self._shortest(recipe, rows, number)

    def _shortest(self, recipe: Recipe, rows: Rows, number: float) -> Recipe:
        """The recipe with this number, or with two digits if these fit as well: -9.99998 becomes -10."""
        every = [recipe.but(fill=each) for each in (0.0, float(f"{number:.2g}"), number)]
        enough = max(2 * self.gap(every[-1], rows), self.allowed(every[-1], rows))
        return next(each for each in every if each is every[-1] or self.gap(each, rows) <= enough)

    @cached_property
    def _near(self) -> float:
        """The largest gap on the screen with which a candidate is compared any further."""
        return max(1e-3 * largest(self.theirs(self.screen)), 5 * self.allowed(RIGHT, self.screen))

    def explanations(self) -> list[MistakeExplanation]:
        """The candidates that fit, best first: single mistakes, else pairs, else rounding judged by statistics."""
        variants = [(mistake, change) for mistake in mistakes() for change in mistake.variants(self.inputs)]
        every = [MistakeExplanation((mistake,), (change,), Recipe(change)) for mistake, change in variants]
        every = [single for single in every if not (self.untried and single.recipe.wide)]
        narrowings = [single for single in every if single.entries[0].evidence == "rounding"]
        singles = [single for single in every if single not in narrowings]
        fitting = self.fitting(singles)
        if fitting or not np.isfinite(self.theirs(self.sample)).any():  # many pairs of mistakes give only NaN
            return fitting
        if fitting := self.fitting(pairs(singles)):
            return fitting
        rows, gap = self.everything, self.gap(RIGHT, self.everything)
        sure = {n: self.narrowed(np.dtype(n.recipe["half_dtype"]), rows) for n in narrowings}
        surest = max(narrowings, key=sure.__getitem__, default=None)
        return [replace(surest, residual=gap, tolerance=gap)] if surest is not None and sure[surest] else []

    def fitting(self, candidates: Iterable[MistakeExplanation]) -> list[MistakeExplanation]:
        """The candidates that fit, closest first.

        A candidate with a solved number counts only if no other fits: hidden scores of -c imitate a cap after the mask.
        A candidate whose changes include all of another's is dropped: its extra changes have no effect here.
        """
        single = self.inputs.problem.queries == 1  # a pair with a solved number fits any single query
        fitting = [c for c in map(self._compared, candidates) if c is not None]
        fitting = [c for c in fitting if not (single and c.solved and len(c.entries) > 1)]
        fitting = [c for c in fitting if not any(other.recipe.items() < c.recipe.items() for other in fitting)]
        return sorted([c for c in fitting if not c.solved] or fitting, key=lambda c: c.residual)

    def _compared(self, candidate: MistakeExplanation) -> MistakeExplanation | None:
        """Measure a candidate's residual and tolerance; None as soon as it does not fit some rows."""
        self.tried += 1
        with suppress(ValueError, IndexError):  # shapes do not fit: no program makes this mistake
            recipe = self.filled(candidate.recipe, self.sample) if candidate.solved else candidate.recipe
            if recipe is None or self.gap(recipe, self.screen) > self._near:
                return None
            for rows in (self.sample, self.everything):
                residual, tolerance = self.measure(recipe, rows)
                if residual > tolerance:
                    return None
            return replace(candidate, recipe=recipe, residual=residual, tolerance=tolerance)
        return None


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


def pairs(singles: list[MistakeExplanation]) -> Iterator[MistakeExplanation]:
    """Two mistakes that change different fields of the recipe."""
    for a, b in combinations(singles, 2):
        change_a, change_b = a.changes[0], b.changes[0]
        both_softmax = change_a.keys() & SOFTMAX and change_b.keys() & SOFTMAX
        independent = not change_a.keys() & change_b.keys() and not both_softmax
        seldom = a.entries[0].seldom and b.entries[0].seldom
        if a.entries[0] is not b.entries[0] and independent and not seldom:
            recipe = Recipe({**a.recipe, **change_b})
            yield MistakeExplanation(a.entries + b.entries, a.changes + b.changes, recipe)
