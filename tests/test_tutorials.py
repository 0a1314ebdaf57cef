"""The statements of the tutorials, checked with numbers."""

import numpy as np
import pytest

import clearhead as ch
from diagnosing import softmax
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


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("with_output_projection", [True, False])
def test_multi_head_attention_concatenates_single_heads(heads, with_output_projection):
    x, (w_q, w_k, w_v, w_o) = normal(5, 8), normal(4, 8, 8)
    t = ch.trace_layer(x, w_q, w_k, w_v, w_o if with_output_projection else None, num_heads=heads)
    width = 8 // heads
    parts = []
    for h in range(heads):
        columns = slice(h * width, (h + 1) * width)
        a = softmax((x @ w_q[:, columns]) @ (x @ w_k[:, columns]).T / np.sqrt(width))
        np.testing.assert_allclose(t.weights[h], a, rtol=1e-9, atol=1e-12)
        parts.append(a @ (x @ w_v[:, columns]))
    joined = np.concatenate(parts, axis=-1)
    np.testing.assert_allclose(t.concat, joined, rtol=1e-9, atol=1e-12)
    expected = joined @ w_o if with_output_projection else joined
    np.testing.assert_allclose(t.output, expected, rtol=1e-9, atol=1e-11)
    assert t.output.shape == x.shape


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


def test_grouped_heads_follow_from_the_widths():
    x = normal(3, 5, 8)
    t = ch.trace_layer(x, normal(8, 8), normal(8, 4), normal(8, 6), num_heads=4)
    assert t.q.shape == (3, 4, 5, 2)
    assert t.k.shape == (3, 2, 5, 2)
    assert t.v.shape == (3, 2, 5, 3)
    assert t.output.shape == (3, 5, 12)


def test_projection_biases_are_added():
    x, (w_q, w_k, w_v, w_o), b = normal(5, 4), normal(4, 4, 4), normal(4, 4)
    t = ch.trace_layer(x, w_q, w_k, w_v, w_o, num_heads=2, b_q=b[0], b_k=b[1], b_v=b[2], b_o=b[3])
    q, k, v = ((x @ w + bias).reshape(5, 2, 2).swapaxes(0, 1) for w, bias in ((w_q, b[0]), (w_k, b[1]), (w_v, b[2])))
    joined = ch.attention(q, k, v).swapaxes(0, 1).reshape(5, 4)
    np.testing.assert_allclose(t.output, joined @ w_o + b[3], rtol=1e-10, atol=1e-12)
