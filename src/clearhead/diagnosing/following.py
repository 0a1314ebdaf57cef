"""What a step of a worked example would be if the claims before it were right: so a mistake is told from what follows.

A claim that is wrong takes the place of its step, and everything after it is computed from there.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from clearhead.core import reference
from clearhead.core.axes import Array
from clearhead.textbook.shapes import turned
from clearhead.textbook.trace import Trace
from clearhead.textbook.trace_layer import joined

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
_ONWARD = ("q", "k", "v", "scores", "scaled", "weights", "heads", "concat")  # what can be computed on from


class Following(NamedTuple):
    """A step's numbers as they follow from earlier claims."""

    sources: tuple[str, ...]  # these claims
    array: Array


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def following(traced: Trace, wrong: Mapping[str, Array], target: str) -> Following | None:
    """The numbers of `target` if the nearest wrong claims before it were right.

    `wrong` has each claimed step that is wrong, by name, in the step's shape. None where `target` depends on none of
    them, or on one from which its step cannot be computed, such as masked scores.
    """
    layer, problem = hasattr(traced, "concat"), traced.problem
    sources = _sources(target, wrong, layer=layer)
    scales = "scaled" not in sources or bool(problem.scale.all())
    if not sources or not set(sources) <= set(_ONWARD) or not scales:
        return None
    truth = turned(np.asarray(getattr(traced, target)), traced.convention)

    def step(name: str) -> Array:
        array = wrong[name] if name in sources else np.asarray(getattr(traced, name))
        rows = turned(array, traced.convention)
        return rows.reshape(problem.batch, -1, *rows.shape[-2:])

    return Following(sources, turned(_computed(traced, sources, step, target).reshape(truth.shape), traced.convention))


def _sources(target: str, wrong: Mapping[str, Array], *, layer: bool) -> tuple[str, ...]:
    """The wrong claims from which `target` is computed, each the last one on its way."""
    found: list[str] = []
    for name in _FROM.get(target, ("concat",) if layer else ("weights", "v")) if target not in "qkv" else ():
        found += [name] if name in wrong else _sources(name, wrong, layer=layer)
    return tuple(dict.fromkeys(found))


def _computed(traced: Trace, sources: tuple[str, ...], step: Callable[[str], Array], target: str) -> Array:
    """The target from the claims in `sources` and the true steps beside them; tokens as rows, (batch, heads, …)."""
    problem, layer = traced.problem, hasattr(traced, "concat")

    def scores() -> Array:
        if "scores" in sources:
            return step("scores")
        if "scaled" in sources:
            return step("scaled") / problem.scale[:, None, None]
        return step("q") @ _per_query_head(traced, step("k")).swapaxes(-1, -2)

    if target == "scores":
        return scores()
    weights = step("weights") if "weights" in sources else None
    if weights is None and {"q", "k", "scores", "scaled"} & set(sources):
        book = reference.from_scores(problem, scores())
        if target not in ("heads", "concat", "output"):
            return np.asarray(getattr(book, target))
        weights = book.weights
    if "concat" in sources:
        concat = step("concat")
    else:
        weights = step("weights") if weights is None else weights
        heads = step("heads") if "heads" in sources else weights @ _per_query_head(traced, step("v"))
        if target == "heads" or not layer:
            return heads
        concat = joined(heads)[:, None]
    if target == "concat" or not hasattr(traced, "w_o"):
        return concat
    bias = np.asarray(getattr(traced, "b_o", 0.0))
    return np.asarray(concat @ turned(np.asarray(traced.w_o), traced.convention) + bias)


def _per_query_head(traced: Trace, x: Array) -> Array:
    return np.repeat(x, traced.problem.group, axis=1)
