"""NumPy's functions and Python's operators on a matrix that is never stored: answered exactly, or refused by name."""

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import clearhead as ch
from calls import alone, sharded
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from problems import Case, each_engine, on_every_engine
from programs import peak_of
from seeds import fresh, normal

NAMES = ("sum", "mean", "max", "min", "argmax", "argmin")
EXACT = ("min", "argmax", "argmin")  # taken from the same weights that A[...] holds


def matrix(*, dtype: Any = np.float64, **rules: Any) -> ch.AttentionMatrix:
    return ch.AttentionMatrix(normal(2, 4, 9, 8, dtype=dtype), normal(2, 2, 7, 8, dtype=dtype), **rules)


def axes_of(ndim: int) -> list[Any]:
    """Every axis and tuple of axes that holds queries or keys, counted from either end."""
    tuples = [one for count in range(1, ndim + 1) for one in combinations(range(ndim), count) if max(one) >= ndim - 2]
    negative = [tuple(axis - ndim for axis in reversed(one)) for one in tuples]
    return [None, *tuples, *negative, *(one[0] for one in (*tuples, *negative) if len(one) == 1)]


@on_every_engine(("native", "portable", "triton"), times=0.4, limits={"most": 20_000}, data=st.data())
def test_reductions_are_numpys_under_every_rule(engine: str, case: Case, data: st.DataObject):
    A = case.matrix(engine=engine)
    swapped, keepdims = data.draw(st.booleans()), data.draw(st.booleans())
    A, dense = (A.T, np.asarray(A.T)) if swapped else (A, np.asarray(A))
    exact = np.asarray(case.restore(case.book.weights))
    exact = exact.swapaxes(-1, -2) if swapped else exact
    largest = np.abs(np.nan_to_num(case.book.masked, neginf=0)).max(initial=0)  # its rounding is the weights' error
    for name in NAMES:
        axis = data.draw(st.sampled_from(axes_of(A.ndim)), name)
        if name.startswith("arg") and isinstance(axis, tuple):
            axis = axis[0] if axis[0] % A.ndim >= A.ndim - 2 else None
        function: Any = getattr(np, name)
        inputs = axis if axis is not None else tuple(range(A.ndim))
        empty = 0 in np.array(A.shape)[list(inputs) if isinstance(inputs, tuple) else [inputs]]
        if empty and name == "mean":
            continue
        if empty and name != "sum":
            with pytest.raises(ShapeError):
                function(A, axis=axis, keepdims=keepdims)
            continue
        result = function(A, axis=axis, keepdims=keepdims)
        truth = function(dense if name in EXACT else exact, axis=axis, keepdims=keepdims)
        assert np.shape(result) == np.shape(truth)
        assert result.dtype == (np.int64 if name.startswith("arg") else A.dtype)
        tolerance = {"rtol": 0, "atol": 0} if name in EXACT else {"rtol": max(1e-4, 2**-21 * largest), "atol": 1e-6}
        np.testing.assert_allclose(result, truth, **tolerance)
        np.testing.assert_array_equal(getattr(A, name)(axis, keepdims=keepdims), result)


def test_sums_have_the_bits_of_the_statistics():
    A = matrix(dtype=np.float32, causal=True, query_offset=-2)
    np.testing.assert_array_equal(np.sum(A, axis=-2), A.received())
    np.testing.assert_array_equal(np.max(A, axis=-2), A.peak())
    np.testing.assert_array_equal(np.max(A, axis=-1), A.top(1).weights[..., 0])
    assert (np.sum(A, axis=-1)[..., :2] == 0).all()
    np.testing.assert_allclose(np.sum(A, axis=-1)[..., 2:], 1, rtol=1e-6)


def test_half_precision_does_not_round_the_sums():
    A = matrix(dtype=np.float16, sinks=[0.3, 0.1, 2.0, -1.0])
    np.testing.assert_allclose(A.sum(axis=-1), np.asarray(A, np.float64).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", [2**20, 60])
@each_engine(tier=pytest.mark.long)
def test_nan_passes_as_in_numpy(engine: str, tile: int, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clearhead.ops.reductions._TILE", tile)
    monkeypatch.setattr("clearhead.ops.reductions._WIDTH", 3)
    q, k = normal(3, 9, 8), normal(3, 7, 8)
    q[0, 4], k[1, 3, 2], q[2, 0, 1] = np.nan, np.nan, np.inf
    inputs = (torch.from_numpy(q), torch.from_numpy(k)) if engine == "triton" else (q, k)
    A = ch.AttentionMatrix(*inputs, causal=True, query_offset=0, engine=engine)
    dense = np.asarray(A)
    assert np.isnan(dense).any(axis=(-1, -2))[:2].all()
    for axis in (-1, -2, None):
        np.testing.assert_allclose(getattr(np, name)(A, axis=axis), getattr(np, name)(dense, axis=axis), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_ties_and_tiles_give_numpys_first_index(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clearhead.ops.reductions._TILE", 60)
    monkeypatch.setattr("clearhead.ops.reductions._WIDTH", 3)
    q, k = fresh().integers(0, 2, (2, 3, 9, 2)), fresh().integers(0, 2, (2, 3, 10, 2))
    A = ch.AttentionMatrix(q.astype(np.float64), k.astype(np.float64), mask=fresh().random((9, 10)) < 0.8)
    for B in (A, A.T):
        for axis in (-1, -2, None):
            np.testing.assert_allclose(
                getattr(np, name)(B, axis=axis), getattr(np, name)(B[...], axis=axis), rtol=1e-12
            )


def test_reductions_keep_pytorchs_graph():
    q, k = (torch.from_numpy(normal(2, length, 8)) for length in (9, 7))
    weight = torch.from_numpy(normal(2, 7))
    asked: list[Callable[[Any], Any]] = [
        lambda A: (A.sum(-2) * weight).sum(),
        lambda A: (A.mean(-2) * weight).sum(),
        lambda A: (A.sum(-1) * weight[:, :1]).sum() + A.mean(),
        lambda A: A.max(-1).sin().sum(),
        lambda A: (A.max(-2) * weight).sum(),
        lambda A: A.max(),
    ]
    for ask in asked:
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        expected = torch.autograd.grad(ask(_Named((leaves[0] @ leaves[1].mT / 8**0.5).softmax(-1))), leaves)
        result = torch.autograd.grad(ask(ch.AttentionMatrix(*leaves)), leaves)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b)
    for name in ("min", "argmax", "argmin"):
        with pytest.raises(RuleError, match="no derivative"):
            getattr(np, name)(ch.AttentionMatrix(q.requires_grad_(), k), axis=-1)


class _Named:
    """A tensor whose reductions are called as a matrix's are."""

    def __init__(self, x: torch.Tensor) -> None:
        self.sum, self.mean, self.max = x.sum, x.mean, lambda *axes: x.amax(axes) if axes else x.max()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grows_with_queries_times_keys(name: str):
    x = normal(3000, 8, dtype=np.float32)
    A = ch.AttentionMatrix(x, x, engine="native")
    A.logsumexp()
    for axis in (-1, -2, None):
        assert peak_of(lambda axis=axis: getattr(np, name)(A, axis=axis)) < 3000 * 3000 * 4 * 0.7


def test_what_numpy_asks_of_an_array():
    A = matrix()
    assert (np.shape(A), np.ndim(A), np.size(A), len(A)) == ((2, 4, 9, 7), 4, 504, 2)
    assert (A.shape, A.ndim, A.size, A.T.size, A.T.ndim) == ((2, 4, 9, 7), 4, 504, 504, 4)
    assert (np.size(A, -1), np.size(A, 0)) == (7, 2)
    np.testing.assert_array_equal(np.matmul(A, v := normal(2, 4, 7, 3)), A @ v)
    np.testing.assert_array_equal(np.matmul(A.T, g := normal(2, 4, 9, 3)), A.T @ g)
    np.testing.assert_array_equal(np.amax(A, -1), np.max(A, -1))
    assert np.sum(A, -1, None, None, True).shape == (2, 4, 9, 1)


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
        for refuse in (lambda B: np.asarray(B, copy=False), lambda B: np.from_dlpack(B, copy=False)):
            with pytest.raises(ValueError, match="an array of them is always a copy"):
                refuse(B)


def test_conversions_are_refused_where_pytorch_records_a_graph():
    A = ch.AttentionMatrix(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3))
    for make in (np.asarray, np.from_dlpack, torch.as_tensor, torch.tensor, torch.from_dlpack):
        with pytest.raises(RuleError, match="weights read by index have no derivative"):
            make(A)
    with torch.no_grad():
        assert torch.as_tensor(A).shape == (2, 2)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "np.sort": (lambda A: np.sort(A), "A.top(8): each query's strongest keys."),
    "np.argsort": (lambda A: np.argsort(A, axis=-1), "A.top(8): each query's strongest keys."),
    "np.linalg.svd": (lambda A: np.linalg.svd(A), ""),
    "np.linalg.norm": (lambda A: np.linalg.norm(A), ""),
    "np.var": (lambda A: np.var(A), ""),
    "np.allclose": (lambda A: np.allclose(A, A), ""),
    "np.array_equal": (lambda A: np.array_equal(np.ones(3), A), ""),
    "np.concatenate": (lambda A: np.concatenate([A, A]), ""),
    "np.transpose": (lambda A: np.transpose(A), "A.T"),
    "np.einsum": (lambda A: np.einsum("bhij->bhji", A), "A @ v, A.T @ g"),
    "np.trace": (lambda A: np.trace(A), "A.diagonal(): the weight that each query gives the key at its own position."),
    "np.where": (lambda A: np.where(A, 1, 0), ""),
    "np.add (+)": (lambda A: A + 1, ""),
    "np.add (+) ": (lambda A: 1 + A, ""),
    "np.add (+)  ": (lambda A: np.ones(7) + A, ""),
    "np.add (+)   ": (lambda A: torch.ones(7) + A, ""),
    "np.subtract (-)": (lambda A: A - A, ""),
    "np.multiply (*)": (lambda A: 2.0 * A, ""),
    "np.divide (/)": (lambda A: A / np.float32(2), ""),
    "np.power (**)": (lambda A: A**2, ""),
    "np.negative": (lambda A: -A, ""),
    "np.absolute": (lambda A: abs(A), ""),
    "np.log": (lambda A: np.log(A), ""),
    "np.greater (>)": (lambda A: A > 0.5, ""),
    "np.less (<)": (lambda A: A < 0.5, ""),
    "np.matmul (@)": (lambda A: np.ones((2, 9)) @ A,
                     "A @ v, and A.T @ g for what stands on the left: g.mT @ A is (A.T @ g).mT"),
    "np.add.reduce": (lambda A: np.add.reduce(A, axis=-1), "np.sum(A, axis=-1), and mean, max, min, argmax, argmin"),
    "==": (lambda A: A == 0, "`A is B` asks whether they are one object."),
    "== ": (lambda A: A == A, "`A is B` asks whether they are one object."),
    "==  ": (lambda A: A.__ne__(torch.ones(3)), "`A is B` asks whether they are one object."),
    "==   ": (lambda A: A.__eq__(np.ones((9, 7))), "`A is B` asks whether they are one object."),
    "==    ": (lambda A: A == [[1.0, 0.0], [0.0, 1.0]], "`A is B` asks whether they are one object."),
    "==     ": (lambda A: A != ((1.0,), (0.0,)), "`A is B` asks whether they are one object."),
    "==      ": (lambda A: range(7) == A, "`A is B` asks whether they are one object."),
    "==       ": (lambda A: memoryview(b"ab") != A, "`A is B` asks whether they are one object."),
    "np.equal (==)": (lambda A: np.ones((9, 7)) == A, ""),
    "bool": (lambda A: bool(A), "`A is None` asks whether there is one, A.size how many weights it has."),
    "bool ": (lambda A: A or 1, "`A is None` asks whether there is one, A.size how many weights it has."),
    "in": (lambda A: 0.5 in A, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_store_every_weight_is_refused_by_name(name: str):
    call, instead = REFUSED[name]
    for A, shown in (
        (matrix(), "AttentionMatrix(batch 2, heads 4, queries 9, keys 7) float64, never stored"),
        (matrix().T, "TransposedMatrix of AttentionMatrix(batch 2, heads 4, queries 9, keys 7) float64, never stored"),
    ):
        with pytest.raises(DtypeError) as error:
            call(A)
        words = f"{name.rstrip()} would need every weight of {shown}.\n\nhint: "
        hint = f"A[...] is a stored copy, 504 weights, A[..., :512, :512] a tile of it. {instead}".strip()
        assert str(error.value) == words + hint


def test_add_in_place_is_refused():
    A: Any = matrix()
    with pytest.raises(DtypeError, match=re.escape("np.add (+) would need")):
        A += 1


def test_other_comparisons_ask_for_the_object():
    A, B = matrix(), matrix()
    assert A != None  # noqa: E711
    assert A != "x"
    assert A != b"x"
    assert A != {1: 2}
    assert A in [B, A][1:]
    assert {A: 1, B: 2}[A] == 1
    assert len({A, B, A}) == 2


def test_matrices_over_ranks_and_effects_refuse_comparisons_too():
    def compare() -> None:
        A = sharded()
        x = torch.ones(3, 4)
        for one in (A, A.T, A.cuts(x, x), A.cuts(x, x).T, matrix().cuts(np.ones((7, 4)), np.ones((9, 4)))):
            for other in (0, 1.0, [], [[1.0]], ((1.0,),), np.ones((3, 3)), torch.ones(3), matrix()):
                for call in (lambda: one == other, lambda: other != one, lambda: bool(one), lambda: one * 2):  # noqa: B023
                    with pytest.raises(DtypeError, match=r"would need every (weight|effect) of"):
                        call()
            assert one != "x"
            assert one != None  # noqa: E711

    alone(compare, {})


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "an axis that is not there": (lambda A: np.sum(A, axis=4), SelectionError, "axis is 4: expected one of 4 axes"),
    "an axis twice": (lambda A: np.sum(A, axis=(-1, 3)), SelectionError, "axis is (-1, 3): expected one of 4 axes"),
    "an axis in words": (lambda A: A.max("keys"), SelectionError, "axis is 'keys': expected one of 4 axes"),
    "an axis that is a truth": (lambda A: A.min(True), SelectionError, "axis is True: expected one of 4 axes"),
    "heads alone": (lambda A: np.mean(A, axis=1), SelectionError, "axis is 1: the result would have a number for each"),
    "no axis": (lambda A: np.sum(A, axis=()), SelectionError, "axis is (): the result would have a number for each"),
    "the largest's indices over two": (lambda A: A.argmax((-1, -2)), SelectionError, "argmax takes one axis, or None."),
    "keepdims in words": (lambda A: A.sum(-1, keepdims="x"), RuleError, "keepdims is 'x': expected True or False."),
    "out": (
        lambda A: np.sum(A, axis=-1, out=np.ones((2, 4, 9))),
        RuleError,
        "np.sum of a matrix takes axis and keepdims.",
    ),
    "dtype": (lambda A: np.mean(A, -1, np.float16), RuleError, "dtype is <class 'numpy.float16'>: np.mean of a matrix"),
    "where": (lambda A: np.max(A, where=[True]), RuleError, "where is [True]: np.max of a matrix takes"),
    "initial": (lambda A: np.min(A, initial=0.0), RuleError, "initial is 0.0: np.min of a matrix takes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str):
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=re.escape(words)):
        call(matrix())


def test_a_part_keeps_its_rules_whatever_v_is():
    q, k = (torch.from_numpy(normal(2, 4, 6, 8)) for _ in range(2))
    part = ch.AttentionMatrix(q, k, causal=True).part(0)
    np.testing.assert_array_equal(part @ k[:1], (ch.AttentionMatrix(q, k, causal=True) @ k)[:1])
    with pytest.raises(DtypeError, match=r"^v requires grad"):
        part @ k[:1].clone().requires_grad_()


def test_the_transposed_matrix_is_also_called_mt():
    whole = matrix()
    assert whole.mT.shape == whole.T.shape == (2, 4, 7, 9)
    assert whole.mT.mT is whole
    np.testing.assert_array_equal(whole.mT[0, 1], whole[0, 1].T)
