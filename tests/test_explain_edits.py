"""`explain` with edits, against the same edits made by hand with dense masks, in NumPy and in Transformers."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.changing.edits_text import edits_from_options
from clearhead.errors import RuleError, SelectionError
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from dense_gpt2 import WORDS, dense, softmax
from seeds import fresh
from terminal import call

TEXT = "mary had a little"
shipped = cache(gpt2.load)


def by_hand(model, ids, added, factors):
    """The last token's probabilities, the weights and the heads' outputs, with dense logits added by hand."""
    logits, weights, outputs = dense(model, ids, added=added, factors=factors)
    return softmax(logits[-1]), weights, outputs


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
        shares, weights, outputs = by_hand(model, ids, added, factors)
        plain, plain_weights, plain_outputs = by_hand(model, ids, 0 * factors[..., None, None], np.ones_like(factors))
        layer, head = seen["layer"], seen["head"]
        np.testing.assert_allclose(seen["head_steps"]["weights"], weights[layer, head], atol=2e-5)
        np.testing.assert_allclose(seen["before"]["head_steps"]["weights"], plain_weights[layer, head], atol=2e-5)
        np.testing.assert_allclose(seen["token_arithmetic"]["weights"], weights[layer, head, -1], atol=2e-5)
        for side, truth in ((seen, shares), (seen["before"], plain)):
            np.testing.assert_allclose([c["probability"] for c in side["next"]], np.sort(truth)[::-1][:5], atol=2e-5)
            np.testing.assert_allclose([truth[c["id"]] for c in side["next"]], np.sort(truth)[::-1][:5], atol=2e-5)
        for token in seen["moved"]["next"]:
            assert token["before"] == pytest.approx(plain[token["id"]], abs=2e-5)
            assert token["after"] == pytest.approx(shares[token["id"]], abs=2e-5)
        assert max(abs(t["after"] - t["before"]) for t in seen["moved"]["next"]) == pytest.approx(
            np.abs(shares - plain).max(), abs=4e-5
        )
        moved = np.linalg.norm((outputs - plain_outputs)[:, :, -1], axis=-1)
        np.testing.assert_allclose(seen["moved"]["head_distance"], moved, atol=2e-4)
        np.testing.assert_allclose(
            seen["moved"]["head_length"], np.linalg.norm(plain_outputs[:, :, -1], axis=-1), atol=2e-4
        )
        assert_printed(done.stdout, seen)


def assert_printed(text, seen):
    """The terminal has the numbers of the JSON."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next tokens")) + 2
    for line, token in zip(lines[start : start + 8], seen["moved"]["next"], strict=False):
        before, after = (float(x[:-1]) / 100 for x in line.split()[-3:-1])
        assert before == pytest.approx(token["before"], rel=0.06, abs=6e-5)
        assert after == pytest.approx(token["after"], rel=0.06, abs=6e-5)
        assert float(line.split()[-1]) == pytest.approx(100 * (token["after"] - token["before"]), rel=0.06, abs=6e-3)
    rows = lines[next(i for i, line in enumerate(lines) if "row of A" in line) + 2 :]
    both = np.array([seen["before"]["token_arithmetic"]["weights"], seen["token_arithmetic"]["weights"]])
    for line in rows[: min(8, both.shape[1])]:
        key = int(line.split()[0])
        for word, weight in zip(line.split()[-3:-1], both[:, key], strict=True):
            assert weight == (0 if word == "masked" else pytest.approx(float(word), abs=6e-5))


def test_without_edits_nothing_changes():
    seen = steps_of_text(TEXT, shipped())
    assert (seen.edits, seen.before, seen.moved) == ((), None, None)
    assert not {"edits", "before", "moved"} & set(seen.to_json())
    same = steps_of_text(TEXT, shipped(), edits=ch.boost(keys="mary", by=0), layer=seen.layer, head=seen.head)
    assert same.moved.heads(5) == []
    np.testing.assert_array_equal(same.trace.weights, seen.trace.weights)
    assert same.before.next == seen.next == same.next
    assert same.to_json()["before"] == seen.to_json()


def test_the_edited_head_that_moved_furthest_is_shown():
    cut = ch.cut(queries="little", keys="mary", heads={0: [1, 2], 1: [4]})
    seen = steps_of_text(TEXT, shipped(), edits=cut)
    among = {place: seen.moved.distance[place] for place in ((0, 1), (0, 2), (1, 4))}
    assert (seen.layer, seen.head) == max(among, key=among.get)
    assert steps_of_text(TEXT, shipped(), edits=cut, layer=1).head == 4
    other = steps_of_text(TEXT, shipped(), edits=cut, layer=1, head=0)
    assert (other.layer, other.head) == (1, 0)
    assert steps_of_text(TEXT, shipped(), edits=cut, head=7).head == 7


def test_a_head_that_is_off_says_so_and_passes_nothing_on():
    seen = steps_of_text(TEXT, shipped(), edits=[ch.off(layers=[1], heads=[2]), ch.scaled(0.5, layers=[1], heads=[3])])
    run = seen.runs[1]
    assert run.factors.tolist() == [1, 1, 0, 0.5, 1, 1, 1, 1]
    assert not run.heads[2].any()
    np.testing.assert_allclose(run.heads[3], seen.before.runs[1].heads[3] / 2, atol=1e-6)
    assert seen.to_json()["head_factors"] == [None, run.factors.tolist()]
    done = call("explain", TEXT, "--off", "1.2")
    assert "the edits multiply this head's output by 0 after A·V" in done.stdout
    assert "the edits do not change these weights" in done.stdout
    assert call("explain", TEXT, "--off", "--layer", 1, "--head", 2).stdout.splitlines()[4:] == [
        line for line in done.stdout.splitlines()[4:] if "chosen since" not in line
    ]


# the command line


@pytest.mark.parametrize(
    ("kind", "text", "edit"),
    [
        ("cut", "on>sat", ch.cut(queries="on", keys="sat", layers=[1], heads=[5])),
        ("cut", "on>sat@0.3", ch.cut(queries="on", keys="sat", layers=[0], heads=[3])),
        ("cut", "on>sat@0", ch.cut(queries="on", keys="sat", layers=[0])),
        ("cut", "on>sat@.3", ch.cut(queries="on", keys="sat", heads=[3])),
        ("cut", ">0:2@0.3,1.2,1.4", ch.cut(keys=slice(0, 2), heads={0: [3], 1: [2, 4]})),
        ("cut", " on > sat#2 , -1 @0.1", ch.cut(queries="on", keys=["sat#2", -1], layers=[0], heads=[1])),
        ("cut", "2:>:@0", ch.cut(queries=slice(2, None), keys=slice(None, None), layers=[0])),
        ("cut", "on>", ch.cut(queries="on", layers=[1], heads=[5])),
        ("boost", "sat=2", ch.boost(keys="sat", by=2, layers=[1], heads=[5])),
        ("boost", "on>sat,on=-1e-1@1", ch.boost(queries="on", keys=["sat", "on"], by=-0.1, layers=[1])),
        ("off", "", ch.off(layers=[1], heads=[5])),
        ("off", "0.3,0.4", ch.off(layers=[0], heads=[3, 4])),
        ("off", "0,1", ch.off(layers=[0, 1])),
    ],
)
def test_an_option_is_an_edit(kind, text, edit):
    assert edits_from_options([(kind, text)], 1, 5) == [edit]


@pytest.mark.parametrize(
    ("edits", "error", "what"),
    [
        (ch.off(heads=[1], to="mean"), RuleError, "explain shows cut, boost, tempered"),
        ([], RuleError, "edits is empty"),
        (ch.cut(keys="mary", layers=["x"]), SelectionError, "there is no layer 'x'"),
        (ch.boost(queries="mary", keys="had", by=1), SelectionError, "do not see these keys"),
    ],
)
def test_edits_that_explain_does_not_show_are_refused(edits, error, what):
    with pytest.raises(error, match=what):
        steps_of_text(TEXT, shipped(), edits=edits)


def test_weights_move_to_the_first_token_as_in_transformers():
    from clearhead.models import hub

    other = hub.load(str(Path(gpt2.__file__).parents[1] / "models" / gpt2.SHIPPED))
    edits = edits_from_options([("cut", "2:>1,2@0.4"), ("cut", "little>had@1")], None, None, "first")
    one, two = (steps_of_text(TEXT, model, layer=0, head=4, edits=edits) for model in (shipped(), other))
    for ours, theirs in zip(one.runs, two.runs, strict=True):
        np.testing.assert_allclose(ours.heads, theirs.heads, atol=1e-4)
    weights = np.array([softmax(row) for row in steps_of_text(TEXT, shipped(), layer=0, head=4).trace.masked])
    weights[2:, 0] += weights[2:, 1:3].sum(-1)
    weights[2:, 1:3] = 0
    np.testing.assert_allclose(one.trace.weights, weights, atol=2e-5)
    with pytest.raises(RuleError, match="no derivative"):
        ch.explain(TEXT, shipped(), edits=edits)
    assert "--rest is for --cut" in call("explain", TEXT, "--rest", "first").stderr
    assert "rest='first'" in call("explain", TEXT, "--cut", "little>had", "--rest", "first").stdout


def test_tempered_is_shown_too():
    seen = steps_of_text(TEXT, shipped(), layer=0, head=4, edits=ch.tempered(2, layers=[0]))
    for i, row in enumerate(steps_of_text(TEXT, shipped(), layer=0, head=4).trace.masked):
        a = np.sqrt(softmax(row)) / np.sqrt(softmax(row)).sum()
        np.testing.assert_allclose(seen.trace.weights[i], a, atol=2e-5)
