"""Tokens as columns: the words speak of columns, S = Kᵀ·Q is keys × queries, and the code's lines of the transpose."""

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.textbook.page import Scene
from clearhead.words import LANGUAGES, say
from seeds import fresh


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
def test_the_terminal_says_what_rows_and_columns_are_and_which_sum_to_1(tmp_path, capsys, convention):
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
def test_a_diagnosis_says_that_its_lines_of_code_have_tokens_as_rows(tmp_path, language):
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
