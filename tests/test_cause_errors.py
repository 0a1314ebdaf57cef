"""Matrices of effects: what creating one does not compute, and what is refused: graphs, engines, sizes."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import engines
from clearhead.core import room
from clearhead.errors import ClearheadError, DtypeError, RuleError, SizeError
from error_texts import let_no_engine_run
from seeds import fresh

Q, K, V, G = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((2, 2, 5, 3)), np.ones((2, 4, 6, 3))


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(Q, K)


def test_creating_one_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    let_no_engine_run(monkeypatch)
    for g in (G, G.astype(np.float32)):
        for E in (matrix().cuts(V, g), matrix().contributions(V, g), matrix().contributions(V)):
            assert (E.shape, E.dtype, len(E), E.size) == ((2, 4, 6, 5), np.float64, 2, 240)
            with pytest.raises(AssertionError, match="work began"):
                E.by_key()


def test_effects_larger_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "SMALL", 0)
    many = np.broadcast_to(0.0, (2**21, 2))
    E = ch.AttentionMatrix(many, many).cuts(many, many)
    for call, words in (
        (lambda: E[...], r"^effects of shape \(2097152, 2097152\) .*E\[\.\.\., :512, :512\] is a tile"),
        (lambda: E.top(2**40), r"^top of shape"),
        (lambda: E.image(2**30, 2**30), r"^image of shape"),
    ):
        with pytest.raises(SizeError, match=f"(?s){words}"):
            call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_an_engine_that_cannot_run_is_refused_where_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(engines.get("portable"), "effects")
    with pytest.raises(RuntimeError, match=r"^the portable engine has no effects\.\n\nhint: leave `engine` out"):
        ch.AttentionMatrix(Q, K, engine="portable").cuts(V, G)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "output"])
def test_tensors_of_a_graph_are_refused_and_taken_without_it(name: str):
    rng = fresh()
    inputs = {n: torch.from_numpy(rng.standard_normal(x.shape)) for n, x in {"q": Q, "k": K, "v": V, "g": G}.items()}
    inputs["output"] = torch.from_numpy(rng.standard_normal((12, 7)))

    def effects() -> Any:
        A = ch.AttentionMatrix(inputs["q"], inputs["k"])
        if name == "output":
            return A.contributions(inputs["v"], output=inputs["output"])
        return A.cuts(inputs["v"], inputs["g"])

    plain = effects()[...]
    inputs[name] = inputs[name].clone().requires_grad_()
    words = (
        "cuts have no derivative, and PyTorch keeps or traces a graph for them.\n\n"
        "hint: with torch.no_grad(): A.cuts(v, g)"
        if name in "qk"
        else f"{name} requires grad, and nothing here keeps a graph for it.\n\n"
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
    with pytest.raises(DtypeError, match=r"^x requires grad"):
        E @ v


def test_arrays_on_another_device_are_named():
    with pytest.raises(ClearheadError, match=r"^g is on device meta: no engine here runs there"):
        ch.AttentionMatrix(torch.ones(3, 2), torch.ones(3, 2)).cuts(torch.ones(3, 2), torch.ones(3, 2, device="meta"))
