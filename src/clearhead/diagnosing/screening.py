"""The first comparison of a candidate with theirs: one head and a few rows, in float32.

A layer's output mixes all heads. So one head of one row of theirs is recovered first: the output projection is undone,
and the heads are split again in the way in which the candidate joins them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import Fit, largest
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Recipe, Selection
from clearhead.diagnosing.workings import Workings

_LONG, _COLUMNS = 1024, 8  # from so many keys on, so many columns of an output are compared


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
        single, workings = np.dtype(np.float32), fit.plain
        selection = Selection(heads if inputs.merged else heads[self.head :][:1], tuple(sorted(rows & set(range(n)))))
        if fit.plain.precision != single:
            workings = Workings(inputs, single)
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
    if w.shape[0] != w.shape[1]:
        return None
    try:
        solved: Array = np.linalg.solve(w.T, row.T).T
    except np.linalg.LinAlgError:
        return None
    return solved


def taken(inputs: Diagnosed, batches: tuple[int, ...]) -> Diagnosed:
    """The same inputs for some batch entries."""
    if len(batches) == inputs.problem.batch:
        return inputs
    index = list(batches)
    return replace(
        inputs.mapped(lambda x: x[index]),
        whole=inputs,
        entries=batches,
        problem=inputs.problem.take(batches=np.array(index)),
        theirs=inputs.theirs[index],
    )


def generic(inputs: Diagnosed) -> Diagnosed:
    """Inputs of the same shapes, dtypes and rules, whose numbers are random."""
    rng = np.random.default_rng(0)

    def drawn(x: Array) -> Array:
        return np.asarray(rng.standard_normal(x.shape)).astype(x.dtype)

    def matrix(x: Array) -> Array:
        return drawn(x) / x.dtype.type(len(x) ** 0.5 if x.ndim > 1 else 1)

    return replace(inputs.mapped(drawn, matrix), weights=inputs.weights)
