"""Why scores are divided by √d_k: variances, and the derivative of the softmax."""

import json

import numpy as np
import pytest

from clearhead.cli import main
from clearhead.textbook.why_scale import saturation, why_scale
from dense_gpt2 import softmax
from seeds import fresh


def test_the_variance_of_a_score_is_d_k_and_the_scaled_one_is_1():
    widths = sorted({int(width) for width in fresh().integers(1, 300, 4)})
    scale = why_scale(widths, keys=4, queries=4000, seed=int(fresh().integers(2**31)))
    # q·k of 16,000 pairs, four to a query: the estimate's standard error is below 6 % at d_k = 1 and smaller beyond
    np.testing.assert_allclose(scale.variance, widths, rtol=0.36)
    np.testing.assert_allclose(scale.scaled_variance * widths, scale.variance, rtol=1e-12)


def test_without_the_scale_the_softmax_saturates_and_with_it_not():
    scale = why_scale((4, 64, 1024), queries=300, seed=int(fresh().integers(2**31)))
    assert (np.diff(scale.largest) > 0).all()
    assert (np.diff(scale.slope) < 0).all()
    assert np.ptp(scale.scaled_largest) < 0.1
    assert (scale.scaled_slope > 0.12).all()


def test_slopes_are_the_derivative_by_finite_differences():
    rng = fresh()
    scores, factors = rng.standard_normal(5), rng.uniform(0.1, 3, 4)
    scale = saturation(scores, factors)
    np.testing.assert_allclose(scale.weights, softmax(factors[:, None] * scores), rtol=1e-12)
    for row, factor in enumerate(factors):
        for j in range(5):
            step = 1e-5 * np.eye(5)[j]
            slope = (softmax(factor * scores + step) - softmax(factor * scores - step))[j] / 2e-5
            assert scale.slopes[row, j] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert saturation((3.0, 1.0), (1.0, 40.0)).slopes[1].max() < 1e-30


def test_the_command_prints_both_tables(capsys):
    assert main(["scale", "--widths", "1,64", "--keys", "8", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["variance"] == pytest.approx(why_scale((1, 64), keys=8).variance.tolist())
    assert main(["scale"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 15
    assert max(map(len, said.splitlines())) <= 80
    assert main(["scale", "--lang", "zh"]) == 0
    assert "得分为什么要除以 √d_k" in capsys.readouterr().out


def test_numbers_and_pictures_follow_from_the_draw():
    seed, d_k = int(fresh().integers(2**31)), int(fresh().integers(1, 300))
    scale = why_scale([3, d_k], keys=6, queries=40, seed=seed)
    rng = np.random.default_rng((seed, d_k))
    q, k = rng.standard_normal((40, 1, d_k)), rng.standard_normal((40, 6, d_k))
    scores = np.einsum("iod,ijd->ij", q, k)
    assert scale.variance[1] == pytest.approx(scores.var())
    sides = (scores, scale.largest, scale.slope), (scores / np.sqrt(d_k), scale.scaled_largest, scale.scaled_slope)
    for side, (logits, largest, slope) in enumerate(sides):
        ranked = np.sort(softmax(logits), axis=-1)[:, ::-1]
        np.testing.assert_allclose(scale.ranked[1, side], ranked.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(scale.slopes[1, side], (ranked * (1 - ranked)).mean(axis=0), rtol=1e-9)
        assert (largest[1], slope[1]) == pytest.approx((scale.ranked[1, side, 0], scale.slopes[1, side, 0]))
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
