"""Traces, shapes and rollout against code written here, over random problems."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import RuleError, SelectionError, ShapeError, UnknownNameError
from clearhead.explaining.head_steps import document
from clearhead.explaining.steps import steps_of_text
from clearhead.models.model import load
from clearhead.textbook.page import Scene
from clearhead.textbook.trace import Trace
from clearhead.words import say
from seeds import fresh, normal

sizes = st.integers(1, 6)


@given(n=sizes, m=sizes, d_k=sizes, d_v=sizes, heads=st.sampled_from([None, 1, 2]), seed=st.integers(0, 2**32 - 1))
def test_every_intermediate_is_there_and_follows_from_the_one_before(n, m, d_k, d_v, heads, seed):
    rng = np.random.default_rng(seed)
    lead = () if heads is None else (heads,)
    q, k, v = (rng.standard_normal((*lead, *shape)) for shape in ((n, d_k), (m, d_k), (m, d_v)))
    bias, mask = rng.standard_normal((n, m)), rng.random((n, m)) < 0.7
    t = ch.trace(q, k, v, softcap=2.0, bias=bias, mask=mask, scale=0.5)
    np.testing.assert_allclose(t.scores, q @ k.swapaxes(-1, -2))
    np.testing.assert_allclose(t.scaled, 0.5 * t.scores)
    np.testing.assert_allclose(t.capped, 2 * np.tanh(t.scaled / 2))
    np.testing.assert_allclose(t.biased, t.capped + bias)
    np.testing.assert_array_equal(t.masked, np.where(mask, t.biased, -np.inf))
    safe = np.where(np.isneginf(t.logsumexp), 0, t.logsumexp)[..., None]
    np.testing.assert_allclose(t.weights, np.exp(t.masked - safe), atol=1e-15)
    np.testing.assert_allclose(t.output, t.weights @ v, atol=1e-13)
    assert t.check.largest_difference <= 1e-12
    assert [s.name for s in t.steps] == [
        "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "output",
    ]  # fmt: skip
    for step in t.steps:
        assert step.array.shape == step.shape
        assert len(step.axes) == len(step.shape)


def test_unused_rules_leave_an_intermediate_unchanged():
    x = fresh().standard_normal((4, 3))
    t = ch.trace(x, x, x)
    assert t.masked is not None
    for later in (t.capped, t.biased, t.masked):
        np.testing.assert_array_equal(later, t.scaled)
    assert [s.name for s in t.steps] == ["q", "k", "v", "scores", "scaled", "weights", "output"]


def test_shapes_are_known_before_computing_and_agree_with_the_trace():
    rng = fresh()
    x, context = rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 7, 6))
    w_q, w_k, w_v = rng.standard_normal((8, 8)), rng.standard_normal((6, 4)), rng.standard_normal((6, 4))
    w_o = rng.standard_normal((8, 3))
    arrays = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    t = ch.trace_layer(*arrays.values(), num_heads=4, context=context)
    before = ch.shapes(**arrays, num_heads=4, context=context)
    only_shapes = ch.shapes(**{n: a.shape for n, a in arrays.items()}, num_heads=4, context=context.shape)
    for a, b, c in zip(t.steps, before, only_shapes, strict=True):
        assert a.to_json() == b.to_json()
        assert a.shape == c.shape
        assert a.bytes == b.bytes == 2 * c.bytes == a.array.size * 8
    assert "(batch 2, heads 4, queries 5, keys 7)" in str(before)


@given(n=st.integers(1, 40), heads=st.integers(1, 3), layers=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_rollout_equals_a_row_of_the_product_of_layers(n, heads, layers, seed):
    rng = np.random.default_rng(seed)
    matrices = [
        ch.AttentionMatrix(rng.standard_normal((2, heads, n, 4)), rng.standard_normal((2, heads, n, 4)), causal=True)
        for _ in range(layers)
    ]
    product = np.broadcast_to(np.eye(n), (2, n, n))
    for matrix in matrices:  # later layers multiply from the left
        product = (0.3 * np.eye(n) + 0.7 * matrix[...].mean(axis=1)) @ product
    query = int(rng.integers(-n, n))
    row = ch.rollout(matrices, query=query, residual=0.3)
    np.testing.assert_allclose(row, product[:, query], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(row.sum(axis=-1), 1, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: ch.trace(x, x, x, casual=True), UnknownNameError, "did you mean `causal`?"),
        (lambda x: ch.trace(x, x, x, convention="cols"), RuleError, "expected 'rows' (X·W) or 'columns' (W·X)"),
        (lambda x: ch.trace(x, x, x).token(9), SelectionError, "query 9 is outside 0..3"),
        (lambda x: ch.trace_layer(x, x.T, x, x), ShapeError, "but x has d_model 3: they must meet"),
        (lambda x: ch.trace_layer(x, *[np.eye(4, 3)] * 3), ShapeError, "it fits as its transpose: w_q.T"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, num_heads=2), ShapeError, "w_q is 3 wide, which num_heads 2"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, np.eye(4)), ShapeError, "the heads are 1·3 = 3 wide"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, b_o=np.ones(3)), RuleError, "b_o is given but w_o is not"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, b_q=np.ones(2)), ShapeError, "b_q has shape (2,)"),
        (lambda x: ch.trace_layer(x, np.eye(3, 6), np.eye(3, 4), x.T, num_heads=3), ShapeError, "2 key heads but num"),
        (lambda x: ch.shapes(x), ShapeError, "k is missing"),
        (lambda x: ch.rollout([], query=0), ShapeError, "at least one matrix"),
        (lambda x: ch.rollout([ch.AttentionMatrix(x, x)], query=4), SelectionError, "query 4 is outside 0..3"),
        (lambda x: ch.rollout([ch.AttentionMatrix(x, x)], query=0, residual=2), RuleError, "between 0 and 1"),
        (lambda x: ch.rollout([ch.AttentionMatrix(x, x[:2])], query=0), ShapeError, "the same tokens as queries and"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    x = fresh().standard_normal((4, 3))
    with pytest.raises(error, match=re.escape(words)):
        call(x)


def says(trace: Trace, name: str, language: Any = "en") -> str:
    return say(language, next(step.words for step in trace.steps if step.name == name))


def test_the_x_of_a_layer_file_is_not_called_normalised():
    x, w = normal(3, 4), normal(4, 4)
    traced = ch.trace_layer(x, w, w, w, w, num_heads=2)
    assert says(traced, "x") == "each token's vector: what enters the layer"
    assert "归一化" not in says(traced, "x", "zh")
    header = traced.document(Scene("")).header
    assert "normalised" not in header["words"]["en"]["x"]
    model = steps_of_text("humpty dumpty", load())
    assert "after layer normalisation" in say("en", model.steps[0].words)
    assert "after layer normalisation" in document(model).header["words"]["en"]["x"]


def test_without_w_o_the_text_does_not_say_that_heads_are_mixed():
    x, w = normal(3, 4), normal(4, 4)
    alone, mixed = ch.trace_layer(x, w, w, w, num_heads=2), ch.trace_layer(x, w, w, w, w, num_heads=2)
    assert says(alone, "output") == "the heads side by side (concatenated): there is no W^O to mix them"
    assert says(mixed, "output") == "the heads mixed by W^O: the layer's output"
    words = alone.document(Scene("")).header["words"]
    assert [words[language]["layer output"] for language in ("en", "zh")] == [
        says(alone, "output"),
        "各个头并排拼接即为输出：没有 W^O 来混合它们",
    ]
    assert mixed.document(Scene("")).header["words"]["en"]["layer output"] == says(mixed, "output")


def test_spans_and_scales_have_their_step_in_both_languages():
    x, bias = normal(2, 3, 4), normal(3, 3)
    labels, table = np.array([0, 1, -1]), np.array([[0.5, -np.inf], [2.0, 1.0]])
    added = np.array([[0.5, -np.inf, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    t = ch.trace(x, x, x, spans=(labels, labels, table), scale=[0.5, -2.0])
    formulas = [step.formula for step in t.steps]
    assert formulas[4:6] == ["S' = s_h·S", "B = S' + spans"]
    np.testing.assert_allclose(t.scaled, x @ x.swapaxes(-1, -2) * np.array([0.5, -2.0])[:, None, None])
    np.testing.assert_array_equal(t.biased, t.scaled + added)
    assert says(t, "biased") == "a number added to the scores for each pair of a query's and a key's span; -∞ forbids"
    assert says(t, "biased", "zh") == "按查询和键所属的片段，给每一对得分加上一个数；-∞ 表示不可关注"
    words = t.document(Scene("")).header["words"]
    assert [words[language]["biased"] for language in ("en", "zh")] == [says(t, "biased"), says(t, "biased", "zh")]
    both = ch.trace(x, x, x, spans=(labels, labels, table), bias=bias)
    assert next(step.formula for step in both.steps if step.name == "biased") == "B = S' + bias + spans"
    assert t.check.largest_difference < 1e-12
