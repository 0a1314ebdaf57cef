"""Deprecated names work for one more version, give the same results, and say what to write instead."""

import inspect

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import DtypeError
from clearhead.layers.layer import Layer
from clearhead.watching.seen import Seen

Q = np.random.default_rng(0).standard_normal((2, 4, 6, 8)).astype(np.float32)
K = np.random.default_rng(1).standard_normal((2, 2, 6, 8)).astype(np.float32)


def test_near_still_gives_the_weight_on_the_last_keys():
    matrix = ch.AttentionMatrix(Q, K, causal=True)
    with pytest.warns(DeprecationWarning, match=r"^AttentionMatrix\.near goes with the next version: exp\(L of"):
        near = matrix.near(1)
    weights = matrix[...]
    own = np.diagonal(weights, axis1=-2, axis2=-1).copy()
    own[..., 1:] += np.diagonal(weights, -1, -2, -1)
    np.testing.assert_allclose(near, own, rtol=1e-5)
    window = ch.AttentionMatrix(Q, K, window=(1, 0), causal=True).logsumexp()
    np.testing.assert_allclose(near, np.exp(window - matrix.logsumexp()), rtol=1e-5)


def test_one_and_sequence_still_give_parts():
    matrix = ch.AttentionMatrix(Q, K, causal=True)
    with pytest.warns(DeprecationWarning, match=r"^AttentionMatrix\.one goes with the next version"):
        one = matrix.one(3)
    with pytest.warns(DeprecationWarning, match=r"^AttentionMatrix\.sequence goes with the next version"):
        sequence = matrix.sequence(1)
    np.testing.assert_array_equal(one[...], matrix[:1, 3:])
    np.testing.assert_array_equal(sequence[...], matrix[1:])
    np.testing.assert_array_equal(ch.AttentionMatrix(Q[[1]], K[[1]], causal=True)[...], sequence[...])


def test_rollout_still_takes_its_old_keyword():
    observed = ch.AttentionMatrix(Q, K, causal=True).observe(logsumexp=True)
    layer = Layer("0", "path", 1, False, tuple(range(4)), observed, Q, K, None, {"causal": True}, None, "")
    seen = Seen({"0": layer})
    with pytest.warns(DeprecationWarning, match=r"^token= of Seen\.rollout goes .*: it is called query=\.$") as warned:
        old = seen.rollout(token=5)
    assert warned[0].filename == __file__
    np.testing.assert_array_equal(old, seen.rollout(query=5))
    np.testing.assert_array_equal(old, seen.rollout(5))
    with pytest.raises(TypeError, match=r"got token= and query=, which are one"):
        seen.rollout(token=5, query=5)
    assert list(inspect.signature(Seen.rollout).parameters)[1] == "query"


def test_a_part_of_a_matrix_keeps_its_rules_whatever_v_is():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in (Q, K, K))
    part = ch.AttentionMatrix(q, k, causal=True).part(0)
    np.testing.assert_array_equal(part @ v[:1], (ch.AttentionMatrix(q, k, causal=True) @ v)[:1])
    with pytest.raises(DtypeError, match=r"^v requires grad"):
        part @ v[:1].clone().requires_grad_()


def test_the_transposed_matrix_is_also_called_mt():
    matrix = ch.AttentionMatrix(Q, K)
    assert matrix.mT.shape == matrix.T.shape == (2, 4, 6, 6)
    assert matrix.mT.mT is matrix
    np.testing.assert_array_equal(matrix.mT[0, 1], matrix[0, 1].T)
