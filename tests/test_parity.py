"""Every engine against the float64 reference: the same meaning, or a refusal that `reasons_not` announced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import clearhead as ch
from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array
from clearhead.core.statistics import PER_QUERY, listed
from problems import Case, draw_layout, each_engine, on_every_engine, refused
from slack import Slack, assert_close, assert_columns, assert_rows, rounding

HALVES = tuple(dtype for dtype in FLOATS if dtype.itemsize == 2)
every_engine = each_engine()


@on_every_engine(top=st.integers(1, 9))
def test_output_and_row_statistics(engine: str, case: Case, top: int):
    asked: Any = dict.fromkeys(listed(axes=PER_QUERY), True)
    seen = case.matrix(engine=engine).observe(case.v, top=top, **asked)
    assert_rows(case, seen, top, engine)
    assert (seen.received, seen.peak, seen.image, seen.groups) == (None, None, None, None)


def pooled_for(engine: str, case: Case, *pixels: int) -> tuple[tuple[int, int] | None, tuple[Array, Array] | None]:
    """The size of an image and the labels of groups, if the engine pools weights."""
    return (pixels, case.labels()) if "groups" in engines.get(engine).STATISTICS else (None, None)


@on_every_engine(height=st.integers(1, 70), width=st.integers(1, 70))
def test_column_statistics(engine: str, case: Case, height: int, width: int):
    pixels, labels = pooled_for(engine, case, height, width)
    seen = case.matrix(engine=engine).observe(received=True, peak=True, image=pixels, groups=labels)
    assert_columns(case, seen, slice(None), pixels, labels)
    assert (seen.output, seen.logsumexp, seen.entropy, seen.top) == (None, None, None, None)


@on_every_engine(data=st.data())
def test_statistics_of_some_queries_only(engine: str, case: Case, data: st.DataObject):
    queries = data.draw(st.slices(case.problem.queries))
    (pixels, labels), matrix = pooled_for(engine, case, 5, 7), case.matrix(engine=engine)
    if data.draw(st.booleans()):
        matrix.logsumexp()  # the log-sum-exp known before, or not
    seen = matrix.observe(
        case.v, logsumexp=True, entropy=True, distance=True, top=3, received=True, peak=True, image=pixels,
        groups=labels, queries=queries,
    )  # fmt: skip
    full = matrix.observe(case.v, logsumexp=True, entropy=True, distance=True, top=3)
    for name in ("logsumexp", "entropy", "distance"):
        assert_same(engine, getattr(seen, name), getattr(full, name)[..., queries])
    assert_same(engine, seen.output, full.output[..., queries, :])
    for ours, whole in zip(seen.top, full.top, strict=True):
        # nearly equal weights may swap places where their last bits differ
        if engine == "native" or ours is seen.top.weights:
            assert_same(engine, ours, whole[..., queries, :])
    assert_columns(case, seen, queries, pixels, labels)
    assert (seen.queries, seen.keys) == (full.output[..., queries, :].shape[-2], case.problem.keys)


def assert_same(engine: str, result: Array, expected: Array) -> None:
    """The same bits on the native engine; the last bits of NumPy's products depend on the block's height."""
    result, expected = np.asarray(result), np.asarray(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if engine != "native":
        low = 1e-13 if result.dtype == np.float64 else 1e-5 if result.dtype == np.float32 else 1e-2
        np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=low, atol=low)
    else:
        np.testing.assert_array_equal(result, expected)


@on_every_engine(data=st.data())
def test_indexing_works_as_on_a_numpy_array(engine: str, case: Case, data: st.DataObject):
    matrix = case.matrix(engine=engine)
    assert matrix.shape == case.restore(case.book.weights).shape
    index = data.draw(basic_indices(matrix.shape))
    if data.draw(st.booleans()):
        matrix.logsumexp()
    tile = matrix[index]
    dense = np.asarray(matrix)
    assert_close(dense, case.restore(case.book.weights), case.restore(Slack(case).weights), "dense")
    assert_same(engine, tile, dense[index])


@every_engine
def test_one_head_taken_backwards(engine: str):
    """NumPy calls an axis of size 1 contiguous, whatever its stride."""
    q, k = (np.random.default_rng(0).standard_normal((1, 2, n, 4)) for n in (2, 3))
    matrix = ch.AttentionMatrix(q, k, alibi_slopes=np.array([0.3, 0.4]), sinks=np.array([0.1, 0.2]), engine=engine)
    assert_same(engine, matrix[:, ::-2], np.asarray(matrix)[:, ::-2])


@on_every_engine(data=st.data())
def test_products_from_the_right(engine: str, case: Case, data: st.DataObject):
    right = draw_operand(data, case, case.problem.keys, (case.problem.heads, case.problem.kv_heads))
    spread, restore = spread_over_heads(case, right), case.restore
    truth = case.book.weights @ spread
    allowed = Slack(case, engine).product(np.abs(spread), truth, case.q.dtype)
    truth, allowed = (restore(x)[..., 0] if right.ndim == 1 else restore(x) for x in (truth, allowed))
    result = case.matrix(engine=engine) @ right
    assert_close(result, truth, allowed, "A @ v")
    assert result.dtype == case.q.dtype


@on_every_engine(data=st.data())
def test_products_from_the_keys_side(engine: str, case: Case, data: st.DataObject):
    right = draw_operand(data, case, case.problem.queries, (case.problem.heads,))
    if data.draw(st.booleans()):
        right = right * (np.arange(case.problem.queries) == 1).reshape(-1, *(1,) * (right.ndim > 1)).astype(right.dtype)
    spread, restore, matrix = spread_over_heads(case, right), case.restore, case.matrix(engine=engine)
    truth = case.book.weights.swapaxes(-1, -2) @ spread
    allowed = Slack(case).weights.swapaxes(-1, -2) @ np.abs(spread) + rounding(truth, matrix.dtype)
    truth, allowed = (restore(x)[..., 0] if right.ndim == 1 else restore(x) for x in (truth, allowed))
    assert_close(matrix.T @ right, truth, allowed, "A.T @ g")
    ones = np.ones(case.problem.queries)
    mass = restore(definition.received(replace(case.book, weights=Slack(case).weights)))
    assert_close(matrix.T @ ones, matrix.received(), mass, "A.T @ ones")


def draw_operand(data: st.DataObject, case: Case, length: int, heads: tuple[int, ...]) -> Array:
    """The operand of a product: one vector or matrix for all heads, or one matrix for each head."""
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


@pytest.mark.parametrize("engine", ["native", "portable"])
def test_the_tolerance_notices_weights_rounded_to_float16(engine: str):
    """CPU engines have a tighter tolerance than one that multiplies float16 by float16."""
    q, k, v = (np.random.default_rng(seed).standard_normal((40, 16)).astype(np.float16) for seed in range(3))
    case = Case(q, k, v, {}, 0)
    rough = (case.book.weights.astype(np.float16).astype(np.float64) @ v.astype(np.float64)).astype(np.float16)
    assert (np.abs(rough - case.book.output) <= Slack(case, "triton").output(q.dtype)).all()
    allowed = Slack(case, engine).output(q.dtype)
    assert (np.abs(rough - case.book.output) > allowed).any()
    if not refused(engine, case):
        assert_close(case.attention(engine=engine), case.restore(case.book.output), case.restore(allowed))
