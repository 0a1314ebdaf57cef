"""The first look at a candidate: one head and a few rows, in float32.

A layer's output mixes all heads, so one row of theirs is taken apart first: the output projection undone, the heads
split again, as the candidate would have joined them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.axes import Array
from clearhead.diagnosing.fitting import Fit, largest
from clearhead.diagnosing.recipe import RIGHT, Inputs, Layer, Part, Recipe
from clearhead.diagnosing.workings import Workings


class View(NamedTuple):
    """Where to look, with what, and how far off is too far."""

    fit: Fit
    part: Part
    work: Workings
    rough: float


class Screen:
    """Tells candidates that cannot be from those that deserve a closer look."""

    def __init__(self, fit: Fit) -> None:
        given, n, heads = fit.given, fit.given.problem.queries, tuple(range(fit.given.problem.heads))
        self.row, self.head = n // 2, len(heads) // 2
        rows = {self.row} if given.merged else {min(1, n - 1), self.row, n - 1}
        self.part = Part(heads if given.merged else heads[self.head :][:1], tuple(sorted(rows & set(range(n)))))
        self.work = fit.plain if fit.plain.precision == np.float32 else Workings(given, np.dtype(np.float32))
        self.allowed = fit.tolerance(RIGHT, self.part)
        rough = max(1e-3 * largest(fit.theirs(self.part)), 5 * self.allowed)
        self.whole = View(fit, self.part, self.work, rough)
        self._apart: dict[Any, View] = {}
        self._alone = Workings(replace(given, apart=True), np.dtype(np.float32)) if given.merged else self.work

    def near(self, recipe: Recipe) -> Recipe | None:
        """The recipe with its free number found, if it comes near theirs."""
        fit, part, work, rough = self.view(recipe)
        filled = fit.filled(recipe, part, work)
        return filled if filled is not None and fit.gap(filled, part, work) <= rough else None

    def view(self, recipe: Recipe) -> View:
        """One head, where theirs can be taken apart."""
        if not self.whole.fit.given.merged or not self.part.rows:
            return self.whole
        key = recipe.w_o, recipe.b_o, recipe.merge
        if key not in self._apart:
            self._apart[key] = self._taken_apart(recipe) or self.whole
        return self._apart[key]

    def _taken_apart(self, recipe: Recipe) -> View | None:
        given, (whole, _, _, rough) = self.whole.fit.given, self.whole
        assert given.layer is not None
        p = given.problem
        theirs = whole.theirs(self.part)[:, 0, 0]
        shaken = theirs + self.allowed * np.random.default_rng(0).choice([-1.0, 1.0], theirs.shape)
        joined, again = (_unprojected(given.layer, recipe, row, p.heads) for row in (theirs, shaken))
        if joined is None or again is None or joined.shape[-1] % p.heads or not np.isfinite(joined).all():
            return None
        noise = 10 * float(np.abs(joined - again).max(initial=0.0))
        if not noise < 0.1 * largest(joined):
            return None
        d_v = joined.shape[-1] // p.heads
        head, row = self.head, self.row
        if recipe.merge == "flat":  # the row starts in the middle of another
            head, row = divmod(self.row * p.heads, p.queries)
            found = joined[:, :d_v]
        elif recipe.merge == "interleaved":
            found = joined.reshape(-1, d_v, p.heads)[:, :, head]
        else:
            found = joined.reshape(-1, p.heads, d_v)[:, head]
        apart = np.zeros((len(theirs), p.heads, p.queries, d_v))
        apart[:, head, row] = found
        fit = Fit(replace(given, theirs=apart, apart=True), whole.dtype, whole.slack)
        part = self._alone.part((head,), (row,))
        return View(fit, part, self._alone, max(rough, 1e-3 * largest(found), noise))


def _unprojected(layer: Layer, recipe: Recipe, row: Array, heads: int) -> Array | None:
    """The joined heads that the output projection made this row of; None where it cannot be undone."""
    if "o" not in layer.w or recipe.w_o == "missing":
        return row
    w = layer.w["o"].astype(np.float64)
    if "o" in layer.b and recipe.b_o == "given":
        row = row - layer.b["o"].astype(np.float64)
    if recipe.w_o == "on values":
        return row
    if w.shape[0] != w.shape[1]:
        return None
    if recipe.w_o == "per head":
        w = w * np.kron(np.eye(heads), np.ones((len(w) // heads, len(w) // heads)))
    try:
        solved: Array = np.linalg.solve(w if recipe.w_o == "transposed" else w.T, row.T).T
    except np.linalg.LinAlgError:
        return None
    return solved


def taken(given: Inputs, batches: tuple[int, ...]) -> Inputs:
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
