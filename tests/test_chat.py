"""Messages in place of a text: the template's tokens are marked, the question is not hidden, the answer comes first."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.models import finding
from clearhead.models.chats import rendered
from clearhead.models.hub import of_loaded
from clearhead.models.model import load
from dense_gpt2 import SHIPPED
from problems import of_tiers
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
    text, tokens, *_ = stripping.tokenizer.chat(messages)
    assert text_of(tokens, template=False) == f"{PLACE} {QUESTION}"
    assert f"{PLACE} user" in text
    cause = ch.explain(messages, stripping)
    assert [part.text for part in cause.parts] == PLACE.split()
    assert cause.answer == ch.explain(text, stripping, generate=24).answer


def test_the_question_is_hidden_only_where_there_is_nothing_else(model):
    alone = ch.explain([{"role": "user", "content": QUESTION}], model, generate=3)
    assert [part.text for part in alone.parts] == QUESTION.split()
    messages = [{"role": "system", "content": PLACE}, {"role": "user", "content": QUESTION}]
    both = ch.explain(messages, model, generate=3)
    assert [part.text for part in both.parts] == PLACE.split()
    more = [*messages, {"role": "assistant", "content": "hill"}, messages[1]]
    turns = ch.explain(more, model, parts="turns", generate=3)
    assert [part.text for part in turns.parts] == [PLACE, QUESTION, "hill"]
    chosen = ch.explain(messages, model, hide=[(0, len(both.text))], generate=3)
    assert [part.text for part in chosen.parts] == [*PLACE.split(), *QUESTION.split()]


def test_a_reply_is_counted_and_stops_where_it_ends(model):
    transformers = pytest.importorskip("transformers")
    inner = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="float32").eval()
    words = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    ids = [token.id for token in model.tokenizer.tokens(PLACE)]
    last = model.generate(ids, 6)[-1]
    inner.generation_config.eos_token_id = [0, last]
    inner.generation_config.repetition_penalty, inner.generation_config.no_repeat_ngram_size = 3.0, 2
    ended = replace(model, tokenizer=replace(model.tokenizer, ends=frozenset((0, last))))
    for most in (3, 20):
        replies = []
        for one in (ended, of_loaded(inner, words)):
            steps = []
            replies.append(one.generate(ids, most, lambda items, steps=steps: map(steps.append, items), ends=True))
            assert steps[:3] == [0, 1, 2]
            assert len(steps) <= 7
        assert replies[0] == replies[1] == model.generate(ids, min(most, 5))


PUBLISHED = {  # what the templates of published models have in them
    "a block": "{% for m in messages %}<{{ m.role }}>{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "json": "{{ messages | tojson(indent=1, ensure_ascii=true) }}{{ {'b': '<&>', 'a': 'é'} | tojson(sort_keys=true) }}",
    "none": "{{ tools is none }}{{ documents is not none }}{{ pad_token }}{{ unk_token is defined }}"
    "{{ messages[0].content }}{{ 2 ** 5 }}",
    "repeated": "{{ '-' * 3 }}{{ [1] * 2 }}{% for m in messages %}{{ m.role }} {{ m.content | trim }}{% endfor %}",
    "thoughts": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1].lstrip() }}\n{% endfor %}",
    "last first": "{% for m in messages | reverse %}[{{ m.role }}]{{ m.content }}{% break %}{% endfor %}",
    "by length": "{% for m in messages %}{{ m.role }}{{ m.content | length }}{{ m.content }}{% endfor %}",
}  # fmt: skip
CHATS = [
    [("user", "user")], [("system", "is"), ("user", " hi\n"), ("assistant", "<think>so</think>is"), ("user", "is")],
    [("user", "<a> & 'b'"), ("assistant", "assistant"), ("user", "你好 user")],
]  # fmt: skip


FOUND = {  # in the source of llama.cpp, where CLEARHEAD_LLAMA_CPP says where that is
    path.stem: path
    for path in sorted(Path(os.environ.get("CLEARHEAD_LLAMA_CPP", "nowhere"), "models", "templates").glob("*.jinja"))
}


@pytest.mark.parametrize("name", of_tiers(PUBLISHED, FOUND, every=3))
def test_a_template_renders_as_transformers_renders_it(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = PUBLISHED.get(name) or FOUND[name].read_text(encoding="utf-8")
    words = {"bos_token": "<s>", "pad_token": "<pad>"}
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        try:
            (theirs,), _ = utils.render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=True, **words
            )
        except Exception:  # it refuses such a chat
            with pytest.raises(ch.errors.FileError):
                rendered(template, messages, name, words)
            continue
        text, turns, dated = rendered(template, messages, name, words)
        assert text == theirs
        assert dated == ("strftime_now" in template) or name not in PUBLISHED
        shown = [text[start:stop] for start, stop in turns]
        for (_, content), said in zip(chat, shown, strict=True):
            ends = content.strip().removeprefix("<think>so</think>")
            assert said.endswith(ends) or (said == "" and text.count(ends) < len(turns))
        starts = [start for start, stop in turns if stop]
        assert name == "last first" or starts == sorted(starts)


def test_a_template_may_want_a_list_of_parts():
    template = (
        "{% for m in messages %}{% for one in m.content if one.type == 'text' %}{{ one.text }}|{% endfor %}{% endfor %}"
    )
    made = rendered(template, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "", {})
    assert made[:2] == ("hi|yes|", [(0, 2), (3, 6)])
    cut = rendered("{{ messages[0].content[:1] }}", [{"role": "user", "content": "hi"}], "", {})
    assert cut[:2] == ("h", [(0, 0)])


def test_a_date_in_a_chat_is_said(model):
    dated = with_template(model, "{{ strftime_now('%Y') }} " + TEMPLATE)
    messages = [{"role": "system", "content": PLACE}, {"role": "user", "content": QUESTION}]
    assert "today's date" in str(ch.explain(messages, dated, generate=3))
    assert "today's date" not in str(ch.explain(messages, model, generate=3))


@pytest.mark.parametrize("template", ["{{ 'x' * 10**9 }}", "{{ [0] * 2**40 }}", "{{ 2 ** 99 }}", "{% for i in [] %}"])
def test_a_template_without_an_end_is_refused(template):
    with pytest.raises(ch.errors.FileError, match="its chat template cannot be used"):
        rendered(template, [{"role": "user", "content": "hi"}], "a model", {})


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
