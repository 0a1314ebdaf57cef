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
from problems import Case, cases
from slack import Slack, assert_close, dtype_of_statistics

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
def test_products_from_the_right_and_from_the_keys_side(engine: str, case: Case, data: st.DataObject):
    if refused(engine, case):
        return
    matrix, weights, allowed = case.matrix(engine=engine), case.book.weights, Slack(case).weights
    rng, problem = case.rng, case.problem
    dtype = data.draw(st.sampled_from(FLOATS))
    ours, theirs = (_operand(data, rng, problem.prefix, size, dtype) for size in (problem.keys, problem.queries))
    for product, right, left, size in (
        (matrix @ ours, ours, weights, problem.keys),
        (matrix.T @ theirs, theirs, weights.swapaxes(-1, -2), problem.queries),
    ):
        spread = right.astype(np.float64)
        spread = np.broadcast_to(spread[:, None] if spread.ndim == 1 else spread, (*problem.prefix, *spread.shape[-2:] if spread.ndim > 1 else (size, 1)))
        spread = spread.reshape(problem.batch, problem.heads, *spread.shape[-2:])
        slack = (allowed if left is weights else allowed.swapaxes(-1, -2)) @ np.abs(spread)
        truth = left @ spread
        if left is weights:
            import ml_dtypes
            slack = slack + float(ml_dtypes.finfo(case.q.dtype).eps) * np.abs(truth) + float(ml_dtypes.finfo(case.q.dtype).smallest_subnormal)
        truth, slack = (problem.restore(x) for x in (truth, slack))
        if right.ndim == 1:
            truth, slack = truth[..., 0], slack[..., 0]
        assert_close(product, truth, slack, "product")
