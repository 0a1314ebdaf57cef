"""`ch.explain` and `explain --why`: against a dense GPT-2 in float64 whose every weight can be changed by hand."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import clearhead as ch
from clearhead.core.effects import spearman
from clearhead.digits import percent, signed
from clearhead.errors import RuleError, SelectionError, ShapeError
from clearhead.explaining import part_runs, rerun
from clearhead.explaining.answers import probability, read_answers
from clearhead.explaining.part_runs import cuts, integral
from clearhead.explaining.texts import parts_of_text
from clearhead.explaining.why_words import conclusion
from clearhead.models import decoder, variants
from clearhead.models import model as gpt2
from clearhead.models.hub import of_loaded
from clearhead.models.mlp import ACTIVATIONS
from clearhead.models.protocol import Token
from dense_gpt2 import SHIPPED, WORDS, dense, in_float64
from page_files import header_of
from seeds import fresh
from terminal import call
from test_derivatives import drawn

STEP = 1e-4
shipped = cache(gpt2.load)


def random_model(rng, positions=40, **sizes):
    activation = str(rng.choice(sorted({*ACTIVATIONS} - {"relu"})))  # relu has a corner
    model = drawn(rng, vocabulary=2400, positions=positions, activation=activation, **sizes)
    tokenizer = replace(shipped().tokenizer, positions=positions, vocabulary=2400)
    return replace(in_float64(model), tokenizer=tokenizer)


def random_text(rng, least=1):
    return " ".join(str(word) for word in rng.choice(WORDS.split(), rng.integers(least, 8)))


def number_of(model, ids, target, gates=None, weigh=None, factors=None):
    """y of one target by dense matrices; each key's weights, but its own query's, times its gate, normalised anew."""

    def gated(layer, a):
        if gates is not None:
            a = a * np.where(np.eye(len(ids), dtype=bool), 1.0, gates)
            a /= a.sum(-1, keepdims=True)
        return a if weigh is None else weigh(layer, a)

    logits = dense(model, ids, weigh=gated, factors=factors)[0]
    return target.value(logits[target.rows.start : target.rows.stop])[0]


def without(model, ids, target, tokens):
    """y where no later token sees these; in place of the first one stands <|endoftext|>, which is token 0."""
    ids = [0 if place == 0 and place in tokens else token for place, token in enumerate(ids)]
    return number_of(model, ids, target, np.where(np.isin(np.arange(len(ids)), sorted({*tokens} - {0})), 0.0, 1.0))


def asked_of(model, text, **asked):
    """The targets of a question."""
    tokens = model.tokenizer.tokens(text)
    run = model.run([token.id for token in tokens])
    return read_answers(model, tokens, run, *(asked.get(name) for name in ("answer", "against"))).targets


@pytest.mark.parametrize(
    "asked", [{}, {"answer": "lamb its fleece"}, {"against": "girl"}, {"answer": "a wall", "against": "hill"}]
)
def test_parts_are_the_integral_of_the_derivative_by_their_gates(asked):
    """Against central differences of a dense model in float64, at the same points."""
    rng = fresh()
    model, text = random_model(rng), random_text(rng, 3)
    points, low = int(rng.integers(1, 4)), float(rng.uniform(0.01, 0.3))
    nodes, weights = np.polynomial.legendre.leggauss(points)
    for target in asked_of(model, text, **asked):
        gated = [place for place in range(len(target.ids) - len(target.answer)) if rng.integers(3)] or [0]
        by_key, by_edge, _ = integral(model, target, gated, points, low, iter)
        expected = np.zeros(len(target.ids))
        for node, weight in zip(np.log(low) * (1 - nodes) / 2, -np.log(low) * weights / 2, strict=True):
            for key in gated:
                sides = []
                for step in (STEP, -STEP):
                    logs = np.where(np.isin(np.arange(len(target.ids)), gated), node, 0.0)
                    logs[key] += step
                    sides.append(number_of(model, target.ids, target, np.exp(logs)))
                expected[key] += weight * (sides[0] - sides[1]) / (2 * STEP)
        size = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(by_key.sum(axis=(0, 1)), expected, atol=1e-5 * size)
        last = by_edge[-1].sum(axis=(0, 1))  # in the last layer only the rows that answer have a derivative
        np.testing.assert_allclose(last, by_key[-1].sum(axis=0), atol=1e-9 * size)


@pytest.mark.parametrize("asked", [{}, {"answer": "lamb its fleece"}, {"answer": " lamb", "against": " girl"}])
@pytest.mark.parametrize("sink", [False, True])
def test_what_is_run_again_is_what_a_dense_model_gives(asked, sink, monkeypatch):
    rng = fresh()
    model, text = random_model(rng), random_text(rng, 3)
    monkeypatch.setattr(rerun, "resting", lambda *_: 100 if sink else 0)
    seen = ch.explain(text, model, parts="tokens", count=4, **asked)
    (target,) = asked_of(model, text, **asked)
    ids, rows = target.ids, target.rows
    whole = number_of(model, ids, target)
    close = {"abs": 1e-7 * max(1.0, abs(whole))}
    assert seen.value == pytest.approx(whole, **close)
    assert seen.sink == sink
    assert [part.tokens for part in seen.parts] == [(place,) for place in range(len(seen.tokens) - 1)]
    nothing = without(model, ids, target, range(len(seen.tokens) - 1))
    assert seen.estimate.total == pytest.approx(whole - nothing, **close)
    assert sum(part.effect for part in seen.parts) == pytest.approx(seen.estimate.total - seen.estimate.gap, abs=1e-9)
    assert [part.replaced for part in seen.parts] == ["<|endoftext|>"] + [""] * (len(seen.parts) - 1)
    for part in seen.parts:
        assert part.hidden == pytest.approx(without(model, ids, target, part.tokens) - whole, **close)
    for (layer, head), truth in np.ndenumerate(seen.estimate.heads_run):

        def off(number, a, layer=layer, head=head):
            if number == layer:
                a[head, rows.start :] = 0
            return a

        assert truth == pytest.approx(number_of(model, ids, target, weigh=off) - whole, **close)
    assert [abs(head.truth) for head in seen.heads] == sorted(map(abs, seen.estimate.heads_run.ravel()), reverse=True)[
        :4
    ]
    for layer, head, query, key, weight, truth, _ in seen.edges:

        def moved_away(number, a, layer=layer, head=head, query=query, key=key):
            if number == layer:
                moved, a[head, query, key] = a[head, query, key], 0.0
                if sink:
                    a[head, query, 0] += moved
                else:
                    a[head, query] /= a[head, query].sum() or 1.0
            return a

        assert truth == pytest.approx(number_of(model, ids, target, weigh=moved_away) - whole, **close)
        assert weight == pytest.approx(dense(model, ids)[1][layer, head, query, key], abs=1e-9)


def test_without_an_integral_effects_are_those_of_runs(monkeypatch: pytest.MonkeyPatch):
    text = "humpty dumpty sat on a wall humpty dumpty had a great"
    monkeypatch.setattr(part_runs, "_PARTS", 4)
    whole = ch.explain(text, hide=[(0, 27)])
    monkeypatch.setattr(part_runs, "_LONG", 10)
    seen, no_question = (ch.explain(text, hide=[(0, end)]) for end in (27, len(text)))
    assert (seen.estimate.points, no_question.estimate.points > 0) == (0, True)
    assert "from all runs. Not explained" in json.dumps(header_of(seen.to_html()))
    assert seen.groups
    assert [part.hidden for part in seen.ranked] == [part.hidden for part in whole.ranked]
    assert seen.estimate.total == pytest.approx(whole.estimate.total)
    np.testing.assert_array_equal(seen.estimate.by_head, 0)
    assert seen.heads[0].truth == pytest.approx(whole.heads[0].truth)


def test_the_odds_of_a_token_far_ahead_are_finite():
    (target,) = asked_of(shipped(), "humpty dumpty sat on")
    value, slopes = target.value(4000.0 * np.eye(1, 2400, target.answer[0]))
    assert value == pytest.approx(4000 - np.log(2399))
    np.testing.assert_allclose(slopes, 2400 / 2399 * np.eye(1, 2400, target.answer[0]) - 1 / 2399, atol=1e-12)


def test_the_strongest_edges_of_either_estimate_are_run_again():
    seen = ch.explain("humpty dumpty sat on", shipped(), count=1000)
    estimate = cuts(seen.again)[:, :, 0]
    strongest = np.argsort(-np.abs(estimate), axis=None)[:20]
    truths = {(edge.layer, edge.head, edge.key): edge.truth for edge in seen.edges}
    named = {place: estimate[place] for each in strongest for place in [np.unravel_index(each, estimate.shape)]}
    assert {*named} <= {*truths}
    assert spearman([*named.values()], [truths[place] for place in named]) > 0.5


def test_pytorch_gives_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = of_loaded(
        transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="float32").eval(),
        transformers.AutoTokenizer.from_pretrained(SHIPPED),
    )
    for asked in ({}, {"answer": " lamb, its", "against": "girl"}):
        theirs, ours = (ch.explain("mary had a little", one, **asked) for one in (model, shipped()))
        np.testing.assert_allclose(theirs.estimate.by_head, ours.estimate.by_head, atol=1e-4)
        assert theirs.estimate.points == ours.estimate.points
        np.testing.assert_allclose(theirs.estimate.heads_run, ours.estimate.heads_run, atol=1e-4)
        assert [edge[:4] for edge in theirs.edges] == [edge[:4] for edge in ours.edges]
        np.testing.assert_allclose(
            [edge.truth for edge in theirs.edges], [edge.truth for edge in ours.edges], atol=1e-3
        )
    assert ch.explain("mary had a little", model).steps().head == ch.explain("mary had a little").steps().head


@pytest.mark.parametrize("name", ["GPTNeoX", "GptOss"])
def test_hiding_in_pytorch_is_what_cutting_its_keys_gives(name):
    """Rotary positions without grouped keys; learned sinks, a window and experts."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(int(fresh().integers(2**31)))
    sizes = {"vocab_size": 2400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0}
    if name == "GptOss":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_scaling": None}
    inner = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    for parameter in inner.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    model, text = of_loaded(inner, tokenizer), "jack and jill went up the hill"
    likeliest = int(np.argmax(model.run([token.id for token in model.tokenizer.tokens(text)]).logits[-1]))
    seen = ch.explain(text, model, answer=likeliest)
    ids = torch.tensor([[token.id for token in seen.tokens]])

    def number(*edits, first=seen.tokens[0].id):
        read = torch.cat([torch.tensor([[first]]), ids[:, 1:]], dim=1)
        with torch.inference_mode(), ch.change(inner, edits) if edits else nullcontext():
            logits = inner(read, use_cache=False).logits[0, -1].double()
        rest = torch.cat([logits[: seen.rivals.token.id], logits[seen.rivals.token.id + 1 :]])
        return float(logits[seen.rivals.token.id] - rest.logsumexp(0))

    assert seen.value == pytest.approx(number(), abs=1e-3)
    assert number(first=0) - number() == pytest.approx(seen.parts[0].hidden, abs=1e-3)
    for part in seen.parts[1:]:
        assert part.hidden == pytest.approx(number(ch.cut(keys=list(part.tokens))) - number(), abs=1e-3)


@given(st.text(alphabet="ab .!?\n。猫犬", max_size=60), st.sampled_from(["tokens", "words", "sentences", "paragraphs"]))
def test_parts_follow_one_another_and_hold_every_letter(text, kind):
    tokens = [Token(7, letter, place, place + 1) for place, letter in enumerate(text)] + [Token(7, "x", 0, 0)]
    result = parts_of_text(kind, text, tokens, [], [(0, len(text))])
    assert all(one.stop <= two.start for one, two in pairwise(result))
    assert all(part.text == text[part.start : part.stop] for part in result)
    held = [place for part in result for place in part.tokens]
    assert held == sorted(set(held))
    assert {place for place, letter in enumerate(text) if not letter.isspace()} <= {*held}
    assert all(part.start <= place < part.stop or text[place].isspace() for part in result for place in part.tokens)


def test_the_correlation_of_ranks_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    rng = fresh()
    for _ in range(20):
        x, y = rng.integers(0, 6, (2, int(rng.integers(3, 12)))).astype(float)
        if np.ptp(x) and np.ptp(y):
            assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-9)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_words_stand_for_the_likelier_of_their_spellings():
    model = shipped()
    logits = model.run([t.id for t in model.tokenizer.tokens("mary had a little")]).logits[-1]
    lamb, mary = (model.tokenizer.continuation(word)[0] for word in (" lamb", "mary"))
    assert model.tokenizer.continuation(" mary")[0] != mary
    for word, expected in ((" lamb", lamb), ("␣lamb", lamb), ("lamb", lamb), ("Lamb", lamb), (lamb, lamb)):
        assert ch.explain("mary had a little", model, answer=word).rivals.token.id == expected
    both = [mary, model.tokenizer.continuation(" mary")[0]]
    chosen = ch.explain("mary had a little", model, against="mary").rivals.against.id
    assert chosen == both[int(logits[both].argmax())]
    girl = ch.explain("mary had a little", model, answer="girl").rivals
    assert girl.against.text == " mary"  # which stands in the text
    swapped = ch.explain("mary had a little", model, answer="girl", against="lamb")
    assert swapped.rivals.lead == -ch.explain("mary had a little", model).rivals.lead < 0


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"text": ""}, ShapeError, "the text is empty"),
        ({"against": ""}, ShapeError, "against is empty"),
        ({"answer": 2400}, SelectionError, "answer 2400 is outside 0..2399"),
        ({"answer": "lamb", "against": " lamb"}, SelectionError, "answer and against are both"),
        ({"answer": "lamb its", "word": "fleece"}, SelectionError, "word 'fleece' is not in the answer"),
        ({"answer": "lamb", "word": " "}, SelectionError, "word ' ' is not in the answer"),
        ({"answer": " "}, ShapeError, "answer is empty"),
        ({"parts": "chapters"}, SelectionError, "parts is 'chapters': expected one of tokens, words"),
        ({"parts": [(0, 4), (3, 8)]}, SelectionError, "parts overlap at character 3"),
        ({"parts": [(0, 99)]}, SelectionError, "0:99 is outside the text of 17 characters"),
        ({"parts": "turns"}, SelectionError, "needs a chat"),
        ({"hide": [(11, 17)]}, SelectionError, "no part to hide"),
        ({"text": "mary"}, SelectionError, "no part to hide"),
        ({"answer": "lamb " * 600}, ShapeError, "positions"),
        ({"text": [{"role": "user", "content": "hello"}]}, RuleError, "rhymes has no chat template"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(options, error, what):
    with pytest.raises(error, match=what):
        ch.explain(**({"text": "mary had a little", "model": shipped()} | options))


def test_terminal_and_json_have_the_same_numbers(tmp_path):
    place = tmp_path / "why.json"
    done = call("explain", "mary had a little", "--why", "--json", place)
    assert (done.returncode, done.stderr) == (0, "")
    data, seen = json.loads(place.read_text(encoding="utf-8")), ch.explain("mary had a little", shipped())
    assert data == json.loads(json.dumps(seen.to_json()))
    assert (data["token"]["text"], data["against"]["text"]) == (" lamb", " girl")
    lines = done.stdout.splitlines()
    assert lines[0] == "Why ␣lamb (99.71%) rather than ␣girl (0.092%)?"
    assert data["conclusion"] == conclusion(seen, "en")

    def shares(*changes):
        return [percent(probability(seen.value + change)) for change in changes]

    rows = [re.split(" {2,}", line.strip()) for line in lines if re.match(r"  \d+\.\d+ ", line)]
    heads, edges = rows[: len(data["heads"])], rows[len(data["heads"]) :]
    for row, edge in zip(edges, data["edges"], strict=True):
        assert row[0] == f"{edge['layer']}.{edge['head']}"
        assert float(row[2]) == pytest.approx(edge["weight"], abs=6e-3)
        assert row[3:4] == shares(edge["truth"])
    for row, head in zip(heads, data["heads"], strict=True):
        assert row[0] == f"{head['layer']}.{head['head']}"
        others = [each for each in data["edges"] if (each["layer"], each["head"]) == (head["layer"], head["head"])]
        assert not others or head["edge"] == max(others, key=lambda each: abs(each["truth"]))
        assert row[3:5] == shares(head["edge"]["truth"], head["truth"])
    assert data["parts"] == sorted(data["parts"], key=lambda part: -abs(part["hidden"]))
    shown = [line for line in lines if any(line.startswith(f"  {part['text']} ") for part in data["parts"])]
    for line, part in zip(shown, data["parts"], strict=True):
        assert line.startswith(f"  {part['text']} ")
        assert signed(part["effect"]) in line
        assert shares(part["hidden"])[0] in line
    printed = call("explain", "mary had a little", "--why", "--json", "-").stdout
    assert json.loads(printed) == data


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_encodings_without_arrows_are_printed_too(encoding):
    done = call("explain", "mary had a little", "--why", encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80


@pytest.mark.parametrize(("module", "limit"), [(decoder, "LONG"), (variants, "_ROOM")])
def test_a_long_text_and_runs_in_small_batches_give_the_same(module, limit, monkeypatch: pytest.MonkeyPatch):
    text = "humpty dumpty sat on a wall"
    kept = ch.explain(text, answer=" humpty dumpty")
    monkeypatch.setattr(module, limit, 0)
    made = ch.explain(text, answer=" humpty dumpty")
    np.testing.assert_allclose(made.estimate.heads_run, kept.estimate.heads_run, atol=2e-5)
    assert [edge[:4] for edge in made.edges] == [edge[:4] for edge in kept.edges]
    np.testing.assert_allclose([edge.truth for edge in made.edges], [edge.truth for edge in kept.edges], atol=2e-5)
