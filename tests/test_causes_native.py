"""What single edges did, by the native engine: its sums and lists are those of its tiles."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.core.axes import Array
from clearhead.core.effects import Terms, terms_of_cuts
from clearhead.core.statistics import ORDERS, Groups, Order, Wanted
from clearhead.engines import native, state_of
from problems import Case, cases, draw_layout, examples
from slack import assert_close
from test_reference import areas

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
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
    groups = Groups(*(np.broadcast_to(x, (problem.batch, len(x))) for x in labels), (3, 4))
    result = drawn.effects(by_key=True, by_query=True, image=(7, 11), groups=groups)
    for name, (left, right) in sides.items():
        allowed = 128 * eps * (left @ np.abs(wide) @ right) + 200 * eps * np.abs(wide).max() + 1e-37
        assert_close(result[name].reshape(*tile.shape[:2], len(left), -1), left @ wide @ right, allowed, name)


@examples(2)
@given(edges(most=40_000), st.sampled_from(ORDERS), st.integers(1, 40))
def test_lists_are_those_of_the_tile_to_the_bit(drawn: Drawn, order: Order, count: int) -> None:
    """Of equal effects the earlier key, or the earlier place."""
    if not drawn.tile.size:
        return
    tile, hidden = drawn.tile, np.isneginf(drawn.case.book.masked)
    result = drawn.effects(top=count, order=order, strongest=count)
    by = {"magnitude": -np.abs(tile), "largest": -tile, "smallest": tile}[order]
    first = np.argsort(np.where(hidden, np.inf, by), axis=-1, kind="stable")[..., :count]
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
