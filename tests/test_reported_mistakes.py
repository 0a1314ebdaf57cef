"""Mistakes that public reports show, each as a few lines of NumPy: `diagnose` names them, surely and alone."""

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from diagnosing import qkv, softmax
from seeds import fresh

QUERY, KEY = np.arange(24)[:, None], np.arange(24)
SINKS = np.linspace(0.5, 1.5, 3)
MASK = np.tri(24, k=18) * (KEY % 5 != 3) > 0
LENGTHS = np.array([20, 15])
WINDOW, OPEN = {"causal": True, "window": (3, 0)}, {"causal": True, "window": (7, 0)}


def named(theirs: Any, arrays: Any, **rules: Any) -> str:
    diagnosis = ch.diagnose(*arrays, theirs, **rules)
    assert diagnosis.verdict == "mistake", diagnosis
    assert diagnosis.explanations[0].confidence == "sure", diagnosis
    return " + ".join(diagnosis.explanations[0].mistakes)


@pytest.mark.parametrize(
    ("rules", "kept", "name"),
    [
        (WINDOW, {}, "all masks ignored"),
        (WINDOW | {"kv_lengths": LENGTHS}, {"kv_lengths": LENGTHS}, "all masks ignored"),
        (WINDOW | {"mask": MASK}, {"mask": MASK}, "all masks ignored"),
        ({"causal": True}, {}, "causal mask missing"),
        ({"window": (3, 0)}, {"window": (3, None)}, "window open to the right"),
        (WINDOW, {"window": (3, None)}, "window open to the right"),
        (OPEN, {"window": (8, 8)}, "window on both sides"),
        ({"window": (7, 2)}, {"window": (7, 7)}, "window on both sides"),
        (OPEN, {"window": (4, 4)}, "window halved"),
        ({"window": (7, 7)}, {"window": (3, 3)}, "window halved"),
        ({"window": (5, 5)}, {"mask": (KEY != QUERY) & (abs(KEY - QUERY) <= 5)}, "window without the query's position"),
        ({"window": (5, 0)}, {"mask": (KEY < QUERY) & (KEY >= QUERY - 6)}, "window without the query's position"),
        ({"sinks": SINKS}, {"sinks": np.exp(SINKS)}, "sinks not as logits"),
        ({"sinks": np.exp(SINKS)}, {"sinks": SINKS}, "sinks not as logits"),
    ],
)
def test_rules_that_are_missing_or_others_are_named(rules, kept, name):
    arrays = qkv()
    assert named(ch.attention(*arrays, **kept), arrays, **rules) == name


def test_an_offset_below_zero_taken_for_zero_is_named():
    arrays = qkv()
    theirs = ch.attention(*arrays, causal=True, query_offset=np.array([0, 2]))
    assert named(theirs, arrays, causal=True, query_offset=np.array([-4, 2])) == "offset below 0 taken for 0"


@pytest.mark.parametrize("interleaved", [True, False])
def test_alibi_slopes_for_twelve_heads_are_named(interleaved):
    some, more = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (8, 16))
    slopes = [np.concatenate([some, more[::2][:4]]), 2.0 ** (-8 * np.arange(1, 13) / 12)]
    right, used = slopes if interleaved else slopes[::-1]
    arrays = qkv(heads=12)
    theirs = ch.attention(*arrays, causal=True, alibi_slopes=used)
    diagnosis = ch.diagnose(*arrays, theirs, causal=True, alibi_slopes=right)
    assert diagnosis.explanations[0].mistakes == ("other ALiBi slopes",)
    assert interleaved == ("no power of two" in diagnosis.explanations[0].did()[0])
    assert "every other one of the one above" in diagnosis.explanations[0].mend()[0]


def test_a_softmax_of_the_mean_is_named_without_the_heads_axis():
    q, k, v = qkv()
    weights = softmax(q @ k.mT / 8**0.5)
    mean = weights.mean(1)
    assert named(mean, (q, k, v), stage="weights") == "mean of the heads"
    assert named(softmax(mean), (q, k, v), stage="weights") == "softmax of the mean of the heads"
    assert named(softmax(weights.mean(1, keepdims=True)) @ v, (q, k, v)) == "softmax of the mean of the heads"


def test_no_number_is_invented_where_hidden_keys_get_all_the_weight():
    """Any number far above the others gives the same: so does -1e5 beside scores of -110,000."""
    q, k, v = qkv()
    scores = np.where(np.tri(24) > 0, q @ k.mT / 8**0.5 - 110_000, -1e5)
    theirs = softmax(scores.astype(np.float64)) @ v
    diagnosis = ch.diagnose(q, k, v, theirs, causal=True, bias=np.full((24, 24), -110_000.0))
    assert [e.mistakes for e in diagnosis.explanations] == [("mask of the wrong sign",)]


@pytest.mark.parametrize("number", [0.0, 2.5, -1.0, -9.0])
def test_any_number_in_the_place_of_forbidden_scores_is_found(number):
    q, k, v = qkv()
    scores = q @ k.mT / np.float32(8**0.5)
    lengths = fresh().integers(6, 20, 2)
    theirs = softmax(np.where(lengths[:, None, None, None] > KEY, scores, np.float32(number))) @ v
    best = ch.diagnose(q, k, v, theirs, kv_lengths=lengths).explanations[0]
    assert best.mistakes == ("mask fills with a finite number",)
    assert best.details["fill"] == pytest.approx(number, abs=1e-2)
