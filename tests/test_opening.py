"""What `explain` opens with: what the chosen token attends to, what follows it, and heads' captions."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len

from clearhead.cli import main
from clearhead.explaining.head_steps import clearest
from clearhead.explaining.steps import steps_of_text
from clearhead.models.model import load
from clearhead.report import explained
from clearhead.report.cells import listed
from terminal import call

TEXT = "mary had a little lamb its fleece was white as snow"


def test_tokens_that_begin_alike_are_told_apart_in_a_list():
    names = [listed(f" international{end}") for end in ("", "ly", "ization", "izations")]
    assert len(set(names)) == 4
    assert [cell_len(name) for name in (*names, listed(" a"), listed("x" * 99))] == [14, 16, 21, 22, 12, 30]


def test_the_opening_says_what_the_run_says():
    seen = steps_of_text(TEXT, load(), token="lamb", layer=0)
    done = call("explain", TEXT, "--token", "lamb", "--layer", 0)
    key = int(seen.row.weights.argmax())
    said = done.stdout.splitlines()
    assert said[0].startswith("4 ␣lamb attends most to itself: " if key == 4 else f"4 ␣lamb attends most to {key} ")
    share = float(re.search(r"([\d.]+)% \(head", said[0])[1])
    assert share == pytest.approx(100 * seen.row.weights[key], abs=0.005)
    assert said[0].endswith(f"(head {seen.head} of layer 0)")
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


def test_a_sinks_share_is_said():
    seen = steps_of_text(TEXT, load())
    rules = seen.run.rules | {"sinks": np.zeros(8)}
    half = replace(seen, run=replace(seen.run, rules=rules), row=replace(seen.row, weights=seen.row.weights / 2))
    said = [line.plain for line in explained.answer(half, "en")]
    assert said[1] == "its sink takes 50.00% of the weight"
    assert "sink takes" not in "".join(line.plain for line in explained.answer(seen, "en"))
