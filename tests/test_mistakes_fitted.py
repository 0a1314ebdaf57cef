"""Mistakes with a number that is diagnosis from the result, float masks, and every subset of a layer's matrices."""

from itertools import combinations

import numpy as np
import pytest

import clearhead as ch
from diagnosing import qkv, softmax, top
from seeds import fresh


@pytest.mark.parametrize("number", [0.03, 0.1, 0.77, 3.0, -0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_hard_coded_scale_is_found(number, dtype):
    q, k, v = qkv(dtype=dtype)
    theirs = softmax(q @ k.swapaxes(-1, -2) * dtype(number)) @ v
    best = top(ch.diagnose(q, k, v, theirs, scale=0.3))
    assert best.mistakes == ("another scale",)
    assert best.details["scale_factor"] == pytest.approx(number / 0.3, rel=1e-4)
    assert "{" not in best.did()[0] + best.did("zh")[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [2, 3, 24])
def test_scores_times_a_mask_of_0_and_1_are_named(n, dtype):
    for _ in range(5):
        q, k, v = qkv(n, dtype=dtype)
        theirs = softmax(q @ k.swapaxes(-1, -2) / dtype(8**0.5) * np.tri(n, dtype=dtype)) @ v
        best = top(ch.diagnose(q, k, v, theirs, causal=True))
        assert best.mistakes == ("mask fills with a finite number",)
        assert best.details["fill"] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mistakes_with_float_masks_are_named(dtype):
    rng = fresh()
    q, k, v = qkv(dtype=dtype)
    seen = rng.random((24, 24)) < 0.5
    seen |= np.eye(24, dtype=bool)
    bias = np.where(seen, 0, -np.inf).astype(dtype)
    scores = q @ k.swapaxes(-1, -2) / dtype(8**0.5)
    for logits, name in (
        (scores, "bias missing"),
        (scores + bias.T, "bias transposed"),
        (scores + seen.astype(dtype), "mask added as 0/1"),
        (scores * seen.astype(dtype), "mask fills with a finite number"),
        (np.where(seen, scores, dtype(-3)), "mask fills with a finite number"),
    ):
        assert top(ch.diagnose(q, k, v, softmax(logits) @ v, bias=bias)).mistakes == (name,)
    late = softmax(scores) * seen
    assert top(ch.diagnose(q, k, v, late @ v, bias=bias)).mistakes == ("mask after softmax",)


@pytest.mark.parametrize("what", ["w", "b"])
def test_every_subset_of_matrices_or_biases_is_named(what):
    rng = fresh()
    x, w = rng.standard_normal((2, 9, 8)), dict(zip("qkvo", rng.standard_normal((4, 8, 8)), strict=True))
    b = dict(zip("qkvo", rng.standard_normal((4, 8)), strict=True))
    biases = {f"b_{name}": each for name, each in b.items()}
    for many in range(1, 5):
        for wrong in combinations("qkvo", many):
            used = {name: each.T if what == "w" and name in wrong else each for name, each in w.items()}
            added = {f"b_{name}": each * (what == "w" or name not in wrong) for name, each in b.items()}
            theirs = ch.trace_layer(x, *used.values(), num_heads=2, **added).output
            diagnosis = ch.diagnose_layer(x, *w.values(), theirs, num_heads=2, **biases)
            if what == "b" and wrong == ("k",):  # adds the same to all of a query's scores
                assert diagnosis.verdict == "right"
                continue
            best = top(diagnosis)
            assert best.mistakes == ("W transposed" if what == "w" else "projection bias left out",)
            named = {field[-1] for field in best.details}
            assert named - {"k"} == set(wrong) - ({"k"} if what == "b" else set()) - {"k"}


@pytest.mark.parametrize("base", [1000.0, 10000.0, 500000.0, 12345.0])
def test_another_rotary_base_is_found(base):
    q, k, v = qkv(40, d=16, dtype=np.float64)
    places = np.arange(40)[:, None]

    def turned(x, base):
        angles = places / base ** (np.arange(8) / 8)
        a, b = x[..., :8], x[..., 8:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    theirs = softmax(turned(q, base) @ turned(k, base).swapaxes(-1, -2) / 4) @ v
    best = top(ch.diagnose(q, k, v, theirs, rotary=50000.0))
    assert best.mistakes == ("another rotary base",)
    assert best.details["rotary_base"] == pytest.approx(base, rel=1e-3)


def test_an_averaged_weight_of_all_heads_is_named():
    q, k, v = qkv()
    mean = softmax(q @ k.swapaxes(-1, -2) / np.float32(8**0.5)).mean(1, keepdims=True).repeat(3, 1)
    assert top(ch.diagnose(q, k, v, mean, stage="weights")).mistakes == ("mean of the heads",)


def test_more_than_two_batch_entries_are_brought_together():
    q, k, v = fresh().standard_normal((3, 5, 3, 9, 8))
    scores = q @ k.swapaxes(-1, -2) / 8**0.5
    assert top(ch.diagnose(q, k, v, softmax(scores, 0) @ v)).mistakes == ("softmax over the batch",)
    turned = (x.transpose(2, 1, 0, 3) for x in (q, k, v))
    a, b, c = turned
    over = (softmax(a @ b.swapaxes(-1, -2) / 8**0.5) @ c).transpose(2, 1, 0, 3)
    assert top(ch.diagnose(q, k, v, over)).mistakes == ("attention over the batch",)
    lengths = np.array([9, 4, 6, 7, 5])
    seen = np.arange(9) < lengths.min()
    shortest = softmax(np.where(seen, scores, -np.inf)) @ v
    assert top(ch.diagnose(q, k, v, shortest, kv_lengths=lengths)).mistakes == ("one length for all",)
