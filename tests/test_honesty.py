"""`diagnose` claims no more than the evidence shows: mistakes that no entry describes, weak evidence, odd outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import clearhead as ch
import right_programs
import wrong
from clearhead.diagnosing import search
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.verdict import BUDGET, Diagnosis, said
from clearhead.errors import FileError
from diagnosing import diagnosed, qkv, softmax
from problems import in_the_gate, of_tiers
from seeds import fresh


def known(diagnosis: Diagnosis) -> dict[str, dict[str, Any]]:
    assert diagnosis.verdict == "unexplained", diagnosis
    for language in ("en", "zh"):
        assert all(said(*fact, language) in diagnosis.told(language) for fact in diagnosis.known)
    return dict(diagnosis.known)


def sure(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    return [e.mistakes for e in diagnosis.explanations if e.confidence == "sure"]


# ── mistakes outside the catalogue ──


class Case(NamedTuple):
    """Inputs of an attention, (batch, heads, tokens, 16), and numbers for what a mistake draws."""

    q: Any
    k: Any
    v: Any
    rng: np.random.Generator


def scores(c: Case) -> Any:
    return c.q @ c.k.mT / np.float32(4)


def output(c: Case, **others: Any) -> Any:
    """The output, with other queries, keys or values."""
    c = c._replace(**others)
    return softmax(scores(c)) @ c.v


def hidden(c: Case, seen: Any) -> Any:
    """The output where queries see only some keys."""
    return softmax(np.where(seen, scores(c), -np.inf)) @ c.v


def put(x: Any, where: Any, value: Any) -> Any:
    """A copy with other numbers at one place."""
    x = x.copy()
    x[where] = value
    return x


CODES: dict[str, Callable[[Case], Any]] = {
    "a hard-coded scale": lambda c: softmax(c.q @ c.k.mT * 0.177) @ c.v,
    "a temperature of 1.1": lambda c: softmax(scores(c) / 1.1) @ c.v,
    "scores clipped at 1": lambda c: softmax(np.clip(scores(c), -1, 1)) @ c.v,
    "uniform weights": lambda c: np.broadcast_to(c.v.mean(2, keepdims=True), c.q.shape),
    "small weights dropped": lambda c: np.where((a := softmax(scores(c))) > 1 / c.k.shape[2], a, 0) @ c.v,
    "values of the next head": lambda c: output(c, v=np.roll(c.v, 1, 1)),
    "keys of the next head": lambda c: output(c, k=np.roll(c.k, 1, 1), v=np.roll(c.v, 1, 1)),
    "no diagonal": lambda c: hidden(c, ~np.eye(c.q.shape[2], dtype=bool)),
    "the last key is skipped": lambda c: hidden(c, np.arange(c.k.shape[2]) < c.k.shape[2] - 1),
    "0.01 added to one head": lambda c: put(output(c), np.s_[:, 1], output(c)[:, 1] + 0.01),
    "a hundredth of the neighbour": lambda c: output(c) + 0.01 * np.roll(output(c), 1, 2),
    "5 % leakage between heads": lambda c: 0.95 * output(c) + 0.05 * output(c).mean(1, keepdims=True),
    "output rounded to two decimals": lambda c: np.round(output(c), 2),
    "one row wrong": lambda c: put(output(c), np.s_[0, 1, 7], 0.3),
    "some NaN": lambda c: put(output(c), np.s_[:, :, ::7, 2], np.nan),
    "dropout on whole keys": lambda c: hidden(c, c.rng.random(c.k.shape[2]) < 0.9),
    "noise of 1e-3": lambda c: output(c) + 1e-3 * c.rng.standard_normal(c.q.shape),
    "one head never written": lambda c: put(output(c), np.s_[:, -1], 0),
    "the last column missing": lambda c: put(output(c), np.s_[..., -1], 0),
}


def of_code(name: str, tokens: int = 48) -> Diagnosis:
    """What `diagnose` says of a code on random inputs."""
    case = Case(*fresh().standard_normal((3, 2, 4, tokens, 16)).astype(np.float32), fresh())
    return ch.diagnose(case.q, case.k, case.v, np.asarray(CODES[name](case), np.float32))


@pytest.mark.gate
@pytest.mark.parametrize("name", CODES)
def test_a_mistake_outside_the_catalogue_is_never_surely_named(name: str):
    assert sure(of_code(name, int(fresh().choice([21, 70])))) == []


EQUAL = {  # to another entry, by the rules and numbers that wrong.py draws
    *("mask added as 0/1", "softcap after mask"),
    *("scale 1/d_k", "window off by one", "window on both sides"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*wrong.NAMES} - EQUAL))
def test_an_entry_left_out_is_never_surely_another(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "mistakes", lambda: tuple(one for one in mistakes() if one.name != name))
    assert sure(diagnosed(wrong.case((name,), fresh()))) == []


# ── weak evidence ──


def causal(n: int = 24, m: int = 24) -> Any:
    return qkv(n, dtype=np.float64)[0], *qkv(m, dtype=np.float64)[1:]


def test_one_query_is_not_enough_to_be_sure():
    q, k, v = causal(n=1)
    diagnosis = ch.diagnose(q, k, v, softmax(q @ k.mT) @ v, causal=True, query_offset=23)
    assert diagnosis.explanations[0].mistakes == ("no scale",)
    assert diagnosis.explanations[0].confidence == "likely"
    assert "only one query is wrong" in diagnosis.told()
    q, k, v = causal()
    assert ch.diagnose(q, k, v, softmax(q @ k.mT) @ v).explanations[0].confidence == "sure"


def test_two_mistakes_are_likely_at_most():
    q, k, v = causal()
    best = ch.diagnose(q, k, v, softmax(q @ k.mT) @ v, causal=True).explanations[0]
    assert set(best.mistakes) == {"no scale", "causal mask missing"}
    assert [key for key, _ in best.doubts] == ["a pair"]


def test_inputs_that_hide_mistakes_are_named():
    q, k, v = causal()
    same = np.broadcast_to(q[:, :, :1], q.shape)
    best = ch.diagnose(same, k, v, softmax(same @ k.mT) @ v).explanations[0]
    assert best.confidence != "sure"
    diagnosis = ch.diagnose(0 * q, k, v, np.broadcast_to(v.mean(2, keepdims=True), v.shape), causal=True)
    assert all(e.confidence != "sure" for e in diagnosis.explanations)  # hidden scores of 0 would give the same


def test_values_whose_squares_overflow_get_a_verdict():
    rng = fresh()
    q, k, v = (rng.standard_normal((2, 2, 40, 8)) * size for size in (1, 1, 1e200))
    dropped = ch.attention(q, k, v) * rng.choice([0, 1.2], v.shape)
    assert ch.diagnose(q, k, v, dropped).verdict == "unexplained"


def test_dropout_is_left_unexplained():
    q, k, v = qkv(n=64)
    weights = torch.tensor(softmax(q @ k.mT / 8**0.5))
    assert known(ch.diagnose(q, k, v, torch.nn.functional.dropout(weights, 0.1).numpy() @ v)) is not None


@pytest.mark.parametrize("name", ["noise of 1e-3", "0.01 added to one head", "a hundredth of the neighbour"])
def test_small_differences_are_no_narrow_dtype(name: str):
    assert known(of_code(name)) is not None


def test_one_wrong_number_between_the_sampled_rows_is_no_narrow_dtype():
    q, k = np.zeros((2, 1, 1, 32, 4))
    v = fresh().integers(-9, 9, (1, 1, 32, 4)).astype(np.float64)  # the mean of 32 is a number of float16
    theirs = np.array(np.broadcast_to(v.mean(2, keepdims=True), v.shape))
    theirs[0, 0, 13, 2] += 1
    assert known(ch.diagnose(q, k, v, theirs))["right query"] == {"right": "0-12, 14-31", "wrong": "13"}


def test_lengths_of_two_batch_entries_are_no_proof():
    q, k, v = causal()
    theirs = ch.attention(q, k, v, kv_lengths=np.array([14, 17]))
    best = ch.diagnose(q, k, v, theirs, kv_lengths=np.array([13, 16])).explanations[0]
    assert (best.mistakes, best.confidence) == (("padding off by one",), "likely")


@pytest.mark.parametrize(
    ("window", "theirs", "mistake", "confidence"),
    [
        ((4, 3), (3, 3), "window off by one", "likely"),
        ((6, 3), (5, 3), "window off by one", "sure"),
        ((6, 2), (6, 1), "window off by one", "sure"),
        ((6, 2), (6, 0), "window on the left only", "sure"),
        ((4, 3), (4, 4), "window on both sides", "likely"),
    ],
)
def test_a_window_that_two_mistakes_give_is_likely_at_most(window, theirs, mistake, confidence):
    q, k, v = causal()
    best = ch.diagnose(q, k, v, ch.attention(q, k, v, window=theirs), window=window).explanations[0]
    if confidence == "sure":
        assert (best.mistakes, best.confidence) == ((mistake,), confidence)
    else:
        assert best.confidence != "sure"


HUGE = [("float16", 100), ("float32", 1e8), ("bfloat16", 100), ("bfloat16", 1e8)]


@pytest.mark.parametrize("huge", in_the_gate(HUGE, *HUGE[1:]), ids=str)
def test_huge_scores_do_not_excuse_wrong_numbers(huge: tuple[str, float]):
    dtype, size = huge
    for _ in range(5):  # a log-sum-exp once excused what is wrong as a whole, in every fourth draw
        q, k, v = (torch.tensor(fresh().standard_normal((1, 2, 40, 16))).to(getattr(torch, dtype)) for _ in range(3))
        q = q * size
        scores = q.double() @ k.mT.double() / 4
        right, opposite = ((torch.softmax(x, -1) @ v.double()).to(v.dtype) for x in (scores, -scores))
        assert ch.diagnose(q, k, v, right).verdict == "right"
        assert ch.diagnose(q, k, v, opposite).verdict != "right"


def test_a_wrong_scale_is_found_where_scores_are_thousands():
    q, k, v = fresh().standard_normal((3, 1, 2, 64, 16)).astype(np.float32)
    q = q * 1000
    scores = q.astype(np.float64) @ k.mT / 4
    # Most rows give one key all the weight at any scale: in one, the best two keys score 2 apart, and so show it.
    second, first = scores[0, 0, 0].argsort()[-2:]
    towards = q[0, 0, 0] / np.linalg.norm(q[0, 0, 0]) ** 2
    k[0, 0, second] += 4 * (scores[0, 0, 0, first] - scores[0, 0, 0, second] - 2) * towards
    scores = q.astype(np.float64) @ k.mT / 4
    assert ch.diagnose(q, k, v, (softmax(0.8 * scores) @ v).astype(np.float32)).verdict != "right"


@pytest.mark.parametrize("dtype", in_the_gate([np.float32, np.float64], np.float32))
def test_a_rounded_logsumexp_is_excused_for_whole_rows_only(dtype: Any):
    q, k, v = fresh().standard_normal((3, 1, 2, 40, 16)).astype(dtype)
    q = q * dtype(500)
    scores = q @ k.mT / dtype(4)
    top = scores.max(-1, keepdims=True)
    logsumexp = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    theirs = np.exp(scores - logsumexp) @ v
    assert ch.diagnose(q, k, v, theirs).verdict == "right"
    one = theirs.copy()
    one[..., 0] *= dtype(1 + 0.02)
    assert ch.diagnose(q, k, v, one).verdict != "right"
    assert ch.diagnose(q, k, v, theirs * dtype(1.03)).verdict != "right"


# ── what is known where nothing explains ──


@pytest.mark.parametrize(
    ("value", "key", "words"),
    [
        (np.nan, "no finite number", "no number is finite"),
        (0.0, "constant", "the kernel did not run"),
        (0.3, "constant", "0.3"),
    ],
)
def test_outputs_that_say_nothing_are_not_searched(value: float, key: str, words: str):
    q, k, v = causal()
    for rules in ({}, {"causal": True}):
        diagnosis = ch.diagnose(q, k, v, np.full_like(v, value), **rules)
        assert list(known(diagnosis)) == [key]
        assert words in diagnosis.told()


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("one row wrong", "right query", {"right": "0-6, 8-47", "wrong": "7"}),
        ("one head never written", "right head", {"right": "0-2", "wrong": "3"}),
        ("the last column missing", "right column", {"right": "0-14", "wrong": "15"}),
        ("some NaN", "some nonfinite", {"count": 56, "rows": 56}),
    ],
)
def test_what_is_known_is_said(name: str, key: str, values: dict[str, Any]):
    assert known(of_code(name))[key] == values


def test_a_factor_is_named_and_numbers_wrong_everywhere_are_said_to_be():
    q, k, v = causal()
    right, factor = ch.attention(q, k, v, causal=True), fresh().uniform(1.1, 3)
    assert known(ch.diagnose(q, k, v, right * factor, causal=True))["a factor"]["factor"] == pytest.approx(factor)
    assert list(known(ch.diagnose(q, k, v, right**3 + 1, causal=True))) == ["wrong everywhere", "ask for weights"]


@pytest.mark.gate
def test_a_causal_mask_two_ahead_is_right_in_its_last_row_alone():
    q, k, v = causal()
    theirs = softmax(np.where(np.tri(24, k=2) > 0, q @ k.mT / 8**0.5, -np.inf)) @ v
    diagnosis = ch.diagnose(q, k, v, theirs, causal=True)
    assert known(diagnosis)["right query"] == {"right": "23", "wrong": "0-22"}


def test_arrays_with_the_heads_behind_the_length_are_recognised():
    q, k, v = causal()
    theirs = softmax(q @ k.mT / 8**0.5) @ v
    diagnosis = ch.diagnose(*(x.swapaxes(1, 2) for x in (q, k, v, theirs)))
    (best,) = diagnosis.explanations
    assert (best.mistakes, best.confidence) == (("attention over heads",), "likely")
    assert best.doubts[0][0] == "axes swapped"
    assert "swap axes 1 and 2" in diagnosis.told()


def test_what_needs_every_score_is_untried_of_a_long_input():
    q, k, v = fresh().standard_normal((3, 1, 1, 2100, 8)).astype(np.float32)
    assert BUDGET < 2100**2
    diagnosis = ch.diagnose(q, k, v, softmax(q @ k.mT / np.float32(8**0.5)) @ v**3)
    assert known(diagnosis)["too long"] == {}


# ── tensors, pickles ──


def test_tensors_that_require_grad_are_read():
    q, k, v = (torch.tensor(x, requires_grad=True) for x in causal())
    assert ch.diagnose(q, k, v, torch.nn.functional.scaled_dot_product_attention(q, k, v)).verdict == "right"


@pytest.mark.parametrize("ending", ["pt", "pkl"])
def test_pickles_are_never_opened(tmp_path, ending):
    (tmp_path / f"case.{ending}").write_bytes(b"\x80\x04.")
    with pytest.raises(FileError, match="a pickle, which could run code"):
        diagnose_file(tmp_path / f"case.{ending}")


# ── right programs ──


def accusations(count: int) -> list[str]:
    """What `diagnose` says against `count` correct programs, each kind in turn, in four dtypes."""
    results, seed, programs = [], int(fresh().integers(2**40)), list(right_programs.PROGRAMS.items())
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        name, program = programs[number % len(programs)]
        q, k, v, rules = right_programs.activations(rng) if rng.random() < 0.1 else right_programs.draw(rng)
        verdict = ch.diagnose(q, k, v, program(right_programs.ready(q, k, v, rules), rng), **rules)
        if verdict.verdict != "right":
            results.append(f"{name} {rules} q {tuple(q.shape)} {q.dtype} rng [{seed}, {number}]: {verdict!r}")
    return results


def test_a_hundred_right_programs_are_not_accused():
    assert accusations(6 * len(right_programs.PROGRAMS)) == []


@pytest.mark.gate
@pytest.mark.parametrize("part", of_tiers((), range(5)))
def test_thousands_of_right_programs_are_not_accused(part: int):
    assert accusations(270) == []


def test_rotary_angles_in_float32_are_right_far_behind_the_start():
    """As libraries compute them: 20,000 tokens in, such an angle is off by 1e-3."""
    keys, queries, d = 20_000, 8, 16
    k, v = fresh().standard_normal((2, 1, 1, keys, d)).astype(np.float32)
    q = fresh().standard_normal((1, 1, queries, d)).astype(np.float32)
    frequencies = np.float32(10000.0) ** (-np.arange(0, d, 2, dtype=np.float32) / np.float32(d))

    def turned(x, start):
        angles = (np.arange(start, start + x.shape[-2], dtype=np.float32)[:, None] * frequencies).astype(np.float32)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    scores = turned(q, keys - queries) @ turned(k, 0).mT / np.float32(d**0.5)
    weights = np.exp(np.where(np.tri(queries, keys, keys - queries) > 0, scores, -np.inf).astype(np.float32))
    theirs = weights / weights.sum(-1, keepdims=True) @ v
    diagnosis = ch.diagnose(q, k, v, theirs, causal=True, query_offset=keys - queries, rotary=10000.0)
    assert diagnosis.verdict == "right", diagnosis
