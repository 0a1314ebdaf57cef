"""`check_file`: which step is wrong, by how much, and which mistake explains it; claims of layers, names of tokens."""

import json

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.diagnosing.claims import check_file, is_consequence
from clearhead.errors import ClearheadError, FileError, ShapeError, UnknownNameError
from diagnosing import EXAMPLE, WRONG, softmax, written
from page_files import header_of
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
        ({**EXAMPLE, "H": EXAMPLE["q"]}, FileError, "claims concat, a step of a layer"),
    ],
)
def test_files_with_wrong_contents_are_refused(tmp_path, data, error, words):
    with pytest.raises(error) as caught:
        check_file(written(tmp_path / "case.json", data))
    assert words in str(caught.value)
    assert "\n" not in caught.value.one_line()


STEPS = ("q", "k", "v", "scores", "scaled", "weights", "heads", "concat", "output")


def layer(heads=2, **more):
    rng = fresh()
    widths = {"w_q": (6, 8), "w_k": (6, 8), "w_v": (6, 6), "w_o": (6, 5)}
    inputs = {"x": rng.standard_normal((4, 6))} | {n: rng.standard_normal(size) for n, size in widths.items()}
    return inputs | {"num_heads": heads} | more


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_every_step_of_a_layer_can_be_claimed(tmp_path, heads, convention):
    inputs = layer(heads, b_v=fresh().standard_normal(6), causal=True)
    if convention == "columns":
        inputs |= {n: inputs[n].T for n in ("x", "w_q", "w_k", "w_v", "w_o")} | {"convention": "columns"}
    t = ch.trace_layer(**inputs)
    case = check_file(written(tmp_path / "case.npz", inputs | {name: getattr(t, name) for name in STEPS}))
    assert [v.name for v in case.verdicts] == list(STEPS)
    assert case.first_wrong is None


def test_q_k_and_v_may_be_claimed_before_they_are_split(tmp_path):
    inputs = layer()
    x = inputs["x"]
    whole = {n: x @ inputs[f"w_{n}"] for n in "qkv"}
    h = ch.trace_layer(x, inputs["w_q"], inputs["w_k"], inputs["w_v"], num_heads=2).output
    capital = {"Q": whole["q"], "K": whole["k"], "V": whole["v"], "H": h}
    case = check_file(written(tmp_path / "case.npz", inputs | capital))
    assert [v.right for v in case.verdicts] == [True] * 4
    assert [v.name for v in case.verdicts] == ["q", "k", "v", "concat"]
    turned = {n: inputs[n].T for n in ("x", "w_q", "w_k", "w_v", "w_o")}
    data = {**inputs, **turned, **{n: a.T for n, a in capital.items()}, "convention": "columns"}
    assert check_file(written(tmp_path / "case.npz", data)).first_wrong is None


def test_what_follows_from_a_wrong_claim_is_told_apart(tmp_path):
    inputs = layer(1)
    x, w_q, w_k, w_v, w_o = (inputs[n] for n in ("x", "w_q", "w_k", "w_v", "w_o"))
    q, k, v = x @ w_q + 0.5, x @ w_k, x @ w_v + 1.0  # wrong by a bias that the file does not have
    scores = q @ k.T
    a = softmax(scores / np.sqrt(8))
    claims = {"q": q, "k": k, "v": v, "scores": scores, "weights": a, "h": a @ v, "output": a @ v @ w_o}
    verdicts = {v.name: v for v in check_file(written(tmp_path / "case.npz", inputs | claims)).verdicts}
    assert verdicts["k"].right
    assert {n: v.source for n, v in verdicts.items()} == {
        "q": None, "k": None, "v": None, "scores": "q", "weights": "scores", "concat": "weights, v", "output": "concat",
    }  # fmt: skip
    assert all(is_consequence(verdicts[n]) for n in ("scores", "weights", "concat", "output"))
    for off in (0, 1):
        data = inputs | {"q": q, "v": v, "output": a @ v @ w_o + off}
        last = check_file(written(tmp_path / "case.npz", data)).verdicts[-1]
        assert is_consequence(last) == (not off)
        assert off or last.source == "q, v"


@pytest.mark.parametrize(
    ("name", "make", "mistake"),
    [
        ("q", lambda i: i["x"] @ i["w_q"].T + i["b_q"], "W transposed"),
        ("v", lambda i: i["x"] @ i["w_v"], "projection bias left out"),
        ("q", lambda i: (i["x"] @ i["w_q"] + i["b_q"]).reshape(2, 4, 3), "heads split without the transpose"),
        ("q", lambda i: (i["x"] @ i["w_q"] + i["b_q"]).reshape(4, 3, 2).transpose(2, 0, 1), "heads interleaved"),
        ("scaled", lambda i: ch.trace_layer(**i).scores / 3, "scale 1/d_k"),
        ("weights", lambda i: ch.trace_layer(**{**i, "causal": False}).weights, "causal mask missing"),
        ("heads", lambda i: ch.trace_layer(**i, scale=1.0).heads, "no scale"),
        ("output", lambda i: ch.trace_layer(**i | {"w_v": i["w_k"], "b_v": i["b_k"]}).output, "keys instead of values"),
        ("concat", lambda i: np.asarray(ch.trace_layer(**i).heads).reshape(4, 6), "heads merged without the transpose"),
    ],
)
def test_mistakes_in_claims_of_a_layer_are_named(tmp_path, name, make, mistake):
    rng = fresh()
    inputs = {"x": rng.standard_normal((4, 6)), "num_heads": 2, "causal": True}
    inputs |= {f"w_{n}": rng.standard_normal((6, 6)) for n in "qkvo"}
    inputs |= {f"b_{n}": rng.standard_normal(6) for n in "qkv"}
    case = check_file(written(tmp_path / "case.npz", inputs | {name: make(inputs)}))
    assert case.first_wrong is not None
    assert (case.first_wrong.name, case.first_wrong.mistake) == (name, mistake)
    assert case.first_wrong.did("en") != case.first_wrong.did("zh") != []


def test_claims_that_no_mistake_explains_stay_unexplained(tmp_path):
    inputs = layer()
    for name in ("q", "k", "v", "heads", "concat"):
        off = np.asarray(getattr(ch.trace_layer(**inputs), name))
        case = check_file(written(tmp_path / "case.npz", inputs | {name: off + fresh().standard_normal(off.shape)}))
        assert case.first_wrong is not None
        assert case.first_wrong.mistake is None


def cross(tmp_path):
    rng = fresh()
    q, k, v = rng.standard_normal((2, 3)), rng.standard_normal((4, 3)), rng.standard_normal((4, 2))
    names = {"tokens": ["le", " chat"], "source_tokens": ["the", " cat", " sat", " on"]}
    data = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), **names}
    (tmp_path / "cross.json").write_text(json.dumps(data))
    return data, names, tmp_path / "cross.json"


def test_tokens_of_a_file_are_shown_everywhere(tmp_path, capsys):
    data, names, place = cross(tmp_path)
    case = check_file(place)
    assert (case.tokens, case.sources) == (names["tokens"], names["source_tokens"])
    assert main(["trace", str(place), "--query", "1", "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "query 1 chat: each score is two lengths and an angle" in said
    for name in ("le ", "cat", "sat", "0 the", "1 ␣cat"):
        assert name in said
    tokens = json.loads((tmp_path / "out.json").read_text())["tokens"]
    assert tokens == {"queries": names["tokens"], "keys": names["source_tokens"]}
    case.save(tmp_path / "page.html")
    assert header_of((tmp_path / "page.html").read_text())["tokens"] == ["le", " chat"]
    arrays = {n: np.array(x) for n, x in data.items()}
    assert check_file(written(tmp_path / "case.npz", arrays)).sources == names["source_tokens"]
    (tmp_path / "short.json").write_text(json.dumps({**data, "tokens": ["le"]}))
    with pytest.raises(ShapeError, match="tokens has 1 strings for 2 queries"):
        check_file(tmp_path / "short.json")


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_the_terminal_shows_lengths_and_angles_of_a_query(tmp_path, capsys, convention):
    rng = fresh()
    q, k, v = rng.standard_normal((2, 4, 3, 5)), rng.standard_normal((2, 2, 3, 5)), rng.standard_normal((2, 2, 3, 2))
    arrays = {"q": q, "k": k, "v": v}
    if convention == "columns":
        arrays = {n: x.swapaxes(-1, -2) for n, x in arrays.items()} | {"convention": "columns"}
    place = written(tmp_path / "case.npz", arrays)
    assert main(["trace", str(place), "--batch", "1", "--head", "3", "--query", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("query 2: each score"))
    shown_norm = float(lines[start + 1].split("‖q‖ = ")[1].split(";")[0])
    np.testing.assert_allclose(shown_norm, np.linalg.norm(q[1, 3, 2]), atol=6e-5)
    for j, line in enumerate(lines[start + 3 : start + 6]):
        key = k[1, 1, j]
        norm, score = np.linalg.norm(key), q[1, 3, 2] @ key
        shown = [float(text) for text in line.split()[1:]]
        np.testing.assert_allclose(shown[:3], [norm, score / norm / np.linalg.norm(q[1, 3, 2]), score], atol=6e-5)
