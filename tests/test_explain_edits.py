"""`clearhead explain` with edits beside edits made by hand with dense masks, in NumPy and in Transformers."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.changing.edits_text import edits_from_options
from clearhead.explaining.texts import read
from clearhead.models import model as gpt2
from clearhead.report.changed import moved
from dense_gpt2 import WORDS, dense, softmax
from seeds import fresh
from terminal import call

TEXT = "mary had a little"
shipped = cache(gpt2.load)


def by_hand(model, ids, added, factors):
    """The last token's probabilities, with dense logits added and heads multiplied by hand."""
    return softmax(dense(model, ids, added=added, factors=factors)[0][-1])


def drawn(rng):
    """A text of words, arguments of the command line, and what they add and multiply by hand."""
    words = [str(word) for word in rng.choice(WORDS.split(), rng.integers(4, 9), replace=False)]
    text = " ".join(words)
    model = shipped()
    tokens = model.tokenizer.tokens(text)
    n, (layers, heads) = len(tokens), (model.config.layers, model.config.heads)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    places = [
        [i for i, t in enumerate(tokens) if start < t.stop <= start + len(word)]
        for start, word in zip(starts, words, strict=False)
    ]
    added, factors, options = np.zeros((layers, heads, n, n)), np.ones((layers, heads)), []
    for kind in rng.permutation(["cut", "boost", "off", "cut"]):
        layer, head = int(rng.integers(layers)), int(rng.integers(heads))
        one = bool(rng.integers(2))  # one head, or the whole layer
        chosen, where = ((layer,), (head,) if one else range(heads)), f"{layer}.{head}" if one else f"{layer}"
        grid = np.ix_(*chosen)
        if kind == "off":
            factors[grid] = 0
            options += ["--off", where]
            continue
        key = int(rng.integers(len(words) - 1))
        query = int(rng.integers(key, len(words)))
        number = float(np.round(rng.normal(0, 2), 2))
        amount = -np.inf if kind == "cut" else number
        added[np.ix_(*chosen, places[query], places[key])] += amount
        keys = words[key] if rng.integers(2) else ",".join(map(str, places[key]))
        pair = f"{words[query]}>{keys}"
        options += [f"--{kind}", f"{pair}@{where}" if kind == "cut" else f"{pair}={number}@{where}"]
    return text, [t.id for t in tokens], options, added, factors


def test_terminal_and_json_have_numbers_of_edits_made_by_hand(tmp_path):
    model, place = shipped(), tmp_path / "seen.json"
    for _ in range(6):
        text, ids, options, added, factors = drawn(fresh())
        done = call("explain", text, *options, "--json", place)
        assert done.returncode == 0, (options, done.stderr)
        seen = json.loads(place.read_text(encoding="utf-8"))
        after = by_hand(model, ids, added, factors)
        before = by_hand(model, ids, 0 * factors[..., None, None], np.ones_like(factors))
        tokens = seen["next"]
        for token in tokens:
            assert token["before"] == pytest.approx(before[token["id"]], abs=2e-5)
            assert token["after"] == pytest.approx(after[token["id"]], abs=2e-5)
        for name, shares in (("before", before), ("after", after)):
            likeliest = sorted((token[name] for token in tokens), reverse=True)[:5]
            np.testing.assert_allclose(likeliest, np.sort(shares)[::-1][:5], atol=2e-5)
        moves = [abs(token["after"] - token["before"]) for token in tokens]
        assert moves == sorted(moves, reverse=True)
        assert moves[0] == pytest.approx(np.abs(after - before).max(), abs=4e-5)
        assert_printed(done.stdout, tokens)


def assert_printed(text, tokens):
    """The terminal has the numbers of the JSON."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next tokens")) + 2
    for line, token in zip(lines[start:], tokens, strict=False):
        before, after = (float(x[:-1]) / 100 for x in line.split()[-3:-1])
        assert before == pytest.approx(token["before"], rel=0.06, abs=6e-5)
        assert after == pytest.approx(token["after"], rel=0.06, abs=6e-5)
        assert float(line.split()[-1]) == pytest.approx(100 * (token["after"] - token["before"]), rel=0.06, abs=6e-3)


def test_a_model_in_pytorch_is_edited_as_the_decoder_in_numpy():
    from clearhead.models import hub

    other = hub.load(str(Path(gpt2.__file__).parents[1] / "models" / gpt2.SHIPPED))
    edits = edits_from_options([("cut", "2:>1,2@0.4"), ("cut", "little>had@1"), ("off", "0.2")], None, None, "first")
    one, two = (moved(model, read(model, TEXT), edits, iter) for model in (shipped(), other))
    assert [token["id"] for token in one] == [token["id"] for token in two]
    for name in ("before", "after"):
        np.testing.assert_allclose([x[name] for x in one], [x[name] for x in two], atol=1e-5)


def test_the_heads_asked_for_are_those_of_an_edit_without_a_place():
    done, other = call("explain", TEXT, "--off", "--layer", 1, "--head", 2), call("explain", TEXT, "--off", "1.2")
    assert done.stdout == other.stdout
    assert "--rest needs --cut" in call("explain", TEXT, "--rest", "first").stderr
    assert "rest='first'" in call("explain", TEXT, "--cut", "little>had", "--rest", "first").stdout
    refused = call("explain", TEXT, "--off", "1.2", "--steps")
    assert (refused.returncode, "cannot go with --steps" in refused.stderr) == (2, True)
    for options, what in (
        (("--cut", "mary>little"), "none of its queries sees any of its keys"),
        (("--cut", "dog>mary"), "the text has no such word"),
        (("--off", "7.0"), "there is no layer"),
    ):
        refused = call("explain", TEXT, *options)
        assert (refused.returncode, what in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    ("kind", "text", "edit"),
    [
        ("cut", "on>sat", ch.cut(queries="on", keys="sat", layers=[1], heads=[5])),
        ("cut", "on>sat@0.3", ch.cut(queries="on", keys="sat", layers=[0], heads=[3])),
        ("cut", "on>sat@0", ch.cut(queries="on", keys="sat", layers=[0])),
        ("cut", "on>sat@.3", ch.cut(queries="on", keys="sat", heads=[3])),
        ("cut", " on > sat#2 , -1 @0.1", ch.cut(queries="on", keys=["sat#2", -1], layers=[0], heads=[1])),
        ("cut", "2:>:@0", ch.cut(queries=slice(2, None), keys=slice(None, None), layers=[0])),
        ("cut", "on>", ch.cut(queries="on", layers=[1], heads=[5])),
        ("boost", "sat=2", ch.boost(keys="sat", by=2, layers=[1], heads=[5])),
        ("boost", "on>sat,on=-1e-1@1", ch.boost(queries="on", keys=["sat", "on"], by=-0.1, layers=[1])),
        ("off", "", ch.off(layers=[1], heads=[5])),
    ],
)
def test_an_option_is_an_edit(kind, text, edit):
    assert edits_from_options([(kind, text)], 1, 5) == [edit]


def test_an_option_of_several_places_is_several_edits():
    edits = [ch.off(layers=[0], heads=[3]), ch.off(layers=[1])]
    assert edits_from_options([("off", "0.3,1")], None, None) == edits
