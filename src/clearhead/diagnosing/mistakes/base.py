"""One mistake: a small change of the textbook's recipe, with the words for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from clearhead.diagnosing.recipe import Change, Inputs

Words = tuple[str, str]  # English, Chinese; {field} stands for a changed field of the recipe
Variants = Callable[[Inputs], Iterable[Change]]


@dataclass(frozen=True, eq=False, slots=True)
class Mistake:
    """A mistake people make; `variants` are its changes of the recipe, none where the inputs leave no room for it."""

    name: str
    variants: Variants
    did: Words  # what their code did
    mend: Words  # the line to change
    needs: Words  # what an input must have to show it
    evidence: Literal["numbers", "rounding", "chance"] = "numbers"  # to the last bit; as rounding goes; by statistics
    rule: str = ""  # the caller's rule that it breaks
    alone: bool = False  # never looked for in pairs
    rare: Variants = lambda _: ()  # more variants, tried alone and last


def always(*changes: Change) -> Variants:
    """A mistake that any input leaves room for."""
    return lambda _: changes


def when(holds: Callable[[Inputs], bool], *changes: Change) -> Variants:
    """A mistake that needs something of the inputs."""
    return lambda given: changes if holds(given) else ()


def square(given: Inputs) -> bool:
    """As many queries as keys."""
    return given.problem.queries == given.problem.keys


def several_heads(given: Inputs) -> bool:
    """More than one head."""
    return given.problem.heads > 1


def hides(given: Inputs) -> bool:
    """Does a rule say who sees whom?"""
    p = given.problem
    rules = (p.mask, p.kv_lengths, p.query_segments)
    return p.causal or p.window != (None, None) or any(rule is not None for rule in rules)
