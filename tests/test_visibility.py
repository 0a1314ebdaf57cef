"""Visibility in its three forms: dense, for one block, and as the span of keys outside which a block can be skipped."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from problems import Case, cases, examples

RANGED = ("causal", "window", "kv_lengths", "query_lengths", "query_offset")  # rules by which blocks can be skipped


def draw_part(data: st.DataObject, case: Case) -> tuple[Problem, Array]:
    """Some queries and keys, with steps of either sign, and the visibility among them."""
    rows, cols = (range(n)[data.draw(st.slices(n))] for n in (case.problem.queries, case.problem.keys))
    dense = visibility.dense(case.problem)[:, :, list(rows)][..., list(cols)]
    return case.problem.take(rows, cols), dense


def draw_block(data: st.DataObject, size: int) -> slice:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))
    return slice(start, stop)


@given(case=cases(most=2000), data=st.data())
def test_a_part_has_the_same_visibility_as_in_the_whole_problem(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    np.testing.assert_array_equal(visibility.dense(part), dense)


@given(case=cases(most=2000), data=st.data())
def test_the_visibility_of_a_block_is_its_part_of_the_whole(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    rows, cols = draw_block(data, part.queries), draw_block(data, part.keys)
    for batch, head in np.ndindex(dense.shape[:2]):
        tile, truth = visibility.tile(part, batch, head, rows, cols), dense[batch, head, rows, cols]
        if isinstance(tile, bool):
            assert (truth == tile).all()
        else:
            np.testing.assert_array_equal(tile, truth)


@given(case=cases(most=2000), data=st.data())
def test_no_key_outside_the_spans_is_visible(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    rows, cols = draw_block(data, part.queries), draw_block(data, part.keys)
    for batch in range(part.batch):
        keys, queries = visibility.key_span(part, batch, rows), visibility.query_span(part, batch, cols)
        assert outside(dense[batch, :, rows], keys, -1).sum() == 0
        assert outside(dense[batch, :, :, cols], queries, -2).sum() == 0


@examples(3)
@given(case=cases(rules=RANGED, most=400), data=st.data())
def test_spans_are_as_short_as_possible(case: Case, data: st.DataObject):
    """For one query or one key the span is exactly what it sees."""
    part, dense = draw_part(data, case)
    for batch in range(part.batch):
        for i in range(part.queries):
            keys = visibility.key_span(part, batch, slice(i, i + 1))
            np.testing.assert_array_equal(np.flatnonzero(dense[batch, 0, i]), np.arange(part.keys)[keys])
        for j in range(part.keys):
            queries = visibility.query_span(part, batch, slice(j, j + 1))
            np.testing.assert_array_equal(np.flatnonzero(dense[batch, 0, :, j]), np.arange(part.queries)[queries])


def outside(seen: Array, span: slice, axis: int) -> Array:
    """What is visible outside a span."""
    inside: Any = np.zeros(seen.shape[axis], bool)
    inside[span] = True
    return seen & ~(inside if axis == -1 else inside[:, None])


@given(case=cases(most=2000), data=st.data())
def test_positions_count_in_the_whole_matrix(case: Case, data: st.DataObject):
    part, _ = draw_part(data, case)
    offset = np.broadcast_to(np.asarray(case.rules.get("query_offset", 0)), case.problem.prefix[:-1]).reshape(-1)
    for batch in range(part.batch):
        place = visibility.positions(part, batch, slice(0, part.queries))
        np.testing.assert_array_equal(place, np.array(part.rows, int) + offset[batch])
        far = visibility.distances(part, batch, slice(0, part.queries), slice(0, part.keys))
        np.testing.assert_array_equal(far, np.abs(place[:, None] - np.array(part.cols, int)))
