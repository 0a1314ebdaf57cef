"""`check_file`: which step is wrong, by how much, and which mistake explains it."""

import numpy as np
import pytest

from clearhead.diagnosing.claims import check_file, is_consequence
from clearhead.errors import ClearheadError, FileError, ShapeError, UnknownNameError
from diagnosing import EXAMPLE, WRONG, softmax, written
from seeds import fresh


def test_the_wrong_example_of_the_tutorial_is_explained(tmp_path):
    case = check_file(written(tmp_path / "case.json", WRONG))
    scores, weights = case.verdicts
    assert case.first_wrong is scores
    assert (scores.mistake, scores.difference) == ("transpose missing", 3.0)
    np.testing.assert_array_equal(scores.truth, [[6.5, 10], [2, 3.5]])
    assert not weights.right
    assert weights.source == "scores"
    assert not is_consequence(weights)
    np.testing.assert_allclose(weights.follows, [[0.0049, 0.9951], [0.0558, 0.9442]], atol=1e-4)
    assert weights.off_source == pytest.approx(0.0088, abs=1e-4)


def test_values_right_to_their_printed_decimals_are_accepted(tmp_path):
    right = {**EXAMPLE, "scores": [[6.5, 10], [2, 3.5]], "scaled": [[4.596, 7.071], [1.414, 2.475]]}
    right |= {"weights": [[0.078, 0.922], [0.257, 0.743]], "output": [[0.9224, 2.1553], [0.7428, 2.5144]]}
    case = check_file(written(tmp_path / "case.json", right))
    assert [v.right for v in case.verdicts] == [True] * 4
    assert case.first_wrong is None
    off = check_file(written(tmp_path / "case.json", {**EXAMPLE, "weights": [[0.079, 0.921], [0.257, 0.743]]}))
    assert off.first_wrong is not None


def test_a_wrong_step_is_told_from_those_that_follow_from_it(tmp_path):
    rng = fresh()
    q, k, v = (rng.standard_normal((5, 4)) for _ in range(3))
    scores = q @ k.T  # the scale was forgotten
    weights = softmax(scores)
    np.savez(tmp_path / "case.npz", q=q, k=k, v=v, scaled=scores, weights=weights, output=weights @ v)
    scaled, a, o = check_file(tmp_path / "case.npz").verdicts
    assert scaled.mistake == "no scale"
    assert is_consequence(a)
    assert a.source == "scaled"
    assert is_consequence(o)


@pytest.mark.parametrize(
    ("step", "make", "mistake"),
    [
        ("weights", lambda q, k, v: softmax(q @ k.T / 2), "causal mask missing"),
        ("scores", lambda q, k, v: q @ k, "transpose missing"),
        ("scores", lambda q, k, v: k @ q.T, "q and k swapped"),
        ("scaled", lambda q, k, v: q @ k.T / 4, "scale 1/d_k"),
        ("weights", lambda q, k, v: softmax(q @ k.T, -1), "no scale"),
        ("weights", lambda q, k, v: softmax(q @ k.T / 2, 0), "softmax over queries"),
        ("weights", lambda q, k, v: softmax(q @ k.T / 2, None), "softmax over the whole matrix"),
        ("output", lambda q, k, v: softmax(q @ k.T / 2, -1).T @ v, "weights transposed"),
        ("output", lambda q, k, v: softmax(q @ k.T / 2, -1) @ k, "keys instead of values"),
    ],
)
def test_known_mistakes_are_named(tmp_path, step, make, mistake):
    q, k, v = fresh().standard_normal((3, 4, 4))
    causal = mistake == "causal mask missing"
    np.savez(tmp_path / "case.npz", q=q, k=k, v=v, causal=causal, **{step: make(q, k, v)})
    first = check_file(tmp_path / "case.npz").first_wrong
    assert first is not None
    assert (first.name, first.mistake) == (step, mistake)


def test_files_may_hold_layers_rules_capital_names_and_nulls(tmp_path):
    x = fresh().standard_normal((3, 4)).round(3).tolist()
    w = np.eye(4).tolist()
    layer = {"X": x, "W_q": w, "W_k": w, "W_v": w, "num_heads": 2, "causal": True, "window": [1, None]}
    case = check_file(written(tmp_path / "case.json", layer))
    assert case.trace.weights.shape == (2, 3, 3)
    masked = case.trace.masked
    claimed = [[[None if np.isinf(c) else round(float(c), 6) for c in row] for row in head] for head in masked]
    assert check_file(written(tmp_path / "case.json", {**layer, "masked": claimed})).first_wrong is None
    columns = {**EXAMPLE, "convention": "columns", "scores": [[6.5, 10], [2, 3.5]]}
    assert check_file(written(tmp_path / "case.json", columns)).trace.convention == "columns"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"q": [[1]], "k": [[1]]}, FileError, "lacks v"),
        ({**EXAMPLE, "x": [[1]]}, FileError, "holds both q and x"),
        ({**EXAMPLE, "casual": True}, UnknownNameError, "did you mean `causal`?"),
        ({**EXAMPLE, "q": [[1, 2], [3]]}, FileError, "q is not a list of equally long rows"),
        ({**EXAMPLE, "q": [["a", 1], [1, 2]]}, FileError, "q holds 'a': expected numbers"),
        ({**EXAMPLE, "q": [[1, 2, 3]]}, ShapeError, "q has d_k 3 but k has d_k 2"),
        ({**EXAMPLE, "scores": [[1, 2, 3]]}, FileError, "the claimed scores has shape (1, 3)"),
        ('{"q": [[1]], "k": [[1]], "v": [[1]], "scale": NaN}', ClearheadError, "scale is nan"),
        ({**EXAMPLE, "Q": [[1]]}, FileError, "gives a name twice"),
    ],
)
def test_files_with_wrong_contents_are_refused(tmp_path, data, error, words):
    with pytest.raises(error) as caught:
        check_file(written(tmp_path / "case.json", data))
    assert words in str(caught.value)
    assert "\n" not in caught.value.one_line()
