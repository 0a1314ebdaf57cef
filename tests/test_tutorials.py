"""What the tutorials say, in numbers: one token and all, two conventions, convex combinations, patterns, the scale."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.textbook.costs import sparse_patterns
from clearhead.textbook.why_scale import why_scale
from diagnosing import softmax, written
from seeds import fresh, normal


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
    block, ahead = np.arange(n) // width, np.arange(n) - np.arange(n)[:, None]
    expected = {
        "full": np.ones((n, n), bool),
        "window": abs(ahead) <= width,
        "blocks": np.isin(block[:, None] - block, (0, 1)) | (block == 0),
        "segments": block[:, None] == block,
    }
    for name, (rules, seen) in sparse_patterns(n, width).items():
        np.testing.assert_array_equal(seen, expected[name])
        a = softmax(np.where(seen, q @ k.T / 2, -np.inf))
        np.testing.assert_allclose(ch.attention(q, k, v, **rules), a @ v, rtol=1e-9, atol=1e-12)


def test_the_command_prints_what_sparse_patterns_cost(capsys):
    assert main(["shapes", "n=12", "d_k=4", "d_v=6", "h=2", "--sparse", "5"]) == 0
    said = capsys.readouterr().out
    for name, (_, seen) in sparse_patterns(12, 5).items():
        line = next(line for line in said.splitlines() if line.startswith(f"  {name} "))
        assert line.split()[1:] == [str(seen.sum()), f"{100 * seen.mean():.2f}%", f"{20 * seen.sum():,}"]
        assert "".join("█" if each else "·" for each in seen[6]) in said
    assert max(map(len, said.splitlines())) <= 80
    assert main(["shapes", "n=40", "--sparse", "5", "--lang", "zh"]) == 0
    assert "不算全部 1,600 对查询和键" in capsys.readouterr().out
    assert main(["shapes", "d_k=4", "--sparse", "5"]) == 2


def test_gradients_vanish_and_explode_without_the_scale():
    scale = why_scale((4, 64, 1024), queries=300, seed=int(fresh().integers(2**31)))
    np.testing.assert_allclose(scale.variance[:, 0], scale.d_k, rtol=0.3)  # of 4,800 pairs
    np.testing.assert_allclose(scale.variance[:, 1] * scale.d_k, scale.variance[:, 0], rtol=1e-12)
    assert (np.diff(scale.largest[:, 0]) > 0).all()
    assert (np.diff(scale.slope[:, 0]) < 0).all()
    assert np.ptp(scale.largest[:, 1]) < 0.1
    assert (scale.slope[:, 1] > 0.12).all()
    median, most = scale.gradient[..., 0], scale.gradient[..., 1]
    assert median[2, 0] < 0.05 * median[1, 0]
    assert (np.diff(most[:, 0]) > 1).all()
    assert np.ptp(scale.gradient[:, 1], axis=0).max() < 0.4


def test_the_command_prints_both_tables(capsys):
    assert main(["scale", "--widths", "1,64", "--keys", "8", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(data["variance"], why_scale((1, 64), keys=8).variance)
    assert main(["scale"]) == 0
    said = capsys.readouterr().out
    shown = [line.split() for line in said.splitlines() if line[:11].strip().isdigit()]
    scale = why_scale((1, 4, 16, 64, 256))
    tables = np.hstack([scale.variance, np.stack([scale.largest, scale.slope], -1).reshape(5, 4)])
    np.testing.assert_allclose(np.array([row[1:] for row in shown[:5]], float), tables, atol=6e-5)
    np.testing.assert_allclose(np.array([row[1:] for row in shown[5:]], float), scale.gradient.reshape(5, 4), atol=6e-5)
    assert max(map(len, said.splitlines())) <= 80
    assert main(["scale", "--lang", "zh"]) == 0
    assert "得分为什么要除以 √d_k" in capsys.readouterr().out


def test_numbers_follow_from_the_draw():
    seed, d_k = int(fresh().integers(2**31)), int(fresh().integers(1, 300))
    scale = why_scale([3, d_k], keys=6, queries=40, seed=seed)
    rng = np.random.default_rng((seed, d_k))
    q, k = rng.standard_normal((40, 1, d_k)), rng.standard_normal((40, 6, d_k))
    scores = np.einsum("iod,ijd->ij", q, k)
    assert scale.variance[1, 0] == pytest.approx(scores.var())
    for side, factor in enumerate((1, d_k**-0.5)):
        logits = factor * scores
        weights = softmax(logits)
        largest, best = weights.max(axis=-1), weights.argmax(axis=-1)
        assert scale.largest[1, side] == pytest.approx(largest.mean(), rel=1e-9)
        assert scale.slope[1, side] == pytest.approx((largest * (1 - largest)).mean(), rel=1e-9)
        by_scores = weights.max(axis=-1, keepdims=True) * (np.eye(6)[best] - weights)
        norms = np.linalg.norm(factor * np.einsum("ij,ijd->id", by_scores, k), axis=-1)
        assert scale.gradient[1, side] == pytest.approx((np.median(norms), norms.max()), rel=1e-9)
    again = why_scale([3, d_k], keys=6, queries=40, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(scale, again, strict=True))
