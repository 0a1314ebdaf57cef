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
@pytest.mark.parametrize("part", range(5))
def test_thousands_of_right_programs_are_not_accused(part: int):
    """`python -m benchmarks.honesty --only right` asks five thousand."""
    assert accusations(540) == []


def test_rotary_angles_in_float32_are_right_far_behind_the_start():
    """As libraries compute them: 20,000 tokens in, such an angle is off by 1e-3."""
    keys, queries, d = 20_000, 8, 16
    k, v = fresh().standard_normal((2, 1, 1, keys, d)).astype(np.float32)
    q = fresh().standard_normal((1, 1, queries, d)).astype(np.float32)
    frequencies = np.float32(10000.0) ** (-np.arange(0, d, 2, dtype=np.float32) / np.float32(d))

    def turned(x, start):
        angles = (np.arange(start, start + x.shape[-2], dtype=np.float32)[:, None] * frequencies).astype(np.float32)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    scores = turned(q, keys - queries) @ turned(k, 0).swapaxes(-1, -2) / np.float32(d**0.5)
    weights = np.exp(np.where(np.tri(queries, keys, keys - queries) > 0, scores, -np.inf).astype(np.float32))
    theirs = weights / weights.sum(-1, keepdims=True) @ v
    found = ch.diagnose(q, k, v, theirs, causal=True, query_offset=keys - queries, rotary=10000.0)
    assert found.verdict == "right", found
