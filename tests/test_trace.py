"""Traces, shapes, costs and rollout against code written here; tokens as columns in words and formulas."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import RuleError, SelectionError, ShapeError, UnknownNameError
from clearhead.explaining.head_steps import document
from clearhead.explaining.steps import steps_of_text
from clearhead.models.model import load
from clearhead.textbook.costs import NAMES, layer_costs, read_sizes
from clearhead.words import LANGUAGES, say
from seeds import fresh, normal

sizes = st.integers(1, 6)


@given(n=sizes, m=sizes, d_k=sizes, d_v=sizes, heads=st.sampled_from([None, 1, 2]), seed=st.integers(0, 2**32 - 1))
def test_every_intermediate_follows_from_the_one_before(n, m, d_k, d_v, heads, seed):
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
    assert t.difference <= 1e-12
    assert [s.name for s in t.steps] == [
        "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "output",
    ]  # fmt: skip
    for step in t.steps:
        assert step.array.shape == step.shape
        assert len(step.axes) == len(step.shape)
    unused = ch.trace(q, k, v, scale=0.5)
    for name in ("capped", "biased", "masked"):
        np.testing.assert_array_equal(getattr(unused, name), unused.scaled)
    assert [s.name for s in unused.steps] == ["q", "k", "v", "scores", "scaled", "weights", "output"]


def test_shapes_known_before_computing_are_the_traces():
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
        product = (np.eye(n) + matrix[...].mean(axis=1)) / 2 @ product
    query = int(rng.integers(-n, n))
    row = ch.rollout(matrices, query=query)
    np.testing.assert_allclose(row, product[:, query], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(row.sum(axis=-1), 1, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: ch.trace(x, x, x, casual=True), UnknownNameError, "did you mean `causal`?"),
        (lambda x: ch.trace(x, x, x, convention="cols"), RuleError, "expected 'rows' (X·W) or 'columns' (W·X)"),
        (lambda x: ch.trace(x, x, x).token(9), SelectionError, "query 9 is outside 0..3"),
        (lambda x: ch.trace_layer(x, x.T, x, x), ShapeError, "but x has d_model 3: d_in must match"),
        (lambda x: ch.trace_layer(x, *[np.eye(4, 3)] * 3), ShapeError, "it fits as its transpose: w_q.T"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, num_heads=2), ShapeError, "no multiple of num_heads 2"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, np.eye(4)), ShapeError, "the heads are 1·3 = 3 wide"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, b_o=np.ones(3)), RuleError, "b_o is given but w_o is not"),
        (lambda x: ch.trace_layer(x, *[np.eye(3)] * 3, b_q=np.ones(2)), ShapeError, "b_q has shape (2,)"),
        (lambda x: ch.trace_layer(x, np.eye(3, 6), np.eye(3, 4), x.T, num_heads=3), ShapeError, "2 key heads but num"),
        (lambda x: ch.shapes(x), ShapeError, "k is missing"),
        (lambda x: read_sizes(["q=3"]), UnknownNameError, "unknown size `q`"),
        (lambda x: read_sizes(["n=0"]), RuleError, "n is '0'"),
        (lambda x: layer_costs({"d_model": 10, "h": 3}), RuleError, "not divisible by h 3"),
        (lambda x: layer_costs({"h": 4, "h_kv": 3, "d_k": 2}), ShapeError, "multiple of key heads"),
        (lambda x: ch.rollout([], query=0), ShapeError, "at least one matrix"),
        (lambda x: ch.rollout([ch.AttentionMatrix(x, x[:2])], query=0), ShapeError, "the same tokens as queries and"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    x = fresh().standard_normal((4, 3))
    with pytest.raises(error, match=re.escape(words)):
        call(x)


LABELS, TABLE = np.array([0, 1, -1]), np.array([[0.5, -np.inf], [2.0, 1.0]])
COLUMNS = {"convention": "columns"}
SENTENCES: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "x", "each token's vector: what enters the layer", "每个词元的向量，即本层的输入"),
    ({}, "output", "the heads mixed by W^O: the layer's output", "用 W^O 混合各个头，得到本层的输出"),
    ({"w_o": False}, "output", "the heads side by side (concatenated): there is no W^O to mix them",
     "各个头并排拼接即为输出：没有 W^O 来混合它们"),
    ({"spans": (LABELS, LABELS, TABLE)}, "biased",
     "a number added to each score by the spans of its query and its key; -∞ forbids",
     "按查询和键所属的片段，给每一对得分加上一个数；-∞ 表示不可关注"),
    ({"scale": 0.3}, "scaled", "scaled, so that the softmax does not put everything on one key",
     "缩放得分，避免 softmax 把权重全部压在一个键上"),
    ({"sinks": [0.5, 1.0]}, "weights", "no weight is negative; each query's weights and its sink's share sum to 1",
     "权重非负；每个查询的权重与汇点所占份额之和为 1"),
    (COLUMNS, "scores", "how well each key matches each query: entry (j, i) is k_j·q_i", ""),
    (COLUMNS, "weights", "no weight is negative, and each column, the weights of one query, sums to 1", ""),
    (COLUMNS, "concat", "the heads one above the other", ""),
    ({**COLUMNS, "sinks": [0.5, 1.0]}, "weights",
     "no weight is negative; each column, the weights of one query, sums to 1 together with its sink's share",
     "权重非负；每一列是一个查询的权重，它们与汇点所占份额之和为 1"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "step", "en", "zh"), SENTENCES)
def test_a_step_has_its_sentence_in_report_and_page(options, step, en, zh):
    given = {"w_o": True, "convention": "rows"} | options
    x, w = normal(3, 4), normal(4, 4, 4)
    arrays = [x, *(w if given.pop("w_o") else w[:3])]
    trace = ch.trace_layer(*[a.T if given["convention"] == "columns" else a for a in arrays], num_heads=2, **given)
    words = next(each.words for each in trace.steps if each.name == step)
    assert (say("en", words), say("zh", words)) == (en, zh or say("zh", words))
    if not {"scale", "sinks"} & set(options):  # the page's controls change these
        name = "layer output" if step == "output" else step
        page = trace.document().header["words"]
        assert (page["en"][name], page["zh"][name]) == (en, say("zh", words))


def test_a_models_x_is_said_to_be_normalised():
    model = steps_of_text("humpty dumpty", load())
    assert "after layer normalisation" in say("en", model.steps[0].words)
    assert "after layer normalisation" in document(model).header["words"]["en"]["x"]


def test_spans_and_scales_of_heads_are_steps():
    x, bias = normal(2, 3, 4), normal(3, 3)
    added = np.array([[0.5, -np.inf, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    t = ch.trace(x, x, x, spans=(LABELS, LABELS, TABLE), bias=bias, scale=[0.5, -2.0])
    assert [step.formula for step in t.steps][4:6] == ["S' = s_h·S", "B = S' + bias + spans"]
    np.testing.assert_allclose(t.scaled, x @ x.swapaxes(-1, -2) * np.array([0.5, -2.0])[:, None, None])
    np.testing.assert_allclose(t.biased, t.scaled + bias + added)
    assert t.difference < 1e-12


@pytest.mark.parametrize("more", [(), ("B",), ("m",), ("h_kv",), ("B", "m", "h_kv")])
def test_a_layers_costs_from_its_sizes_are_those_of_its_steps(more):
    rng = fresh()
    s = {name: int(rng.integers(2, 9)) for name in ("n", "d_k", "d_v", "d_model", *more)}
    s["h"] = s.get("h_kv", 1) * int(rng.integers(1, 4))
    kv, lead = s.get("h_kv", s["h"]), (s["B"],) if "B" in s else ()
    weights = {"w_q": s["h"] * s["d_k"], "w_k": kv * s["d_k"], "w_v": kv * s["d_v"]}
    shapes = {name: (s["d_model"], width) for name, width in weights.items()}
    shapes["w_o"] = (s["h"] * s["d_v"], s["d_model"])
    context = {"context": (*lead, s["m"], s["d_model"])} if "m" in s else {}
    steps = ch.shapes(x=(*lead, s["n"], s["d_model"]), **shapes, **context, num_heads=s["h"])
    costs = layer_costs(s)
    assert [(row["name"], tuple(row["shape_in_numbers"]), row["multiply_adds"][1]) for row in costs["steps"]] == [
        (step.name, step.shape, step.multiply_adds) for step in steps
    ]
    assert costs["multiply_adds_in_all"][1] == sum(step.multiply_adds for step in steps)
    assert costs["bytes_of_weights"][1] == next(step.bytes for step in steps if step.name == "weights")
    for name, (_, count) in costs["parameters"].items():
        assert count == np.prod(shapes[name])
    for row in layer_costs(dict.fromkeys(s))["steps"]:
        symbols, number = row["multiply_adds"]
        assert number in (None, 0)
        if number is None:  # the symbols come to the number
            factors = symbols.replace("n²", "n·n").split("·")
            assert np.prod([s[factor] for factor in factors]) == next(
                step.multiply_adds for step in steps if step.name == row["name"]
            )


def test_sizes_follow_from_others_and_may_be_missing():
    assert layer_costs({"n": 3, "h": 2, "d_k": 4})["steps"][-1]["shape_in_numbers"] == [3, 8]
    assert layer_costs({"B": None, "n": 3})["steps"][-1]["shape_in_numbers"] == ["B", 3, "d_model"]
    assert layer_costs({})["multiply_adds_in_all"][1] is None


def test_the_command_prints_symbols_beside_numbers(capsys):
    assert main(["shapes", "n=12", "d_model=512", "h=8"]) == 0
    said = capsys.readouterr().out
    assert "S = Q·Kᵀ                    (h, n, n)             (8, 12, 12)" in said
    assert "h·n²·d_k = 73,728 multiply-adds" in said
    assert "parameters in all: 2·h·d_model·d_k + 2·h·d_model·d_v = 1,048,576" in said
    assert main(["shapes", "--lang", "zh"]) == 0
    assert "h·n²·d_k 次乘加" in capsys.readouterr().out
    assert main(["shapes", *NAMES, "--json", "-"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[-1]["shape"] == ["B", "n", "d_model"]
    assert main(["shapes", "d_model=10", "h=3"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("d_k", "d_v"), [(4, 6), (64, 6), (4, 4)])
def test_widths_of_keys_and_values_may_differ(capsys, d_k, d_v):
    """d_k is summed over in S, so only costs depend on it; d_v is what O has."""
    t = ch.trace(normal(3, d_k), normal(5, d_k), normal(5, d_v))
    assert (t.scores.shape, t.weights.shape, t.output.shape) == ((3, 5), (3, 5), (3, d_v))
    assert main(["shapes", f"d_k={d_k}", f"d_v={d_v}"]) == 0
    assert (f"d_k = {d_k} and d_v = {d_v} need not be equal" in capsys.readouterr().out) == (d_k != d_v)


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_the_terminal_says_which_rows_or_columns_sum_to_1(tmp_path, capsys, convention):
    q = fresh().standard_normal((3, 4))
    np.savez(tmp_path / "case.npz", q=q, k=q, v=q, convention=convention)
    assert main(["trace", str(tmp_path / "case.npz")]) == 0
    said = capsys.readouterr().out
    words = "rows: queries, columns: keys; rows sum to 1" if convention == "rows" else "columns sum to 1"
    assert words in said
    assert ("rows: keys, columns: queries; columns sum to 1" in said) == (convention == "columns")
    np.savez(tmp_path / "sinks.npz", q=q, k=q, v=q, convention=convention, sinks=[1.0])
    assert main(["trace", str(tmp_path / "sinks.npz"), "--lang", "zh"]) == 0
    assert f"每{'行' if convention == 'rows' else '列'}之和为" in capsys.readouterr().out


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_diagnosis_says_that_its_code_has_tokens_as_rows(tmp_path, language):
    q, k, v = fresh().standard_normal((3, 4, 6))
    scores = k.T @ q
    wrong = np.exp(scores) / np.exp(scores).sum(axis=0)
    for convention, arrays in (("columns", (q, k, v, v @ wrong)), ("rows", (q.T, k.T, v.T, (v @ wrong).T))):
        np.savez(
            tmp_path / "case.npz", **dict(zip(("q", "k", "v", "theirs"), arrays, strict=True)), convention=convention
        )
        diagnosis = diagnose_file(tmp_path / "case.npz")
        assert diagnosis.explanations[0].mistakes == ("no scale",)
        note = "your tokens are columns" if language == "en" else "您的词元按列排列"
        assert (note in diagnosis.told(language)) == (convention == "columns")
