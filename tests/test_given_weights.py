"""Weights that are given: traced, checked and diagnosed without q and k."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.claims import check_file
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import ClearheadError, FileError, RuleError, ShapeError
from diagnosing import written
from seeds import fresh

MIX = {"weights": [0.15, 0.25, 0.55, 0.05], "v": [[1, 0], [0, 1], [1, 1], [2, 0]]}


def drawn(*lead: int, queries: int = 4, keys: int = 6, kv_heads: int | None = None):
    rng = fresh()
    v_lead = lead if kv_heads is None else (*lead[:-1], kv_heads)
    scores = rng.standard_normal((*lead, queries, keys))
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    return weights, rng.standard_normal((*v_lead, keys, 3))


@pytest.mark.parametrize(("lead", "kv_heads"), [((), None), ((2,), None), ((4,), 2), ((2, 4), 1), ((3, 2, 4), 2)])
def test_the_output_is_the_sum_of_values_times_weights(lead, kv_heads):
    a, v = drawn(*lead, kv_heads=kv_heads)
    a = a * fresh().uniform(0.5, 1.5, a.shape[:-1])[..., None]  # rows need not sum to 1
    each = v if kv_heads is None else np.repeat(v, lead[-1] // kv_heads, axis=-3)
    t = ch.trace_weights(a, v)
    np.testing.assert_allclose(t.output, np.einsum("...ij,...jd->...id", a, each), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(t.weights, a)
    assert t.check.largest_difference < 1e-12
    assert [(s.name, s.shape, s.shape == s.array.shape) for s in t.steps] == [
        ("weights", a.shape, True), ("v", v.shape, True), ("output", t.output.shape, True),
    ]  # fmt: skip
    row = t.token(-1)
    assert (row.scores, row.masked, row.norm, row.key_norms, row.cosine) == (None,) * 5
    np.testing.assert_allclose(row.contributions.sum(axis=-2), t.output[..., -1, :], rtol=1e-12, atol=1e-13)
    assert row.difference < 1e-13
    columns = ch.trace_weights(a.swapaxes(-1, -2), v.swapaxes(-1, -2), convention="columns")
    np.testing.assert_allclose(columns.output.swapaxes(-1, -2), t.output, rtol=1e-13, atol=1e-14)
    assert columns.steps[2].formula == "O = V·A"


def test_the_example_of_four_values():
    t = ch.trace_weights(np.array(MIX["weights"]), np.array(MIX["v"]))
    np.testing.assert_allclose(t.output, [[0.8, 0.8]], rtol=1e-14)
    names = ["what", " is", "attention", "?"]
    written = t.token(0).written_out(tokens=names)
    assert written == "0.5500·v_attention + 0.2500·v_is + 0.1500·v_what + 0.0500·v_? = [0.8000 0.8000]"


def test_a_value_of_weight_0_is_not_read():
    v = np.array([[np.nan, 1], [np.inf, 2], [3, 4]])
    t = ch.trace_weights(np.array([[0.0, 0, 1], [0.5, 0.5, 0]]), v)
    np.testing.assert_array_equal(t.output, [[3, 4], [np.nan, 1.5]])
    assert t.check.largest_difference == 0
    np.testing.assert_array_equal(t.token(0).output, [3, 4])
    assert ch.diagnose_weights(np.eye(3), v, v).verdict == "right"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, v: ch.trace_weights(-a, v), RuleError, "a weight is a share"),
        (lambda a, v: ch.trace_weights(a * np.nan, v), RuleError, "weights holds nan"),
        (lambda a, v: ch.trace_weights(a.T, v), ShapeError, "weights.swapaxes(-1, -2) would fit"),
        (lambda a, v: ch.trace_weights(a[None], v), ShapeError, "expected as many axes"),
        (lambda a, v: ch.trace_weights(a[[0, 1, 2] * 1][None], v[None][[0, 0]]), ShapeError, "a multiple of"),
        (lambda a, v: ch.trace_weights(a, v, convention="cols"), RuleError, "convention is 'cols'"),
        (lambda a, v: ch.trace_weights(a, v).to_html(), RuleError, "here the weights themselves were given"),
        (lambda a, v: ch.diagnose_weights(a, v, v), ShapeError, "expected (queries 4, d_v 3)"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call(*drawn())


def test_a_file_of_weights_is_traced_and_its_output_checked(tmp_path, capsys):
    case = check_file(written(tmp_path / "case.json", {**MIX, "output": [0.8, 0.8]}))
    assert case.first_wrong is None
    wrong = written(tmp_path / "case.json", {**MIX, "output": [0.8, 0.9]})
    assert main(["trace", str(wrong)]) == 1
    assert "the first wrong step is output, by up to 0.1" in capsys.readouterr().out
    rounded = written(tmp_path / "case.json", {**MIX, "weights": [[0.33, 0.33, 0.33, 0]]})
    assert main(["trace", str(rounded), "--json", str(tmp_path / "out.json")]) == 0
    assert "rows sum to 0.99 … 1, not to 1" not in (said := capsys.readouterr().out)
    assert "rows sum to 0.99 … 0.99, not to 1" in said
    assert [s["name"] for s in json.loads((tmp_path / "out.json").read_text())["steps"]] == ["weights", "v", "output"]
    assert main(["trace", str(rounded), "--lang", "zh"]) == 0
    assert "每行之和为 0.99" in capsys.readouterr().out
    assert main(["trace", str(rounded), "--html", str(tmp_path / "x.html")]) == 2
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("reader", [check_file, diagnose_file])
def test_rules_beside_given_weights_are_refused(tmp_path, reader):
    theirs = {"theirs": [[0, 0]]} if reader is diagnose_file else {}
    with pytest.raises(FileError, match="causal, which acts before there are weights"):
        reader(written(tmp_path / "case.json", {**MIX, "causal": True, **theirs}))
    with pytest.raises(ClearheadError, match="lacks v"):
        reader(written(tmp_path / "case.json", {"weights": MIX["weights"], **theirs}))
    with pytest.raises(ClearheadError, match="lacks k"):
        reader(written(tmp_path / "case.json", {**MIX, "q": [[1, 2]], **theirs}))


@pytest.mark.parametrize(
    ("make", "mistake"),
    [
        (lambda a, v: np.repeat(v, 2, 1) * 0 + a.swapaxes(-1, -2) @ np.repeat(v, 2, 1), "weights transposed"),
        (lambda a, v: a @ np.tile(v, (1, 2, 1, 1)), "grouped keys tiled"),
    ],
)
def test_mistakes_between_weights_and_the_output_are_named(tmp_path, make, mistake):
    a, v = drawn(2, 4, queries=5, keys=5, kv_heads=2)
    a = a * fresh().uniform(0.5, 1.5, a.shape[:-1])[..., None]
    right = ch.trace_weights(a, v).output
    assert ch.diagnose_weights(a, v, right).verdict == "right"
    result = ch.diagnose_weights(a, v, make(a, v))
    assert (result.verdict, result.explanations[0].mistakes) == ("mistake", (mistake,))
    np.savez(tmp_path / "case.npz", weights=a, v=v, theirs=make(a, v))
    assert diagnose_file(tmp_path / "case.npz").explanations[0].mistakes == (mistake,)
    odd = right + fresh().standard_normal(right.shape)
    assert ch.diagnose_weights(a, v, odd).verdict == "unexplained"
    turned = [x.swapaxes(-1, -2) for x in (a, v, make(a, v))]
    assert ch.diagnose_weights(*turned, convention="columns").explanations[0].mistakes == (mistake,)


def test_weights_alone_cannot_be_diagnosed_at_another_stage(tmp_path):
    with pytest.raises(RuleError, match="only the output can be wrong"):
        diagnose_file(written(tmp_path / "case.json", {**MIX, "theirs": [[0.1, 0.2, 0.3, 0.4]], "stage": "weights"}))
