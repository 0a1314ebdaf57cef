"""Explanations: every number shown is that of the model's run."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.cli import main
from clearhead.explaining.steps import steps_of_text
from clearhead.explaining.texts import parts_of
from clearhead.models.model import load
from dense_gpt2 import gpt2_weights

TEXT = "humpty dumpty sat on a wall"


shipped = cache(load)


@pytest.fixture(scope="module")
def model():
    return shipped()


def test_the_numbers_shown_are_those_of_the_model(model):
    seen = steps_of_text(TEXT, model, layer=1, head=2)
    ids = [t.id for t in model.tokenizer.tokens(TEXT)]
    run = model.run(ids)
    logits = run.logits[-1].astype(np.float64)
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert [c.id for c in seen.next] == np.argsort(-shares)[:5].tolist()
    assert [c.probability for c in seen.next] == pytest.approx(
        np.sort(shares)[::-1][:5].tolist(),
        rel=1e-5,  # a row alone and rows together round differently
    )
    part = run.layers[1]
    np.testing.assert_allclose(seen.trace.output, part.heads[2], atol=1e-5)
    w = gpt2_weights(model)
    q = part.x @ w["h.1.attn.w_q"] + w["h.1.attn.b_q"]
    np.testing.assert_allclose(seen.trace.q, q[:, 2 * 64 : 3 * 64], atol=1e-6)
    joined = np.concatenate(list(part.heads), axis=-1)
    expected = joined @ w["h.1.attn.c_proj.weight"] + w["h.1.attn.c_proj.bias"]
    np.testing.assert_allclose(seen.run.output, expected, atol=1e-5)
    assert seen.row.difference < 1e-12
    assert seen.trace.difference < 1e-5


def test_the_default_is_the_last_token_and_the_strongest_head(model):
    """Without it the odds of the likeliest next token change most; test_why.py compares these with a dense model."""
    seen, changes = steps_of_text(TEXT, model), ch.explain(TEXT, model).estimate.heads_run
    assert seen.token == len(seen.tokens) - 1
    for layer, part in enumerate(seen.runs):
        weights = np.asarray(ch.AttentionMatrix(part.q, part.k, causal=True), np.float64)[:, -1]
        np.testing.assert_allclose(seen.entropy[layer], -(weights * np.log(weights)).sum(axis=-1), atol=1e-5)
    assert seen.change == pytest.approx(changes[seen.layer, seen.head], abs=1e-3)
    assert abs(seen.change) == pytest.approx(np.abs(changes).max(), abs=1e-3)
    assert steps_of_text(TEXT, model, layer=1).head == np.abs(changes[1]).argmax()
    assert steps_of_text(TEXT, model, head=3).layer == np.abs(changes[:, 3]).argmax()


@pytest.mark.parametrize(
    ("wanted", "place"), [("0", 0), ("-1", 5), ("dumpty", 1), ("Humpty", 0), ("a", 4), (" on ", 3), ("ump", 1)]
)
def test_a_token_is_found_by_index_or_by_word(model, wanted, place):
    assert steps_of_text(TEXT, model, token=wanted).token == place


def test_json_holds_the_whole_explanation(model):
    data = json.loads(json.dumps(steps_of_text(TEXT, model, layer=0, head=1).to_json(), allow_nan=False))
    assert np.array(data["head_steps"]["weights"]).shape == (6, 6)
    assert data["head_steps"]["masked"][0][1] is None
    assert [s["name"] for s in data["layer_steps"]][-1] == "output"
    assert np.array(data["token_arithmetic"]["contributions"]).shape == (6, 64)
    assert np.array(data["layer_output"]).shape == (6, 512)
    assert sum(data["token_arithmetic"]["weights"]) == pytest.approx(1)


def test_a_file_of_one_sentence_is_explained_by_its_words(tmp_path, capsys):
    for text, parts in (("mary had a little\n", "mary/had/a"), ("jack fell. he had a", "jack fell./he had")):
        (tmp_path / "text").write_text(text)
        assert main(["explain", "--file", str(tmp_path / "text"), "--why", "--json", "-"]) == 0
        assert {part["text"] for part in json.loads(capsys.readouterr().out)["parts"]} == set(parts.split("/"))


def test_the_last_newline_of_a_file_is_not_a_token(tmp_path, capsys):
    for ending in ("", "\n", "\r\n"):
        (tmp_path / "text").write_bytes(f"{TEXT}{ending}".encode())
        assert main(["explain", "--file", str(tmp_path / "text"), "--json", "-"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert [token["text"] for token in seen["tokens"]][-1] == " wall"
    (tmp_path / "text").write_text(f"{TEXT}\n\n")
    main(["explain", "--file", str(tmp_path / "text"), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["text"] == f"{TEXT}\n"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_tokens_of_one_character_are_counted_as_one(text):
    tokens = shipped().tokenizer.tokens(text)
    names = parts_of(tokens, text).names
    for index, (token, name) in enumerate(zip(tokens, names, strict=True)):
        if name != token.text:
            place, of = map(int, name[1:].split("/"))
            whole = names[index - place + 1 : index - place + 1 + of]
            assert whole == [f"{name[0]}{part + 1}/{of}" for part in range(of)]
            assert 2 <= of <= max(len(form.encode()) for form in (name[0], name[0].lower()))  # Ⱥ has 2 bytes, ⱥ 3
