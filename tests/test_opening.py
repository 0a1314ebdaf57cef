"""What `explain` opens with: the text, shaded by the chosen token's row, what follows it, and heads' captions."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from clearhead.cli import main
from clearhead.explaining.answer_words import clearest
from clearhead.explaining.steps import steps_of_text
from clearhead.models.model import load
from clearhead.models.protocol import Token
from clearhead.report import explained, streams
from clearhead.report.cells import listed
from clearhead.report.shaded import BARS, pieces_of, shaded_text
from clearhead.report.streams import printable
from seeds import fresh
from terminal import call

TEXT = "mary had a little lamb its fleece was white as snow"
PARTS = ["猫", "，", "。", " a", "mary", " lamb", "\n", " ", "x" * 30, "é", "🙂", "👩\u200d👩"]


def shaded(text, tokens, row, width=80, color=None, language="en"):
    console = Console(width=width, color_system=color, force_terminal=color is not None)
    return list(shaded_text(console, text, tokens, row, language))


def words_of(text):
    """Each word with the space before it, as one token."""
    result = [(result.start(), result.end()) for result in re.finditer(r"\s?\S+|\s", text)]
    return [Token(0, text[slice(*span)], *span) for span in result]


def random_row(count):
    """The weights of the last token that a causal row has, those that are masked, and its index."""
    rng = fresh()
    chosen = int(rng.integers(count))
    weights = np.where(np.arange(count) <= chosen, rng.random(count) ** 6, 0.0)
    return weights / weights.sum(), np.arange(count) > chosen, chosen


def test_tokens_that_begin_alike_are_told_apart_in_a_list():
    names = [listed(f" international{end}") for end in ("", "ly", "ization", "izations")]
    assert len(set(names)) == 4
    assert [cell_len(name) for name in (*names, listed(" a"), listed("x" * 99))] == [14, 16, 21, 22, 12, 30]


def test_a_bar_above_each_token_says_its_weight():
    tokens, (weights, masked, chosen) = words_of(TEXT), random_row(len(TEXT.split()))
    lines = [line.plain for line in shaded(TEXT, tokens, (weights, masked, chosen))]
    bars, text = lines[0].ljust(80), lines[1]
    position = 2
    for place, token in enumerate(tokens):
        word = token.text.strip()
        position = text.index(word, position)
        step = 0 if masked[place] else round(8 * (weights[place] / weights.max()) ** 0.5)
        assert bars[position : position + len(word)] == f" {BARS}"[step] * len(word), word
        assert (text[position - 1] + text[position + len(word) : position + len(word) + 1] == "[]") == (place == chosen)
        position += len(word)
    assert text.replace("[", "").replace("]", "") == f"  {TEXT}"
    low, _, high = lines[2].split()[:3]
    assert float(high) == pytest.approx(weights.max(), rel=1e-2)
    assert float(low) == pytest.approx(weights.max() / 256, rel=0.06)


@pytest.mark.parametrize("color", ["truecolor", "256"])
def test_in_colour_the_same_tokens_have_a_background(color):
    tokens, (weights, masked, chosen) = words_of(TEXT), random_row(len(TEXT.split()))
    text, legend = shaded(TEXT, tokens, (weights, masked, chosen), color=color)
    assert text.plain.replace("[", "").replace("]", "") == f"  {TEXT}"
    colours = {}
    for span in text.spans:
        word = text.plain[span.start : span.end].strip("[]")
        colours[word] = span.style.bgcolor
        assert span.style.bold == (True if word == tokens[chosen].text.strip() else None)
    for place, token in enumerate(tokens):
        step = 0 if masked[place] else round(8 * (weights[place] / weights.max()) ** 0.5)
        assert (colours.get(token.text.strip()) is not None) == (step > 0)
    assert sum(span.style.bgcolor is not None for span in legend.spans if not isinstance(span.style, str)) == 8


@given(st.lists(st.sampled_from(PARTS), min_size=1), st.sampled_from([10, 24, 80]), st.data())
def test_no_line_is_too_wide_and_no_character_is_lost(parts, width, data):
    text, ends = "".join(parts), np.cumsum([len(part) for part in parts]).tolist()
    tokens = [Token(0, part, end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    chosen = data.draw(st.integers(0, len(parts) - 1))
    row = np.full(len(parts), 1 / len(parts)), np.zeros(len(parts), bool), chosen
    lines = [line.plain for line in shaded(text, tokens, row, width)][:-1]
    assert all(cell_len(line) <= width for line in lines if "…" not in line)  # `put` wraps that note
    if not any("…" in line for line in lines):
        shown = "".join(line.strip() for line in lines if not set(line) <= set(f" {BARS}"))
        bare = [re.sub(r"[\s␣⏎\[\]]", "", each) for each in (shown, printable(text))]
        assert bare[0] == bare[1]


def test_closing_punctuation_stays_with_its_word():
    text = "庆历四年春，滕子京谪守巴陵郡。" * 3
    tokens = [Token(0, each, place, place + 1) for place, each in enumerate(text)]
    row = np.full(len(text), 1 / len(text)), np.zeros(len(text), bool), 0
    for width in range(12, 40):
        lines = [line.plain.strip() for line in shaded(text, tokens, row, width)][1:-1:2]
        assert not any(line[0] in "，。" for line in lines)
        assert "".join(lines) == f"[{text[0]}]{text[1:]}"


def test_bytes_of_one_character_are_one_piece():
    spans = [("[CLS]", 0, 0), ("⟨e7⟩", 0, 1), ("⟨8c⟩", 0, 1), ("⟨ab⟩", 0, 1), (" sat", 1, 5), ("[SEP]", 0, 0)]
    tokens = [Token(0, *span) for span in spans]
    weights = np.array([0.1, 0.2, 0.3, 0.15, 0.05, 0.2])
    masked = np.array([False, False, False, False, False, True])
    pieces = pieces_of("猫 sat", tokens, (weights, masked, 2))
    assert [(piece.gap, piece.said) for piece in pieces] == [
        (False, "[CLS]"),
        (True, "[猫]"),
        (True, "sat"),
        (True, "[SEP]"),
    ]
    assert [piece.weight for piece in pieces] == pytest.approx([0.1, 0.65, 0.05, 0.2])
    assert [piece.masked for piece in pieces] == [False, False, False, True]


def test_of_a_very_long_text_lines_with_most_weight_are_shown():
    rng = fresh()
    text = " ".join(f"word{place:05}" for place in range(800))
    tokens = words_of(text)
    weights = np.full(800, 1e-6)
    strong = rng.choice(790, 5, replace=False)
    weights[strong] = 0.1
    weights /= weights.sum()
    lines = [line.plain for line in shaded(text, tokens, (weights, np.zeros(800, bool), 799))]
    assert len(lines) <= 24 * 2 + 25 + 1
    for place in (*strong, 799):
        assert any(f"word{place:05}" in line for line in lines)
    left = sum(int(count) for line in lines for count in re.findall(r"… (\d+) lines with", line))
    assert left == 800 // 7 + 1 - 24  # seven words to a line


def test_the_opening_says_what_the_run_says():
    seen = steps_of_text(TEXT, load(), token="lamb", layer=0)
    done = call("explain", TEXT, "--token", "lamb", "--layer", 0)
    key = int(seen.row.weights.argmax())
    said = done.stdout.splitlines()
    assert said[0].startswith("4 ␣lamb attends most to itself: " if key == 4 else f"4 ␣lamb attends most to {key} ")
    share = float(re.search(r"([\d.]+)% \(head", said[0])[1])
    assert share == pytest.approx(100 * seen.row.weights[key], abs=0.005)
    assert said[0].endswith(f"(head {seen.head} of layer 0)")
    assert said[3] == "  mary had a little [lamb] its fleece was white as snow"
    place = said.index("most likely after 4 ␣lamb")
    alone = steps_of_text("mary had a little lamb", load())  # a causal model: what follows does not matter
    assert [choice.id for choice in seen.after] == [choice.id for choice in alone.next]
    assert said[place + 1].split()[1] == f"{100 * alone.next[0].probability:.2f}%"
    captions = [head for head, _ in clearest(seen.heads())]
    for head in captions:
        assert f"  layer {head.layer} head {head.head}: {head.caption.said['en']}" in done.stdout
    chinese = call("explain", TEXT, "--token", "lamb", "--lang", "zh").stdout
    assert "最关注" in chinese
    assert "␣lamb 之后最可能的词元" in chinese


def test_json_has_the_answer(capsys):
    assert main(["explain", TEXT, "--token", "lamb", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    answer = data["answer"]
    seen = steps_of_text(TEXT, load(), token="lamb")
    assert answer["shading"][:5] == pytest.approx(seen.row.weights[:5].tolist())
    assert answer["shading"][5:] == [None] * 6
    assert [choice["id"] for choice in answer["next"]] == [choice.id for choice in seen.after]
    places = [(head["layer"], head["head"]) for head in answer["heads"]]
    assert places == [(layer, head) for layer in range(2) for head in range(8)]
    rows = np.arange(1, 11)
    for head in answer["heads"]:
        chosen = steps_of_text(TEXT, load(), layer=head["layer"], head=head["head"])
        weights = chosen.trace.weights
        assert head["statistics"]["sink"] == pytest.approx(weights[:, 0].mean(), abs=1e-5)
        assert head["statistics"]["previous"] == pytest.approx(weights[rows, rows - 1].mean(), abs=1e-5)
        assert set(head["caption"]) == {"kind", "clearness", "said"}


def test_without_a_block_character_the_bars_are_ascii():
    plain = call("explain", TEXT, "--token", "snow", encoding="ascii").stdout
    assert plain.isascii()
    bars, text = plain.splitlines()[2:4]
    assert text == "  mary had a little lamb its fleece was white as [snow]"
    assert set(bars) <= set(" .:-=+*#@")
    assert "@" in bars


def test_a_sinks_share_is_said():
    seen = steps_of_text(TEXT, load())
    rules = seen.run.rules | {"sinks": np.zeros(8)}
    half = replace(seen, run=replace(seen.run, rules=rules), row=replace(seen.row, weights=seen.row.weights / 2))
    said = [line.plain for line in explained.answer(Console(width=80), half, "en")]
    assert said[1] == "its sink takes 50.00% of the weight"
    assert "sink takes" not in "".join(line.plain for line in explained.answer(Console(width=80), seen, "en"))


def test_without_a_terminal_lines_say_how_far_a_long_run_is(monkeypatch, capsys):
    monkeypatch.setattr(streams, "_PATIENCE", -1.0)
    monkeypatch.setattr(streams, "_LINES", -1.0)
    assert [*streams.progress(range(4), "runs")] == [0, 1, 2, 3]
    assert capsys.readouterr().err == "runs: 2 of 4\nruns: 3 of 4\nruns: 4 of 4\n"
