"""Matrices of effects of every kind of array and dtype, without edges, summed, in little memory; what is refused."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import clearhead as ch
from cause_problems import EVERYTHING, each_engine
from clearhead.core import room
from clearhead.errors import DtypeError, RuleError, SizeError
from error_texts import let_no_engine_run
from programs import peak_of
from seeds import fresh, normal


def test_values_and_derivatives_for_all_heads_alike():
    q, k, v, g = normal(2, 4, 6, 3), normal(2, 2, 7, 3), normal(7, 5), normal(6, 5)
    A = ch.AttentionMatrix(q, k)
    each = A.cut_effects(np.broadcast_to(v, (2, 4, 7, 5)), np.broadcast_to(g, (2, 4, 6, 5)))
    np.testing.assert_array_equal(A.cut_effects(v, g)[...], each[...])
    np.testing.assert_array_equal(A.cut_effects(v[:, 0], g[:, 0])[...], A.cut_effects(v[:, :1], g[:, :1])[...])
    np.testing.assert_allclose(A.cut_effects(np.broadcast_to(v, (2, 2, 7, 5)), g)[...], each[...], rtol=1e-12)


MIXED = [
    (np.float32, np.float32, np.float64, np.float64),
    (np.float64, np.float32, np.float32, np.float64),
    (ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float32, np.float32),
    (np.float16, np.float32, np.float16, np.float32),
    (ml_dtypes.bfloat16, np.float16, np.float16, np.float32),
]


@each_engine
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("first", "second", "third", "widest"), MIXED)
def test_mixed_dtypes_lose_no_digits(engine: str, known: bool, first: Any, second: Any, third: Any, widest: Any):  # noqa: FBT001
    q, k, v, g = (normal(2, n, 5, dtype=t) for n, t in ((6, first), (7, first), (7, second), (6, third)))
    A = ch.AttentionMatrix(q, k, engine=engine)
    if known:
        A.logsumexp()
    E = A.cut_effects(v, g)
    wide = [x.astype(widest) for x in (q, k, v, g)]
    expected = ch.AttentionMatrix(*wide[:2], engine=engine).cut_effects(*wide[2:])[...]
    assert E.dtype == widest
    near = {"rtol": 20 * np.finfo(widest).eps, "atol": 1e-14 if widest == np.float64 else 1e-6}
    np.testing.assert_allclose(E[...], expected, **near)


def test_autocast_narrows_q_k_and_v_and_leaves_g():
    q, k, v, g = (torch.from_numpy(normal(2, n, 5, dtype=np.float32)) for n in (6, 7, 7, 6))
    with torch.autocast("cpu", torch.bfloat16):
        result = ch.AttentionMatrix(q, k).cut_effects(v, g)
    narrow = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(result[...], ch.AttentionMatrix(*narrow[:2]).cut_effects(narrow[2], g)[...])
    assert not torch.equal(result[...], ch.AttentionMatrix(*narrow[:2]).cut_effects(narrow[2], g.bfloat16())[...])


@pytest.mark.parametrize("kind", ["cut", "contribution"])
def test_memory_grows_with_keys_not_with_queries_times_keys(kind: str):
    """On the portable engine, which allocates nothing that tracemalloc does not see: 256 queries of 8,192 keys."""
    peaks = []
    for n in (2048, 8192):
        q, k, v, g = normal(256, 4), normal(n, 4), normal(n, 4), normal(256, 4)
        A = ch.AttentionMatrix(q, k, engine="portable")
        E = A.cut_effects(v, g) if kind == "cut" else A.contributions(v, g)
        peaks.append(peak_of(lambda E=E: E.observe(**EVERYTHING)))
    assert peaks[1] < 4.2 * peaks[0]
    assert peaks[1] < 256 * 8192 * 8


Q, K, V, G = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((2, 2, 5, 3)), np.ones((2, 4, 6, 3))


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(Q, K)


def test_creating_one_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    let_no_engine_run(monkeypatch)
    for g in (G, G.astype(np.float32)):
        for E in (matrix().cut_effects(V, g), matrix().contributions(V, g)):
            assert (E.shape, E.dtype, len(E), E.size) == ((2, 4, 6, 5), np.float64, 2, 240)
            with pytest.raises(AssertionError, match="work began"):
                E.by_key()


def test_effects_larger_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "SMALL", 0)
    many = np.broadcast_to(0.0, (2**21, 2))
    E = ch.AttentionMatrix(many, many).cut_effects(many, many)
    for call, words in (
        (lambda: E[...], r"^effects of shape \(2097152, 2097152\) .*E\[\.\.\., :512, :512\] is a tile"),
        (lambda: E.top(2**40), r"^top of shape"),
        (lambda: E.image(2**30, 2**30), r"^image of shape"),
    ):
        with pytest.raises(SizeError, match=f"(?s){words}"):
            call()


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_tensors_of_a_graph_are_refused_and_taken_without_it(name: str):
    rng = fresh()
    inputs = {n: torch.from_numpy(rng.standard_normal(x.shape)) for n, x in {"q": Q, "k": K, "v": V, "g": G}.items()}

    def effects() -> Any:
        return ch.AttentionMatrix(inputs["q"], inputs["k"]).cut_effects(inputs["v"], inputs["g"])

    plain = effects()[...]
    inputs[name] = inputs[name].clone().requires_grad_()
    words = (
        "cuts have no derivative, and PyTorch keeps or traces a graph for them.\n\n"
        "hint: with torch.no_grad(): A.cut_effects(v, g)"
        if name in "qk"
        else f"{name} requires grad, and this call has no derivative.\n\n"
        f"hint: {name}.detach(), or `with torch.no_grad():` around the call."
    )
    with pytest.raises(RuleError if name in "qk" else DtypeError) as error:
        effects()
    assert str(error.value) == words
    with torch.no_grad():
        E = effects()
    assert torch.equal(E[...], plain)  # also with gradients on again
    assert not E.by_key().requires_grad


def test_a_derivative_from_autograd_goes_in_as_it_comes_out():
    rng = fresh()
    q, k, v = (torch.from_numpy(rng.standard_normal(x.shape)).requires_grad_() for x in (Q, K, V))
    A = ch.AttentionMatrix(q, k)
    o = A @ v
    (g,) = torch.autograd.grad(o.square().sum(), o, retain_graph=True)
    with torch.no_grad():
        E = A.contributions(v, g)
    torch.testing.assert_close(E.by_query(), (g * o).sum(-1).detach())
    with pytest.raises(DtypeError, match=r"^v requires grad"):
        E @ v
