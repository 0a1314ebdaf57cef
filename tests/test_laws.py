"""Laws of attention that results obey for any inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import visibility
from clearhead.core.axes import Array
from problems import RULES, Case, cases
from slack import Slack, assert_close, rounding

NO_SINKS = tuple(rule for rule in RULES if rule != "sinks")
FLOAT64 = (np.dtype(np.float64),)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


@given(case=cases(rules=NO_SINKS))
def test_each_row_of_weights_sums_to_one_or_is_empty(case: Case):
    dense, sees = np.asarray(case.matrix()), case.restore(visibility.dense(case.problem).any(axis=-1))
    assert (dense >= 0).all()
    sums = dense.astype(np.float64).sum(axis=-1)
    assert_close(sums, sees.astype(np.float64), case.restore(Slack(case).weights.sum(axis=-1)))


@given(case=cases())
def test_a_row_of_weights_and_its_sink_sum_to_one(case: Case):
    sinks = case.rng.standard_normal(case.problem.heads)
    matrix = case.matrix(sinks=sinks)
    lse, sums = np.asarray(matrix.logsumexp(), np.float64), np.asarray(matrix, np.float64).sum(axis=-1)
    share = np.exp(sinks[:, None] - lse.reshape(case.problem.batch, case.problem.heads, case.problem.queries))
    expected = np.where(np.isneginf(lse), 0.0, 1 - case.restore(share))
    with_sinks = replace(case, rules={**case.rules, "sinks": sinks})
    allowed = Slack(with_sinks).weights.sum(axis=-1) + Slack(with_sinks).logit
    assert_close(sums, expected, case.restore(allowed))


@given(case=cases(rules=NO_SINKS))
def test_an_output_lies_in_the_convex_hull_of_its_visible_values(case: Case):
    output, visible = case.attention(), visibility.dense(case.problem)
    group = case.problem.heads // case.problem.kv_heads
    values = np.repeat(case.given.v.astype(np.float64), group, axis=1)[:, :, None]
    seen = visible[..., None]
    low = np.where(seen, values, np.inf).min(axis=-2, initial=np.inf)
    high = np.where(seen, values, -np.inf).max(axis=-2, initial=-np.inf)
    slack = Slack(case).output(case.q.dtype) + rounding(
        np.abs(np.where(seen, values, 0)).max(-2, initial=0), case.q.dtype
    )
    output = output.reshape(low.shape).astype(np.float64)
    sees = visible.any(axis=-1)[..., None]
    assert np.where(sees, (output >= low - slack) & (output <= high + slack), output == 0).all()


@given(case=cases())
def test_a_row_that_sees_nothing_is_zero_and_never_nan(case: Case):
    blind = ~visibility.dense(case.problem).any(axis=-1)
    blind[:, :, : case.problem.queries // 3] = True
    sight = np.broadcast_to(case.restore(~blind)[..., None], case.matrix().shape)
    mask = case.rules.get("mask")
    changes = {"mask": sight if mask is None else mask & sight, "sinks": np.ones(case.problem.heads)}
    seen = case.matrix(**changes).observe(
        case.v, logsumexp=True, max_logit=True, entropy=True, distance=True, top=2, received=True, peak=True
    )
    assert seen.top is not None
    rows = case.restore(blind)
    for name, nothing in {"output": 0, "entropy": 0, "distance": 0, "logsumexp": -np.inf, "max_logit": -np.inf}.items():
        assert (getattr(seen, name)[rows] == nothing).all(), name
        assert not np.isnan(getattr(seen, name).astype(np.float64)).any(), name
    assert (seen.top.weights[rows] == 0).all()
    assert (seen.top.indices[rows] == -1).all()
    assert not np.isnan(seen.received).any()
    assert not np.isnan(seen.peak).any()


@given(case=cases(rules=NO_SINKS, dtypes=FLOAT64), shift=st.floats(-50, 50))
def test_adding_a_number_to_a_row_of_scores_changes_no_weight(case: Case, shift: float):
    bias = np.asarray(case.rules.get("bias", 0.0), np.float64)
    moved = case.matrix(bias=bias + shift)
    allowed = case.restore(Slack(case).weights) * (1 + abs(shift))
    assert_close(np.asarray(moved), np.asarray(case.matrix()), allowed, "weights")
    sees = np.isfinite(case.matrix().logsumexp())
    lse = np.where(sees, moved.logsumexp() - shift, -np.inf)
    assert_close(lse, case.matrix().logsumexp(), case.restore(Slack(case).logit) * (1 + abs(shift)), "logsumexp")


@given(case=cases(rules=("scale", "softcap", "sinks", "segments")))
def test_reordered_keys_reorder_the_weights(case: Case):
    order = case.rng.permutation(case.problem.keys)
    rules = {**case.rules, **{n: case.rules[n][..., order] for n in ("kv_segments",) if n in case.rules}}
    mixed = Case(case.q, case.k[..., order, :], case.v[..., order, :], rules, case.seed)
    slack = Slack(case)
    assert_close(
        np.asarray(mixed.matrix()), np.asarray(case.matrix())[..., order], case.restore(slack.weights)[..., order]
    )
    assert_close(mixed.attention(), case.attention(), 2 * case.restore(slack.output(case.q.dtype)))


@given(case=cases())
def test_fewer_visible_keys_never_raise_the_log_sum_exp(case: Case):
    less = np.broadcast_to(case.rng.random(case.problem.keys) < 0.5, case.matrix().shape)
    mask = case.rules.get("mask")
    fewer = case.matrix(mask=less if mask is None else mask & less)
    assert (fewer.logsumexp() <= case.matrix().logsumexp() + case.restore(Slack(case).logit)).all()


def test_top_lists_equal_weights_in_the_order_of_keys():
    q, k = np.zeros((1, 4)), np.zeros((1200, 4))
    np.testing.assert_array_equal(ch.AttentionMatrix(q, k).top(5).indices, [[0, 1, 2, 3, 4]])
    bias = np.zeros(1200)
    bias[[7, 600, 1100]] = 1.0
    np.testing.assert_array_equal(ch.AttentionMatrix(q, k, bias=bias).top(5).indices, [[7, 600, 1100, 0, 1]])


def test_top_is_padded_where_fewer_keys_are_visible():
    q, k = normal(3, 4), normal(3, 4)
    top = ch.AttentionMatrix(q, k, causal=True).top(5)
    np.testing.assert_array_equal((top.indices >= 0).sum(axis=-1), [1, 2, 3])
    assert (top.weights[top.indices < 0] == 0).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logits_of_any_size_neither_overflow_nor_underflow(dtype: str):
    q, k, v = (x.astype(dtype) for x in (1e4 * normal(5, 8), normal(7, 8), normal(7, 3)))
    for sign in (1, -1):
        dense = np.asarray(ch.AttentionMatrix(sign * q, k), np.float64)
        assert_close(dense.sum(axis=-1), np.ones(5), 8 * np.finfo(dtype).eps * np.abs(q @ k.T).max())
        assert np.isfinite(ch.attention(sign * q, k, v)).all()


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "d_v"),
    [
        ((0, 4), (3, 4), 2),
        ((3, 4), (0, 4), 2),
        ((0, 4), (0, 4), 0),
        ((3, 0), (5, 0), 2),
        ((3, 4), (5, 4), 0),
        ((2, 4, 3, 5), (2, 2, 0, 5), 3),
        ((0, 4, 3, 5), (0, 2, 6, 5), 3),
        ((2, 0, 3, 5), (2, 0, 6, 5), 3),
        ((3, 0, 2, 4, 5), (3, 0, 1, 6, 5), 3),
    ],
)
def test_axes_of_length_zero(q_shape: tuple[int, ...], k_shape: tuple[int, ...], d_v: int):
    q, k, v = normal(*q_shape), normal(*k_shape), normal(*k_shape[:-1], d_v)
    matrix = ch.AttentionMatrix(q, k)
    rows, cols = q_shape[:-1], (*q_shape[:-2], k_shape[-2])
    seen = matrix.observe(
        v, logsumexp=True, max_logit=True, entropy=True, distance=True, top=2, received=True, peak=True, image=(2, 3),
        groups=(np.zeros(q_shape[-2], int), np.zeros(k_shape[-2], int)),
    )  # fmt: skip
    assert seen.top is not None
    assert seen.output.shape == (*rows, d_v)
    np.testing.assert_array_equal(seen.output, ch.attention(q, k, v))
    assert {getattr(seen, name).shape for name in ("logsumexp", "max_logit", "entropy", "distance")} == {rows}
    assert {seen.received.shape, seen.peak.shape} == {cols}
    assert seen.top.weights.shape == seen.top.indices.shape == (*rows, 2)
    assert seen.image.shape == (*q_shape[:-2], 2, 3)
    assert matrix[...].shape == matrix.shape == (*rows, k_shape[-2])
    assert matrix.T[...].shape == matrix.T.shape == (*cols, q_shape[-2])
    assert (matrix.T @ np.ones(q_shape[-2])).shape == cols
    if k_shape[-2] == 0:
        assert (seen.output == 0).all()
        assert np.isneginf(seen.logsumexp).all()


def test_with_d_k_of_zero_every_key_has_the_same_weight():
    np.testing.assert_allclose(ch.AttentionMatrix(np.empty((2, 0)), np.empty((5, 0)))[...], np.full((2, 5), 0.2))


@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"sinks": [0.3]}, {"alibi_slopes": [0.2], "window": (3, 1)}])
def test_one_head_gives_the_same_bits_as_the_two_dimensional_call(rules: dict[str, Any]):
    q, k, v = normal(70, 8), normal(70, 8, seed=1), normal(70, 5, seed=2)
    flat = ch.attention(q, k, v, **rules)
    for lead in ((1,), (1, 1), (1, 1, 1)):
        heads = ch.attention(*(x.reshape(*lead, *x.shape) for x in (q, k, v)), **rules)
        np.testing.assert_array_equal(heads, flat.reshape(*lead, *flat.shape), strict=True)


def test_all_statistics_take_two_passes_and_a_known_log_sum_exp_takes_none(monkeypatch: pytest.MonkeyPatch):
    engine, passes = engines.get(ch.plan(normal(2, 2), normal(2, 2)).engine), []

    def count(name: str) -> None:
        work = getattr(engine, name)

        def counted(*args: Any) -> Any:
            passes.append(name)
            return work(*args)

        monkeypatch.setattr(engine, name, counted)

    count("rows")
    count("columns")
    matrix, v = ch.AttentionMatrix(normal(5, 4), normal(6, 4)), normal(6, 2)
    matrix.observe(v, logsumexp=True, entropy=True, top=2, received=True, peak=True, image=(2, 2))
    assert passes == ["rows", "columns"]
    matrix.observe(received=True, logsumexp=True)
    matrix.logsumexp()
    assert passes == ["rows", "columns", "columns"]
