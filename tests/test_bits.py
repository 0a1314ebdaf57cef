"""The same bits every time: for any slice of the batch, heads and queries, any strides and any number of threads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import clearhead as ch
from clearhead.core.axes import Array
from problems import Case, cases

ROWS: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True}
COLUMNS: dict[str, Any] = {"received": True, "peak": True, "image": (9, 70)}


def answers(case: Case, **wanted: Any) -> dict[str, Array]:
    """The requested statistics and the output, by name."""
    seen = case.matrix().observe(case.v, **wanted)
    return {name: getattr(seen, name) for name in (*wanted, "output")}


def assert_same_bits(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name, strict=True)


@given(case=cases(), data=st.data())
def test_requesting_other_statistics_changes_no_bit(case: Case, data: st.DataObject):
    together = answers(case, **ROWS, **COLUMNS)
    one = data.draw(st.sampled_from((*ROWS, *COLUMNS)))
    alone = answers(case, **{one: {**ROWS, **COLUMNS}[one]})
    if one == "received":  # beside an output alone, the native engine adds up the weights of the row pass
        np.testing.assert_allclose(together["received"], alone.pop("received"), rtol=1e-5, atol=1e-5)
    assert_same_bits(together, alone)
    np.testing.assert_array_equal(case.attention(), together["output"], strict=True)
    np.testing.assert_array_equal(case.matrix() @ case.v, together["output"], strict=True)
    np.testing.assert_array_equal(case.matrix().logsumexp(), together["logsumexp"], strict=True)


@given(case=cases(), data=st.data())
def test_a_used_matrix_gives_the_same_bits_as_a_fresh_one(case: Case, data: st.DataObject):
    names = data.draw(st.sets(st.sampled_from((*ROWS, *COLUMNS)), min_size=1))
    asked = {name: {**ROWS, **COLUMNS}[name] for name in names}
    v = case.v if data.draw(st.booleans()) else None
    matrix = case.matrix()
    fresh = matrix.observe(v, **asked)
    matrix.logsumexp()  # the matrix keeps the log-sum-exp from here on
    used = matrix.observe(v, **asked)
    for name in (*names, *(["output"] if v is not None else [])):
        np.testing.assert_array_equal(getattr(used, name), getattr(fresh, name), err_msg=name, strict=True)


@pytest.mark.parametrize("shape", [(130, 700, 64, 64), (64, 512, 130, 200), (3, 1100, 33, 1)])
def test_threads_change_no_bit_where_blas_would_use_several(shape: tuple[int, int, int, int]):
    rng, (n, m, d_k, d_v) = np.random.default_rng(0), shape
    case = Case(rng.standard_normal((n, d_k)), rng.standard_normal((m, d_k)), rng.standard_normal((m, d_v)), {}, 0)
    g, result = rng.standard_normal((n, 65)), []
    for count in (1, 2, 3, 5, 7, 16):
        with threadpool_limits(count):
            result.append({**answers(case, **ROWS, **COLUMNS), "back": case.matrix().T @ g})
    for other in result[1:]:
        assert_same_bits(other, result[0])


def test_inputs_are_not_modified():
    rng = np.random.default_rng(0)
    q, k, v, bias = (rng.standard_normal(shape) for shape in ((5, 4), (7, 4), (7, 3), (5, 7)))
    before = [x.copy() for x in (q, k, v, bias)]
    ch.AttentionMatrix(q, k, bias=bias, softcap=2.0).observe(v, **ROWS, **COLUMNS)
    for x, y in zip((q, k, v, bias), before, strict=True):
        np.testing.assert_array_equal(x, y)
