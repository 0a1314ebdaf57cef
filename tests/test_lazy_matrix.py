"""What NumPy may ask of a matrix that is never stored; and copies, pickles and reprs of it and of what it gives."""

import copy
import io
import multiprocessing
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core.arrays import to_torch
from clearhead.core.statistics import STATISTICS
from clearhead.errors import DtypeError, RuleError
from problems import Case, cases, examples
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
    assert A.mT.shape == A.T.shape
    assert A.mT.mT is A
    np.testing.assert_array_equal(A.mT[0, 1], A[0, 1].T)


@pytest.mark.parametrize("tensors", [False, True])
def test_conversions_store_every_weight(tensors: bool):  # noqa: FBT001
    q, k = normal(2, 9, 8, dtype=np.float32), normal(2, 7, 8, dtype=np.float32)
    A = ch.AttentionMatrix(*((torch.from_numpy(q), torch.from_numpy(k)) if tensors else (q, k)))
    for B in (A, A.T):
        dense = np.asarray(B[...])
        for result in (np.asarray(B), np.array(B), np.from_dlpack(B), np.array(B, copy=True)):
            assert result.dtype == np.float32
            np.testing.assert_array_equal(result, dense)
        assert np.asarray(B, np.float64).dtype == np.asarray(B, dtype="f2").astype(np.float64).dtype == np.float64
        np.testing.assert_array_equal(np.stack(list(B)), dense)
        for make in (torch.as_tensor, torch.asarray, torch.tensor, torch.from_dlpack):
            assert torch.equal(make(B), torch.from_numpy(dense))
        with pytest.raises(ValueError, match="an array of them is always a copy"):
            np.asarray(B, copy=False)


def test_conversions_that_do_not_fit_in_memory_are_refused():
    x = np.ones((4_000_000, 2), np.float32)
    A = ch.AttentionMatrix(x, x, logsumexp=None)
    for B in (A, A.T, A.cut_effects(x, x)):
        with pytest.raises(MemoryError, match="of shape"):
            np.asarray(B)


def test_conversions_are_refused_where_pytorch_records_a_graph():
    A = ch.AttentionMatrix(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3))
    for make in (np.asarray, np.from_dlpack, torch.as_tensor, torch.tensor, torch.from_dlpack):
        with pytest.raises(RuleError, match="weights read by index have no derivative"):
            make(A)
    with torch.no_grad():
        assert torch.as_tensor(A).shape == (2, 2)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "numpy.sum": np.sum,
    "numpy.argmin": lambda A: np.argmin(A, axis=-1),
    "numpy.sort": np.sort,
    "numpy.linalg.svd": np.linalg.svd,
    "numpy.allclose": lambda A: np.allclose(A, A),
    "numpy.array_equal": lambda A: np.array_equal(np.ones(3), A),
    "numpy.concatenate": lambda A: np.concatenate([A, A]),
    "numpy.einsum": lambda A: np.einsum("bhij->bhji", A),
    "numpy.where": lambda A: np.where(A, 1, 0),
    "numpy.add": lambda A: A + 1,
    "numpy.add ": lambda A: np.add.reduce(A, axis=-1),
    "numpy.add  ": lambda A: np.ones(7) + A,
    "numpy.add   ": lambda A: torch.ones(7) + A,
    "numpy.add    ": lambda A: operator.iadd(A, 1),
    "numpy.multiply": lambda A: 2.0 * A,
    "numpy.negative": lambda A: -A,
    "numpy.greater": lambda A: A > 0.5,
    "numpy.matmul": lambda A: np.ones((2, 9)) @ A,
    "==": lambda A: A == 0,
    "== ": lambda A: A == A,
    "==  ": lambda A: torch.ones(3) != A,
    "==   ": lambda A: A == [[1.0, 0.0], [0.0, 1.0]],
    "==    ": lambda A: A != ((1.0,), (0.0,)),
    "==     ": lambda A: range(7) == A,
    "==      ": lambda A: memoryview(b"ab") != A,
    "numpy.equal": lambda A: np.ones((9, 7)) == A,
    "bool": bool,
    "bool ": lambda A: A or 1,
}
OF_WEIGHTS = "A @ np.ones(A.shape[-1]) sums over keys, A.received() over queries, A.top(1) has each query's largest"
OF_EFFECTS = "E.by_query() sums over keys, E.by_key() over queries, E.top(1, 'largest') has each query's largest"


@pytest.mark.parametrize("name", [*REFUSED, "sum", "mean", "max", "argmin", "reshape", "tolist"])
def test_what_would_store_every_weight_is_refused_by_name(name: str):
    for A, shown, instead in (
        (matrix(), f"AttentionMatrix{SIZES}, never stored", OF_WEIGHTS),
        (matrix().T, f"TransposedMatrix of AttentionMatrix{SIZES}, never stored", OF_WEIGHTS),
        (effects(), f"EffectMatrix(cut, {SIZES[1:]}", OF_EFFECTS),
    ):
        with pytest.raises(DtypeError if name in REFUSED else AttributeError) as error:
            REFUSED[name](A) if name in REFUSED else getattr(A, name)(axis=-1)
        words = f"{name.rstrip()} would need every number of {shown}.\n\nhint: {instead}; "
        assert str(error.value) == f"{words}np.asarray stores all 504 numbers."
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


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
    "saved by PyTorch": saved,
}


def same(a: Any, b: Any) -> None:
    """Equal in kind, dtype and every bit."""
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    bits = [np.ascontiguousarray(x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x) for x in (a, b)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@examples(0.7)
@given(case=cases(most=2000), known=st.booleans(), part=st.booleans())
def test_copies_have_the_same_bits_under_every_rule(tensors: bool, case: Case, known: bool, part: bool):  # noqa: FBT001
    q, k, v = ((to_torch(torch, x.copy()) if tensors else x) for x in (case.q, case.k, case.v))
    matrix = ch.AttentionMatrix(q, k, **case.rules)
    if known:
        matrix.logsumexp()
    asked: dict[str, Any] = {"logsumexp": True, "entropy": True, "received": True, "top": 2, "image": (2, 3)}
    seen = matrix.observe(v, **asked, groups=case.labels())
    if part and matrix.call.problem.batch:
        matrix = matrix.part(0)
    copies = {how: (copied(matrix), copied(seen)) for how, copied in COPIES.items()}
    known = matrix.known_state is not None
    assert {other.known_state is not None for other, _ in copies.values()} == {known}
    for how, (other, again) in copies.items():
        note(how)
        assert (other.shape, other.dtype, repr(other)) == (matrix.shape, matrix.dtype, repr(matrix))
        same(other[...], matrix[...])
        same(other.logsumexp(), matrix.logsumexp())
        same(other.T[...], matrix.T[...])
        for name in STATISTICS:
            if name != "top" and (value := getattr(seen, name)) is not None:
                same(getattr(again, name), value)
        assert (again.queries, again.keys, again.sinks, again.peak) == (seen.queries, seen.keys, seen.sinks, None)
        for one in (again.top, COPIES[how](seen.top)):
            assert type(one) is type(seen.top)
            same(one.weights, seen.top.weights)
            same(one.indices, seen.top.indices)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["cut", "contribution"])
@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
def test_copies_of_causes_have_the_same_bits_and_what_is_known(how: str, kind: str, tensors: bool, monkeypatch: Any):  # noqa: FBT001
    q, k, v, g = (normal(*shape, dtype=np.float32) for shape in ((2, 4, 6, 8), (2, 2, 5, 8), (5, 3), (6, 3)))
    if tensors:
        q, k, v, g = (torch.from_numpy(x) for x in (q, k, v, g))
    A = ch.AttentionMatrix(q, k, causal=True, query_offset=0, sinks=[0.1] * 4)
    E = A.cut_effects(v, g) if kind == "cut" else A.contributions(v, g)
    before = E.observe(by_key=True, strongest=5)
    other = COPIES[how](E)
    assert (repr(other), other.shape, other.dtype, other.kind) == (repr(E), E.shape, E.dtype, kind)
    for name in engines.NAMES:
        for work in ("rows", "others"):
            monkeypatch.setattr(engines.get(name), work, None, raising=False)  # it is known
    after = COPIES[how](other.observe(by_key=True, strongest=5))
    assert type(after.by_key) is type(before.by_key)
    for one, two in ((after.by_key, before.by_key), *zip(after.strongest, before.strongest, strict=True)):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(other.T[...], E.T[...])
    assert repr(after) == repr(before)


def test_a_pickle_holds_what_is_broadcast_once():
    q, mask = normal(2, 16, 100, 4), np.ones((100, 100), bool)
    part = ch.AttentionMatrix(q, q, mask=mask).part(1)
    assert len(pickle.dumps(part)) < 2 * (q[1].nbytes + q[1].nbytes + mask.nbytes)
    np.testing.assert_array_equal(copy.deepcopy(part)[...], part[...])
    q, v, g = normal(50, 4, 30, 2), normal(30, 64), normal(30, 64)
    E = ch.AttentionMatrix(q, q).cut_effects(v, g)
    assert len(pickle.dumps(E)) < 2 * (2 * q.nbytes + v.nbytes + g.nbytes)


@pytest.mark.parametrize("tensors", [False, pytest.param(True, marks=pytest.mark.gate)], ids=["arrays", "tensors"])
def test_other_processes_answer_for_a_matrix(tensors: bool):  # noqa: FBT001
    q, k = normal(2, 3, 4), normal(2, 5, 4)
    matrix = ch.AttentionMatrix(
        *((torch.from_numpy(q), torch.from_numpy(k)) if tensors else (q, k)), mask=normal(5) > -1
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seen = pool.apply(operator.methodcaller("observe", received=True, top=2), (matrix,))
    here = matrix.observe(received=True, top=2)
    same(seen.received, here.received)
    same(seen.top.indices, here.top.indices)


def test_shallow_copies_share_what_a_graph_computed():
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    matrix = ch.AttentionMatrix(2 * leaf, leaf)
    seen = matrix.observe(entropy=True)
    assert copy.copy(seen).entropy is seen.entropy
    (copy.copy(matrix) @ leaf).sum().backward()
    assert leaf.grad is not None


def test_a_deep_copy_shares_nothing():
    q, v = normal(3, 4), normal(3, 4)
    whole = ch.AttentionMatrix(q, q), ch.AttentionMatrix(q, q).cut_effects(v, v)
    others, before = copy.deepcopy(whole), [one[...] for one in whole]
    q[...], v[...] = 0, 0
    for other, x in zip(others, before, strict=True):
        np.testing.assert_array_equal(other[...], x)


@pytest.mark.parametrize("how", ["pickled", "deep-copied", "saved by PyTorch"])
def test_matrices_with_an_autograd_graph_are_not_copied(how: str):
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    kept = COPIES[how](ch.AttentionMatrix(leaf, leaf.detach()))
    assert kept.entropy().requires_grad
    with pytest.raises(
        RuleError, match=r"^q belongs to PyTorch's graph, which cannot be copied\.\n\nhint: q\.detach\(\)$"
    ):
        COPIES[how](ch.AttentionMatrix(2 * leaf, leaf))


@pytest.mark.parametrize("how", COPIES)
def test_traces_can_be_copied(how: str):
    q = normal(2, 3, 4)
    for traced in (ch.trace(q, q, q), ch.trace_layer(q, *[normal(4, 4)] * 4, num_heads=2)):
        again = COPIES[how](traced)
        np.testing.assert_array_equal(again.output, traced.output)
        np.testing.assert_array_equal(again.token(1).weights, traced.token(1).weights)
        assert str(again) == str(traced)


def test_every_repr_is_one_line():
    q, many = normal(2, 30, 4), np.broadcast_to(0.0, (12, 8, 16_384, 8))
    seen, traced = ch.AttentionMatrix(q, q).observe(q, top=2, entropy=True), ch.trace(q, q, q)
    wide, narrow = ch.AttentionMatrix(many, many), ch.AttentionMatrix(q[0], q[0])
    labels = np.zeros(30, int), np.zeros(30, int)
    effects = (
        ch.AttentionMatrix(q, q).cut_effects(q, q).observe(by_key=True, top=2, strongest=3, image=(2, 2), groups=labels)
    )
    short = {
        "Top(weights (2, 30, 2), indices (2, 30, 2))": seen.top,
        "TokenTrace(query 0, weights (2, 30), output (2, 4))": traced.token(0),
        "Step(scores: S = Q·Kᵀ, (heads 2, queries 30, keys 30))": traced.steps[3],
        "Trace(q, k, v, scores, scaled, weights, output)": traced,
        "EffectMatrix(contribution, batch 12, heads 8, queries 16384, keys 16384) float64": (
            wide.contributions(many, many)
        ),
        "TransposedMatrix of EffectMatrix(contribution, queries 30, keys 30) float64": narrow.contributions(
            q[0], q[0]
        ).T,
        "Ranked(values (2, 30, 2), indices (2, 30, 2))": effects.top,
        "Strongest(batch (3,), head (3,), query (3,), key (3,), value (3,))": effects.strongest,
        "SignedImage(mean (2, 2, 2), largest (2, 2, 2))": effects.image,
    }
    long = {
        f"Observation(queries 30, keys 30, output (2, 30, 4), entropy (2, 30), top {seen.top})": seen,
        "TransposedMatrix of AttentionMatrix(heads 2, queries 30, keys 30) float64, never stored": (
            ch.AttentionMatrix(q, q).T
        ),
        f"Observation(queries 30, keys 30, by_key (2, 30), top {effects.top}, strongest {effects.strongest}, "
        f"image {effects.image}, groups (2, 1, 1))": effects,
        "Observation(queries 30, keys 30)": ch.AttentionMatrix(q, q).cut_effects(q, q).observe(),
    }
    assert {words: repr(shown) for words, shown in (short | long).items()} == {words: words for words in short | long}
    assert max(map(len, short)) <= 80
