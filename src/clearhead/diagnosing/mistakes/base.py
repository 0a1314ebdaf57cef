"""One mistake: a small change of the textbook's recipe, with the words for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from clearhead.diagnosing.recipe import Change, Inputs

Words = tuple[str, str]  # English, Chinese; {field} stands for a changed field of the recipe


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake people make; `variants` are its changes of the recipe, none where the inputs leave no room for it."""

    name: str
    variants: Callable[[Inputs], Iterable[Change]]
    did: Words  # what their code did
    mend: Words  # the line to change
    needs: Words  # what an input must have to show it
    evidence: Literal["numbers", "rounding", "chance"] = "numbers"  # to the last bit, by size only, by statistics


def always(change: Change) -> Callable[[Inputs], Iterable[Change]]:
    """A mistake that any input leaves room for."""
    return lambda _: [change]


def when(holds: Callable[[Inputs], bool], *changes: Change) -> Callable[[Inputs], Iterable[Change]]:
    """A mistake that needs something of the inputs."""
    return lambda given: changes if holds(given) else ()


def square(given: Inputs) -> bool:
    """As many queries as keys."""
    return given.problem.queries == given.problem.keys


def positional(given: Inputs) -> bool:
    """Is causal asked for?"""
    return given.problem.causal


def masked(given: Inputs) -> bool:
    """Does a rule say who sees whom?"""
    p = given.problem
    parts = (p.mask, p.kv_lengths, p.query_segments)
    return p.causal or p.window != (None, None) or any(x is not None for x in parts)
