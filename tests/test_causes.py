"""Contributions and cuts of single edges: those of the float64 reference, of forbidding each, and of tiles."""

from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import clearhead as ch
from cause_problems import (
    ENGINES,
    Causes,
    along,
    check_elements,
    check_observed,
    covered,
    each_engine,
    signed_largest,
)
from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.effects import Terms, terms_of_cuts
from clearhead.core.statistics import Wanted
from clearhead.engines import native, state_of
from problems import Case, cases, draw_layout, examples, on_every_engine
from seeds import fresh, normal
from slack import assert_close
from test_reference import areas

KIND = st.sampled_from(("cut", "contribution", "moved"))
SMALL = {"most": 3000}  # the reference's cuts take O(queries·keys²)
FEW = {"most": 80, "most_heads": 6}  # every edge is forbidden in turn


@on_every_engine(ENGINES, times=0.7, limits=SMALL, kind=KIND, data=st.data())
def test_effects_are_the_references(engine: str, case: Case, kind: str, data: st.DataObject):
    check_elements(engine, case, kind, data.draw(basic_indices(case.matrix().shape)))


@on_every_engine(ENGINES, times=0.7, limits=SMALL, kind=KIND, pixels=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_what_is_observed_is_numpys_answer_to_the_effects(engine: str, case: Case, kind: str, pixels: tuple[int, int]):
    check_observed(engine, case, kind, pixels)


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
    np.testing.assert_allclose(E.image(2, 3).largest, 1, rtol=1e-12)


@each_engine
def test_a_picture_shows_the_positive_of_equal_effects_and_nan(engine: str):
    """All weights are equal, so that effects of one size are equal to the bit wherever they lie: in several tiles."""
    queries, keys = 150, 1100
    v, g = fresh().choice([-2.0, -1, 1, 2], (2, keys, 1)), fresh().choice([-1.0, 1], (1, queries, 1))
    v[0] = np.sign(v[0])
    A = ch.AttentionMatrix(np.zeros((1, queries, 1)), np.zeros((1, keys, 1)), engine=engine)
    pixels = tuple(fresh().integers(1, 4, 2).tolist())
    for values in v:
        E = A.contributions(values[None], g)
        for height, width in (pixels, (1, 1)):
            expected = signed_largest(g[None] * values[:, 0] / keys, height, width)[0]
            np.testing.assert_allclose(E.image(height, width).largest, expected, rtol=1e-12)
    place = fresh().integers(keys)
    v[0, place] = np.nan
    result = A.contributions(v[:1], g).image(1, pixels[1]).largest
    under = [place in range(keys)[covered(pixel, pixels[1], keys)] for pixel in range(pixels[1])]
    np.testing.assert_array_equal(np.isnan(result), np.broadcast_to(under, result.shape))


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


compiled = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
KINDS = ("contribution", "cut")


@dataclass(frozen=True)
class Drawn:
    """A problem with a derivative g by the output."""

    case: Case
    g: Array
    kind: str

    @cached_property
    def terms(self) -> Terms:
        call = self.case.given
        state = state_of(native, call)
        if self.kind == "contribution":
            return Terms("contribution", state, g=self.g)
        return replace(terms_of_cuts(native.others(call, self.g), call.problem.sinks, state), g=self.g)

    @cached_property
    def tile(self) -> Array:
        return native.weights(self.case.given, self.terms)

    def effects(self, **asked: Any) -> dict[str, Array]:
        return dict(native.columns(self.case.given, self.terms, Wanted(of="effects", **asked)))


@st.composite
def edges(draw: st.DrawFn, **limits: Any) -> Drawn:
    case = draw(cases(**limits))
    problem = case.problem
    g = case.rng.standard_normal((problem.batch, problem.heads, problem.queries, case.given.v.shape[-1]))
    return Drawn(case, draw_layout(draw, g.astype(problem.dtype)), draw(st.sampled_from(KINDS)))


@compiled
@given(edges(most=40_000))
def test_sums_are_those_of_the_tile(drawn: Drawn) -> None:
    """Over more keys than the definition of cuts, which takes O(queries·keys²), can be computed for."""
    problem, tile, rng = drawn.case.problem, drawn.tile, drawn.case.rng
    if not tile.size:
        return
    n, m = tile.shape[-2:]
    labels = rng.integers(-1, 3, n), rng.integers(-1, 4, m)
    wide, eps = tile.astype(np.float64), float(np.finfo(tile.dtype).eps)
    members = [(np.arange(count)[:, None] == x).astype(float) for count, x in zip((3, 4), labels, strict=True)]
    sides = {
        "by_key": (np.ones((1, n)), np.eye(m)),
        "by_query": (np.eye(n), np.ones((m, 1))),
        "groups": (members[0], members[1].T),
        "image_mean": (areas(7, n), areas(11, m).T),
    }
    groups = (*(np.broadcast_to(x, (problem.batch, len(x))) for x in labels), (3, 4))
    result = drawn.effects(by_key=True, by_query=True, image=(7, 11), groups=groups)
    for name, (left, right) in sides.items():
        allowed = 128 * eps * (left @ np.abs(wide) @ right) + 200 * eps * np.abs(wide).max() + 1e-37
        assert_close(result[name].reshape(*tile.shape[:2], len(left), -1), left @ wide @ right, allowed, name)


@compiled
@examples(2)
@given(edges(most=40_000), st.integers(1, 40))
def test_lists_are_those_of_the_tile_to_the_bit(drawn: Drawn, count: int) -> None:
    """Of equal effects the earlier key, or the earlier place."""
    if not drawn.tile.size:
        return
    tile, hidden = drawn.tile, np.isneginf(drawn.case.book.masked)
    result = drawn.effects(top=count, strongest=count)
    first = np.argsort(np.where(hidden, np.inf, -np.abs(tile)), axis=-1, kind="stable")[..., :count]
    none = np.take_along_axis(hidden, first, -1)
    n = first.shape[-1]
    np.testing.assert_array_equal(result["top_indices"][..., :n], np.where(none, -1, first))
    np.testing.assert_array_equal(result["top_values"][..., :n], np.where(none, 0, np.take_along_axis(tile, first, -1)))
    assert (result["top_indices"][..., n:] == -1).all()
    assert (result["top_values"][..., n:] == 0).all()
    flat, gone = (x.reshape(*tile.shape[:2], -1) for x in (tile, hidden))
    first = np.argsort(np.where(gone, np.inf, -np.abs(flat)), axis=-1, kind="stable")[..., :count]
    none = np.take_along_axis(gone, first, -1)
    n = first.shape[-1]
    np.testing.assert_array_equal(result["strongest_indices"][..., :n], np.where(none, -1, first))
    values = np.where(none, 0, np.take_along_axis(flat, first, -1))
    np.testing.assert_array_equal(result["strongest_values"][..., :n], values)
    assert (result["strongest_indices"][..., n:] == -1).all()
