"""Correct programs of many kinds are never called mistakes."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
import right
from seeds import fresh


def known(told: Any, given: right.Given) -> bool:
    """Does a known gap of `diagnose`'s tolerance explain the accusation? It does not count two things.

    Code that computes exp(s - L) rounds L, and so every weight by eps·|L|. And a plain run in bfloat16 or float16 may
    be lucky, as only those in float32 are repeated: code that rounds scaled queries too is then further off.
    """
    wide = right.WIDER.get(given.q.dtype, given.q.dtype)
    logits = right.scores(given.to(torch.float64)).masked_fill(~given.seen, -torch.inf)
    size = torch.nan_to_num(torch.logsumexp(logits, -1), neginf=0.0).abs().max()
    rounding = 4 * torch.finfo(wide).eps * size * given.v.abs().max()
    luck = 8 if given.q.dtype in right.WIDER else 3
    return told.difference <= luck * told.tolerance + float(rounding)


def accusations(count: int) -> list[str]:
    """What `diagnose` says against `count` correct programs; each kind in turn."""
    found, seed = [], int(fresh().integers(2**40))
    for at in range(count):
        rng = np.random.default_rng([seed, at])
        program = right.PROGRAMS[at % len(right.PROGRAMS)]
        q, k, v, rules = right.activations(rng) if rng.random() < 0.1 else right.draw(rng)
        theirs = program(right.ready(q, k, v, rules), rng)
        told = ch.diagnose(q, k, v, theirs, **rules)
        if told.verdict != "right" and not known(told, right.ready(q, k, v, rules)):
            size = f"{told.difference:.3g} off, {told.tolerance:.3g} allowed"
            found.append(
                f"{program.__name__} {q.dtype} {tuple(q.shape)} m {k.shape[2]} {sorted(rules)}: {told!r}, {size}, "
                f"largest query {q.abs().max():.3g}, rng [{seed}, {at}]"
            )
    return found


def test_a_hundred_right_programs_are_not_accused():
    assert accusations(4 * len(right.PROGRAMS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_right_programs_are_not_accused(part: int):
    assert accusations(540) == []
