"""Numbers written by hand: each is as precise as its own last decimal, so that 0.11 may stand beside 0.175."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import differences
from clearhead.diagnosing.recipe import RIGHT, Inputs, Recipe, Selection
from clearhead.diagnosing.workings import Workings

_WHOLE, _COARSEST, _PRINTED = 0.5, 0.006, 4e-7  # of no decimals, of two, and of seven: a program wrote so many

if TYPE_CHECKING:
    from clearhead.diagnosing.verdict import Diagnosis


def judged_by_decimals(judged: "Callable[[Inputs, float], Diagnosis]", inputs: Inputs, halves: Array) -> "Diagnosis":
    """The verdict by the finest decimal; where it fails, by a coarser one, if each number agrees to its own decimals.

    halves   half of each number's last decimal, in the axes of theirs; 0 where it has none
    """
    fine = float(halves[halves > 0].min(initial=_WHOLE))
    by_hand = fine > _PRINTED
    coarser = sorted({half for half in halves.ravel().tolist() if fine < half <= _COARSEST}) if by_hand else []
    halves = np.clip(halves, fine, coarser[-1] if coarser else fine)  # 0.5 beside 0.43 is 0.50
    finest = judged(inputs, fine)
    for slack in coarser:
        if finest.verdict == "right":
            break
        found = judged(inputs, slack)
        recipes = [e.candidate.recipe for e in found.explanations] or [RIGHT] * (found.verdict == "right")
        better = found.verdict == "right" or finest.verdict == "unexplained"
        if better and any(_agrees(inputs, recipe, halves) for recipe in recipes):
            return found
    return finest


@np.errstate(all="ignore")
def _agrees(inputs: Inputs, recipe: Recipe, halves: Array) -> bool:
    """Is each number as near to the recipe's as its decimals say?"""
    whole = Selection(tuple(range(inputs.problem.heads)), tuple(range(inputs.problem.queries)))
    computed = Workings(inputs).answer(recipe, whole)
    if computed.shape != inputs.theirs.shape:
        return False
    rounding = 1e-6 * (1 + np.abs(computed))
    return bool((differences(inputs.theirs.astype(np.float64), computed) <= halves + rounding).all())
