"""`ch.why` and `explain --why`: against a dense GPT-2 in float64 whose every edge can be faded out."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from rich.cells import cell_len

import clearhead as ch
from clearhead.core.agreement import spearman
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from clearhead.models import model as gpt2
from clearhead.models.functions import ACTIVATIONS
from clearhead.models.hub import HubConfig, HubModel
from dense_gpt2 import WORDS, dense, in_float64, softmax
from seeds import fresh
from terminal import call
from test_derivatives import drawn

STEP = 1e-4
shipped = cache(gpt2.load)


def exact(model):
    """The same model in float64, whose tokenizer is the shipped one."""
    return replace(in_float64(model), tokenizer=shipped().tokenizer)


def random_model(rng):
    return exact(drawn(rng, vocabulary=2400, positions=40))


def random_text(rng, least=1):
    return " ".join(str(word) for word in rng.choice(WORDS.split(), rng.integers(least, 8)))


def logits_of(model, ids, faded=None, dimmed=None):
    """Of the last token, by dense matrices, and all weights.

    faded    an edge and a share: so far its row goes from what it is to what it is without the edge, renormalised
    dimmed   (layer, head) and a share: so much is taken from that head's output
    """
    factors = np.ones((model.config.layers, model.config.heads))
    if dimmed:
        factors[dimmed[0]] -= dimmed[1]

    def weigh(layer, a):
        if faded and faded[0][0] == layer:
            (_, head, query, key), share = faded
            rest = np.where(np.arange(len(ids)) == key, 0.0, a[head, query])
            rest /= rest.sum() or 1.0
            a[head, query] += share * (rest - a[head, query])
        return a

    logits, weights, _ = dense(model, ids, weigh=weigh, factors=factors)
    return logits[-1], weights


def slope_and_change(model, ids, seen, **places):
    """Of the lead: the derivative by the share that an edge is faded or a head is dimmed, and the whole change."""

    def lead(share):
        logits = logits_of(model, ids, **{name: (place, share) for name, place in places.items()})[0]
        return logits[seen.token.id] - logits[seen.against.id]

    return (lead(STEP) - lead(-STEP)) / (2 * STEP), lead(1) - lead(0)


def checked(model, text, count=8, **options):
    """`why`, with every number of it compared."""
    seen = ch.why(text, model, count=count, **options)
    ids = [token.id for token in model.tokens(text)]
    n = len(ids)
    logits, weights = logits_of(model, ids)
    shares = softmax(logits)
    for candidate in (seen.token, seen.against):
        assert candidate.logit == pytest.approx(logits[candidate.id], abs=1e-8)
        assert candidate.probability == pytest.approx(shares[candidate.id], abs=1e-9)
        assert candidate.text == model.text(candidate.id)
    assert seen.lead == pytest.approx(seen.token.logit - seen.against.logit, abs=1e-8)

    places = [place for place in np.ndindex(weights.shape) if place[3] <= place[2]]
    both = np.array([slope_and_change(model, ids, seen, faded=place) for place in places])
    size = max(1.0, np.abs(both).max())
    slope, change = (dict(zip(places, column, strict=True)) for column in both.T)
    for effect in (*seen.edges, *seen.weights_alone):
        assert effect.weight == pytest.approx(weights[effect.edge], abs=1e-9)
        assert effect.estimate == pytest.approx(slope[effect.edge], abs=1e-5 * size)
        assert effect.truth == pytest.approx(change[effect.edge], abs=1e-8 * size)
    by_token = [sum(slope[place] for place in places if place[3] == j) for j in range(n)]
    np.testing.assert_allclose(seen.by_token, by_token, atol=1e-5 * size * len(places))

    strongest = np.sort(np.abs(both[:, 0]))[::-1][:count]
    listed = np.array([abs(effect.estimate) for effect in seen.edges])
    np.testing.assert_allclose(np.sort(listed)[::-1], strongest[: len(listed)], atol=1e-5 * size)
    np.testing.assert_allclose(strongest[len(listed) :], 0, atol=1e-5 * size)
    truths = [abs(effect.truth) for effect in seen.edges]
    assert truths == sorted(truths, reverse=True)
    largest = np.sort(weights[:, :, -1].ravel())[::-1][:count]
    np.testing.assert_allclose([effect.weight for effect in seen.weights_alone], largest, atol=1e-9)
    again = {effect.edge: abs(effect.truth) for effect in (*seen.edges, *seen.weights_alone)}
    assert seen.run_again == len(again)
    for effect in (*seen.edges, *seen.weights_alone):
        rank = 1 + sorted(again.values(), reverse=True).index(abs(effect.truth))
        assert effect.rank == rank or list(again.values()).count(abs(effect.truth)) > 1

    assert seen.by_head.shape == weights.shape[:2]
    assert len(seen.heads) == min((count + 1) // 2, seen.by_head.size)
    for layer, head, estimate, truth in seen.heads:
        expected = slope_and_change(model, ids, seen, dimmed=(layer, head))
        assert (estimate, -seen.by_head[layer, head]) == pytest.approx((expected[0],) * 2, abs=1e-5 * size)
        assert truth == pytest.approx(expected[1], abs=1e-8 * size)
    assert np.abs(seen.by_head).max() == pytest.approx(max(abs(head.estimate) for head in seen.heads))
    return seen


@pytest.mark.parametrize("trial", range(4))
def test_every_number_is_that_of_a_dense_model_with_the_edge_faded_out(trial):
    rng = fresh()
    activation = str(rng.choice(sorted({*ACTIVATIONS} - {"relu"})))  # relu has a corner
    model = exact(drawn(rng, vocabulary=2400, positions=40, activation=activation))
    checked(model, random_text(rng), int(rng.integers(1, 12)))


@pytest.mark.parametrize("text", ["mary", pytest.param("mary had a little", marks=pytest.mark.gate)])
def test_the_shipped_model_too(text):
    seen = checked(exact(shipped()), text, token="lamb")
    assert seen.token.text == " lamb"
    assert seen.agreement == spearman([e.estimate for e in seen.edges], [e.truth for e in seen.edges])


def test_the_correlation_of_ranks_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    rng = fresh()
    for _ in range(20):
        x, y = rng.integers(0, 6, (2, int(rng.integers(3, 12)))).astype(float)
        if np.ptp(x) and np.ptp(y):
            assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-9)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_words_stand_for_the_likelier_of_their_spellings_and_ids_for_themselves():
    model = shipped()
    logits = model.run([t.id for t in model.tokens("mary had a little")]).logits[-1]
    lamb, mary = (model.tokenizer.encode(word).ids[0] for word in (" lamb", "mary"))
    assert model.tokenizer.encode(" mary").ids[0] != mary
    for word, expected in ((" lamb", lamb), ("␣lamb", lamb), ("lamb", lamb), ("Lamb", lamb), (lamb, lamb)):
        assert ch.why("mary had a little", model, token=word).token.id == expected
    both = [mary, model.tokenizer.encode(" mary").ids[0]]
    chosen = ch.why("mary had a little", model, against="mary").against.id
    assert chosen == both[int(logits[both].argmax())]
    assert ch.why("mary had a little", model, token="girl").against.text == " lamb"
    swapped = ch.why("mary had a little", model, token="girl", against="lamb")
    assert swapped.lead == -ch.why("mary had a little", model).lead < 0


def test_edits_are_in_force_in_every_run():
    rng = fresh()
    model, text = random_model(rng), random_text(rng, 3)
    n = len(model.tokens(text))
    edits = [ch.cut(queries=n - 1, keys=0, layers=[0]), ch.scaled(0.5, layers=[0], heads=[0])]
    seen = ch.why(text, model, edits=edits, count=3)
    ids = [token.id for token in model.tokens(text)]

    def lead(*more):
        logits = model.run(ids, edits=(*edits, *more)).logits[-1]
        return logits[seen.token.id] - logits[seen.against.id]

    assert seen.lead == pytest.approx(lead(), abs=1e-8)
    assert seen.edits == tuple(edits)
    assert not any(e.layer == 0 and e[2:4] == (n - 1, 0) for e in (*seen.edges, *seen.weights_alone))
    for layer, head, query, key, _, _, truth, _ in seen.edges:
        again = lead(ch.cut(queries=query, keys=key, layers=[layer], heads=[head]))
        assert truth == pytest.approx(again - lead(), abs=1e-7)
    for layer, head, _, truth in seen.heads:
        assert truth == pytest.approx(lead(ch.off(layers=[layer], heads=[head])) - lead(), abs=1e-7)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"text": 7}, DtypeError, "text is 7"),
        ({"text": ""}, ShapeError, "the text is empty"),
        ({"token": "xyzzyx"}, SelectionError, "token 'xyzzyx' is not one token: the model's vocabulary cuts it into"),
        ({"against": ""}, SelectionError, "against '' is not one token"),
        ({"token": 2400}, SelectionError, "token 2400 is outside 0..2399"),
        ({"token": 1.5}, SelectionError, r"token is 1\.5"),
        ({"token": "lamb", "against": " lamb"}, SelectionError, "token and against are both"),
        ({"count": 0}, RuleError, "count"),
        ({"each": 3}, RuleError, "each is 3"),
        ({"edits": ch.share(keys="had", at_least=0.5)}, RuleError, "no derivative is taken through this edit"),
        ({"edits": ch.cut(queries="mary", keys="had")}, SelectionError, "it changes nothing"),
        ({"model": HubModel("own", HubConfig("llama", 1, 1, 1, 1, 1), None, None)}, RuleError, "own runs in PyTorch"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(options, error, what):
    with pytest.raises(error, match=what):
        ch.why(**({"text": "mary had a little", "model": shipped()} | options))
    if "model" in options:
        with pytest.raises(RuleError) as raised:
            ch.why("mary", **options)
        assert raised.value.hint.startswith("ch.watch(model, causes=True)")


def test_a_progress_bar_walks_layers_and_what_is_run_again():
    walked = []
    seen = ch.why("mary had", shipped(), each=lambda items: (walked.append(len(items)), items)[1])
    assert walked == [2, 2, seen.run_again + len(seen.heads)]


def test_terminal_and_json_have_the_same_numbers(tmp_path):
    place = tmp_path / "why.json"
    done = call("explain", "mary had a little", "--why", "--json", place)
    assert (done.returncode, done.stderr) == (0, "")
    data, seen = json.loads(place.read_text(encoding="utf-8")), ch.why("mary had a little", shipped())
    assert data == json.loads(json.dumps(seen.to_json()))
    assert (data["token"]["text"], data["against"]["text"]) == (" lamb", " girl")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("␣lamb rather than ␣girl: its logit leads by 6.90 (99.70% against")
    rows = [line.split() for line in lines if re.match(r"  \d+\.\d+ ", line)]
    edges, heads, weights = rows[:8], rows[8:12], rows[12:]
    for row, edge in zip(edges, data["edges"], strict=True):
        assert row[0] == f"{edge['layer']}.{edge['head']}"
        assert (int(row[1]), int(row[4])) == (edge["query"], edge["key"])
        numbers = [edge[name] for name in ("weight", "estimate", "truth")]
        assert list(map(float, row[6:9])) == pytest.approx(numbers, abs=6e-3)
        assert row[9] == ("␣lamb" if edge["truth"] < 0 else "␣girl")
    for row, head in zip(heads, data["heads"], strict=True):
        assert list(map(float, row[1:3])) == pytest.approx([head["estimate"], head["truth"]], abs=6e-3)
    for row, edge in zip(weights, data["weights_alone"], strict=False):
        assert float(row[3]) == pytest.approx(edge["weight"], abs=6e-4)
        assert float(row[4]) == pytest.approx(edge["truth"], abs=6e-3)
        assert int(row[5]) == edge["rank"]
    tokens = next(i for i, line in enumerate(lines) if line.startswith("the text")) + 1
    assert lines[tokens].split() == ["mary", "␣had", "␣a", "␣little"]
    assert list(map(float, lines[tokens + 1].split())) == pytest.approx(data["by_token"], abs=6e-3)
    printed = call("explain", "mary had a little", "--why", "--json", "-").stdout
    assert json.loads(printed) == data


def test_a_long_token_is_cut_and_stays_above_its_number(monkeypatch):
    text = gpt2.Model.text
    monkeypatch.setattr(gpt2.Model, "text", lambda model, token: text(model, token) + "y" * 90)
    lines = call("explain", "mary had", "--why").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  ") and "…" in line)
    assert len(lines[start].split()) == len(lines[start + 1].split()) == 2
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_encodings_without_arrows_are_printed_too(encoding):
    done = call("explain", "mary had a little", "--why", encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80


def test_a_file_a_target_and_edits_go_with_why(tmp_path):
    (tmp_path / "text.txt").write_text("mary had a little\n", encoding="utf-8")
    done = call("explain", "--file", tmp_path / "text.txt", "--why", "girl", "--against", "hen", "--cut=-1>0@0.2")
    assert done.returncode == 0, done.stderr
    assert "␣girl" in done.stdout.splitlines()[0]
    assert "␣hen" in done.stdout.splitlines()[0]
    assert "edits  cut(queries=-1, keys=0, layers=[0], heads=[2])" in done.stdout
    one = call("explain", "mary had a little", "--why", "--cut", "little>mary", "--layer", "0", "--head", "3")
    assert "heads=[3]" in one.stdout
