"""`explain TEXT`: the answer on one screen before what more is asked for; its conclusion; a file before a question."""

import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from rich.cells import cell_len

import clearhead as ch
from clearhead.explaining import part_runs
from clearhead.explaining.answers import rival, whole_word
from clearhead.explaining.why_words import conclusion, head_lines, inside, listed, part_lines
from clearhead.models import finding
from clearhead.models import model as gpt2
from clearhead.models.protocol import Token
from clearhead.models.tokenizer import Reading
from clearhead.words import LANGUAGES
from problems import of_tiers
from seeds import fresh
from terminal import call

TEXT = "mary had a little"
TEXTS = {
    "humpty dumpty sat on": [],
    "jack and jill went up the hill to fetch a pail of water, jack fell down and broke his": ["--against", "leg"],
    "猫 sat on\nthe wall, and 狗 too": ["--trust"],
    TEXT: ["--answer", "lamb its fleece was white as snow and everywhere that mary went"],
    "twinkle twinkle little star. how i wonder what you are. up above the": ["--parts", "sentences"],
}
COLOURS = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
cause = cache(lambda: ch.explain(TEXT, gpt2.load()))


def lines_of(*arguments, **environment):
    done = call("explain", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("environment", [{}, *of_tiers((), COLOURS)], ids=str)
def test_the_answer_fits_22_lines_and_ends_with_the_head(text, language, environment):
    lines = lines_of(text, *TEXTS[text], "--lang", language, **environment)
    assert len(lines) <= 22
    assert max(map(cell_len, lines)) <= 80
    assert re.search(r"--steps \D*(\d+\.\d+)", lines[-1])


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_transformers_models_answer_or_have_steps(name, tmp_path):
    hub = pytest.importorskip("test_hub")
    lines = lines_of("humpty dumpty sat on a wall", "--model", hub.saved(tmp_path, hub.FAMILY[name])[0])
    assert (len(lines) <= 22) == (" → " in lines[0]) == (name == "llama")
    assert any("S = Q·Kᵀ" in line for line in lines) == (name == "bert")


def test_what_more_is_asked_for_follows_the_answer():
    answer, head = lines_of(TEXT)[:-1], cause().strongest
    steps, way, chosen = (lines_of(TEXT, *more) for more in (["--steps"], ["--way"], ["--layer", 0, "--head", 5]))
    assert steps[: len(answer)] == way[: len(answer)] == chosen[: len(answer)] == answer
    assert any(line.startswith(f"head {head.head} of layer {head.layer}: A") for line in steps)
    assert any(line.startswith("head 5 of layer 0: A") for line in chosen)
    assert way[len(answer) + 2].startswith("the way to ␣lamb")
    whole = "\n".join(lines_of(TEXT, "--all"))
    places = [whole.index(part) for part in ("Why ␣lamb", "The edges:", "So:", "S = Q·Kᵀ", "the way to ␣lamb")]
    assert places == sorted(places)
    assert whole.count("the way to") == "\n".join(steps).count("the way to") == 1
    assert lines_of(TEXT, "--generate", 2)[0].startswith("mary had a little → lamb,  ")
    every = "\n".join(lines_of(TEXT, "--why"))
    assert all(f"\n  {head.layer}.{head.head} " in every for head in cause().heads)
    assert not any(part in every for part in ("the way to", "S = Q·Kᵀ"))


@pytest.mark.parametrize("options", ["--token had", "--off 0.3", "--generate 2 --token 3", "--token 2 --steps"])
def test_a_chosen_token_and_edits_are_shown_alone(options):
    assert not any(line.startswith(("Why ", "So: ")) for line in lines_of(TEXT, *options.split()))


def test_of_a_text_with_nothing_to_hide_there_is_its_opening():
    lines = lines_of("humpty")
    assert len(lines) <= 25
    assert lines[0].startswith("0 humpty attends most to itself")
    assert lines[-1].startswith("--steps shows every step of head")
    assert "S = Q·Kᵀ" in "\n".join(lines_of("humpty", "--steps"))


@pytest.mark.parametrize(
    ("options", "key"), [("--way", "token_arithmetic"), ("--all", "by_head"), ("--parts words", "gap")]
)
def test_json_is_explains_unless_the_answer_is_asked_about(options, key, tmp_path):
    lines_of(TEXT, *options.split(), "--json", tmp_path / "file.json")
    data = json.loads((tmp_path / "file.json").read_text(encoding="utf-8"))
    assert key in data
    assert json.loads(call("explain", TEXT, *options.split(), "--json", "-").stdout) == data


def made(seen, hidden, head=-0.01, **changed):
    """The explanation as it would be if hiding its second part changed y so, and the only head by `head`."""
    parts = [part._replace(hidden=hidden if place == 1 else 0.0, **changed) for place, part in enumerate(seen.parts)]
    heads = [seen.heads[0]._replace(truth=head, edge=None)]
    return replace(seen, parts=parts, heads=heads, rivals=seen.rivals._replace(value=2.0), pairs=[])


def test_a_leader_is_another_word_and_a_fragment_says_so():
    girl, lamb = cause().rivals.against._replace(probability=0.5), cause().rivals.token
    said = [
        part_lines(made(cause(), -4.0, likeliest=likeliest, begins=begins), "en")[0].partition(": ")[2]
        for likeliest, begins in ((girl, True), (lamb._replace(id=0, text="Lamb"), False))
    ]
    assert said == ["“lamb” falls to 11.92%, and “girl…” leads with 50.00%.", "“lamb” falls to 11.92%."]


@pytest.mark.parametrize(
    ("hidden", "head", "said"),
    [
        (-4.0, -3.0, "Without “had”: “lamb” falls to 11.92%, and “girl” leads with 50.00%."),
        (-4.0, -3.0, "With head 0.2 off: “lamb” falls to 26.89%."),
        (-4.0, -3.0, "So: “lamb” needs “had”: without it, less than half of its probability is left."),
        (-4.0, -3.0, "Head 0.2 carries it."),
        (-4.0, -0.3, "No single head carries it."),
        (-0.1, -1.0, "So: no single part decides: without “had”, “lamb” still has 86.99% of 88.08%."),
        (1.0, 1.0, "Without “had”: “lamb” rises to 95.26%."),
        (1.0, 1.0, "So: hiding a single part never makes “lamb” less likely."),
        (1.0, 1.0, "No single head carries it."),
    ],
)
def test_the_sentences_follow_the_numbers(hidden, head, said):
    girl = cause().rivals.against._replace(probability=0.5)
    seen = made(cause(), hidden, head, likeliest=girl)
    english, chinese = (
        [line for form in (part_lines, head_lines, conclusion) for line in form(seen, each)] for each in LANGUAGES
    )
    assert said in english
    assert all(re.search("[一-鿿]", each) for each in chinese)


def test_a_head_that_any_text_needs_carries_no_answer():
    seen = made(cause(), -4.0, -2.0)
    assert seen.carrier == seen.heads[0]
    needed = replace(seen, heads=[seen.heads[0]._replace(anywhere=-1.0)])
    assert needed.carrier is None
    said = "No single head carries it: 0.2 is needed by any text."
    assert said in conclusion(needed, "en")
    both = replace(seen, heads=[seen.heads[0]._replace(truth=-3.0, anywhere=-2.0), seen.heads[0]._replace(head=5)])
    (line,) = head_lines(both, "en", 1)
    assert line.startswith("With head 0.5 off: ")  # the one that the conclusion names


def test_the_answer_is_told_first_and_then_its_parts():
    told = []
    found = ch.explain(TEXT, told=told.append)
    first, second = told
    assert (first.answer, first.probability, first.ranked[0].hidden) == (found.answer, found.probability, None)
    assert [part.hidden for part in second.parts] == [part.hidden for part in found.parts]
    assert second.heads == first.heads == []
    assert str(found).splitlines() == lines_of(TEXT)[:-1]  # which ends with the options


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Paris and Rome", 0, " Rome"),  # it stands in the text, and is likelier than a hundredth of the answer
        ("nothing", 0, " London"),  # " Lon" goes on to " London": a fragment
        ("nothing", 4, " 8"),  # numbers beside numbers
    ],
)
def test_the_rival_is_a_whole_word(text, answer, expected):
    words = [" Paris", " Lon", " London", " Rome", " 7", " 8", "don", " is"]

    class Words:
        tokenizer = SimpleNamespace(text=words.__getitem__, fits=lambda place, more: None)

        @staticmethod
        def again(run, variants, rows):
            assert (run.logits.shape, rows) == ((1, len(words)), range(1, 2))
            return [np.eye(len(words))[[6 if each.ids[1] == 1 else 7]] for each in variants]

    run = SimpleNamespace(logits=np.array([[9.0, 8.5, 8, 7, 6, 5, 1, 2]]), edits=())
    reading = Reading(text, [Token(7, " is", 0, 1)], [])
    assert words[rival(Words, reading, run, answer)] == expected


def test_an_answer_has_whole_characters():
    model, text = ch.load_model(), f" {chr(fresh().integers(0x4E00, 0x9FA5))} had"
    ids, texts = model.tokenizer.continuation(text), model.tokenizer.texts
    scripted = SimpleNamespace(tokenizer=model.tokenizer, generate=lambda said, *_, **__: [ids[len(said)]])
    made = whole_word(scripted, [], SimpleNamespace(logits=np.eye(model.config.vocabulary)[ids[:1]]))
    assert ["".join(texts(made)), *texts(ids)[len(made) :]] == [text[:2], " had"]
    assert (model.tokenizer.decoded(ids[:-2]).strip(), texts(ids[:-2])[-1][0]) == ("", "⟨")  # a part of a character


def test_many_words_are_hidden_by_sentences_then_word_by_word():
    text = "humpty dumpty sat on a wall. " * 9 + "humpty dumpty had a great"
    seen = ch.explain(text, gpt2.load())
    assert len(seen.parts) > 48 > len(seen.groups) == 10
    assert all(group.hidden is not None for group in seen.groups)
    best = sorted(seen.groups, key=lambda group: -abs(group.hidden))[:3]
    run = {part.tokens for part in seen.parts if part.hidden is not None}
    assert run == {part.tokens for part in seen.parts if any(part.tokens[0] in group.tokens for group in best)}
    assert seen.ranked[:3] == best
    (part, within), *_ = listed(seen, 6)
    assert (part, within) == (best[0], False)
    changes = [abs(one.hidden) for one in inside(seen, best[0])]
    assert changes == sorted(changes, reverse=True)


def test_a_very_long_text_is_hidden_by_blocks_of_sentences_first(monkeypatch):
    monkeypatch.setattr(part_runs, "_ROOM", 0)
    monkeypatch.setattr(part_runs, "_PARTS", 4)
    text = "humpty dumpty sat on a wall. " * 9 + "humpty dumpty had a great"
    seen = ch.explain(text, gpt2.load())
    blocks, sentences = (
        [group for group in seen.groups if (group.text.count(".") > 1) == several] for several in (1, 0)
    )
    assert len(blocks) == 1  # of four
    assert len(sentences) > 3
    held = sorted(token for group in seen.groups for token in group.tokens)
    assert held == sorted(token for part in seen.parts for token in part.tokens)
    assert sum(part.hidden is not None for part in seen.parts) == sum(len(inside(seen, group)) for group in sentences)


@pytest.mark.parametrize("before", ["humpty is here.", ""])
def test_a_file_before_a_question_is_found_in_the_template(before, tmp_path, monkeypatch):
    content = "message.content" if before else "message.content | upper"
    template = before + "{%- for message in messages %} {{ " + content + " }} {% endfor %}man :"
    model = replace(gpt2.load(), tokenizer=replace(gpt2.load().tokenizer, template=template))
    monkeypatch.setattr(finding, "load_model", lambda *_, **__: model)
    (tmp_path / "text.txt").write_text("humpty\n", encoding="utf-8")
    options = ["--chat", "jack and jill", "--generate", 2, "--parts", "words", "--json", tmp_path / "why.json"]
    lines_of("--file", tmp_path / "text.txt", *options)
    data = json.loads((tmp_path / "why.json").read_text(encoding="utf-8"))
    word = "humpty" if before else "HUMPTY"  # the file's, not the template's, and also where the template changes it
    assert [(part["text"], part["start"]) for part in data["parts"]] == [(word, data["text"].rindex(word))]


@pytest.mark.parametrize("asked", [{}, {"answer": " lamb its fleece"}, {"against": "girl"}])
def test_a_plot_has_the_numbers_of_the_screen(asked):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    seen = ch.explain(TEXT, gpt2.load(), **asked)
    axes = seen.plot(ax=pyplot.figure().subplots())
    widths = [bar.get_width() for bar in axes.patches]
    if asked == {"against": "girl"}:
        assert widths == pytest.approx([seen.value + part.hidden for part in seen.ranked])
        return
    said = [re.search(r" (\d[\d.e-]*)%", line)[1] for line in part_lines(seen, "en")]
    assert widths == pytest.approx([float(number) for number in said], rel=6e-3, abs=0.006)
    pyplot.close("all")
