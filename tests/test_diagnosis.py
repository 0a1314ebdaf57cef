"""`diagnose`: correct results are accepted; files and errors."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import clearhead as ch
import wrong
from clearhead.core import definition
from clearhead.core.call import describe
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.diagnosing.recipe import RIGHT, Diagnosed
from clearhead.diagnosing.search import Search, largest
from clearhead.diagnosing.verdict import BUDGET
from clearhead.diagnosing.workings import answer
from clearhead.errors import DtypeError, FileError, RuleError, ShapeError, UnknownNameError
from diagnosing import softmax
from programs import python
from right_programs import draw
from seeds import fresh


@pytest.mark.parametrize("stage", ["scores", "scaled", "capped", "biased", "masked", "weights", "output"])
def test_the_recipe_without_mistakes_equals_the_reference(stage):
    rng = fresh()
    for _ in range(20):
        q, k, v, rules = draw(rng)
        described = describe(*(x.double().numpy() for x in (q, k, v)), rules)
        arrays = described.q, described.k, described.v
        truth = getattr(definition.attend(described.problem, *arrays), stage)
        with np.errstate(all="ignore"):
            search = Search(Diagnosed(described.problem, *arrays, truth, stage))
            recipe = answer(search.exact, RIGHT, search.everything)
        np.testing.assert_allclose(recipe, truth, rtol=1e-11, atol=1e-12 * (1 + largest(truth)))


def test_the_layer_recipe_without_mistakes_equals_trace_layer():
    rng = fresh()
    case = wrong.case(("projection bias left out", "causal mask missing"), rng, torch.float64)
    names = ("x", "w_q", "w_k", "w_v", "w_o")
    arrays = [case.inputs[name] for name in names]
    rest = {name: value for name, value in case.inputs.items() if name not in names}
    trace = ch.trace_layer(*arrays, **rest, **case.rules)
    assert ch.diagnose_layer(*arrays, trace.output, **rest, **case.rules).verdict == "right"
    for stage in ("q", "k", "v", "scores", "masked", "weights", "heads", "concat"):
        diagnosis = ch.diagnose_layer(*arrays, getattr(trace, stage), stage=stage, **rest, **case.rules)
        assert diagnosis.verdict == "right"


def test_a_mistake_in_a_layers_step_is_named_there():
    x, w_q, w_k, w_v, w_o = fresh().standard_normal((5, 6, 6))
    trace, turned = ch.trace_layer(x, w_q, w_k, w_v, w_o, num_heads=2), ch.trace_layer(x, w_q.T, w_k, w_v, num_heads=2)
    for stage, theirs, mistake in (("q", turned.q, "W transposed"), ("concat", trace.output, "")):
        diagnosis = ch.diagnose_layer(x, w_q, w_k, w_v, w_o, theirs, num_heads=2, stage=stage)
        assert [e.mistakes for e in diagnosis.explanations] == ([(mistake,)] if mistake else [])
        assert all(e.details == {"w_q": "transposed"} and not e.alike for e in diagnosis.explanations)  # not of K, too
    with pytest.raises(RuleError, match="stage is 'q': expected one of scores, scaled"):
        ch.diagnose(x, x, x, x, stage="q")


def test_the_columns_convention_and_tensors_are_accepted():
    rng = fresh()
    x, w_q, w_k, w_v, w_o = rng.standard_normal((5, 6, 6))
    theirs = ch.trace_layer(x, w_q, w_k, w_v, num_heads=2).output
    columns = [a.T for a in (x, w_q, w_k, w_v, w_o, theirs)]
    diagnosis = ch.diagnose_layer(*columns, num_heads=2, convention="columns")
    assert diagnosis.explanations[0].mistakes == ("output projection left out",)
    q, k, v = (torch.tensor(a, dtype=torch.bfloat16) for a in rng.standard_normal((3, 9, 8)))
    assert ch.diagnose(q, k, v, (q @ k.T).softmax(-1) @ v).explanations[0].mistakes == ("no scale",)


def test_explanations_that_fit_equally_well_are_all_named():
    q, k, v = fresh().standard_normal((3, 7, 4))
    diagnosis = ch.diagnose(q, k, v, softmax(q @ k.T) @ v, scale=0.7, window=(100, None))
    assert diagnosis.explanations[0].mistakes == ("no scale",)
    diagnosis = ch.diagnose(q, q, v, softmax(q @ q.T / 2, 0) @ v)  # q = k: Aᵀ·V, a softmax over queries, …
    assert diagnosis.verdict in ("ambiguous", "mistake")
    twice = ch.diagnose(q, k, v, softmax(q @ k.T / 4) @ v)
    assert twice.verdict == "ambiguous"
    assert "2 explanations fit them equally well" in twice.told()
    assert "有 2 种解释都同样吻合" in twice.told("zh")


def test_a_result_that_fits_no_known_mistake():
    q, k, v = fresh().standard_normal((3, 2, 20, 8))
    diagnosis = ch.diagnose(q, k, v, v**3)
    assert (diagnosis.verdict, diagnosis.explanations) == ("unexplained", ())
    assert "none of the known mistakes" in str(diagnosis)
    assert ch.diagnose(q, k, v, np.full_like(v, np.nan)).verdict == "unexplained"
    broken = softmax(q @ k.mT / 8**0.5) @ v
    broken[1, 13, 5] += 1
    diagnosis = ch.diagnose(q, k, v, broken)
    assert list(diagnosis.first_difference.values())[:4] == [0, 1, 13, 5]
    assert diagnosis.verdict == "unexplained"
    broken[1, 13, 5] = np.nan
    assert ch.diagnose(q, k, v, broken).verdict == "unexplained"


def test_empty_results_are_right():
    empty = np.zeros((2, 0, 4))
    assert ch.diagnose(empty, np.ones((2, 3, 4)), np.ones((2, 3, 4)), empty).verdict == "right"
    none = np.zeros((2, 0, 4))
    assert ch.diagnose(np.ones((2, 3, 4)), none, none, np.zeros((2, 3, 4))).verdict == "right"


def test_large_inputs_are_sampled_and_the_report_says_so():
    rng = fresh()
    q, k, v = rng.standard_normal((3, 3, 2, 1200, 8)).astype(np.float32)
    assert q.shape[0] * 2 * 1200**2 > BUDGET
    right = np.asarray(ch.attention(q, k, v))
    diagnosis = ch.diagnose(q, k, v, right)
    assert diagnosis.verdict == "right"
    assert not diagnosis.looked["everything"]
    assert diagnosis.told().startswith("only a sample was checked")
    diagnosis = ch.diagnose(q, k, v, np.asarray(ch.attention(q, k, v, scale=1.0)))
    assert diagnosis.explanations[0].mistakes == ("no scale",)


@settings(max_examples=6)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from(["output", "weights", "scores", "masked"]), st.integers(0, 99)
)
def test_any_array_of_the_right_shape_gets_a_verdict(n, m, stage, seed):
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((n, 3)), rng.standard_normal((m, 3)), rng.standard_normal((m, 2))
    theirs = rng.choice([0.0, 1.0, np.nan, np.inf, -np.inf, 0.3], size=(n, 2 if stage == "output" else m))
    diagnosis = ch.diagnose(q, k, v, theirs, stage=stage, causal=True, query_offset=m - n)
    assert diagnosis.verdict in ("right", "mistake", "ambiguous", "unexplained")
    for language in ("en", "zh"):
        assert diagnosis.told(language)
    json.dumps(diagnosis.to_json(), allow_nan=False)


# ── files ──

Q, K, V = [[1, 3], [2, 0.5]], [[0.5, 2], [1, 3]], [[0, 4], [1, 2]]
WRONG = {"q": Q, "k": K, "v": V, "theirs": [[3.5, 11.0], [1.5, 5.5]], "stage": "scores"}


def test_a_file_may_hold_a_layer_or_a_stage(tmp_path):
    rng = fresh()
    x, w_q, w_k, w_v, w_o = rng.standard_normal((5, 6, 6))
    theirs = ch.trace_layer(x, w_q.T, w_k, w_v, w_o, num_heads=2).output
    np.savez(tmp_path / "b.npz", x=x, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, theirs=theirs, num_heads=2)
    assert diagnose_file(tmp_path / "b.npz").explanations[0].mistakes == ("W transposed",)
    q, k, v = rng.standard_normal((3, 5, 4))
    np.savez(tmp_path / "c.npz", q=q, k=k, v=v, theirs=softmax(q @ k.T / 2, 0), stage="weights")
    assert diagnose_file(tmp_path / "c.npz").explanations[0].mistakes == ("softmax over queries",)
    save_file({"q": q, "k": k, "v": v, "theirs": q @ k.T}, tmp_path / "d.safetensors", metadata={"stage": "scaled"})
    assert diagnose_file(tmp_path / "d.safetensors").explanations[0].mistakes == ("no scale",)


def test_decimals_rounded_for_printing_are_right(tmp_path):
    place = tmp_path / "case.json"
    place.write_text(json.dumps(WRONG | {"stage": "weights", "theirs": [[0.078, 0.922], [0.257, 0.743]]}))
    assert diagnose_file(place).verdict == "right"
    place.write_text(json.dumps(WRONG))
    assert diagnose_file(place).explanations[0].mistakes == ("transpose missing",)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"theirs": None}, FileError, "theirs is not a list"),
        ({"theirs": [[1.0, 2.0, 3.0]]}, ShapeError, "at stage 'scores' expected (queries 2, keys 2)"),
        ({"stage": "score"}, RuleError, "stage is 'score': expected one of scores, scaled"),
        ({"rotary": -1}, RuleError, "rotary is -1"),
        ({name: [[1.0]] for name in "qkv"} | {"theirs": [[1.0]], "rotary": 1e4}, RuleError, "need an even d_k"),
        ({"casual": True}, UnknownNameError, "did you mean `causal`?"),
        ({"x": Q}, FileError, "holds both q and x"),
        ({"q": [[1, 2, 3]]}, ShapeError, "q has d_k 3 but k has d_k 2"),
    ],
)
def test_files_with_wrong_contents_are_refused(tmp_path, change, error, words):
    place = tmp_path / "case.json"
    place.write_text(json.dumps(WRONG | change))
    with pytest.raises(error, match=re.escape(words)):
        diagnose_file(place)


def test_a_file_without_a_result_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"q": Q, "k": K, "v": V}))
    with pytest.raises(FileError, match="lacks theirs"):
        diagnose_file(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 7, 3, 4), "theirs.swapaxes(-2, -3)"),
        ((2, 7, 12), "its heads are joined: theirs.reshape(*theirs.shape[:-1], 3, 4).swapaxes(-2, -3)"),
        ((2, 3, 4, 7), "its last two axes are swapped"),
        ((2, 3, 7, 5), 'it has the shape of the weights: stage="weights"'),
        ((2, 3, 7), "expected (batch 2, heads 3, queries 7, d_v 4)"),
    ],
)
def test_a_wrong_shape_error_says_which_shape_is_expected(shape, words):
    q, k = np.ones((2, 3, 7, 4)), np.ones((2, 3, 5, 4))
    with pytest.raises(ShapeError, match=re.escape(words)):
        ch.diagnose(q, k, k, np.ones(shape))


def test_other_bad_input_is_refused():
    x = np.ones((3, 4))
    with pytest.raises(DtypeError, match="theirs is int64"):
        ch.diagnose(x, x, x, np.ones((3, 4), dtype=np.int64))
    with pytest.raises(DtypeError, match="theirs is a list"):
        ch.diagnose(x, x, x, [[1.0]])
    with pytest.raises(UnknownNameError, match="casual"):
        ch.diagnose(x, x, x, x, casual=True)
    with pytest.raises(RuleError, match="b_o is given but w_o is not"):
        ch.diagnose_layer(x, np.eye(4), np.eye(4), np.eye(4), None, x, b_o=np.ones(4))
    with pytest.raises(ShapeError, match=r"b_q has shape \(3,\)"):
        ch.diagnose_layer(x, np.eye(4), np.eye(4), np.eye(4), None, x, b_q=np.ones(3))


@pytest.mark.parametrize("ending", ["json", "npz", "safetensors"])
def test_spans_and_scales_in_files(tmp_path, ending):
    q, k, v = fresh().standard_normal((3, 2, 5, 4)).astype(np.float32)
    labels, table = [0, 1, -1, 1, 0], np.array([[0.5, -np.inf], [1.0, 2.0]])
    rules = {"spans": (labels, labels, table), "scale": [0.3, 0.5]}
    place = tmp_path / f"case.{ending}"
    arrays = {"q": q, "k": k, "v": v, "theirs": ch.attention(q, k, v, **{**rules, "spans": None})}
    if ending == "json":
        listed = {name: x.tolist() for name, x in arrays.items()}
        spans = [labels, labels, [[0.5, None], [1, 2]]]
        place.write_text(json.dumps(listed | {"spans": spans, "scale": [0.3, 0.5]}))
    else:
        parts = {f"spans[{index}]": np.array(part) for index, part in enumerate(rules["spans"])}
        arrays |= parts | {"scale": np.array([0.3, 0.5])}
        np.savez(place, **arrays) if ending == "npz" else save_file(arrays, place)
    diagnosis = diagnose_file(place)
    assert diagnosis.explanations[0].mistakes == ("spans missing",)


LONG = """
import sys, numpy as np, clearhead as ch
from benchmarks.memory import peak

q, k, v = np.random.default_rng(int(sys.argv[1])).standard_normal((3, 8, 4096, 64), dtype=np.float32)
theirs = ch.attention(q, k, v, causal=True)
theirs = (theirs + 0.05 * np.sin(7 * theirs)[:, ::-1]).astype(np.float32)
before = peak()
found = ch.diagnose(q, k, v, theirs, causal=True)
print(found.verdict, peak() - before)
"""


@pytest.mark.long
def test_memory_of_a_long_unexplained_case():
    """The process's peak memory, which includes what is allocated in C++."""
    verdict, peak = python(LONG, fresh().integers(2**31)).split()
    assert verdict == "unexplained"
    assert int(peak) < 500e6
