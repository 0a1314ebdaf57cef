"""Matrices, observations and traces can be copied and pickled, and their reprs are one line."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.axes import Array
from clearhead.errors import RuleError
from clearhead.view.parts import one_head

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
}


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("dtype", [np.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [(), ("logsumexp",)])
def test_a_copy_of_a_matrix_gives_the_same_weights(how: str, dtype: Any, known: tuple[str, ...]):
    q, k = (normal(2, length, 4) for length in (3, 5))
    if dtype is not np.float64:
        q, k = (torch.from_numpy(x).to(dtype) for x in (q, k))
    matrix = ch.AttentionMatrix(q, k, causal=True, query_offset=2, bias=normal(5), sinks=[0.0, 1.0])
    for name in known:
        getattr(matrix, name)()
    other = COPIES[how](matrix)
    assert type(other[...]) is type(matrix[...])
    np.testing.assert_array_equal(np.asarray(other), np.asarray(matrix))
    np.testing.assert_array_equal(np.asarray(other.T), np.asarray(matrix).swapaxes(-1, -2))
    assert (other.shape, other.size, other.T.size) == ((2, 3, 5), 30, 30)
    part = COPIES[how](one_head(matrix, 1))
    np.testing.assert_array_equal(np.asarray(part)[0, 0], np.asarray(matrix)[1])


def test_a_deep_copy_shares_nothing():
    q = normal(3, 4)
    matrix = ch.AttentionMatrix(q, q)
    other, before = copy.deepcopy(matrix), matrix[...]
    q[...] = 0
    np.testing.assert_array_equal(other[...], before)


@pytest.mark.parametrize("how", ["pickled", "deep-copied"])
def test_matrices_with_an_autograd_graph_are_not_copied(how: str):
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    kept = COPIES[how](ch.AttentionMatrix(leaf, leaf.detach()))
    assert kept.entropy().requires_grad
    with pytest.raises(RuleError, match=r"^q hangs on PyTorch's graph, which is not copied\.\n\nhint: q\.detach\(\)$"):
        COPIES[how](ch.AttentionMatrix(2 * leaf, leaf))
    with pytest.raises(RuleError, match=r"^entropy hangs on PyTorch's graph"):
        COPIES[how](ch.AttentionMatrix(leaf, leaf).observe(entropy=True))


@pytest.mark.parametrize("how", COPIES)
def test_observations_and_traces_can_be_copied(how: str):
    q, sinks = normal(2, 3, 4), np.zeros(2)
    seen = ch.AttentionMatrix(q, q, sinks=sinks).observe(q, top=2, image=(2, 2))
    other = COPIES[how](seen)
    np.testing.assert_array_equal(other.top.indices, seen.top.indices)
    np.testing.assert_array_equal(other.image, seen.image)
    assert (other.queries, other.keys, other.sinks) == (3, 3, True)
    for traced in (ch.trace(q, q, q), ch.trace_layer(q, *[normal(4, 4)] * 4, num_heads=2)):
        again = COPIES[how](traced)
        np.testing.assert_array_equal(again.output, traced.output)
        np.testing.assert_array_equal(again.token(1).weights, traced.token(1).weights)
        assert str(again) == str(traced)


def test_every_repr_is_one_line():
    q = normal(2, 30, 4)
    seen, traced = ch.AttentionMatrix(q, q).observe(q, top=2, entropy=True), ch.trace(q, q, q)
    told = {
        "Observation(queries 30, keys 30, output (2, 30, 4), entropy (2, 30), top (2, 30, 2))": seen,
        "Top(weights (2, 30, 2), indices (2, 30, 2))": seen.top,
        "TokenTrace(query 0, weights (2, 30), output (2, 4))": traced.token(0),
        "Geometry(query_norms (2, 30), key_norms (2, 30), cosine (2, 30, 30))": traced.geometry,
        "Step(scores: S = Q·Kᵀ, (heads 2, queries 30, keys 30))": traced.steps[3],
        "Trace(q, k, v, scores, scaled, weights, output)": traced,
        "TransposedMatrix of AttentionMatrix(heads 2, queries 30, keys 30) float64, never stored": (
            ch.AttentionMatrix(q, q).T
        ),
    }
    assert {words: repr(shown) for words, shown in told.items()} == {words: words for words in told}
