"""What NumPy may ask of a matrix that is never stored; copies and reprs of it and of what it gives."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import DtypeError, RuleError
from seeds import normal

SIZES = "(batch 2, heads 4, queries 9, keys 7) float64"


def matrix(*, dtype: Any = np.float64, **rules: Any) -> ch.AttentionMatrix:
    return ch.AttentionMatrix(normal(2, 4, 9, 8, dtype=dtype), normal(2, 2, 7, 8, dtype=dtype), **rules)


def effects() -> ch.EffectMatrix:
    return matrix().cut_effects(normal(2, 4, 7, 3), normal(2, 4, 9, 3))


def test_what_numpy_asks_of_an_array():
    A = matrix()
    assert (A.shape, A.ndim, A.size, len(A)) == ((2, 4, 9, 7), 4, 504, 2)
    assert (A.T.shape, A.T.ndim, A.T.size, len(A.T)) == ((2, 4, 7, 9), 4, 504, 2)
    assert A.T.T is A


@pytest.mark.parametrize("tensors", [False, True])
def test_conversions_store_every_weight(tensors: bool):  # noqa: FBT001
    q, k = normal(2, 9, 8, dtype=np.float32), normal(2, 7, 8, dtype=np.float32)
    A = ch.AttentionMatrix(*((torch.from_numpy(q), torch.from_numpy(k)) if tensors else (q, k)))
    dense = np.asarray(A[...])
    for result in (np.asarray(A), np.array(A), np.from_dlpack(A), np.array(A, copy=True)):
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, dense)
    assert np.asarray(A, np.float64).dtype == np.asarray(A, dtype="f2").astype(np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.stack(list(A)), dense)
    for make in (torch.as_tensor, torch.asarray, torch.tensor, torch.from_dlpack):
        assert torch.equal(make(A), torch.from_numpy(dense))
    with pytest.raises(ValueError, match="an array of them is always a copy"):
        np.asarray(A, copy=False)


def test_conversions_are_refused_where_pytorch_records_a_graph():
    A = ch.AttentionMatrix(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3))
    for make in (np.asarray, np.from_dlpack, torch.as_tensor, torch.tensor, torch.from_dlpack):
        with pytest.raises(RuleError, match="weights read by index have no derivative"):
            make(A)
    with torch.no_grad():
        assert torch.as_tensor(A).shape == (2, 2)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "numpy.sum": np.sum,
    "numpy.linalg.svd": np.linalg.svd,
    "numpy.array_equal": lambda A: np.array_equal(np.ones(3), A),
    "numpy.concatenate": lambda A: np.concatenate([A, A]),
    "numpy.add": lambda A: A + 1,
    "numpy.add ": lambda A: np.add.reduce(A, axis=-1),
    "numpy.add  ": lambda A: torch.ones(7) + A,
    "numpy.add   ": lambda A: operator.iadd(A, 1),
    "numpy.negative": lambda A: -A,
    "numpy.greater": lambda A: A > 0.5,
    "numpy.matmul": lambda A: np.ones((2, 9)) @ A,
    "==": lambda A: A == 0,
    "== ": lambda A: torch.ones(3) != A,
    "==  ": lambda A: A == [[1.0, 0.0], [0.0, 1.0]],
    "numpy.equal": lambda A: np.ones((9, 7)) == A,
    "bool": bool,
}
OF_WEIGHTS = "A @ np.ones(A.shape[-1]) sums over keys, A.received() over queries, A.top(1) has each query's largest"
OF_EFFECTS = "E.by_query() sums over keys, E.by_key() over queries, E.top(1) has each query's strongest"


@pytest.mark.parametrize("name", [*REFUSED, "sum", "argmin", "reshape"])
def test_what_would_store_every_weight_is_refused_by_name(name: str):
    for A, shown, instead in (
        (matrix(), f"AttentionMatrix{SIZES}, never stored", OF_WEIGHTS),
        (matrix().T, f"TransposedMatrix of AttentionMatrix{SIZES}, never stored", OF_WEIGHTS),
        (effects(), f"EffectMatrix(cut, {SIZES[1:]}", OF_EFFECTS),
    ):
        with pytest.raises(DtypeError if name in REFUSED else AttributeError) as error:
            REFUSED[name](A) if name in REFUSED else getattr(A, name)(axis=-1)
        words = f"{name.rstrip()} would need every number of {shown}.\n\nhint: {instead}; "
        assert str(error.value) == f"{words}np.asarray of the matrix stores all 504 numbers."
        assert not hasattr(A, name)


def test_other_comparisons_ask_for_the_object():
    A, B = matrix(), matrix()
    assert A != None  # noqa: E711
    assert A != "x"
    assert A != b"x"
    assert A != {1: 2}
    assert A in [B, A][1:]
    assert {A: 1, B: 2}[A] == 1
    assert len({A, B, A}) == 2


def test_a_part_keeps_its_rules_whatever_v_is():
    q, k = (torch.from_numpy(normal(2, 4, 6, 8)) for _ in range(2))
    part = ch.AttentionMatrix(q, k, causal=True).part(0)
    np.testing.assert_array_equal(part @ k[:1], (ch.AttentionMatrix(q, k, causal=True) @ k)[:1])
    with pytest.raises(DtypeError, match=r"^v requires grad"):
        part @ k[:1].clone().requires_grad_()


def test_a_copy_shares_what_is_known_and_the_graph():
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    matrix = ch.AttentionMatrix(2 * leaf, leaf)
    (copy.copy(matrix) @ leaf).sum().backward()
    assert leaf.grad is not None
    plain = ch.AttentionMatrix(leaf.detach(), leaf.detach())
    plain.logsumexp()
    assert copy.copy(plain).known_state is plain.known_state


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_results_can_be_copied_and_pickled(how: Callable[[Any], Any]):
    q = normal(2, 3, 4)
    seen, traced = ch.AttentionMatrix(q, q).observe(q, entropy=True, top=2), ch.trace(q, q, q)
    again, repeated = how(seen), how(traced)
    np.testing.assert_array_equal(again.entropy, seen.entropy)
    np.testing.assert_array_equal(again.top.indices, seen.top.indices)
    np.testing.assert_array_equal(repeated.token(1).weights, traced.token(1).weights)
    assert (repr(again), str(repeated)) == (repr(seen), str(traced))
    for matrix in (A := ch.AttentionMatrix(q, q, causal=True), A.cut(0, 1), A.contributions(q, q), A.cut_effects(q, q)):
        np.testing.assert_array_equal(how(matrix) @ q, matrix @ q)
        assert repr(how(matrix.T)) == repr(matrix.T)


def test_every_repr_is_one_line():
    q, many = normal(2, 30, 4), np.broadcast_to(0.0, (12, 8, 16_384, 8))
    seen, traced = ch.AttentionMatrix(q, q).observe(q, top=2, entropy=True), ch.trace(q, q, q)
    wide, narrow = ch.AttentionMatrix(many, many), ch.AttentionMatrix(q[0], q[0])
    labels = np.zeros(30, int), np.zeros(30, int)
    effects = (
        ch.AttentionMatrix(q, q).cut_effects(q, q).observe(by_key=True, top=2, strongest=3, image=(2, 2), groups=labels)
    )
    shown: list[Any] = [
        seen, seen.top, traced, traced.token(0), traced.steps[3], wide.contributions(many, many), wide.T,
        narrow.contributions(q[0], q[0]).T, effects, effects.top, effects.strongest,
    ]  # fmt: skip
    for one in shown:
        words = repr(one)
        assert words.startswith(f"{type(one).__name__}")
        assert "\n" not in words
        assert len(words) < 260, words
    assert repr(effects.top) == "Ranked(values (2, 30, 2), indices (2, 30, 2))"
    assert repr(seen) == f"Observation(queries 30, keys 30, output (2, 30, 4), entropy (2, 30), top {seen.top})"
