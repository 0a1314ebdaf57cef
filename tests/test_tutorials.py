"""The statements of the tutorials, checked with numbers."""

import numpy as np

import clearhead as ch
from seeds import normal


def test_one_token_and_all_tokens_agree():
    q, k, v = (normal(2, 9, 8) for _ in range(3))
    t = ch.trace(q, k, v, causal=True)
    for i in (0, 4, -1):
        row = t.token(i)
        assert row.difference <= 1e-13
        np.testing.assert_allclose(row.weights, t.weights[:, i], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(row.contributions.sum(axis=-2), t.output[:, i], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(row.scores, np.einsum("hd,hkd->hk", q[:, i], k), rtol=1e-11, atol=1e-13)


def test_both_conventions_are_the_same_computation():
    x, context = normal(5, 6), normal(7, 4)
    w_q, w_o = normal(6, 8), normal(6, 6)
    w_k, w_v = normal(4, 8), normal(4, 6)
    rows = ch.trace_layer(x, w_q, w_k, w_v, w_o, num_heads=2, context=context)
    columns = ch.trace_layer(x.T, w_q.T, w_k.T, w_v.T, w_o.T, num_heads=2, context=context.T, convention="columns")
    np.testing.assert_allclose(columns.output.T, rows.output, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(columns.weights.swapaxes(-1, -2), rows.weights, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(columns.weights.sum(axis=-2), 1, rtol=1e-12)
    assert [s.formula for s in rows.steps][2:4] == ["Q = X·W^Q", "K = C·W^K"]
    assert [s.formula for s in columns.steps][2:4] == ["Q = W^Q·X", "K = W^K·C"]
    plain = ch.trace(x, x, x), ch.trace(x.T, x.T, x.T, convention="columns")
    np.testing.assert_array_equal(plain[0].output, plain[1].output.T)
