"""Shapes in symbols are those of the numbers; tokens as columns: the words, S = Kᵀ·Q, and the code's lines."""

import json
import re
from math import prod

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import RuleError, ShapeError, UnknownNameError
from clearhead.textbook.layer_shapes import NAMES, layer_shapes, read_sizes
from clearhead.textbook.page import Scene
from clearhead.textbook.symbols import Term
from clearhead.words import LANGUAGES, say
from seeds import fresh


def value(size, numbers):
    """What a size comes to with these numbers."""
    return size.number * prod(numbers[s] ** p for s, p in size.powers) if isinstance(size, Term) else size


def drawn():
    rng = fresh()
    numbers = {name: int(rng.integers(2, 9)) for name in ("B", "n", "m", "h_kv", "d_k", "d_v", "d_model")}
    return numbers | {"h": numbers["h_kv"] * int(rng.integers(1, 4))}


def of_layer(sizes):
    """A layer's shapes, written out here."""
    b, n, m, h, kv, d_k, d_v, d = (sizes[name] for name in ("B", "n", "m", "h", "h_kv", "d_k", "d_v", "d_model"))

    def times(a, b):
        return f"{a}·{b}" if isinstance(a, str) else a * b

    return {"x": (b, n, d), "w_q": (d, times(h, d_k)), "w_k": (d, times(kv, d_k)), "w_v": (d, times(kv, d_v))} | {
        "w_o": (times(h, d_v), d), "context": (b, m, d), "num_heads": h,
    }  # fmt: skip


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_symbols_give_the_shapes_and_costs_of_the_numbers(convention):
    numbers = drawn()

    def steps(sizes):
        passed = of_layer(sizes)
        if convention == "columns":
            passed |= {k: (*v[:-2], v[-1], v[-2]) for k, v in passed.items() if k != "num_heads"}
        return ch.shapes(**passed, convention=convention)

    words, counted = steps({name: name for name in numbers}), steps(numbers)
    for a, b in zip(words, counted, strict=True):
        assert tuple(value(size, numbers) for size in a.shape) == b.shape
        assert value(a.multiply_adds, numbers) == b.multiply_adds
        assert value(a.bytes, numbers) == b.bytes
        assert a.axes == b.axes
    assert "(B, h, n, m)" in str(words) if convention == "rows" else "(B, h, m, n)" in str(words)
    assert "in all: " in str(words)


def test_symbols_and_numbers_go_together():
    steps = ch.shapes(("n", 64), ("m", 64), ("m", "d_v"))
    assert [str(size) for size in steps[-1].shape] == ["n", "d_v"]
    assert str(steps[3].multiply_adds) == "64·n·m"
    assert steps[0].sizes == "(n, 64)"
    assert str(ch.shapes(("n", 512), (3, 512), (3, 512))[3].shape) == "(n, 3)"
    heads = ch.shapes(x=("n", 512), w_q=(512, 512), w_k=(512, 512), w_v=(512, 512), num_heads="h")
    assert [str(size) for size in heads[1].shape] == ["h", "n", "512/h"]
    assert heads[-2].formula == "H = concat(O_0 … O_{h-1})"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ch.shapes(("n", "d"), ("m", "e"), ("m", "e")), ShapeError, "q has d_k d but k has d_k e"),
        (lambda: ch.shapes(("n", "d"), ("m", "d"), ("n", "d")), ShapeError, "v has n keys but k has m"),
        (lambda: ch.shapes(("n", "d"), ("n+1", "d"), ("n", "d")), ShapeError, "in whole numbers or symbols"),
        (lambda: ch.shapes(x=("n", "d"), w_q=("e", "d"), w_k=("d", "d"), w_v=("d", "d")), ShapeError, "w_q is"),
        (lambda: ch.shapes(x=(2, 4), w_q=(4, 4), w_k=(4, 4), w_v=(4, 4), num_heads="h+1"), RuleError, "or a symbol"),
        (lambda: ch.trace_layer(np.eye(2), *[np.eye(2)] * 3, num_heads="h"), RuleError, "expected a whole number"),
        (lambda: read_sizes(["q=3"]), UnknownNameError, "unknown size `q`"),
        (lambda: read_sizes(["n=0"]), RuleError, "n is '0'"),
        (lambda: read_sizes(["n="]), RuleError, "n is ''"),
        (lambda: layer_shapes({"d_model": 10, "h": 3}), RuleError, "not divisible by h 3"),
        (lambda: layer_shapes({"h": 4, "h_kv": 3, "d_k": 2}), ShapeError, "multiple of key heads"),
        (lambda: layer_shapes({"t": 3}), UnknownNameError, "unknown size `t`"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_a_layer_from_its_sizes_alone():
    numbers = drawn()
    result = layer_shapes(numbers)
    expected = ch.shapes(**of_layer(numbers))
    assert result.numbers is not None
    assert [(s.shape, s.multiply_adds, s.bytes) for s in result.numbers] == [
        (s.shape, s.multiply_adds, s.bytes) for s in expected
    ]
    for name, (symbols, count) in result.parameters.items():
        assert value(symbols, numbers) == count == prod(of_layer(numbers)[name])
    assert layer_shapes({}).numbers is None
    assert layer_shapes({"n": 3, "h": 2, "d_k": 4}).numbers[-1].shape == (3, 8)
    part = layer_shapes({"B": None, "n": 3})
    assert str(part.numbers[-1].shape) == "(B, 3, d_model)"


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


def test_widths_of_keys_and_values_may_differ(capsys):
    """d_k is summed over in S, so only costs depend on it; d_v is what O has."""
    for d_k, d_v in ((4, 6), (64, 6), (4, 9)):
        q, k, v = (fresh().standard_normal(shape) for shape in ((3, d_k), (5, d_k), (5, d_v)))
        t = ch.trace(q, k, v)
        assert (t.scores.shape, t.weights.shape, t.output.shape) == ((3, 5), (3, 5), (3, d_v))
        assert main(["shapes", f"d_k={d_k}", f"d_v={d_v}"]) == 0
        assert f"d_k = {d_k} and d_v = {d_v} need not be equal" in capsys.readouterr().out
    assert main(["shapes", "d_k=4", "d_v=4"]) == 0
    assert "need not be equal" not in capsys.readouterr().out


def layer(convention, w_o=True, **rules):
    rng = fresh()
    x, w = rng.standard_normal((5, 4)), rng.standard_normal((4, 4, 4))
    arrays = [x, *(w if w_o else w[:3])]
    turned = [a.T if convention == "columns" else a for a in arrays]
    return ch.trace_layer(*turned, num_heads=2, convention=convention, **rules)


def sentence(trace, name, language="en"):
    return say(language, next(step.words for step in trace.steps if step.name == name))


def test_the_sentences_speak_of_columns_where_tokens_are_columns():
    rows, columns = layer("rows", w_o=False), layer("columns", w_o=False)
    assert sentence(columns, "weights") == "no weight is negative, and each column, the weights of one query, sums to 1"
    assert sentence(columns, "scores") == "how well each key matches each query: entry (j, i) is k_j·q_i"
    assert sentence(columns, "concat") == "the heads one above the other"
    for name in ("x", "scores", "weights", "concat", "output"):
        for language in LANGUAGES:
            assert sentence(rows, name, language) != sentence(columns, name, language)
        assert "column" not in sentence(rows, name)
    for language in LANGUAGES:
        words = columns.document(Scene("")).header["words"][language]
        assert [words[name] for name in ("x", "scores", "weights", "concat")] == [
            sentence(columns, name, language) for name in ("x", "scores", "weights", "concat")
        ]


def test_an_entry_of_s_is_the_product_of_that_key_and_that_query():
    rng = fresh()
    q, k, v = rng.standard_normal((3, 4)), rng.standard_normal((3, 6)), rng.standard_normal((2, 6))
    t = ch.trace(q, k, v, convention="columns")
    assert t.scores.shape == (6, 4)
    for j, i in np.ndindex(6, 4):
        assert t.scores[j, i] == pytest.approx(k[:, j] @ q[:, i])
    np.testing.assert_allclose(t.weights.sum(axis=0), 1)


def test_a_layer_says_which_scale_and_sinks_it_has():
    t = layer("rows", scale=0.3, sinks=[0.5, 1.0])
    assert sentence(t, "scaled") == "scaled, so that the softmax does not put everything on one key"
    assert sentence(t, "weights").endswith("its sink's share sum to 1")
    assert sentence(layer("columns", sinks=[0.5, 1.0]), "weights").startswith("no weight is negative; each column,")


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
