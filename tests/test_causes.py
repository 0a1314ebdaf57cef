"""Contributions and cuts of single edges: those of the float64 reference, of forbidding each, and of tiles."""

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import clearhead as ch
from cause_problems import ENGINES, Causes, along, check_elements, check_observed, each_engine
from clearhead.core import definition
from clearhead.core.axes import Array
from problems import Case, on_every_engine
from seeds import fresh, normal
from slack import assert_close

KIND = st.sampled_from(("cut", "contribution", "moved"))
SMALL = {"most": 3000}  # the reference's cuts take O(queries·keys²)
FEW = {"most": 80, "most_heads": 6}  # every edge is forbidden in turn


@on_every_engine(ENGINES, times=0.7, limits=SMALL, kind=KIND, data=st.data())
def test_effects_are_the_references(engine: str, case: Case, kind: str, data: st.DataObject):
    check_elements(engine, case, kind, data.draw(basic_indices(case.matrix().shape)))


@on_every_engine(ENGINES, times=0.7, limits=SMALL, kind=KIND, pixels=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_what_is_observed_is_numpys_answer_to_the_effects(engine: str, case: Case, kind: str, pixels: tuple[int, int]):
    check_observed(engine, case, kind, pixels)


@on_every_engine(ENGINES, times=0.5, limits={"most": 40_000}, kind=st.sampled_from(("contribution", "moved")))
def test_what_is_observed_over_many_blocks_is_numpys_answer(engine: str, case: Case, kind: str):
    check_observed(engine, case, kind, (7, 11))


def exact_cuts(logits: Array, t: Array, sink: float | None) -> list[list[Decimal]]:
    """The definition in decimals of 150 digits."""
    result = []
    with localcontext() as context:
        context.prec = 150
        for row, along in zip(logits.tolist(), t.tolist(), strict=True):
            shares = [Decimal(x).exp() for x in row]
            more = Decimal(0) if sink is None else Decimal(sink).exp()
            gains = [share * Decimal(x) for share, x in zip(shares, along, strict=True)]
            whole = sum(gains) / (sum(shares) + more)
            left = [(sum(gains) - gain, sum(shares) - share + more) for gain, share in zip(gains, shares, strict=True)]
            result.append([gain / share - whole for gain, share in left])
    return result


@each_engine
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rest", [1e-3, 1e-12, 1e-60])
@pytest.mark.parametrize("sink", [None, -3.0])
def test_cuts_keep_their_digits_where_a_weight_is_nearly_all(engine: str, dtype: Any, rest: float, sink: float | None):
    """The largest weight is 1 - rest, in every place of the row; the relative error of every edge is bounded."""
    n = 6
    logits = fresh().uniform(-1, 1, (n, n)).astype(np.float32)
    logits[np.arange(n), np.arange(n)] += np.float32(-np.log(rest))
    t = np.stack([fresh().permutation(n) + 1.0 for _ in range(n)]) + 11 * np.eye(n)  # no two terms nearly cancel
    q, g = np.eye(n, dtype=dtype), np.eye(n, dtype=dtype)
    rules: dict[str, Any] = {} if sink is None else {"sinks": sink}
    A = ch.AttentionMatrix(q, logits.T.astype(dtype), scale=1.0, engine=engine, **rules)
    result = A.cut_effects(t.T.astype(dtype), g)[...]
    eps, tiny = np.finfo(dtype).eps, np.finfo(dtype).tiny
    with localcontext() as context:
        context.prec = 150
        for i, row in enumerate(exact_cuts(logits, t, sink)):
            for j, expected in enumerate(row):
                error = abs(Decimal(float(result[i, j])) - expected)
                within = Decimal(float(60 * eps * (1 - np.log(rest)))) * abs(expected) + 20 * Decimal(float(tiny))
                assert error <= within, (i, j, result[i, j], expected)


@each_engine
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scores_of_thousands_and_a_strongest_key_in_any_block(engine: str, dtype: Any):
    q, k, v, g = (normal(2, n, 4, dtype=dtype) for n in (70, 1100, 1100, 70))
    case = Case(30 * q, 30 * k, v, {"scale": 1.0}, 0)
    book = case.book
    assert book.logsumexp.max() > 1000
    expected = definition.contributions(book, along(case.given.v, g[None]))
    whole, masked = expected.sum(-1), book.masked[0]
    t = g.astype(np.float64) @ v.astype(np.float64).swapaxes(-1, -2)
    best = masked.argmax(-1)
    np.put_along_axis(others := masked.copy(), best[..., None], -np.inf, -1)
    shares = np.exp(others - others.max(-1, keepdims=True))
    mean = (shares * t).sum(-1) / shares.sum(-1)
    weights = book.weights[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = weights / (1 - weights) * (whole[0][..., None] - t)
    place = np.arange(1100) == best[..., None]
    cuts = np.where(place, weights * (mean[..., None] - t), cuts)
    result = ch.AttentionMatrix(case.q, case.k, scale=1.0, engine=engine).cut_effects(v, g)
    assert_close(result[...], cuts, case.restore(Causes(case).allowed) * 10, "cuts")


@each_engine
def test_an_infinite_logit_leaves_no_number_in_its_row(engine: str):
    q, v, g = normal(4, 3), normal(4, 3), normal(4, 3)
    bias = np.zeros((4, 4))
    bias[2, 1] = np.inf
    for E in (
        ch.AttentionMatrix(q, q, bias=bias, causal=True, engine=engine).cut_effects(v, g),
        ch.AttentionMatrix(q, q, bias=bias, causal=True, engine=engine).contributions(v, g),
    ):
        dense = E[...]
        assert np.isnan(dense[2, 1])
        assert np.isfinite(dense[[0, 1, 3]]).all()
        assert dense[2, 3] == 0
        assert (E.top(1).indices[[0, 1, 3]] >= 0).all()


@each_engine
def test_an_infinite_effect_comes_first(engine: str):
    v = np.array([[1.0], [np.inf], [-1.0], [np.nan]])  # which is never listed
    E = ch.AttentionMatrix(normal(1, 2), normal(4, 2), engine=engine).contributions(v, np.ones((1, 1)))
    seen = E.observe(top=4, strongest=4)
    assert (seen.top.values[0, 0], seen.top.indices[0, 0], seen.top.indices[0, 3]) == (np.inf, 1, -1)
    assert (seen.strongest.key[0], len(seen.strongest.key)) == (1, 3)


@each_engine
def test_equal_effects_come_in_the_order_of_their_places(engine: str):
    keys = 600
    A = ch.AttentionMatrix(np.zeros((3, 2, 5, 1)), np.zeros((3, 1, keys, 1)), engine=engine)
    E = A.contributions(np.tile([float(keys), -keys], keys // 2), np.ones(5))
    np.testing.assert_array_equal(E.top(3).indices, np.tile(np.arange(3), (3, 2, 5, 1)))
    place = np.arange(2 * keys + 100)
    edges = E.strongest(len(place))
    places = (place // (10 * keys), place // (5 * keys) % 2, place // keys % 5, place % keys, 1 - place % 2 * 2.0)
    for result, expected in zip(edges, places, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12)
    edges = E.strongest(10**9)
    assert len(edges.value) == 3 * 2 * 5 * keys
    assert (edges.batch[-1], edges.head[-1], edges.query[-1], edges.key[-1]) == (2, 1, 4, keys - 1)


@each_engine
@pytest.mark.parametrize("side", ["E @ x", "E.T @ x"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nonfinite_operand_reaches_only_those_that_see_it(engine: str, side: str, bad: float):
    n, place = 60, 30
    E = ch.AttentionMatrix(*normal(2, 2, n, 8), causal=True, engine=engine).cut_effects(*normal(2, 2, n, 8))
    sees, effects = np.arange(n) >= place, E[..., place]
    if side == "E.T @ x":
        E, sees, effects = E.T, np.arange(n) <= place, E[:, place]
    x = np.ones((n, 3))
    clean = E @ x
    x[place] = bad
    result = E @ x
    np.testing.assert_allclose(result[:, ~sees], clean[:, ~sees], rtol=1e-12)
    np.testing.assert_array_equal(result[:, sees], np.repeat(np.sign(effects[:, sees, None]) * bad, 3, axis=-1))
