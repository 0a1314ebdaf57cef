"""Every mistake is named, alone and in pairs; independent code makes them (wrong.py, or a few lines here).

One has a number that is solved from the result; the last ones are those that public reports show.
"""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
import wrong
import wrong_attention
from clearhead.diagnosing.mistakes import CONDITIONS, mistakes, values
from diagnosing import diagnosed, qkv, softmax, top
from problems import in_the_gate
from seeds import fresh

# the same numbers, whatever the inputs
TWINS = {"scale 1/d_k": "scale twice"}
SIZES = list(product((torch.float32, torch.float64), (0, 1, 2)))
TIERS = (), pytest.mark.gate, *3 * [pytest.mark.long], pytest.mark.gate


def test_names_are_unique_and_described_in_both_languages():
    names = [mistake.name for mistake in mistakes()]
    assert len(names) == len(set(names))
    for mistake in mistakes():
        for words in (mistake.did, mistake.mend, mistake.needs):
            assert words.keys() == {"en", "zh"}, mistake.name
            assert all(words.values())
        assert any("\u4e00" <= letter <= "\u9fff" for letter in mistake.did["zh"]), mistake.name


def test_the_data_name_conditions_and_fields_that_exist():
    for mistake in mistakes():
        named = [*mistake.when, *(change["when"] for change in mistake.changes if "when" in change)]
        assert set(named) <= set(CONDITIONS)
    changed = {field for mistake in mistakes() for change in mistake.changes for field in change}
    for field, words in values().items():
        assert field in changed
        assert all(isinstance(x, str) or x.keys() == {"en", "zh"} for x in words.values()), field


@pytest.mark.parametrize("name", wrong.NAMES)
@pytest.mark.parametrize(
    ("dtype", "size"), [pytest.param(*one, marks=tier) for one, tier in zip(SIZES, TIERS, strict=True)]
)
def test_each_mistake_alone_is_named(name, dtype, size):
    diagnosis = diagnosed(wrong.case((name,), fresh(), dtype, size))
    best = top(diagnosis)
    names = {e.mistakes for e in diagnosis.explanations if e.confidence == "ambiguous"} | {best.mistakes}
    assert (name,) in names, diagnosis
    assert best.mistakes in ((name,), (TWINS.get(name),)) or diagnosis.verdict == "ambiguous", diagnosis


PAIRS = [
    ("no scale", "causal mask missing"),
    ("scale inverted", "padding ignored"),
    ("causal mask strict", "softcap missing"),
    ("mask inverted", "bias missing"),
    ("mask fills with a finite number", "scale of d_model"),
    ("grouped keys tiled", "rotary pairing"),
    ("heads merged without the transpose", "softmax over queries"),
    ("W transposed", "causal mask missing"),
    ("projection bias left out", "heads split without the transpose"),
    ("ALiBi missing", "weights transposed"),
    ("window off by one", "sinks missing"),
    ("segments ignored", "k and v swapped"),
]


@pytest.mark.parametrize("pair", in_the_gate(PAIRS, *PAIRS[::2], *PAIRS[4:]), ids=" + ".join)
def test_two_mistakes_together_are_named(pair):
    found = diagnosed(wrong.case(pair, fresh()))
    named = found.explanations if found.verdict == "ambiguous" else [top(found)]  # 1/d_k is 1/√d_model of 4 heads of 4
    assert frozenset(pair) in {frozenset(each.mistakes) for each in named}


def test_scale_twice_and_1_over_d_k_differ_under_another_scale():
    q, k, v = qkv()
    twice = softmax((q * 0.3) @ k.mT * 0.3) @ v
    assert top(ch.diagnose(q, k, v, twice, scale=0.3)).mistakes == ("scale twice",)
    default = ch.diagnose(q, k, v, softmax(q @ k.mT / 8) @ v)
    assert default.verdict == "ambiguous"
    assert {e.mistakes[0] for e in default.explanations} == {"scale 1/d_k", "scale twice"}
    assert "scale=0.1" in default.told()


@pytest.mark.parametrize(
    ("stage", "make", "mistake"),
    [
        ("weights", lambda scaled: scaled, "no softmax"),
        ("weights", lambda scaled: softmax(scaled).mT, "weights transposed"),
        ("weights", lambda scaled: softmax(scaled).mean(1, keepdims=True).repeat(3, 1), "mean of the heads"),
    ],
)
def test_mistakes_before_the_output_are_named_at_their_stage(stage, make, mistake):
    q, k, v = qkv()
    assert top(ch.diagnose(q, k, v, make(q @ k.mT / np.float32(8**0.5)), stage=stage)).mistakes == (mistake,)


def rounded(x, dtype):
    return torch.tensor(x).to(dtype).float().numpy()


@pytest.mark.parametrize("dtype", in_the_gate([torch.float16, torch.bfloat16], torch.float16))
def test_scores_weights_or_outputs_in_a_narrow_dtype_are_named(dtype):
    q, k, v = qkv(n=96)  # of fewer, one in hundreds of draws does not tell
    scores, scale = q @ k.mT, np.float32(8**0.5)
    for theirs in (
        softmax(rounded(scores, dtype) / scale) @ v,
        rounded(softmax(scores / scale), dtype) @ v,
        rounded(softmax(scores / scale) @ v, dtype),
    ):
        assert_narrow(ch.diagnose(q, k, v, theirs), dtype)


def assert_narrow(diagnosis, dtype):
    best = top(diagnosis)
    assert best.mistakes == ("a narrow dtype somewhere",)
    assert best.details["half_dtype"] == str(dtype).removeprefix("torch.")
    assert best.confidence == "likely"


@pytest.mark.parametrize("dtype", in_the_gate([torch.float16, torch.bfloat16], torch.bfloat16))
def test_a_narrow_dtype_of_all_steps_is_found_in_most_draws(dtype):
    answers = []
    for _ in range(4):
        inputs = qkv(n=48)
        q, k, v = (torch.tensor(x).to(dtype) for x in inputs)
        theirs = ((q @ k.mT) / 8**0.5).softmax(-1) @ v
        answers.append(ch.diagnose(*inputs, theirs.float().numpy()))
    named = [
        diagnosis for diagnosis in answers if diagnosis.verdict != "unexplained"
    ]  # by chance, errors follow the output
    assert len(named) >= 2
    for diagnosis in named:
        assert_narrow(diagnosis, dtype)


def test_float32_inside_float64_is_named():
    inputs = qkv(dtype=np.float64)
    q, k, v = (x.astype(np.float32) for x in inputs)
    theirs = softmax(q @ k.mT / np.float32(8**0.5)) @ v
    assert_narrow(ch.diagnose(*inputs, theirs.astype(np.float64)), torch.float32)


def test_a_mask_after_the_softmax_that_is_divided_out_again_is_right():
    q, k, v = qkv()
    late = softmax(q @ k.mT / np.float32(8**0.5)) * np.tri(24, dtype=np.float32)
    assert ch.diagnose(q, k, v, late / late.sum(axis=-1, keepdims=True) @ v, causal=True).verdict == "right"


@pytest.mark.parametrize("block", [8, 16, 32])
def test_the_block_size_is_found(block):
    q, k, v = (torch.tensor(x) for x in qkv(n=100))
    theirs = wrong_attention.in_blocks(q @ k.mT / 8**0.5 * 2, v, {"rescale missing"}, block, {})
    best = top(ch.diagnose(q.numpy(), k.numpy(), v.numpy(), theirs.numpy(), scale=2 / 8**0.5))
    assert (best.mistakes, best.details["block"]) == (("rescale missing",), block)
    assert f"blocks of {block} keys" in best.did()[0]


STAGES = ("output", "causal"), ("weights", "causal"), ("masked", "causal"), ("output", "lengths")


@pytest.mark.parametrize("dtype", in_the_gate([np.float32, np.float64], np.float64))
@pytest.mark.parametrize(("stage", "rule"), STAGES)
def test_any_finite_number_in_hidden_places_is_found(stage, rule, dtype):
    rng = fresh()
    drawn = (1e-9, *4 * rng.standard_normal(8), *-rng.uniform(8, 14, 2))
    for fill in (0.0, -1.0, -2.5, -7.0, *(drawn if (stage, rule) == ("output", "causal") else ())):
        (q, k, v), lengths = qkv(dtype=dtype), rng.integers(6, 20, 2)
        seen = np.tri(24) > 0 if rule == "causal" else lengths[:, None, None, None] > KEY
        scores = np.where(seen, q @ k.mT / dtype(8**0.5), dtype(fill))
        theirs = {"masked": scores, "weights": softmax(scores), "output": softmax(scores) @ v}[stage]
        rules = {"causal": True} if rule == "causal" else {"kv_lengths": lengths}
        best = top(ch.diagnose(q, k, v, theirs, stage=stage, **rules))
        assert best.mistakes == ("mask fills with a finite number",), fill
        assert best.details["fill"] == pytest.approx(fill, abs=1e-2)


@pytest.mark.parametrize("fill", [-0.7, -4.0])
def test_a_finite_mask_value_is_found_where_heads_are_joined(fill):
    case = wrong.case(("output projection left out", "causal mask missing"), fresh())
    inputs = {name: torch.tensor(x) for name, x in case.inputs.items() if name != "num_heads"}
    heads = case.inputs["num_heads"]
    wrongly = {"mask fills with a finite number"}
    theirs = wrong.layer(inputs, heads, wrongly, {"fill": fill, "block": 8, "which": 0}, case.rules)
    best = top(diagnosed(wrong.Case(case.inputs, case.rules, theirs.numpy())))
    assert best.mistakes == ("mask fills with a finite number",)
    assert best.details["fill"] == pytest.approx(fill, abs=1e-2)


@pytest.mark.parametrize("dtype", in_the_gate([np.float32, np.float64], np.float32))
def test_mistakes_with_float_masks_are_named(dtype):
    rng = fresh()
    q, k, v = qkv(dtype=dtype)
    seen = rng.random((24, 24)) < 0.5
    seen |= np.eye(24, dtype=bool)
    bias = np.where(seen, 0, -np.inf).astype(dtype)
    scores = q @ k.mT / dtype(8**0.5)
    for logits, name in (
        (scores, "bias missing"),
        (scores + bias.T, "bias transposed"),
        (scores + seen.astype(dtype), "mask added as 0/1"),
        (scores * seen.astype(dtype), "mask fills with a finite number"),
        (np.where(seen, scores, dtype(-3)), "mask fills with a finite number"),
    ):
        assert top(ch.diagnose(q, k, v, softmax(logits) @ v, bias=bias)).mistakes == (name,)
    late = softmax(scores) * seen
    assert top(ch.diagnose(q, k, v, late @ v, bias=bias)).mistakes == ("mask after softmax",)


@pytest.mark.parametrize("what", in_the_gate("wb", "w"))
def test_every_subset_of_matrices_or_biases_is_named(what):
    rng = fresh()
    x, w = rng.standard_normal((2, 9, 8)), dict(zip("qkvo", rng.standard_normal((4, 8, 8)), strict=True))
    b = dict(zip("qkvo", rng.standard_normal((4, 8)), strict=True))
    biases = {f"b_{name}": each for name, each in b.items()}
    for many in range(1, 5):
        for chosen in combinations("qkvo", many):
            used = {name: each.T if what == "w" and name in chosen else each for name, each in w.items()}
            added = {f"b_{name}": each * (what == "w" or name not in chosen) for name, each in b.items()}
            theirs = ch.trace_layer(x, *used.values(), num_heads=2, **added).output
            diagnosis = ch.diagnose_layer(x, *w.values(), theirs, num_heads=2, **biases)
            if what == "b" and chosen == ("k",):  # adds the same to all of a query's scores
                assert diagnosis.verdict == "right"
                continue
            best = top(diagnosis)
            assert best.mistakes == ("W transposed" if what == "w" else "projection bias left out",)
            named = {field[-1] for field in best.details}
            assert named - {"k"} == set(chosen) - ({"k"} if what == "b" else set()) - {"k"}


def test_more_than_two_batch_entries_are_brought_together():
    q, k, v = fresh().standard_normal((3, 5, 3, 9, 8))
    scores = q @ k.mT / 8**0.5
    assert top(ch.diagnose(q, k, v, softmax(scores, 0) @ v)).mistakes == ("softmax over the batch",)
    turned = (x.transpose(2, 1, 0, 3) for x in (q, k, v))
    a, b, c = turned
    over = (softmax(a @ b.mT / 8**0.5) @ c).transpose(2, 1, 0, 3)
    assert top(ch.diagnose(q, k, v, over)).mistakes == ("attention over the batch",)


QUERY, KEY = np.arange(24)[:, None], np.arange(24)
SINKS = np.linspace(0.5, 1.5, 3)
MASK = np.tri(24, k=18) * (KEY % 5 != 3) > 0
LENGTHS = np.array([20, 15])
OFFSETS = {"causal": True, "query_offset": [0, 2]}
WINDOW, OPEN = {"causal": True, "window": (3, 0)}, {"causal": True, "window": (7, 0)}


def named(theirs: Any, arrays: Any, **rules: Any) -> str:
    diagnosis = ch.diagnose(*arrays, theirs, **rules)
    assert diagnosis.verdict == "mistake", diagnosis
    assert diagnosis.explanations[0].confidence == "sure", diagnosis
    return " + ".join(diagnosis.explanations[0].mistakes)


@pytest.mark.parametrize(
    ("rules", "kept", "name"),
    [
        (WINDOW, {}, "all masks ignored"),
        (WINDOW | {"kv_lengths": LENGTHS}, {"kv_lengths": LENGTHS}, "all masks ignored"),
        (WINDOW | {"mask": MASK}, {"mask": MASK}, "all masks ignored"),
        (WINDOW | {"kv_lengths": LENGTHS}, {}, "all masks ignored"),
        ({"causal": True}, {}, "causal mask missing"),
        ({"window": (3, 0)}, {"window": (3, None)}, "window open to the right"),
        (WINDOW, {"window": (3, None)}, "window open to the right"),
        (OPEN, {"window": (8, 8)}, "window on both sides"),
        ({"window": (7, 2)}, {"window": (7, 7)}, "window on both sides"),
        (OPEN, {"window": (4, 4)}, "window halved"),
        ({"window": (7, 7)}, {"window": (3, 3)}, "window halved"),
        ({"causal": True, "window": (9, None)}, {"causal": True, "window": (4, None)}, "window halved"),
        ({"window": (5, 5)}, {"mask": (KEY != QUERY) & (abs(KEY - QUERY) <= 5)}, "window without the query's position"),
        ({"window": (5, 0)}, {"mask": (KEY < QUERY) & (KEY >= QUERY - 6)}, "window without the query's position"),
        ({"sinks": SINKS}, {"sinks": np.exp(SINKS)}, "sinks not as logits"),
        ({"sinks": np.exp(SINKS)}, {"sinks": SINKS}, "sinks not as logits"),
        (OFFSETS | {"query_offset": [-4, 2]}, OFFSETS, "offset below 0 taken for 0"),
    ],
)
def test_rules_that_are_missing_or_others_are_named(rules, kept, name):
    arrays = qkv()
    assert named(ch.attention(*arrays, **kept), arrays, **rules) == name


def test_an_offset_below_0_that_is_taken_for_0_is_named_where_it_is_one_number():
    """It is the first corner then, too."""
    arrays = qkv()
    diagnosis = ch.diagnose(*arrays, ch.attention(*arrays, causal=True), causal=True, query_offset=-4)
    names = {e.mistakes for e in diagnosis.explanations}
    assert names == {("causal mask in the other corner",), ("offset below 0 taken for 0",)}


@pytest.mark.parametrize("interleaved", [True, False])
def test_alibi_slopes_for_twelve_heads_are_named(interleaved):
    some, more = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (8, 16))
    slopes = [np.concatenate([some, more[::2][:4]]), 2.0 ** (-8 * np.arange(1, 13) / 12)]
    right, used = slopes if interleaved else slopes[::-1]
    arrays = qkv(heads=12)
    theirs = ch.attention(*arrays, causal=True, alibi_slopes=used)
    diagnosis = ch.diagnose(*arrays, theirs, causal=True, alibi_slopes=right)
    assert diagnosis.explanations[0].mistakes == ("other ALiBi slopes",)
    assert interleaved == ("no power of two" in diagnosis.explanations[0].did()[0])
    assert "every other slope for the one above" in diagnosis.explanations[0].mend()[0]


def test_a_softmax_of_the_mean_is_named_without_the_heads_axis():
    q, k, v = qkv()
    weights = softmax(q @ k.mT / 8**0.5)
    mean = weights.mean(1)
    assert named(mean, (q, k, v), stage="weights") == "mean of the heads"
    assert named(softmax(mean), (q, k, v), stage="weights") == "softmax of the mean of the heads"
    assert named(softmax(weights.mean(1, keepdims=True)) @ v, (q, k, v)) == "softmax of the mean of the heads"
    assert named(weights.mean(1, keepdims=True) @ v, (q, k, v)) == "mean of the heads"
    seen = np.tri(24) > 0
    mean = softmax(np.where(seen, q @ k.mT / 8**0.5, -np.inf)).mean(1)
    for again in (softmax(mean), softmax(np.where(seen, mean, -np.inf))):
        assert named(again, (q, k, v), stage="weights", causal=True) == "softmax of the mean of the heads"


def test_no_number_is_invented_where_hidden_keys_get_all():
    """Any number far above the others gives the same: so does -1e5 beside scores of -110,000."""
    q, k, v = qkv()
    scores = np.where(np.tri(24) > 0, q @ k.mT / 8**0.5 - 110_000, -1e5)
    theirs = softmax(scores.astype(np.float64)) @ v
    diagnosis = ch.diagnose(q, k, v, theirs, causal=True, bias=np.full((24, 24), -110_000.0))
    assert [e.mistakes for e in diagnosis.explanations] == [("mask of the wrong sign",)]
