"""NaN and infinity reach exactly the results of queries that see them; rule values at and beyond float32's range."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, visibility
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.errors import RuleError
from passes import Question, weights
from problems import RULES, Case, cases, each_engine, in_the_gate
from seeds import fresh

NONFINITE = st.sampled_from((np.nan, np.inf, -np.inf))


def everything(case: Case, **changes: Any) -> dict[str, Array]:
    """Every result by name, (batch, heads, …)."""
    question = Question.of(replace(case, rules={**case.rules, **changes}))
    engine = ch.plan(case.q, case.k, **question.case.rules).engine
    return {name: x for (name, _), x in weights(question, engine).items()}


@given(case=cases(rules=tuple(rule for rule in RULES if rule != "bias")), bad=NONFINITE)
def test_a_nonfinite_bias_at_masked_positions_changes_no_bit(case: Case, bad: float):
    bias = case.rng.standard_normal(case.matrix().shape)
    dirty = np.where(case.restore(visibility.dense(case.problem)), bias, bad)
    clean = everything(case, bias=bias)
    for name, array in everything(case, bias=dirty).items():
        np.testing.assert_array_equal(array, clean[name], err_msg=name)


@given(case=cases(), bad=NONFINITE, data=st.data())
def test_a_nonfinite_value_reaches_the_queries_that_see_it(case: Case, bad: float, data: st.DataObject):
    assume(case.problem.keys)
    key = data.draw(st.integers(0, case.problem.keys - 1))
    v = case.v.copy()
    v[..., key, :] = bad
    clean, dirty = case.attention(), replace(case, v=v).attention()
    sees = case.restore(visibility.dense(case.problem))[..., key]
    np.testing.assert_array_equal(dirty[~sees], clean[~sees])
    felt = sees & (case.restore(case.book.weights)[..., key] > 1e-30)
    assert not np.isfinite(dirty[felt].astype(np.float64)).any()


@given(case=cases(), data=st.data())
def test_a_nan_key_reaches_all_that_sees_it(case: Case, data: st.DataObject):
    assume(case.problem.keys)
    key = data.draw(st.integers(0, case.problem.keys - 1))
    k = case.k.copy()
    k[..., key, :] = np.nan
    result, visible = everything(replace(case, k=k)), visibility.dense(case.problem)
    sees = visible[..., key]
    for name in ("output", "log_sum", "max_logit", "entropy", "top_weights"):
        assert np.isnan(result[name][sees].astype(np.float64)).all(), name
    assert np.isnan(result["weights"][sees][:, key]).all()
    np.testing.assert_array_equal(result["weights"][~visible], 0)
    reached = (visible & sees[..., None]).any(axis=-2)  # keys that are visible to a query with NaN weights
    for name in ("received", "peak", "Aᵀ·g"):
        assert np.isnan(result[name][reached]).all(), name


@given(case=cases(rules=tuple(rule for rule in RULES if rule not in ("bias", "mask"))))
def test_a_bias_of_minus_infinity_gives_the_same_bits_as_a_mask(case: Case):
    sight = case.rng.random(case.matrix().shape) < 0.7
    masked = everything(case, mask=sight, bias=np.zeros(1))  # adding zeros may change the rounding
    for dtype in (np.float64, np.float16):
        bias = np.where(sight, 0.0, -np.inf).astype(dtype)
        for name, array in everything(case, bias=bias).items():
            np.testing.assert_array_equal(array, masked[name], err_msg=name)


@given(case=cases(rules=tuple(rule for rule in RULES if rule not in ("causal", "window", "mask"))), data=st.data())
def test_causal_and_window_give_the_same_bits_as_a_mask(case: Case, data: st.DataObject):
    """Causal and window skip blocks, an equivalent mask does not; the results must have the same bits."""
    left, right = data.draw(st.tuples(*[st.one_of(st.none(), st.integers(0, 90))] * 2))
    rules = {"causal": data.draw(st.booleans()), "window": (left, right)}
    offset = np.asarray(case.rules.get("query_offset", 0))
    case = replace(case, rules={**case.rules, "query_offset": offset})
    ahead = np.arange(case.problem.keys) - np.arange(case.problem.queries)[:, None]
    ahead = ahead - offset.reshape(*offset.shape, *(1,) * (case.q.ndim - offset.ndim))
    sight = (ahead <= (0 if rules["causal"] else np.inf)) & (ahead <= (np.inf if right is None else right))
    by_mask = everything(case, mask=sight & (ahead >= (-np.inf if left is None else -left)))
    for name, array in everything(case, **rules).items():
        np.testing.assert_array_equal(array, by_mask[name], err_msg=name)


@pytest.mark.parametrize("number", [-1e8, -1e10, -1e20, -1e37, float(np.finfo(np.float32).min)])
def test_a_row_that_large_numbers_forbid_as_a_whole_is_the_mean(number: float):
    """The bias leaves nothing of the scores: in float32 all are equal, and PyTorch gives the mean of the values too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, 64) for size in (3, 300, 300))
    bias = torch.full((3, 300), number)
    bias[1] = 0
    bias[2, 7:] = 0  # the first keys are out of question, and the maximum comes after them
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    result = ch.AttentionMatrix(q, k, bias=bias, engine="native").observe(v, entropy=True, received=True)
    torch.testing.assert_close(result.output, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(result.entropy[:, :, 0], torch.full((1, 2), float(np.log(300))), atol=1e-4, rtol=0)
    assert bool(result.entropy.isfinite().all() and result.received.isfinite().all())


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12, 1e20])
def test_scores_of_any_finite_size_choose_the_largest(size: float):
    torch.manual_seed(0)  # no two scores of a row are almost equal
    q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    expected = v.gather(2, (q @ k.mT).argmax(-1, keepdim=True).expand(-1, -1, -1, 64))
    torch.testing.assert_close(
        ch.attention(q * size, k, v, engine="native"), expected, atol=1e-3 if size < 1e8 else 1e-6, rtol=0
    )


LOWEST = float(np.finfo(np.float64).min)
FIRST = np.arange(6)[:, None] < 2  # queries
REFUSED: dict[str, list[Any]] = {
    "scale": [1e-46, 1e19, 1e38, -1e39, 1e308, [1e39]],
    "softcap": [1e-46, 1e19, 1e39, 1e308],
    "alibi_slopes": [[1e19], [-1e39]],
}
COMPUTED: list[dict[str, Any]] = [
    {"scale": 1e18},
    {"scale": 1e-18},
    {"softcap": 1e18},
    {"softcap": 1e-18},
    {"alibi_slopes": [1e18]},
    {"alibi_slopes": [-1e18], "softcap": 2.0},
    *({"bias": np.where(FIRST, low, 0.0)} for low in (LOWEST, -1e39, -1e38, 1e39)),
    {"bias": np.full((6, 6), LOWEST), "softcap": 3.0, "causal": True},
    {"bias": np.full((6, 6), LOWEST), "alibi_slopes": [0.3], "sinks": [0.5]},
    {"bias": np.where(np.arange(6) < 3, LOWEST, 0.0), "spans": ([0] * 6, [0, 0, 0, 1, 1, 1], [[LOWEST, 0.0]])},
    *({"spans": ([0] * 6, [0, 0, 1, 1, 2, -1], [[high, -high, 0.5]])} for high in (1e39, -1e39, LOWEST)),
    *({"sinks": [sink]} for sink in (1e39, -1e39, LOWEST)),
]


def inputs(dtype: Any) -> tuple[Array, Array, Array]:
    q, k, v = fresh().standard_normal((3, 6, 8)).astype(dtype)
    return q, k, v


@pytest.mark.parametrize(("rule", "value"), [(rule, value) for rule, values in REFUSED.items() for value in values])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@each_engine()
def test_factors_that_leave_the_range_are_refused_by_name(engine: str, dtype: Any, rule: str, value: Any):
    q, k, v = inputs(dtype)
    rules: Any = {rule: value}
    for call in (lambda: ch.attention(q, k, v, engine=engine, **rules), lambda: ch.AttentionMatrix(q, k, **rules)):
        with pytest.raises(RuleError, match=rf"^{rule} goes (up|down) to "):
            call()


@pytest.mark.parametrize("rules", COMPUTED, ids=lambda rules: " ".join(rules))
@pytest.mark.parametrize("dtype", in_the_gate([np.float32, np.float64, np.float16], np.float16))
@each_engine()
def test_the_largest_values_give_the_references_numbers(engine: str, dtype: Any, rules: dict[str, Any]):
    q, k, v = inputs(dtype)
    passed = describe(q, k, v, rules)
    if engines.get(engine).reasons_not(passed.problem):
        pytest.skip("the engine says that it cannot")
    truth = definition.attend(passed.problem, passed.q, passed.k, passed.v)
    seen = ch.AttentionMatrix(q, k, engine=engine, **rules).observe(v, logsumexp=True)
    close: Any = {"rtol": 0, "atol": 4e-3 if dtype == np.float16 else 1e-5}
    assert truth.output is not None
    np.testing.assert_allclose(seen.output, truth.output[0, 0], **close)
    np.testing.assert_allclose(seen.logsumexp, truth.logsumexp[0, 0].astype(seen.logsumexp.dtype), rtol=1e-5, atol=1e-5)
    assert np.isfinite(seen.logsumexp).all()
