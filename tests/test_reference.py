"""The float64 reference against numbers worked by hand, other libraries, and plain loops."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.call import describe
from loops import output_by_loops, weights_by_loops
from problems import Case, cases, examples
from seeds import fresh

FLOAT64 = (np.dtype(np.float64),)
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # a few thousand eps: sums of at most some hundred float64 numbers


def book_of(q: Array, k: Array, v: Array, **rules: Any) -> definition.Textbook:
    given = describe(q, k, v, rules)
    return definition.attend(given.problem, given.q, given.k, given.v)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def test_the_example_of_the_tutorial_worked_by_hand():
    q, k = np.array([[1.0, 3.0], [2.0, 0.5]]), np.array([[0.5, 2.0], [1.0, 3.0]])
    v = np.array([[0.0, 4.0], [1.0, 2.0]])
    book = book_of(q, k, v)
    strong = [1 / (1 + math.exp(-3.5 / math.sqrt(2))), 1 / (1 + math.exp(-1.5 / math.sqrt(2)))]
    np.testing.assert_array_equal(book.scores[0, 0], [[6.5, 10.0], [2.0, 3.5]])
    np.testing.assert_allclose(book.scaled[0, 0], [[4.596, 7.071], [1.414, 2.475]], atol=5e-4)
    np.testing.assert_allclose(book.weights[0, 0], [[1 - w, w] for w in strong], **EXACT)
    np.testing.assert_allclose(book.weights[0, 0], [[0.0777, 0.9223], [0.2572, 0.7428]], atol=1e-4)
    assert book.output is not None
    np.testing.assert_allclose(book.output[0, 0], [[w, 4 - 2 * w] for w in strong], **EXACT)
    np.testing.assert_allclose(book.output[0, 0], [[0.9223, 2.1554], [0.7428, 2.5144]], atol=2e-4)


def test_two_equal_keys_have_equal_weights_and_known_statistics():
    q, k, v = np.ones((2, 1)), np.zeros((4, 1)), np.array([[0.0], [2.0], [4.0], [6.0]])
    given = describe(q, k, v, {})
    book = definition.attend(given.problem, given.q, given.k, given.v)
    assert book.output is not None
    np.testing.assert_allclose(book.output, np.full((1, 1, 2, 1), 3.0), **EXACT)
    np.testing.assert_allclose(book.logsumexp, np.full((1, 1, 2), math.log(4)), **EXACT)
    np.testing.assert_array_equal(definition.max_logit(book), np.zeros((1, 1, 2)))
    np.testing.assert_allclose(definition.entropy(book), np.full((1, 1, 2), math.log(4)), **EXACT)
    np.testing.assert_allclose(definition.distance(book), [[[1.5, 1.0]]], **EXACT)
    np.testing.assert_allclose(definition.received(book), np.full((1, 1, 4), 0.5), **EXACT)
    np.testing.assert_allclose(definition.peak(book), np.full((1, 1, 4), 0.25), **EXACT)
    np.testing.assert_allclose(definition.image(book, 1, 3), np.full((1, 1, 1, 3), 0.25), **EXACT)
    weights, indices = definition.top(book, 3)
    np.testing.assert_array_equal(indices, np.broadcast_to([0, 1, 2], (1, 1, 2, 3)))
    np.testing.assert_allclose(weights, np.full((1, 1, 2, 3), 0.25), **EXACT)
    labels = np.array([[0, 1]]), np.array([[1, 1, -1, 0]])
    np.testing.assert_allclose(definition.groups(book, *labels), np.array([[[[0.25, 0.5], [0.25, 0.5]]]]), **EXACT)


def test_rules_apply_in_their_documented_order():
    q, k, v = np.array([[2.0]]), np.array([[3.0], [1.0]]), np.eye(2)
    rules = {"scale": 0.5, "softcap": 2.0, "bias": np.array([[1.0, -1.0]]), "alibi_slopes": 0.25, "query_offset": 2}
    book = book_of(q, k, v, sinks=0.5, **rules)
    capped = [2 * math.tanh(3 / 2), 2 * math.tanh(1 / 2)]
    logits = [capped[0] + 1 - 0.25 * 2, capped[1] - 1 - 0.25 * 1]
    total = math.exp(logits[0]) + math.exp(logits[1]) + math.exp(0.5)
    np.testing.assert_array_equal(book.scores.ravel(), [6.0, 2.0])
    np.testing.assert_array_equal(book.scaled.ravel(), [3.0, 1.0])
    np.testing.assert_allclose(book.capped.ravel(), capped, **EXACT)
    np.testing.assert_allclose(book.masked.ravel(), logits, **EXACT)
    np.testing.assert_allclose(book.logsumexp.ravel(), [math.log(total)], **EXACT)
    np.testing.assert_allclose(book.weights.ravel(), [math.exp(x) / total for x in logits], **EXACT)


def test_an_image_counts_a_cell_by_the_part_inside_the_pixel():
    book = book_of(np.zeros((1, 1)), np.array([[0.0], [0.0], [math.log(2)]]), np.zeros((3, 1)), bias=[0.0, 0.0, 1.0])
    a = book.weights[0, 0, 0]
    expected = [[(a[0] + a[1] / 2) / 1.5, (a[1] / 2 + a[2]) / 1.5]]
    np.testing.assert_allclose(definition.image(book, 1, 2)[0, 0], expected, **EXACT)
    np.testing.assert_allclose(definition.image(book, 1, 6)[0, 0], [np.repeat(a, 2)], **EXACT)


@examples(3)
@given(case=cases(dtypes=FLOAT64, most=150))
def test_plain_loops_give_the_same_numbers(case: Case):
    weights, lse = weights_by_loops(case)
    np.testing.assert_allclose(case.restore(case.book.weights), weights, **EXACT)
    np.testing.assert_allclose(case.restore(case.book.logsumexp), lse, **EXACT)
    assert case.book.output is not None
    np.testing.assert_allclose(case.restore(case.book.output), output_by_loops(case, weights), **EXACT)


PYTORCH_RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, theirs; both get the same mask or bias
    "none": ({}, {}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "mask": ({"mask": normal(2, 1, 7, 7) < 1}, {}),
    "bias": ({"bias": normal(2, 4, 7, 7)}, {}),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rule", PYTORCH_RULES)
def test_pytorch_gives_the_same_numbers(rule: str, kv_heads: int):
    q, k, v = normal(2, 4, 7, 5), normal(2, kv_heads, 7, 5, seed=1), normal(2, kv_heads, 7, 3, seed=2)
    ours, theirs = PYTORCH_RULES[rule]
    added = [torch.from_numpy(ours[name]) for name in ("mask", "bias") if name in ours]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), *added, enable_gqa=kv_heads < 4, **theirs
    )
    np.testing.assert_allclose(book_of(q, k, v, **ours).output, expected.numpy(), **EXACT)


@pytest.mark.parametrize("lead", [(), (4,), (2, 4)])
def test_spans_equal_a_bias_that_pytorch_adds(lead: tuple[int, ...]):
    rng = fresh()
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 3)))
    sides, table = (rng.integers(0, 3, (2, 7)), rng.integers(0, 4, 9)), rng.standard_normal((*lead, 3, 4))
    table[..., 1, 2] = -np.inf
    scale = rng.standard_normal(4)
    full = np.broadcast_to(table, (2, 4, 3, 4))
    rows = np.stack([np.take(full[b], sides[0][b], axis=1) for b in range(2)])
    bias = np.take(rows, sides[1], axis=3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q * scale[:, None, None], k, v, bias)), enable_gqa=True, scale=1.0
    )
    result = book_of(q, k, v, spans=(*sides, table), scale=scale)
    np.testing.assert_allclose(result.output, np.nan_to_num(expected.numpy()), **EXACT)


def test_pytorch_aligns_causal_to_the_first_key():
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 6, 4), normal(1, 2, 6, 4, seed=1)
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), is_causal=True)
    np.testing.assert_allclose(book_of(q, k, v, causal=True, query_offset=0).output, expected.numpy(), **EXACT)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"is_causal": 1}, {"causal": True}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"scale": 0.7}, {"scale": 0.7}),
    ],
)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_onnxruntime_gives_the_same_numbers(theirs: dict[str, Any], ours: dict[str, Any], mask: str | None):
    q, k, v = (x.astype(np.float32) for x in (normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8, seed=1)))
    added = {"bool": normal(6, 6, seed=2) < 1, "float": normal(6, 6, seed=2).astype(np.float32)}.get(mask or "")
    inputs = {"Q": q, "K": k, "V": v} | ({} if added is None else {"attn_mask": added})
    (expected,) = onnx_attention(inputs, **theirs)
    rules = dict(ours) if added is None else {**ours, "mask" if mask == "bool" else "bias": added}
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(book_of(q, k, v, **rules).output, expected, rtol=1e-5, atol=1e-6)  # float32


def onnx_attention(inputs: dict[str, Array], **attributes: Any) -> list[Any]:
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.bool_): TensorProto.BOOL}
    declared = [helper.make_tensor_value_info(name, kinds[x.dtype], x.shape) for name, x in inputs.items()]
    node = helper.make_node("Attention", list(inputs), ["Y"], **attributes)
    graph = helper.make_graph([node], "g", declared, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return list(InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, inputs))


def test_softcap_equals_that_of_gemma():
    q, k, v = normal(1, 4, 6, 8), normal(1, 2, 6, 8, seed=1), normal(1, 2, 6, 8, seed=2)
    hidden = np.triu(np.full((6, 6), -np.inf), 1)
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8)
    tensors = [torch.from_numpy(x) for x in (q, k, v, hidden)]
    output, weights = gemma2_attention(module, *tensors, scaling=0.4, softcap=1.5)
    book = book_of(q, k, v, scale=0.4, softcap=1.5, causal=True)
    np.testing.assert_allclose(book.weights, weights.numpy(), atol=1e-7)  # Gemma's softmax is float32
    np.testing.assert_allclose(book.output, output.transpose(1, 2).numpy(), atol=1e-6)


def test_sinks_and_window_equal_those_of_gpt_oss():
    q, k, v, sinks = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 8, seed=2), normal(4)
    i, j = np.ogrid[:6, :6]
    hidden = np.where((j <= i) & (j > i - 3), 0.0, -np.inf)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=torch.from_numpy(sinks))
    tensors = [torch.from_numpy(x) for x in (q, k, v, hidden)]
    output, weights = gpt_oss_attention(module, *tensors, scaling=0.3)
    book = book_of(q, k, v, scale=0.3, sinks=sinks, causal=True, window=(2, None))
    np.testing.assert_allclose(book.weights, weights.numpy(), **EXACT)
    np.testing.assert_allclose(book.output, output.transpose(1, 2).numpy(), **EXACT)
