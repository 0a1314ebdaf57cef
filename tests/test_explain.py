"""Explanations: every number is the run's own."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import SelectionError
from clearhead.explain import explain, parts_of
from clearhead.model import load

TEXT = "humpty dumpty sat on a wall"


shipped = cache(load)


@pytest.fixture(scope="module")
def model():
    return shipped()


def test_the_numbers_are_the_models_own(model):
    seen = explain(model, TEXT, layer=1, head=2)
    ids = [t.id for t in model.tokens(TEXT)]
    run = model.run(ids)
    logits = run.logits[-1].astype(np.float64)
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert [c.id for c in seen.next] == np.argsort(-shares)[:5].tolist()
    assert [c.probability for c in seen.next] == pytest.approx(np.sort(shares)[::-1][:5].tolist())
    part = run.layers[1]
    np.testing.assert_allclose(seen.trace.output, part.heads[2], atol=1e-5)
    w = model.weights
    q = part.x @ w["h.1.attn.w_q"] + w["h.1.attn.b_q"]
    np.testing.assert_allclose(seen.trace.q, q[:, 2 * 64 : 3 * 64], atol=1e-6)
    joined = np.concatenate(list(part.heads), axis=-1)
    expected = joined @ w["h.1.attn.c_proj.weight"] + w["h.1.attn.c_proj.bias"]
    np.testing.assert_allclose(seen.run.output, expected, atol=1e-5)
    assert seen.row.difference < 1e-12
    assert seen.trace.check.largest_difference < 1e-5


def test_nothing_given_takes_the_last_token_and_the_sharpest_head(model):
    seen = explain(model, TEXT)
    assert seen.token == len(seen.tokens) - 1
    run = model.run([t.id for t in seen.tokens])
    for layer, part in enumerate(run.layers):
        scores = part.q.astype(np.float64) @ part.k.swapaxes(-1, -2) / 8
        last = np.exp(scores[:, -1] - scores[:, -1].max(axis=-1, keepdims=True))
        last /= last.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(seen.entropy[layer], -(last * np.log(last)).sum(axis=-1), atol=1e-5)
    assert seen.entropy[seen.layer, seen.head] == seen.entropy.min()
    assert explain(model, TEXT, layer=1).head == seen.entropy[1].argmin()
    assert explain(model, TEXT, head=3).layer == seen.entropy[:, 3].argmin()


@pytest.mark.parametrize(
    ("wanted", "place"), [("0", 0), ("-1", 5), ("dumpty", 1), ("Humpty", 0), ("a", 4), (" on ", 3), ("ump", 1)]
)
def test_a_token_is_found_by_place_or_word(model, wanted, place):
    assert explain(model, TEXT, token=wanted).token == place


def test_a_word_of_several_tokens_is_its_last_one(model):
    seen = explain(model, "the xylophonist", token="xylophonist")
    assert len(seen.tokens) > 3
    assert seen.token == len(seen.tokens) - 1


@pytest.mark.parametrize("choice", [{"layer": 2}, {"head": 8}, {"layer": -1}, {"token": "egg"}, {"token": "6"}])
def test_what_is_not_there_is_an_error(model, choice):
    with pytest.raises(SelectionError) as caught:
        explain(model, TEXT, **choice)
    assert next(iter(choice)) in str(caught.value)


def test_json_holds_all_of_it(model):
    data = json.loads(json.dumps(explain(model, TEXT, layer=0, head=1).to_json(), allow_nan=False))
    assert np.array(data["head_steps"]["weights"]).shape == (6, 6)
    assert data["head_steps"]["masked"][0][1] is None
    assert [s["name"] for s in data["layer_steps"]][-1] == "output"
    assert np.array(data["token_arithmetic"]["contributions"]).shape == (6, 64)
    assert np.array(data["layer_output"]).shape == (6, 512)
    assert sum(data["token_arithmetic"]["weights"]) == pytest.approx(1)


def test_bytes_of_a_character_are_named_after_it(model):
    names, split = parts_of(model.tokens("猫 sat, né"), "猫 sat, né")
    assert names == ["猫1/3", "猫2/3", "猫3/3", " sat", ",", " n", "é1/2", "é2/2"]
    assert (split.first, split.character, split.parts, split.characters) == ("猫1/3", "猫", 3, 2)
    assert parts_of(model.tokens("a cat"), "a cat").split is None


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_the_parts_of_a_character_are_counted_whole(text):
    tokens = shipped().tokens(text)
    names = parts_of(tokens, text).names
    for at, (token, name) in enumerate(zip(tokens, names, strict=True)):
        if name != token.text:
            place, of = map(int, name[1:].split("/"))
            whole = names[at - place + 1 : at - place + 1 + of]
            assert whole == [f"{name[0]}{part + 1}/{of}" for part in range(of)]
            assert 2 <= of <= len(name[0].encode())
