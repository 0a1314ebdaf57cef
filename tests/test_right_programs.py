"""Correct programs of many kinds are never called mistakes."""

import numpy as np
import pytest

import clearhead as ch
import right
from seeds import fresh


def accusations(count: int) -> list[str]:
    """What `diagnose` says against `count` correct programs; each kind in turn."""
    found, seed = [], int(fresh().integers(2**40))
    for at in range(count):
        rng = np.random.default_rng([seed, at])
        program = right.PROGRAMS[at % len(right.PROGRAMS)]
        q, k, v, rules = right.activations(rng) if rng.random() < 0.1 else right.draw(rng)
        theirs = program(right.ready(q, k, v, rules), rng)
        told = ch.diagnose(q, k, v, theirs, **rules)
        if told.verdict != "right":
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
