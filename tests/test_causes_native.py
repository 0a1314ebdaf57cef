"""What single edges did, by the native engine: its tiles against the definition in float64, its sums against them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.core import reference
from clearhead.core.axes import Array
from clearhead.core.effects import ORDERS, Order, Terms, WantedEffects, terms_of_cuts
from clearhead.core.problem import describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines import native
from clearhead.engines.threads import get_num_threads, set_num_threads
from parts import only_batch, only_queries
from problems import Case, cases, draw_layout, examples
from seeds import fresh
from slack import Slack, assert_close

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
KINDS = ("contribution", "cut")
# The weight's error relative to it, a quotient of two of them, and the error of t and of its mean: a few of each.
FACTOR = 4


@dataclass(frozen=True)
class Edges:
    """A problem with a derivative g by the output."""

    case: Case
    g: Array
    kind: str

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.case.problem, self.case.given.q, self.case.given.k, self.case.given.v, self.g

    @cached_property
    def terms(self) -> Terms:
        problem, q, k, *_ = self.arrays
        lse = native.rows(problem, q, k, None, Wanted(output=False, logsumexp=True))["logsumexp"]
        if self.kind == "contribution":
            return Terms("contribution", lse)
        return terms_of_cuts(native.others(*self.arrays), problem.sinks, lse)

    @cached_property
    def tile(self) -> Array:
        return native.effect_tile(*self.arrays, self.terms)

    def effects(self, **asked: Any) -> dict[str, Array]:
        return dict(native.effects(*self.arrays, self.terms, WantedEffects(**asked)))

    def everything(self) -> dict[str, Array]:
        """All that can be observed, and the products."""
        problem = self.case.problem
        if not problem.queries * problem.keys * problem.batch:
            return {}
        labels = [
            np.broadcast_to(x, (problem.batch, x.shape[-1]))
            for x in (self.case.rng.integers(-1, 3, problem.queries), self.case.rng.integers(-1, 4, problem.keys))
        ]
        groups = Groups(*labels, (3, 4))
        found = self.effects(by_key=True, by_query=True, top=3, strongest=5, image=(7, 11), groups=groups)
        return {**found, "tile": self.tile, "E·x": self.product(False), "Eᵀ·x": self.product(True)}

    def operand(self, transposed: bool) -> Array:  # noqa: FBT001
        problem = self.case.problem
        rows = problem.queries if transposed else problem.keys
        return self.case.rng.standard_normal((problem.batch, 1, rows, 5)).astype(np.float32)

    def product(self, transposed: bool) -> Array:  # noqa: FBT001
        return native.effect_product(*self.arrays, self.terms, self.operand(transposed), transposed=transposed)


@st.composite
def edges(draw: st.DrawFn, **limits: Any) -> Edges:
    case = draw(cases(**limits))
    problem = case.problem
    g = case.rng.standard_normal((problem.batch, problem.heads, problem.queries, case.given.v.shape[-1]))
    return Edges(case, draw_layout(draw, g.astype(problem.dtype)), draw(st.sampled_from(KINDS)))


def truth_of(given: Edges) -> tuple[Array, Array]:
    """The effects by definition, and the error that rounding may cause."""
    case, slack = given.case, Slack(given.case)
    a, v = case.book.weights, np.abs(case.given.v.astype(np.float64))
    v = np.repeat(v, case.problem.heads // max(1, v.shape[1]), axis=1)
    size = np.abs(given.g.astype(np.float64)) @ v.swapaxes(-1, -2)  # of the products in each t
    logit = FACTOR * slack.logit[..., None]
    if given.kind == "contribution":
        exact = reference.contributions(case.problem, case.book, case.given.v, given.g)
        return exact, (logit * a + slack.tiny) * size + slack.tiny
    exact = reference.cuts(case.problem, case.book, case.given.v, given.g)
    whole = (a * size).sum(-1, keepdims=True)
    best = a.argmax(-1)[..., None] if a.shape[-1] else np.zeros((*a.shape[:-1], 0), np.int64)
    rest = a.copy()
    np.put_along_axis(rest, best, 0, -1)
    lse = np.where(np.isneginf(case.book.logsumexp), 0.0, case.book.logsumexp)
    sinks = np.zeros(lse.shape) if case.problem.sinks is None else np.exp(case.problem.sinks[:, None] - lse)
    left = (rest.sum(-1) + sinks)[..., None]
    others = (rest * size).sum(-1, keepdims=True) / np.where(left == 0, 1.0, left)
    near = a >= 0.6
    share = np.where(near, a, a / np.where(near, 1.0, 1 - a))
    return exact, (logit * share + slack.tiny) * (np.where(near, others, whole) + size) + slack.tiny


@examples(2)
@given(edges(most=20_000))
def test_tiles_equal_the_definition(drawn: Edges) -> None:
    assert_close(drawn.tile, *truth_of(drawn), drawn.kind)


@examples(2)
@given(edges(most=40_000), st.sampled_from(ORDERS), st.integers(1, 40))
def test_sums_and_lists_are_those_of_the_tile(drawn: Edges, order: Order, count: int) -> None:
    problem, tile = drawn.case.problem, drawn.tile
    found = drawn.everything()
    if not found:
        return
    wide, eps = tile.astype(np.float64), 2 * float(np.finfo(tile.dtype).eps)
    size, tiny = np.abs(wide), 1e-37
    assert_close(found["by_key"], wide.sum(-2), 16 * eps * size.sum(-2) + tiny, "by_key")
    assert_close(found["by_query"], wide.sum(-1), 16 * eps * size.sum(-1) + tiny, "by_query")
    labels = drawn.case.rng.integers(-1, 3, problem.queries), drawn.case.rng.integers(-1, 4, problem.keys)
    rows, cols = ((np.arange(n)[:, None] == x).astype(float) for n, x in zip((3, 4), labels, strict=True))
    assert_close(found["groups"], rows @ wide @ cols.T, 64 * eps * (rows @ size @ cols.T) + tiny, "groups")
    rows, cols = reference._areas(7, problem.queries), reference._areas(11, problem.keys)
    allowed = 64 * eps * (rows @ size @ cols.T) + 100 * eps * size.max(initial=0) + tiny
    assert_close(found["image_mean"], rows @ wide @ cols.T, allowed, "image")
    for name, whole, transposed in (("E·x", wide, False), ("Eᵀ·x", wide.swapaxes(-1, -2), True)):
        x = drawn.operand(transposed).astype(np.float64)
        assert_close(
            found[name], whole @ x, 2 * (64 + problem.queries) * eps * (np.abs(whole) @ np.abs(x)) + tiny, name
        )
    check_lists(drawn, order, count)
    for y, x in np.ndindex(7, 11):  # a border may be a rounding away from its pixel
        sure, maybe = (size[..., rows[y] > least, :][..., cols[x] > least] for least in (1e-9, 0))
        largest = np.abs(found["image_largest"][..., y, x])
        assert (largest >= sure.max(axis=(-1, -2), initial=0)).all()
        assert (largest <= maybe.max(axis=(-1, -2), initial=0)).all()


def check_lists(drawn: Edges, order: Order, count: int) -> None:
    """Equal to the tile's own order, to the bit; of equal effects the earlier key, or the earlier place."""
    tile, hidden = drawn.tile, np.isneginf(drawn.case.book.masked)
    found = drawn.effects(top=count, order=order, strongest=count)
    by = {"magnitude": -np.abs(tile), "largest": -tile, "smallest": tile}[order]
    first = np.argsort(np.where(hidden, np.inf, by), axis=-1, kind="stable")[..., :count]
    none = np.take_along_axis(hidden, first, -1)
    n = first.shape[-1]
    np.testing.assert_array_equal(found["top_indices"][..., :n], np.where(none, -1, first))
    np.testing.assert_array_equal(found["top_values"][..., :n], np.where(none, 0, np.take_along_axis(tile, first, -1)))
    assert (found["top_indices"][..., n:] == -1).all()
    assert (found["top_values"][..., n:] == 0).all()
    flat, gone = (x.reshape(*tile.shape[:2], -1) for x in (tile, hidden))
    first = np.argsort(np.where(gone, np.inf, -np.abs(flat)), axis=-1, kind="stable")[..., :count]
    none = np.take_along_axis(gone, first, -1)
    n = first.shape[-1]
    np.testing.assert_array_equal(found["strongest_indices"][..., :n], np.where(none, -1, first))
    values = np.where(none, 0, np.take_along_axis(flat, first, -1))
    np.testing.assert_array_equal(found["strongest_values"][..., :n], values)
    assert (found["strongest_indices"][..., n:] == -1).all()


def same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name, strict=True)


@given(edges(), st.sampled_from((2, 5)))
def test_threads_and_strides_change_no_bit(drawn: Edges, count: int) -> None:
    case, before = drawn.case, get_num_threads()
    plain = Case(*(np.ascontiguousarray(x) for x in (case.q, case.k, case.v)), case.rules, case.seed)
    try:
        set_num_threads(1)
        alone = drawn.everything()
        set_num_threads(count)
        same(Edges(plain, np.ascontiguousarray(drawn.g), drawn.kind).everything(), alone)
    finally:
        set_num_threads(before)


def test_threads_change_no_bit_of_several_segments() -> None:
    rng, before = fresh(), get_num_threads()
    q, k, v, g = (rng.standard_normal((1, 2, 700, 16)).astype(np.float32) for _ in range(4))
    try:
        found = []
        for count in (1, 2, 5):
            set_num_threads(count)
            found.append(Edges(Case(q, k, v, {"causal": True}, 0), g, "cut").everything())
        for other in found[1:]:
            same(other, found[0])
    finally:
        set_num_threads(before)


@given(edges(axes=(4,)), st.data())
def test_a_row_has_the_same_bits_whatever_the_others(drawn: Edges, data: st.DataObject) -> None:
    case, g, rows = drawn.case, drawn.g, ("by_query", "top_values", "top_indices")
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, case.problem.queries)] * 2)))
    few = Edges(only_queries(case, start, stop), g[:, :, start:stop], drawn.kind)
    np.testing.assert_array_equal(few.tile, drawn.tile[:, :, start:stop])
    found, whole = few.everything(), drawn.everything()
    same({x: found[x] for x in rows if found}, {x: whole[x][:, :, start:stop] for x in rows if found})
    if case.q.shape[0]:
        at = data.draw(st.integers(0, case.q.shape[0] - 1))
        one = Edges(only_batch(case, at), g[at : at + 1], drawn.kind)
        alone = {"by_key": True, "top": 2, "strongest": 3, "image": (3, 5)}
        if drawn.case.problem.queries * drawn.case.problem.keys:
            same(one.effects(**alone), {name: x[at : at + 1] for name, x in drawn.effects(**alone).items()})


@given(edges(), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_nonfinite_values_reach_only_rows_that_see_them(drawn: Edges, bad: float) -> None:
    case = drawn.case
    if not case.book.weights.size:
        return
    at = case.seed % case.problem.keys
    given, sees = case.given, ~np.isneginf(case.book.masked[..., at])
    v = given.v.copy()
    v[:, :, at] = bad
    dirty = describe(given.q, given.k, v, {})
    assert dirty.v is not None
    arrays = (case.problem, given.q, given.k, v, drawn.g)
    terms = (
        drawn.terms
        if drawn.kind != "cut"
        else terms_of_cuts(native.others(*arrays), case.problem.sinks, drawn.terms.logsumexp)
    )
    tile = native.effect_tile(*arrays, terms)
    np.testing.assert_array_equal(tile[~sees], drawn.tile[~sees])
    found = native.effects(*arrays, terms, WantedEffects(by_query=True, by_key=True))
    clean = drawn.effects(by_query=True, by_key=True)
    np.testing.assert_array_equal(found["by_query"][~sees], clean["by_query"][~sees])
    if not sees.any():
        same(dict(found), clean)


def test_a_row_that_sees_one_key() -> None:
    rng = fresh()
    q, k, v, g = (rng.standard_normal((2, 3, 150, 20)) for _ in range(4))
    case = Case(q, k, v, {"window": (0, 0)}, 0)
    whole = (g * v).sum(-1)
    for kind, sign in (("contribution", 1), ("cut", -1)):
        found = Edges(case, g, kind)
        np.testing.assert_allclose(found.tile, sign * whole[..., None] * np.eye(150), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rest", [1e-12, 1e-60])
@pytest.mark.parametrize("sinks", [None, [-1.0], [-40.0]])
def test_a_weight_near_one(dtype: Any, rest: float, sinks: list[float] | None) -> None:
    rng, n, m = fresh(), 40, 600
    logits = rng.standard_normal(m) + np.log(rest / m)
    at = rng.integers(m)
    logits[at] = 0
    q, k = np.ones((1, 1, n, 1), dtype), logits.astype(dtype).reshape(1, 1, m, 1)
    v, g = (rng.standard_normal((1, 1, size, 8)).astype(dtype) for size in (m, n))
    rules = {"scale": 1.0} | ({} if sinks is None else {"sinks": sinks})
    found = Edges(Case(q, k, v, rules, 0), g, "cut").tile[0, 0, :, at]
    long = np.longdouble
    x = k[0, 0, :, 0].astype(long)
    t = g[0, 0].astype(long) @ v[0, 0].astype(long).T
    power = np.exp(x) * (np.arange(m) != at)
    sink = long(0) if sinks is None else np.exp(long(sinks[0]))
    mean = (t * power).sum(-1) / (power.sum() + sink)
    truth = 1 / (1 + power.sum() + sink) * (mean - t[:, at])
    size = (np.abs(g[0, 0]) @ np.abs(v[0, 0]).T).max(-1)
    allowed = 8 * float(np.finfo(dtype).eps) * (1 + np.abs(logits).max()) * size
    assert_close(found, truth.astype(np.float64), allowed)


@pytest.mark.parametrize("transposed", [False, True])
def test_nonfinite_rows_of_x_reach_only_what_sees_them(transposed: bool) -> None:  # noqa: FBT001
    rng = fresh()
    q, k, v, g = (rng.standard_normal((1, 2, 60, 8)) for _ in range(4))
    drawn = Edges(Case(q, k, v, {"causal": True}, 0), g, "cut")
    x = rng.standard_normal((1, 1, 60, 3))
    clean = native.effect_product(*drawn.arrays, drawn.terms, x, transposed=transposed)
    x[:, :, 30] = np.nan
    found = native.effect_product(*drawn.arrays, drawn.terms, x, transposed=transposed)
    blind = slice(31, None) if transposed else slice(None, 30)
    np.testing.assert_allclose(found[:, :, blind], clean[:, :, blind], rtol=1e-12)
    assert np.isnan(found[:, :, slice(None, 31) if transposed else slice(30, None)]).all()
