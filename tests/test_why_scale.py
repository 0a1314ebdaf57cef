"""Why scores are divided by √d_k: variances, and the derivative of the softmax."""

import json

import numpy as np
import pytest

from clearhead.cli import main
from clearhead.textbook.why_scale import why_scale
from dense_gpt2 import softmax
from seeds import fresh


def test_the_variance_of_a_score_is_d_k_and_the_scaled_one_is_1():
    widths = sorted({int(width) for width in fresh().integers(1, 300, 4)})
    scale = why_scale(widths, keys=4, queries=4000, seed=int(fresh().integers(2**31)))
    # q·k of 16,000 pairs, four to a query: the estimate's standard error is below 6 % at d_k = 1 and smaller beyond
    np.testing.assert_allclose(scale.variance[:, 0], widths, rtol=0.36)
    np.testing.assert_allclose(scale.variance[:, 1] * widths, scale.variance[:, 0], rtol=1e-12)


def test_gradients_vanish_and_explode_without_the_scale():
    scale = why_scale((4, 64, 1024), queries=300, seed=int(fresh().integers(2**31)))
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
    shown = [line.split() for line in said.splitlines() if line.lstrip()[:1].isdigit()]
    scale = why_scale((1, 4, 16, 64, 256))
    tables = np.hstack([scale.variance, np.stack([scale.largest, scale.slope], -1).reshape(5, 4)])
    np.testing.assert_allclose(np.array([row[1:] for row in shown[:5]], float), tables, atol=6e-5)
    np.testing.assert_allclose(np.array([row[1:] for row in shown[5:]], float), scale.gradient.reshape(5, 4), atol=6e-5)
    assert max(map(len, said.splitlines())) <= 80
    assert main(["scale", "--lang", "zh"]) == 0
    assert "得分为什么要除以 √d_k" in capsys.readouterr().out


def test_numbers_and_pictures_follow_from_the_draw():
    seed, d_k = int(fresh().integers(2**31)), int(fresh().integers(1, 300))
    scale = why_scale([3, d_k], keys=6, queries=40, seed=seed)
    rng = np.random.default_rng((seed, d_k))
    q, k = rng.standard_normal((40, 1, d_k)), rng.standard_normal((40, 6, d_k))
    scores = np.einsum("iod,ijd->ij", q, k)
    assert scale.variance[1, 0] == pytest.approx(scores.var())
    for side, factor in enumerate((1, d_k**-0.5)):
        logits = factor * scores
        weights = softmax(logits)
        ranked, best = np.sort(weights, axis=-1)[:, ::-1], weights.argmax(axis=-1)
        np.testing.assert_allclose(scale.ranked[1, side], ranked.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(scale.slopes[1, side], (ranked * (1 - ranked)).mean(axis=0), rtol=1e-9)
        by_scores = weights.max(axis=-1, keepdims=True) * (np.eye(6)[best] - weights)
        norms = np.linalg.norm(factor * np.einsum("ij,ijd->id", by_scores, k), axis=-1)
        assert scale.gradient[1, side] == pytest.approx((np.median(norms), norms.max()), rel=1e-9)
        for unit in range(-40, 40):
            inside = ((logits >= unit) & (logits < unit + 1)).mean()
            assert scale.histogram[1, side, unit + 40] == pytest.approx(inside)
    again = why_scale([3, d_k], keys=6, queries=40, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(scale, again, strict=True))


def test_the_command_writes_the_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["scale", "--widths", "4,64", "--html", str(page), "--json", "-"]) == 0
    first = page.read_bytes()
    assert json.loads(capsys.readouterr().out)["d_k"] == [4, 64]
    why_scale((4, 64)).save(page)
    assert page.read_bytes() == first
    assert main(["scale", "--html", str(tmp_path / "no.txt")]) == 2
