"""What a worked example claims for a step: what follows from the claims before it, and which mistakes give it.

A claim that is wrong takes the place of its step, and everything after it is computed from there: so a mistake is told
from what follows.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core import reference
from clearhead.core.axes import Array, join_heads
from clearhead.diagnosing.diagnose import judged
from clearhead.diagnosing.fitting import largest_difference
from clearhead.diagnosing.inputs import file_inputs
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, changed
from clearhead.diagnosing.search import Candidate, closest
from clearhead.diagnosing.verdict import Confidence, MistakeExplanation
from clearhead.diagnosing.workings import Workings
from clearhead.textbook.shapes import turned
from clearhead.textbook.trace import Trace

_FROM: dict[str, tuple[str, ...]] = {  # each step and those that it is computed from
    "scores": ("q", "k"),
    "scaled": ("scores",),
    "capped": ("scaled",),
    "biased": ("capped",),
    "masked": ("biased",),
    "weights": ("masked",),
    "heads": ("weights", "v"),
    "concat": ("heads",),
}
_ONWARD = {"q", "k", "v", "scores", "scaled", "weights", "heads", "concat"}  # what can be computed on from


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def following(traced: Trace, wrong: Mapping[str, Array], target: str) -> tuple[str, Array] | tuple[None, None]:
    """The nearest wrong claims before `target`, by name, and the numbers that it would have if they were right.

    `wrong` has each claimed step that is wrong, by name, in the step's shape. None where `target` depends on none of
    them, or on one from which its step cannot be computed, such as masked scores.
    """
    layer, problem, convention = hasattr(traced, "concat"), traced.problem, traced.convention
    sources = _sources(target, wrong, layer=layer)
    if not sources or not _ONWARD.issuperset(sources) or ("scaled" in sources and not problem.scale.all()):
        return None, None

    def step(name: str) -> Array:
        """A step as it follows from these claims, tokens as rows, (batch, heads, …)."""
        if name in sources or not _sources(name, wrong, layer=layer):
            rows = turned(wrong[name] if name in sources else np.asarray(getattr(traced, name)), convention)
            rows = rows.reshape(problem.batch, -1, *rows.shape[-2:])
            return np.repeat(rows, problem.group, axis=1) if name in ("k", "v") else rows
        if name == "scores":
            return step("q") @ step("k").swapaxes(-1, -2)
        if name == "heads" or (name == "output" and not layer):
            return step("weights") @ step("v")
        if name == "concat":
            return join_heads(step("heads"))[:, None]
        if name == "output":
            w_o, b_o = getattr(traced, "w_o", None), getattr(traced, "b_o", None)
            projected = step("concat") if w_o is None else step("concat") @ turned(np.asarray(w_o), convention)
            return projected if b_o is None else np.asarray(projected + b_o)
        scores = step("scaled") / problem.scale[:, None, None] if "scaled" in sources else step("scores")
        return np.asarray(getattr(reference.from_scores(problem, scores), name))

    truth = turned(np.asarray(getattr(traced, target)), convention)
    return ", ".join(sources), turned(step(target).reshape(truth.shape), convention)


def _sources(target: str, wrong: Mapping[str, Array], *, layer: bool) -> tuple[str, ...]:
    """The wrong claims from which `target` is computed, each the last one on its way."""
    before = () if target in "qkv" else _FROM.get(target, ("concat",) if layer else ("weights", "v"))
    sources = ((name,) if name in wrong else _sources(name, wrong, layer=layer) for name in before)
    return tuple(dict.fromkeys(name for names in sources for name in names))


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
        return judged(file_inputs(place, rest, claimed, "output"), slack).explanations
    if name not in ("q", "k", "v", "heads"):
        return judged(file_inputs(place, values, claimed, name), slack).explanations
    inputs = file_inputs(place, values, np.asarray(traced.output), "output")
    rows = turned(claimed, values.get("convention", "rows"))
    rows = rows.reshape(inputs.problem.batch, -1, *rows.shape[-2:])
    if name == "heads":
        return judged(replace(inputs, theirs=rows, per_head=True), slack).explanations
    return _of_projection(inputs, name, rows, slack)


@np.errstate(invalid="ignore", over="ignore")
def _of_projection(inputs: Diagnosed, name: str, claimed: Array, slack: float) -> tuple[MistakeExplanation, ...]:
    """The mistakes in a projection or the split of its heads that give this Q, K or V."""
    fields, workings, fitting = {f"w_{name}", f"b_{name}", "split"}, Workings(inputs), []
    for mistake in mistakes():
        for change in mistake.variants(inputs):
            if set(change) <= fields:
                recipe = changed(RIGHT, change)
                gap = largest_difference(claimed, workings.operand(recipe, name))
                fitting += [Candidate((mistake,), (change,), recipe, gap, slack)] if gap <= slack else []
    confidence: Confidence = "likely" if len(fitting) == 1 else "ambiguous"
    return tuple(MistakeExplanation(candidate, confidence) for candidate in closest(fitting))
