"""Messages in place of a text: the template's tokens are marked, the question is not hidden, the answer comes first."""

import json
from dataclasses import replace

import pytest

import clearhead as ch
from clearhead.models import finding
from clearhead.models.hub import of_loaded
from clearhead.models.model import load
from dense_gpt2 import SHIPPED
from terminal import call

TEMPLATE = """
{%- for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}man :"""
PLACE, QUESTION = "humpty dumpty sat on a wall", "jack and jill went up the"


def with_template(model, template):
    return replace(model, tokenizer=replace(model.tokenizer, template=template))


@pytest.fixture(scope="module")
def model():
    return with_template(load(), TEMPLATE)


@pytest.fixture
def by_default(monkeypatch, model):
    """The commands load this model."""
    monkeypatch.setattr(finding, "load_model", lambda *_, **__: model)


def text_of(tokens, *, template):
    return " ".join("".join(token.text for token in tokens if token.template == template).split())


def test_the_templates_tokens_are_marked_wherever_tokens_are(model):
    seen = ch.explain([{"role": "user", "content": QUESTION}], model)
    assert text_of(seen.tokens, template=False) == QUESTION
    assert [token["template"] for token in seen.to_json()["tokens"]] == [token.template for token in seen.tokens]


def test_a_template_may_strip_the_spaces_around_a_message(model):
    stripping = with_template(model, TEMPLATE.replace("message.content", "message.content | trim"))
    messages = [{"role": "system", "content": f"\n {PLACE} \n"}, {"role": "user", "content": f"  {QUESTION}\n"}]
    text, tokens = stripping.tokenizer.chat(messages)
    assert text_of(tokens, template=False) == f"{PLACE} {QUESTION}"
    assert f"{PLACE} user" in text
    cause = ch.explain(messages, stripping)
    assert [part.text for part in cause.parts] == PLACE.split()
    assert cause.answer == ch.explain(text, stripping, generate=24).answer


def test_the_question_is_hidden_only_where_there_is_nothing_else(model):
    alone = ch.explain([{"role": "user", "content": QUESTION}], model)
    assert [part.text for part in alone.parts] == QUESTION.split()
    messages = [{"role": "system", "content": PLACE}, {"role": "user", "content": QUESTION}]
    both = ch.explain(messages, model)
    assert [part.text for part in both.parts] == PLACE.split()
    turns = ch.explain([*messages, {"role": "assistant", "content": "hill"}, messages[1]], model, parts="turns")
    assert [part.text for part in turns.parts] == [PLACE, QUESTION, "hill"]
    chosen = ch.explain(messages, model, hide=[(0, len(both.text))])
    assert [part.text for part in chosen.parts] == [*PLACE.split(), *QUESTION.split()]


def test_a_reply_is_counted_and_stops_where_it_ends(model):
    transformers = pytest.importorskip("transformers")
    inner = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="float32").eval()
    words = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    ids = [token.id for token in model.tokenizer.tokens(PLACE)]
    last = model.generate(ids, 6)[-1]
    inner.generation_config.eos_token_id, words.eos_token = last, words.convert_ids_to_tokens(last)
    ended = replace(model, tokenizer=replace(model.tokenizer, end=words.eos_token))
    for most in (3, 20):
        replies = []
        for one in (ended, of_loaded(inner, words)):
            steps = []
            replies.append(one.generate(ids, most, lambda items, steps=steps: map(steps.append, items), ends=True))
            assert steps[:3] == [0, 1, 2]
            assert len(steps) <= 7
        assert replies[0] == replies[1] == model.generate(ids, min(most, 5))


@pytest.mark.usefixtures("by_default")
def test_the_commands_take_messages_and_a_file_before_them(tmp_path):
    (tmp_path / "text.txt").write_text(f"{PLACE}. {PLACE}.\n", encoding="utf-8")
    shown = call("explain", "--chat", QUESTION, "--system", PLACE, "--steps")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "in brackets: tokens of the chat's template" in shown.stdout
    assert "0 (" in shown.stdout
    place = tmp_path / "why.json"
    asked = "--file", tmp_path / "text.txt", "--chat", QUESTION, "--why", "--generate", "3", "--trust", "--json", place
    done = call("explain", *asked)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(place.read_text(encoding="utf-8"))
    assert [part["text"] for part in data["parts"]] == [f"{PLACE}.", f"{PLACE}."]
    assert data["trust"]["masks"] == 16
    assert 1 <= len(data["answer"].split()) <= 3
    words = call("explain", "--chat", QUESTION, "--answer", "hill to fetch", "--parts", "words")
    assert words.stdout.startswith("jack and jill went up the → hill to fetch  ")
