"""One head against several: shapes, parameters, cost and outputs of the same layer."""

import json

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.digits import significant
from clearhead.errors import ClearheadError, SelectionError, ShapeError
from clearhead.textbook.heads import heads_beside
from clearhead.textbook.page import Scene
from dense_gpt2 import softmax
from seeds import fresh
from terminal import refused


def layer(*lead, **more):
    rng = fresh()
    arrays = {"x": rng.standard_normal((*lead, 5, 8)), "w_o": rng.standard_normal((4, 3))}
    arrays |= {name: rng.standard_normal((8, 8)) for name in ("w_q", "w_k")} | {"w_v": rng.standard_normal((8, 4))}
    return arrays | {"b_q": rng.standard_normal(8), "b_o": rng.standard_normal(3)} | more


def by_hand(layer, heads):
    """A layer's weights (heads, queries, keys) and output, head by head, in float64."""
    q, k, v = layer["x"] @ layer["w_q"] + layer["b_q"], layer["x"] @ layer["w_k"], layer["x"] @ layer["w_v"]
    parts, weights = [], []
    for each in range(heads):
        d, e = q.shape[-1] // heads, v.shape[-1] // heads
        a = softmax(q[:, each * d : each * d + d] @ k[:, each * d : each * d + d].T / np.sqrt(d))
        weights.append(a)
        parts.append(a @ v[:, each * e : each * e + e])
    return np.array(weights), np.concatenate(parts, axis=-1) @ layer["w_o"] + layer["b_o"]


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_each_number_of_heads_is_the_layer_computed_by_hand(convention):
    rows = layer()
    turned = rows
    if convention == "columns":
        turned = {name: a.T if a.ndim > 1 else a for name, a in rows.items()} | {"convention": "columns"}
    beside = heads_beside((4, 1, 2), **turned)
    outputs = []
    for heads, each in zip((4, 1, 2), beside, strict=True):
        weights, output = by_hand(rows, heads)
        outputs.append(output)
        seen = np.asarray(each.trace.output)
        np.testing.assert_allclose(seen.T if convention == "columns" else seen, output, rtol=1e-9, atol=1e-10)
        assert (each.num_heads, each.parameters) == (heads, 8 * 8 * 2 + 8 * 4 + 4 * 3 + 8 + 3)
        assert each.multiply_adds == sum(step.multiply_adds for step in each.trace.steps)
        assert each.difference == pytest.approx(np.abs(output - outputs[0]).max(), rel=1e-8, abs=1e-12)
        entropy = -(weights * np.log(weights)).sum(axis=-1).mean(axis=-1)
        np.testing.assert_allclose(each.entropy, entropy, rtol=1e-9)
    costs = {each.num_heads: each.multiply_adds for each in beside}
    softmax = 5 * 5 * 2  # a multiplication by the scale and an exponential for each of a head's weights
    assert costs[2] - costs[1] == softmax
    assert costs[4] - costs[1] == 3 * softmax


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        ((2,), SelectionError, "1 numbers of heads: expected two to 4"),
        ("12", SelectionError, "two to 4 numbers of heads"),
        ((1, 3), ShapeError, "which num_heads 3 does not divide"),
        ((1, 0), ClearheadError, "num_heads is 0"),
    ],
)
def test_errors_say_what_is_wrong(counts, error, words):
    with pytest.raises(error, match=words):
        heads_beside(counts, **layer())


def test_the_command_prints_them_side_by_side(tmp_path, capsys):
    np.savez(tmp_path / "layer.npz", **layer(2, num_heads=2))
    out = tmp_path / "out.json"
    assert main(["trace", str(tmp_path / "layer.npz"), "--num-heads", "1,4", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines()[1:2]] == [["h", "=", "1", "h", "=", "4"]]
    assert "(2, 4, 5, 2)" in said
    assert "U with h = 4\n  batch 0 of 2" in said
    data = json.loads(out.read_text())["heads"]
    expected = ch.trace_layer(**{**dict(np.load(tmp_path / "layer.npz")), "num_heads": 4})
    np.testing.assert_allclose(data[1]["output"], expected.output)
    assert main(["trace", str(tmp_path / "layer.npz"), "--num-heads", "1,4", "--lang", "zh"]) == 0
    assert "单头与多头对比" in capsys.readouterr().out
    for wrong, words in (
        (["--num-heads", "1,x"], "expected whole numbers with commas"),
        (["--num-heads", "1,4", "--head", "0"], "goes without --head"),
        (["--num-heads", "1,4,8,2,1"], "expected two to 4"),
    ):
        assert words in refused("trace", tmp_path / "layer.npz", *wrong)
    assert "for a layer" in refused("trace", "examples/wrong.json", "--num-heads", "1,2")


def test_the_page_has_the_layer_with_one_head(tmp_path):
    arrays = layer(2)
    document = ch.trace_layer(**arrays, num_heads=4, causal=True).document(Scene(title="layer"))
    (described,) = document.header["layers"]
    one, several = heads_beside((1, 4), **arrays, causal=True)
    stored = {name: document.arrays[described["arrays"][name]] for name in ("one_weights", "one_output")}
    np.testing.assert_allclose(stored["one_weights"], np.asarray(one.trace.weights)[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stored["one_output"], np.asarray(one.trace.output), rtol=1e-4, atol=1e-4)
    assert set(described["one"]) == {"en", "zh"}
    rows = {name: cells for name, *cells in described["one"]["en"]}
    assert rows[""] == ["h = 1", "h = 4"]
    assert (rows["Q"], rows["A"]) == (["1×5×8", "4×5×2"], ["1×5×5", "4×5×5"])
    assert rows["parameters"] == [f"{each.parameters:,}" for each in (one, several)]
    assert rows["multiply-adds"] == [f"{each.multiply_adds:,}" for each in (one, several)]
    assert rows["entropy of a query, nats"][0] == significant(float(one.entropy.mean()))
    assert rows["U differs by up to"][0] == significant(several.difference)


@pytest.mark.parametrize(
    "more",
    [
        {"num_heads": 1},
        {"scale": 0.3},
        {"alibi_slopes": [0.5, 0.25]},
        {"sinks": [0.0, 1.0]},
        {"mask": np.tri(5, dtype=bool)},
        {"b_q": np.full(8, np.inf)},
        {"x": np.full((5, 8), np.nan)},
    ],
)
def test_layers_whose_heads_have_own_rules_are_not_compared(more):
    trace = ch.trace_layer(**{**layer(), "num_heads": 2, **more})
    (described,) = trace.document(Scene(title="layer")).header["layers"]
    assert described["one"] is None
    assert "one_weights" not in described["arrays"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_page_of_a_layer_with_nonfinite_values_is_written(value):
    arrays = layer()
    arrays["w_v"][0, 0] = value
    (described,) = ch.trace_layer(**arrays, num_heads=2).document(Scene(title="layer")).header["layers"]
    assert {row[0]: row[1] for row in described["one"]["en"]}["U differs by up to"] == "NaN"
