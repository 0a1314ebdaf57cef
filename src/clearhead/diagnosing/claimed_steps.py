"""Which known mistakes give the wrong numbers that a worked example claims for one of its steps."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rules import Rules
from clearhead.diagnosing.diagnose import examined, judged, layer_inputs
from clearhead.diagnosing.fitting import differences
from clearhead.diagnosing.mistakes import MISTAKES
from clearhead.diagnosing.recipe import RIGHT, Inputs, changed
from clearhead.diagnosing.search import Candidate
from clearhead.diagnosing.verdict import MistakeExplanation
from clearhead.diagnosing.workings import Workings
from clearhead.textbook.case_file import LAYER
from clearhead.textbook.shapes import turned
from clearhead.textbook.trace import Trace


def explanations(
    place: Path, values: dict[str, Any], traced: Trace, name: str, claimed: Array, slack: float
) -> tuple[MistakeExplanation, ...]:
    """What gives the numbers that a file claims for the step `name`, the best first.

    values    the file's inputs and rules, of which `traced` is the trace
    claimed   in the shape of the step, in the file's convention
    slack     how far the written numbers may lie from what was computed
    """
    if name == "concat":  # the output of a layer without W^O
        rest = {key: value for key, value in values.items() if key not in ("w_o", "b_o")}
        return examined(place, rest, claimed, "output", slack).explanations
    if name not in ("q", "k", "v", "heads"):
        return examined(place, values, claimed, name, slack).explanations
    inputs = _layer(values, traced)
    rows = turned(claimed, values.get("convention", "rows"))
    rows = rows.reshape(inputs.problem.batch, -1, *rows.shape[-2:])
    if name == "heads":
        return judged(replace(inputs, theirs=rows, per_head=True), slack).explanations
    return _of_projection(inputs, name, rows, slack)


def _layer(values: dict[str, Any], traced: Trace) -> Inputs:
    """A layer's inputs, with the right output as theirs."""
    rest = {name: value for name, value in values.items() if name not in LAYER}
    arrays = {name: values.get(name) for name in LAYER}
    heads, convention = rest.pop("num_heads", 1), rest.pop("convention", "rows")
    return layer_inputs(arrays, np.asarray(traced.output), heads, convention, "output", None, cast("Rules", rest))


@np.errstate(invalid="ignore", over="ignore")
def _of_projection(inputs: Inputs, name: str, claimed: Array, slack: float) -> tuple[MistakeExplanation, ...]:
    """The mistakes in a projection or the split of its heads that give this Q, K or V."""
    own = {f"w_{name}", f"b_{name}", "split"}
    workings, found = Workings(inputs), []
    for mistake in MISTAKES:
        for change in mistake.variants(inputs):
            if not set(change) <= own:
                continue
            recipe = changed(RIGHT, change)
            computed = workings.operand(recipe, name)
            gap = float(differences(claimed, computed).max(initial=0.0)) if computed.shape == claimed.shape else inf
            if gap <= slack:
                found.append(Candidate((mistake,), (change,), recipe, gap, slack))
    found.sort(key=lambda candidate: candidate.residual)
    return tuple(MistakeExplanation(candidate, "likely" if len(found) == 1 else "ambiguous") for candidate in found)
