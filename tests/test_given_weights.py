"""Weights that are given, traced, checked and diagnosed without q and k; and what the tutorials say, with numbers."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.claims import check_file
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import ClearheadError, FileError, RuleError, ShapeError
from clearhead.textbook.sparse import sparse_patterns
from diagnosing import softmax, written
from seeds import fresh, normal

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
        (lambda a, v: ch.trace_weights(a.T, v), ShapeError, "weights.swapaxes(-1, -2) would fit"),
        (lambda a, v: ch.trace_weights(a[None], v), ShapeError, "expected as many axes"),
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
    q, k, v = normal(3, 6), normal(5, 6), normal(5, 2)
    plain = ch.trace(q, k, v), ch.trace(q.T, k.T, v.T, convention="columns")
    np.testing.assert_array_equal(plain[0].output, plain[1].output.T)
    np.testing.assert_array_equal(plain[0].scores, plain[1].scores.T)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_file_the_example_of_the_tutorials_is_traced(capsys, language):
    assert main(["trace", "--lang", language]) == 0
    said = capsys.readouterr().out
    assert "0.5500·v_attention + 0.2500·v_is + 0.1500·v_what + 0.0500·v_? = [0.8000" in said
    assert "0≤0.8000≤2.0000" in said
    assert ("convex combination of the values:" if language == "en" else "值的凸组合：") in said
    assert f"d_k = 4 {'and' if language == 'en' else '与'} d_v = 2 " in said
    k = np.array([[1, 1, 0, 0.1972], [1, 1, 1, 0.2189], [1, 1.4, 1.2, 1.1958], [1, -1, 1, -1]])
    weights = softmax(np.ones(4) @ k.T / 2)
    np.testing.assert_allclose(weights, [0.15, 0.25, 0.55, 0.05], atol=5e-5)
    row = re.search(r"attention((?:  0\.\d+)+)", said)
    assert row is not None
    np.testing.assert_allclose([float(x) for x in row[1].split()], weights, atol=6e-4)
    assert said.count("✓") == 2


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_an_output_lies_between_the_values_that_it_mixes(tmp_path, capsys, convention):
    q, k, v = normal(3, 2, 5, 4)
    arrays = {"q": q, "k": k, "v": v}
    if convention == "columns":
        arrays = {n: x.swapaxes(-1, -2) for n, x in arrays.items()} | {"convention": "columns"}
    place = written(tmp_path / "case.npz", {**arrays, "causal": True})
    assert main(["trace", str(place), "--head", "1", "--query", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    output = softmax(q[1, 2] @ k[1, :3].T / 2) @ v[1, :3]
    bounds = re.findall(r"([^\s≤]+)≤([^\s≤]+)≤([^\s,]+)", said)
    expected = np.stack([v[1, :3].min(axis=0), output, v[1, :3].max(axis=0)], axis=-1)
    np.testing.assert_allclose(np.array(bounds, dtype=float), expected, atol=6e-5)
    assert main(["trace", str(written(tmp_path / "sinks.npz", {**arrays, "sinks": np.ones(2)}))]) == 0
    assert "≤" not in capsys.readouterr().out


def test_sparse_patterns_have_the_pairs_that_their_rules_allow():
    n, width = (int(x) for x in fresh().integers((2, 1), (40, 9)))
    q, k, v = normal(3, n, 4)
    block = np.arange(n) // width
    ahead = np.arange(n) - np.arange(n)[:, None]
    seen = {
        "full": np.ones((n, n), bool),
        "window": abs(ahead) <= width,
        "blocks": np.isin(block[:, None] - block, (0, 1)) | (block == 0),
        "segments": block[:, None] == block,
    }
    for pattern in sparse_patterns(n, width):
        mask = seen[pattern.name]
        assert (pattern.pairs, pattern.share) == (mask.sum(), mask.mean())
        a = softmax(np.where(mask, q @ k.T / 2, -np.inf))
        np.testing.assert_allclose(ch.attention(q, k, v, **pattern.rules), a @ v, rtol=1e-9, atol=1e-12)
        if n <= 16:
            np.testing.assert_array_equal(pattern.picture, mask)


def test_the_command_prints_what_sparse_patterns_cost(capsys):
    assert main(["shapes", "n=40", "d_k=4", "d_v=6", "h=2", "--sparse", "5"]) == 0
    said = capsys.readouterr().out
    for pattern in sparse_patterns(40, 5):
        line = next(line for line in said.splitlines() if line.startswith(f"  {pattern.name} "))
        assert line.split()[1:] == [f"{pattern.pairs:,}", f"{100 * pattern.share:.2f}%", f"{2 * 10 * pattern.pairs:,}"]
    assert max(map(len, said.splitlines())) <= 80
    assert main(["shapes", "n=40", "--sparse", "5", "--lang", "zh"]) == 0
    assert "不算全部 1,600 对查询和键" in capsys.readouterr().out
    assert main(["shapes", "d_k=4", "--sparse", "5"]) == 2
