"""Correct programs of many kinds are never called mistakes."""

from itertools import islice

import numpy as np
import pytest

import clearhead as ch
from benchmarks import honesty
from benchmarks.right_programs import PROGRAMS
from seeds import fresh


def accusations(count: int) -> list[honesty.Outcome]:
    """What `diagnose` says against `count` correct programs; each kind in turn."""
    outcomes = islice(honesty.right([], 1, int(fresh().integers(2**40))), count)
    return [outcome for outcome in outcomes if outcome.answer != "right"]


def test_a_hundred_right_programs_are_not_accused():
    assert accusations(4 * len(PROGRAMS)) == []


@pytest.mark.gate
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
    diagnosis = ch.diagnose(q, k, v, theirs, causal=True, query_offset=keys - queries, rotary=10000.0)
    assert diagnosis.verdict == "right", diagnosis
