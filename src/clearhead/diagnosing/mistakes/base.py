"""One mistake: a small change of the textbook's recipe, with the words for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clearhead.diagnosing.recipe import Change, Inputs

Sentence = tuple[str, str]  # English, Chinese; {field} stands for a changed field of the recipe
Variants = Callable[[Inputs], Iterable[Change]]


@dataclass(frozen=True, eq=False, slots=True)
class Mistake:
    """A mistake that people make; `variants` gives its changes of the recipe, none where the inputs exclude it."""

    name: str
    variants: Variants
    did: Sentence  # what their code did
    mend: Sentence  # the line to change
    needs: Sentence  # what an input must have to show it
    evidence: Literal["numbers", "rounding", "chance"] = "numbers"  # it gives theirs exactly, but for rounding; by luck
    rule: str = ""  # the caller's rule that it breaks
    alone: bool = False  # never tried together with another mistake
    seldom: bool = False  # never tried together with another seldom one
    rare: Variants = lambda _: ()  # more variants, tried alone and last


def always(*changes: Change) -> Variants:
    """Changes that any inputs allow."""
    return lambda _: changes


def when(holds: Callable[[Inputs], bool], *changes: Change) -> Variants:
    """Changes that only some inputs allow."""
    return lambda inputs: changes if holds(inputs) else ()


def square(inputs: Inputs) -> bool:
    """As many queries as keys."""
    return inputs.problem.queries == inputs.problem.keys


def several_heads(inputs: Inputs) -> bool:
    """More than one head."""
    return inputs.problem.heads > 1


def decoding(inputs: Inputs) -> bool:
    """Do the queries stand at the last of the keys, as with a cache?"""
    p = inputs.problem
    last = p.causal and bool((p.query_offset == p.keys - p.queries).all())
    return p.keys > p.queries and (p.queries == 1 or last)


def with_context(inputs: Inputs) -> bool:
    """Are a layer's keys of other tokens than its queries?"""
    layer = inputs.layer
    return layer is not None and not (
        layer.x.shape == layer.context.shape and np.array_equal(layer.x, layer.context, equal_nan=True)
    )


def forbids(inputs: Inputs) -> bool:
    """Does the bias hide keys, as a float mask of 0 and -inf does?"""
    bias = inputs.problem.bias
    if bias is None:
        return False
    once = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.strides)]
    return bool(np.isneginf(once).any())


def hides(inputs: Inputs) -> bool:
    """Does a rule hide keys from queries?"""
    p = inputs.problem
    rules = (p.mask, p.kv_lengths, p.query_segments)
    if p.span_table is not None and np.isneginf(p.span_table).any():
        return True
    return p.causal or p.window != (None, None) or any(rule is not None for rule in rules) or forbids(inputs)
