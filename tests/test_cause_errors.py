"""Matrices of effects: the exact text of every error, copies, and what creating one does not compute."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import engines
from clearhead.core import room
from clearhead.errors import ClearheadError, DtypeError, RuleError, SizeError
from error_texts import Errors, assert_words, each_error
from seeds import fresh

Q, K, V, G = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((2, 2, 5, 3)), np.ones((2, 4, 6, 3))
MATRIX = "the matrix is (batch 2, heads 4, queries 6, keys 5)."


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(Q, K)


def cuts(v: Any = V, g: Any = G) -> ch.CauseMatrix:
    return matrix().cuts(v, g)


def labels(queries: int = 6, keys: int = 5, dtype: Any = int) -> tuple[Any, Any]:
    return np.zeros(queries, dtype), np.zeros(keys, int)


ERRORS: Errors = {
    TypeError: {
        "v is int64: expected float64, float32, bfloat16 or float16.": lambda: cuts(v=np.ones((2, 2, 5, 3), int)),
        "g is a str: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.\n\n"
        "hint: np.asarray(g, dtype=np.float64) makes one from numbers in a list.": lambda: cuts(g="loss"),
        "g is a NoneType: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.\n\n"
        "hint: np.asarray(g, dtype=np.float64) makes one from numbers in a list.": lambda: cuts(g=None),
        "output is int64: expected float64, float32, bfloat16 or float16.": lambda: matrix().contributions(
            V, output=np.ones((12, 7), int)
        ),
        "query_groups is float64: expected whole numbers, one label per token, below 0 for none.": lambda: cuts().spans(
            *labels(dtype=float)
        ),
        "unknown effect `peak`.\n\nhint: Known: by_key, by_query, groups, image, order, strongest, top.": lambda: (
            cuts().observe(peak=True)
        ),
        "np.add (+) would need every effect of CauseMatrix(cut, batch 2, heads 4, queries 6, keys 5) float64.\n\n"
        "hint: E[...] is a stored copy, 240 effects, E[..., :512, :512] a tile of it.": lambda: cuts() + 1,
        "np.sort would need every effect of TransposedMatrix of CauseMatrix(cut, batch 2, heads 4, queries 6, keys 5) "
        "float64.\n\n"
        "hint: E[...] is a stored copy, 240 effects, E[..., :512, :512] a tile of it. "
        "E.top(8): each query's strongest keys.": lambda: np.sort(cuts().T),
        "max is not answered by CauseMatrix(cut, batch 2, heads 4, queries 6, keys 5) float64.\n\n"
        'hint: E.top(1, "largest"), E.strongest(1).': lambda: np.max(cuts(), axis=-1),
    },
    ValueError: {
        "v has shape (2, 2, 6, 3): expected (2, 2, 5, d), or one for all heads, (5,) or (5, d).\n\n"
        f"hint: {MATRIX}": lambda: cuts(v=np.ones((2, 2, 6, 3))),
        "g has shape (2, 2, 6, 3): expected (2, 4, 6, d), or one for all heads, (6,) or (6, d).\n\n"
        f"hint: {MATRIX}": lambda: cuts(g=np.ones((2, 2, 6, 3))),
        "g has 12 columns but v has d_v 3: g is the derivative by the head's output, which has v's columns.\n\n"
        "hint: o = A @ v; g, = torch.autograd.grad(number, o)": lambda: cuts(g=np.ones((2, 4, 6, 12))),
        "output is given together with g: it is for norms, and g has been carried through W_O.\n\n"
        "hint: leave it out.": lambda: matrix().contributions(V, G, output=np.ones((12, 7))),
        "output has shape (7, 12): expected W_O, (heads·d_v 12, d_model).\n\n"
        "hint: a linear layer's weight is (d_model, heads·d_v): output=weight.T": lambda: matrix().contributions(
            V, output=np.ones((7, 12))
        ),
        "output has shape (3, 7): expected W_O, (heads·d_v 12, d_model).": lambda: matrix().contributions(
            V, output=np.ones((3, 7))
        ),
        "order is 'biggest': expected one of magnitude, largest, smallest.\n\nhint: order=\"magnitude\"": lambda: (
            cuts().top(3, "biggest")
        ),
        "top is 0: expected a whole number from 1 up.\n\nhint: top=8": lambda: cuts().top(0),
        "strongest is 2.5: expected a whole number from 1 up.\n\nhint: strongest=8": lambda: cuts().strongest(2.5),
        "image's height is 0: expected a whole number from 1 up.\n\nhint: image=(256, 256)": lambda: cuts().image(0, 9),
        "key_groups has shape (6,): expected (5,), one label per token.": lambda: cuts().groups(*labels(keys=6)),
        "spans are of cuts: contributions of a span are the sum of those of its edges.\n\nhint: E.groups": lambda: (
            matrix().contributions(V, G).spans(*labels())
        ),
        "by_key is 1: expected True or False.": lambda: cuts().observe(by_key=1),
        f"x has shape (6,): expected (2, 4, 5, d), or one for all heads, (5,) or (5, d).\n\nhint: {MATRIX}": lambda: (
            cuts() @ np.ones(6)
        ),
    },
    IndexError: {
        f"index 4 is outside axis 1: {MATRIX}": lambda: cuts()[0, 4],
        "index -7 is outside axis 3: the matrix is (batch 2, heads 4, keys 5, queries 6).": lambda: cuts().T[..., -7],
        "axis is 1: the result would have a number for each query and each key, and be stored.\n\n"
        "hint: add axis -1 (keys) or -2 (queries), or reduce a stored copy or "
        "tile: A[...], A[..., :512, :512].": lambda: np.sum(cuts(), axis=1),
    },
}


@each_error(ERRORS)
def test_each_error_has_its_exact_text_before_any_work(call: Any, kind: type[Exception], words: str, monkeypatch: Any):
    assert_words(call, kind, words, monkeypatch)


def test_creating_one_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    for name in engines.NAMES:
        for work in ("rows", "others", "effects", "effect_tile"):
            if hasattr(engines.get(name), work):
                monkeypatch.setattr(engines.get(name), work, None)
    for g in (G, G.astype(np.float32)):
        for E in (matrix().cuts(V, g), matrix().contributions(V, g), matrix().contributions(V)):
            assert (E.shape, E.dtype, len(E), E.size) == ((2, 4, 6, 5), np.float64, 2, 240)
            with pytest.raises(TypeError):
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


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["cut", "contribution", "norm"])
@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
def test_copies_have_the_same_bits_and_what_is_known(how: str, kind: str, tensors: bool, monkeypatch: Any):  # noqa: FBT001
    rng = fresh()
    q, k, v, g = (rng.standard_normal(x.shape).astype(np.float32) for x in (Q, K, V[0, 0], G[0, 0]))
    if tensors:
        q, k, v, g = (torch.from_numpy(x) for x in (q, k, v, g))
    A = ch.AttentionMatrix(q, k, causal=True, query_offset=0, sinks=[0.1] * 4)
    E = {"cut": A.cuts, "contribution": A.contributions, "norm": lambda v, g: A.contributions(v)}[kind](v, g)
    before = E.observe(by_key=True, strongest=5)
    other = COPIES[how](E)
    assert (repr(other), other.shape, other.dtype, other.kind) == (repr(E), E.shape, E.dtype, kind)
    for name in engines.NAMES:
        for work in ("rows", "others"):
            if hasattr(engines.get(name), work):
                monkeypatch.setattr(engines.get(name), work, None)  # it is known
    after = COPIES[how](other.observe(by_key=True, strongest=5))
    assert type(after.by_key) is type(before.by_key)
    for one, two in ((after.by_key, before.by_key), *zip(after.strongest, before.strongest, strict=True)):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(other.T[...], E.T[...])
    assert repr(after) == repr(before)


def test_a_pickle_holds_values_for_all_heads_once():
    rng = fresh()
    q, v, g = rng.standard_normal((50, 4, 30, 2)), rng.standard_normal((30, 64)), rng.standard_normal((30, 64))
    E = ch.AttentionMatrix(q, q).cuts(v, g)
    assert len(pickle.dumps(E)) < 2 * (2 * q.nbytes + v.nbytes + g.nbytes)


def test_a_deep_copy_shares_nothing():
    q, v = fresh().standard_normal((3, 4)), fresh().standard_normal((3, 4))
    E = ch.AttentionMatrix(q, q).cuts(v, v)
    other, before = copy.deepcopy(E), E[...]
    q[...], v[...] = 0, 0
    np.testing.assert_array_equal(other[...], before)


def test_every_repr_is_one_line_of_80_columns():
    many = np.broadcast_to(0.0, (12, 16, 16_384, 8))
    A = ch.AttentionMatrix(many, many)
    E = A.contributions(many, many)
    assert repr(E) == "CauseMatrix(contribution, batch 12, heads 16, queries 16384, keys 16384) float64"
    seen = cuts().observe(by_key=True, top=2, strongest=3, image=(2, 2), groups=labels())
    said = {
        "TransposedMatrix of CauseMatrix(norm, queries 6, keys 6) float64": (
            ch.AttentionMatrix(Q[0, 0], Q[0, 0]).contributions(Q[0, 0]).T
        ),
        "Ranked(values (2, 4, 6, 2), indices (2, 4, 6, 2))": seen.top,
        "Strongest(batch (3,), head (3,), query (3,), key (3,), value (3,))": seen.strongest,
        "SignedImage(mean (2, 4, 2, 2), largest (2, 4, 2, 2))": seen.image,
        f"Effects(by_key (2, 4, 5), top {seen.top}, strongest {seen.strongest}, image {seen.image}, "
        "groups (2, 4, 1, 1))": seen,
        "Effects()": cuts().observe(),
    }
    assert {words: repr(shown) for words, shown in said.items()} == {words: words for words in said}
    assert all(len(repr(one)) <= 80 for one in (E, seen.top, seen.strongest, seen.image))
