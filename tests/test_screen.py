"""`explain TEXT`: the answer on one screen before what more is asked for; its conclusion; a file before a question."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from rich.cells import cell_len

import clearhead as ch
from clearhead.explaining.answers import runner_up
from clearhead.explaining.why_words import conclusion
from clearhead.models import finding
from clearhead.models import model as gpt2
from problems import of_tiers
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
cause = cache(lambda: ch.why(TEXT, gpt2.load()))


def lines_of(*arguments, **environment):
    done = call("explain", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("environment", [{}, *of_tiers((), COLOURS)], ids=str)
def test_the_answer_fits_25_lines_of_80_columns_and_ends_with_the_head(text, language, environment):
    lines = lines_of(text, *TEXTS[text], "--lang", language, **environment)
    assert len(lines) <= 25
    assert max(map(cell_len, lines)) <= 80
    head = re.search(r"--steps \D*(\d+\.\d+)", lines[-1])[1]
    assert any(line.startswith(f"  {head} ") for line in lines)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_models_through_transformers_answer_or_where_they_say_no_next_token_have_steps(name, tmp_path):
    hub = pytest.importorskip("test_hub")
    lines = lines_of("humpty dumpty sat on a wall", "--model", hub.saved(tmp_path, hub.FAMILY[name])[0])
    assert (len(lines) <= 25) == lines[0].startswith("Why ") == (name == "llama")
    assert any("S = Q·Kᵀ" in line for line in lines) == (name == "bert")


def test_what_more_is_asked_for_follows_the_answer():
    answer, head = lines_of(TEXT)[:-1], cause().carrier
    steps, way, chosen = (lines_of(TEXT, *more) for more in (["--steps"], ["--way"], ["--layer", 0, "--head", 5]))
    assert steps[: len(answer)] == way[: len(answer)] == chosen[: len(answer)] == answer
    assert any(line.startswith(f"head {head.head} of layer {head.layer}: A") for line in steps)
    assert any(line.startswith("head 5 of layer 0: A") for line in chosen)
    assert way[len(answer) + 2].startswith("the way to ␣lamb")
    whole = "\n".join(lines_of(TEXT, "--all"))
    places = [whole.index(part) for part in ("Why ␣lamb", "The edges:", "So:", "S = Q·Kᵀ", "the way to ␣lamb")]
    assert places == sorted(places)
    assert whole.count("the way to") == "\n".join(steps).count("the way to") == 1
    assert lines_of(TEXT, "--generate", 2)[0].startswith("Why “␣lamb,”?")
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
def test_json_is_that_of_explain_unless_the_answer_is_asked_about(options, key, tmp_path):
    lines_of(TEXT, *options.split(), "--json", tmp_path / "file.json")
    data = json.loads((tmp_path / "file.json").read_text(encoding="utf-8"))
    assert key in data
    assert json.loads(call("explain", TEXT, *options.split(), "--json", "-").stdout) == data


LEAD = 6.901  # of " lamb" over " girl"


@pytest.mark.parametrize(
    ("lead", "share", "said"),
    [
        (-LEAD - 1, 0.001, 'So: "mary" picks ␣lamb over ␣girl: hidden, ␣girl is ahead.'),
        (1.4 - LEAD, 0.9, 'So: "mary" picks ␣lamb over ␣girl: hidden, the lead is 1.40 instead of 6.90.'),
        (6.0 - LEAD, 0.9, 'So: no part picks it alone; with "mary" hidden, ␣lamb has 90.00%, 6.00 ahead.'),
        (7.5 - LEAD, 0.01, 'So: "mary" asks for such a word: hidden, ␣lamb has 1.00%, but 7.50 of lead.'),
        (7.5 - LEAD, 0.9, "Through head 0.2 most, little ← mary: without this edge 91.38%."),
    ],
)
def test_the_conclusion_follows_the_numbers(lead, share, said):
    seen = cause()
    parts = [seen.parts[0]._replace(lead=lead + LEAD - seen.lead, share=share)]
    assert conclusion(replace(seen, parts=parts), "en", parts)[0][0] == said


def test_the_runner_up_is_of_the_answers_kind():
    class Words:
        text = staticmethod([" Paris", " the", "Rome", " London", " 7", " 8"].__getitem__)

    logits = np.array([9.0, 8, 7, 6, 5, 4])
    assert [runner_up(Words, logits, answer) for answer in (0, 1, 2, 4)] == [3, 0, 0, 5]


@pytest.mark.parametrize("before", ["humpty is here.", ""])
def test_a_file_before_a_question_is_found_where_the_template_puts_it(before, tmp_path, monkeypatch):
    content = "message.content" if before else "message.content | upper"
    template = before + "{%- for message in messages %} {{ " + content + " }} {% endfor %}man :"
    monkeypatch.setattr(finding, "load_model", lambda *_, **__: replace(gpt2.load(), template=template))
    (tmp_path / "text.txt").write_text("humpty\n", encoding="utf-8")
    options = ["--chat", "jack and jill", "--generate", 2, "--parts", "words", "--json", tmp_path / "why.json"]
    lines_of("--file", tmp_path / "text.txt", *options)
    data = json.loads((tmp_path / "why.json").read_text(encoding="utf-8"))
    starts = [part["start"] for part in data["parts"]]
    if before:  # the file's word, not the template's
        assert starts == [data["text"].rindex("humpty")]
    else:  # no message stands there as it was given, so that all of it can be hidden
        assert "JACK" in "".join(part["text"] for part in data["parts"])
