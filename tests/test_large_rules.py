"""Rule values at and beyond the range of float32: the same answer from every engine, or a refusal by name."""

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead import engines
from clearhead.core import reference
from clearhead.core.axes import Array
from clearhead.core.problem import describe
from clearhead.errors import RuleError
from problems import each_engine, in_the_gate
from seeds import fresh

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
    truth = reference.attend(passed.problem, passed.q, passed.k, passed.v)
    seen = ch.AttentionMatrix(q, k, engine=engine, **rules).observe(v, logsumexp=True)
    close: Any = {"rtol": 0, "atol": 4e-3 if dtype == np.float16 else 1e-5}
    assert truth.output is not None
    np.testing.assert_allclose(seen.output, truth.output[0, 0], **close)
    np.testing.assert_allclose(seen.logsumexp, truth.logsumexp[0, 0].astype(seen.logsumexp.dtype), rtol=1e-5, atol=1e-5)
    assert np.isfinite(seen.logsumexp).all()


def test_a_mean_of_values_where_a_usual_mask_hides_a_whole_row():
    q, k, v = inputs(np.float32)
    out = ch.attention(q, k, v, bias=np.where(FIRST, LOWEST, 0.0))
    np.testing.assert_allclose(out[:2], np.tile(v.mean(axis=0), (2, 1)), atol=1e-6)
