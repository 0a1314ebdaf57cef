"""Every engine against the float64 reference: the same meaning, or a refusal that `reasons_not` announced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import clearhead as ch
from clearhead import engines, reference
from clearhead.arrays import FLOATS
from clearhead.axes import Array
from clearhead.errors import EngineError
from problems import Case, cases, draw_layout
from slack import Slack, assert_close, dtype_of_statistics, rounding

every_engine = pytest.mark.parametrize("engine", engines.NAMES)


def refused(engine: str, case: Case) -> bool:
    """Does this engine refuse the problem? Then it must say why, all of it, and run nothing."""
    reasons = engines.get(engine).reasons_not(case.problem)
    if reasons:
        with pytest.raises(EngineError) as error:
            case.attention(engine=engine)
        assert all(reason in str(error.value) for reason in reasons)
    return bool(reasons)


@every_engine
@given(case=cases(), top=st.integers(1, 9))
def test_output_and_row_statistics(engine: str, case: Case, top: int):
    if refused(engine, case):
        return
    seen = case.matrix(engine=engine).observe(
        case.v, logsumexp=True, max_logit=True, entropy=True, distance=True, top=top
    )
    book, slack, restore = case.book, Slack(case), case.restore
    assert book.output is not None
    expected = {
        "logsumexp": book.logsumexp,
        "max_logit": reference.max_logit(book),
        "entropy": reference.entropy(book),
        "distance": reference.distance(case.problem, book),
    }
    for name, truth in expected.items():
        assert_close(getattr(seen, name), restore(truth), restore(slack.row(name)), name)
        assert getattr(seen, name).dtype == dtype_of_statistics(case.problem)
    assert_close(seen.output, restore(book.output), restore(slack.output(case.q.dtype)), "output")
    assert seen.output.dtype == case.q.dtype
    assert (seen.received, seen.peak, seen.image, seen.groups) == (None, None, None, None)
    assert_top(case, seen.top, top)


def assert_top(case: Case, top: Any, count: int) -> None:
    """Weights as the reference's; the keys are different ones, visible, and hold those weights."""
    book, slack = case.book, Slack(case)
    weights, indices = reference.top(book, count)
    found, places = (x.reshape(weights.shape) for x in top)
    at = np.maximum(indices, 0)
    allowed = np.take_along_axis(slack.weights, at, -1) if book.weights.shape[-1] else 0
    assert_close(found, weights, allowed, "top weights")
    np.testing.assert_array_equal(places < 0, indices < 0)
    if book.weights.shape[-1]:
        held = np.where(places < 0, 0, np.take_along_axis(book.weights, np.maximum(places, 0), -1))
        assert_close(held, weights, allowed, "what lies at the top's keys")
    chosen = np.sort(places, axis=-1)
    assert not ((chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)).any()


@every_engine
@given(case=cases(), height=st.integers(1, 70), width=st.integers(1, 70))
def test_column_statistics(engine: str, case: Case, height: int, width: int):
    if refused(engine, case):
        return
    labels = case.labels()
    seen = case.matrix(engine=engine).observe(received=True, peak=True, image=(height, width), groups=labels)
    assert_columns(case, seen, slice(None), (height, width), labels)
    assert (seen.output, seen.logsumexp, seen.entropy, seen.top) == (None, None, None, None)


@every_engine
@given(case=cases(), data=st.data())
def test_statistics_of_some_queries_only(engine: str, case: Case, data: st.DataObject):
    if refused(engine, case):
        return
    queries = data.draw(st.slices(case.problem.queries))
    labels, matrix = case.labels(), case.matrix(engine=engine)
    if data.draw(st.booleans()):
        matrix.logsumexp()  # known before, or not: the same answer
    seen = matrix.observe(
        case.v, logsumexp=True, entropy=True, distance=True, top=3, received=True, peak=True, image=(5, 7),
        groups=labels, queries=queries,
    )  # fmt: skip
    full = matrix.observe(case.v, logsumexp=True, entropy=True, distance=True, top=3)
    for name in ("logsumexp", "entropy", "distance"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(full, name)[..., queries])
    np.testing.assert_array_equal(seen.output, full.output[..., queries, :])
    for mine, whole in zip(seen.top, full.top, strict=True):
        np.testing.assert_array_equal(mine, whole[..., queries, :])
    assert_columns(case, seen, queries, (5, 7), labels)
    assert (seen.queries, seen.keys) == (full.output[..., queries, :].shape[-2], case.problem.keys)


def assert_columns(
    case: Case, seen: ch.Observation, queries: slice, pixels: tuple[int, int], labels: tuple[Array, Array]
) -> None:
    slack, restore = Slack(case), case.restore
    chosen = np.isin(np.arange(case.problem.queries), np.arange(case.problem.queries)[queries])[:, None]
    book = replace(case.book, weights=case.book.weights * chosen)
    allowed = replace(case.book, weights=slack.weights * chosen)
    assert_close(seen.received, restore(reference.received(book)), restore(reference.received(allowed)), "received")
    assert_close(seen.peak, restore(reference.peak(book)), restore(reference.peak(allowed)), "peak")
    sides = ((labels[0], case.problem.queries), (labels[1], case.problem.keys))
    rows, cols = (np.broadcast_to(x, (*case.problem.prefix[:-1], n)).reshape(case.problem.batch, n) for x, n in sides)
    truth, within = reference.groups(book, rows, cols), reference.groups(allowed, rows, cols)
    assert_close(seen.groups, restore(truth), restore(within), "groups")
    some = case.book.weights[:, :, queries]
    picture = reference.image(replace(book, weights=some), *pixels)
    assert_close(seen.image, restore(picture), restore(slack.image(some, *pixels)), "image")


@every_engine
@given(case=cases(), data=st.data())
def test_indexing_is_that_of_a_numpy_array(engine: str, case: Case, data: st.DataObject):
    if refused(engine, case):
        return
    matrix = case.matrix(engine=engine)
    assert matrix.shape == case.restore(case.book.weights).shape
    index = data.draw(basic_indices(matrix.shape))
    flipped = data.draw(basic_indices(matrix.T.shape))
    if data.draw(st.booleans()):
        matrix.logsumexp()
    tile, turned = matrix[index], matrix.T[flipped]
    dense = np.asarray(matrix)
    assert_close(dense, case.restore(case.book.weights), case.restore(Slack(case).weights), "dense")
    np.testing.assert_array_equal(tile, dense[index], strict=True)
    np.testing.assert_array_equal(turned, dense.swapaxes(-1, -2)[flipped], strict=True)


@every_engine
@given(case=cases(), data=st.data())
def test_products_from_the_right(engine: str, case: Case, data: st.DataObject):
    if refused(engine, case):
        return
    right = draw_operand(data, case, case.problem.keys, (case.problem.heads, case.problem.kv_heads))
    spread, restore = spread_over_heads(case, right), case.restore
    truth = case.book.weights @ spread
    allowed = Slack(case).weights @ np.abs(spread) + rounding(truth, case.q.dtype)
    truth, allowed = (restore(x)[..., 0] if right.ndim == 1 else restore(x) for x in (truth, allowed))
    product = case.matrix(engine=engine) @ right
    assert_close(product, truth, allowed, "A @ v")
    assert product.dtype == case.q.dtype


@every_engine
@given(case=cases(), data=st.data())
def test_products_from_the_keys_side(engine: str, case: Case, data: st.DataObject):
    if refused(engine, case):
        return
    right = draw_operand(data, case, case.problem.queries, (case.problem.heads,))
    if data.draw(st.booleans()):
        right = right * (np.arange(case.problem.queries) == 1).reshape(-1, *(1,) * (right.ndim > 1)).astype(right.dtype)
    spread, restore, matrix = spread_over_heads(case, right), case.restore, case.matrix(engine=engine)
    truth = case.book.weights.swapaxes(-1, -2) @ spread
    allowed = Slack(case).weights.swapaxes(-1, -2) @ np.abs(spread) + rounding(truth, dtype_of_statistics(case.problem))
    truth, allowed = (restore(x)[..., 0] if right.ndim == 1 else restore(x) for x in (truth, allowed))
    assert_close(matrix.T @ right, truth, allowed, "A.T @ g")
    ones = np.ones(case.problem.queries)
    mass = restore(reference.received(replace(case.book, weights=Slack(case).weights)))
    assert_close(matrix.T @ ones, matrix.received(), mass, "A.T @ ones")


def draw_operand(data: st.DataObject, case: Case, length: int, heads: tuple[int, ...]) -> Array:
    """What a product takes: one vector or matrix for all heads, or a matrix for each."""
    lead = case.problem.prefix and (*case.problem.prefix[:-1], data.draw(st.sampled_from(heads)))
    width = data.draw(st.sampled_from((1, 2, 5, 65)))
    shape = data.draw(st.sampled_from(((length,), (length, width), (*lead, length, width))))
    numbers = case.rng.standard_normal(shape).astype(data.draw(st.sampled_from(FLOATS)))
    return numbers if numbers.ndim == 1 else draw_layout(data.draw, numbers)


def spread_over_heads(case: Case, right: Array) -> Array:
    """The operand in float64 as (batch, heads, length, d)."""
    columns = (right[:, None] if right.ndim == 1 else right).astype(np.float64)
    if columns.ndim == 2:
        return np.broadcast_to(columns, (case.problem.batch, case.problem.heads, *columns.shape))
    each = columns.reshape(case.problem.batch, *columns.shape[-3:])
    return np.repeat(each, case.problem.heads // each.shape[1], axis=1)
