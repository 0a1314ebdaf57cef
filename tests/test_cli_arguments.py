"""Every command with random arguments drawn from its own parser: a documented exit code, never a traceback."""

import argparse
import json
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.arguments import command_line
from clearhead.bench import self_check
from clearhead.engines import threads
from clearhead.errors import FileError
from clearhead.models import hub
from clearhead.models import model as gpt2
from clearhead.view import server
from diagnosing import EXAMPLE
from problems import examples
from terminal import Done, call

(CHOICES,) = (a.choices for a in command_line()._actions if isinstance(a, argparse._SubParsersAction))
ENCODINGS = ("utf-8", "ascii", "gbk", "cp1252", "latin-1")
FILES = ("case.json", "wrong.json", "heads.npz", "text.txt", "latin.txt", "junk.safetensors", "list.json", "none.json")
ODD = (
    *("", " ", "-", "--", "-1", "0", "1", "7", "2147483648", "9" * 30, "9" * 5000, "1e3", "nan", "0x10", "３", "é"),
    *("猫", "\udcff", "a\udcffb", "\x1b[31m", "a\nb", "\0", "x" * 5000, "/dev/null/x", ".", "..", "no/such/place"),
    *("en", "zh", "fr", "float16", "bfloat16", "float32", "0.1", "0.1,", "1.99", ",", "layer.0", "torch", "full", "~"),
    *("--lang", "--json", "-h", "--help", "--version", "la la la", "sat"),
)
WORDS = st.sampled_from(ODD) | st.sampled_from(FILES) | st.text(st.characters(exclude_characters="/"), max_size=8)


def lines_of(name: str) -> st.SearchStrategy[list[str]]:
    """Arguments for one command: its options in any order, with right, wrong and missing values."""
    parts = [positional_of(a) if not a.option_strings else option_of(a) for a in CHOICES[name]._actions]
    mixed = st.tuples(*parts).flatmap(lambda drawn: st.permutations([part for part in drawn if part]))
    before = st.sampled_from([[], [], [], ["--lang", "zh"], ["--lang"], ["--json", "-"], ["--head"]])
    return st.tuples(before, mixed).map(lambda both: [*both[0], name, *(word for part in both[1] for word in part)])


def option_of(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    if action.nargs == 0:
        return st.sampled_from([[], [], [action.option_strings[-1]]])
    right = st.sampled_from(sorted(action.choices)) if action.choices else WORDS
    value = (right | WORDS).map(lambda word: [action.option_strings[-1], word])
    return st.just([]) | st.just([]) | value | st.just([action.option_strings[-1]])


def positional_of(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    return st.sampled_from([[name] for name in FILES[:3]]) | WORDS.map(lambda word: [word]) | st.just([])


def write_files(place: Path) -> None:
    (place / "case.json").write_text(json.dumps({**EXAMPLE, "theirs": EXAMPLE["v"]}))
    (place / "wrong.json").write_text(json.dumps({**EXAMPLE, "scores": [[3.5, 11], [1.5, 5.5]]}))
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 3, 2))
    np.savez(place / "heads.npz", q=q, k=k, v=v, causal=True, scores=q @ k.swapaxes(-1, -2))
    (place / "text.txt").write_text("humpty dumpty\n")
    (place / "latin.txt").write_bytes(b"caf\xe9")
    (place / "junk.safetensors").write_bytes(b"no tensors")
    (place / "list.json").write_text("[1, 2]")


def called(arguments: list[str], encoding: str) -> Done:
    """The result of the command in an otherwise empty folder with a few files."""
    folder = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        inner = Path(place) / "inner"
        inner.mkdir()
        write_files(inner)
        os.chdir(inner)
        try:
            return call(*arguments, encoding=encoding, typed=b"la la")
        finally:
            os.chdir(folder)


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Replace what takes long or waits for a browser or a network; everything before that runs."""

    def no_network(name: str):
        raise FileError(f"{name}: there is no network.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "load", cache(gpt2.load))
        patch.setattr(hub, "load", no_network)
        patch.setattr(server, "serve", lambda *_: None)
        patch.setattr(self_check, "measured", lambda _: ("native", 1e-3, {}))
        patch.setattr(threads, "_chosen", None)
        yield


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_any_arguments_give_an_answer_or_a_one_line_error(name: str):
    @examples(0.5)
    @given(lines_of(name), st.sampled_from(ENCODINGS))
    def holds(arguments: list[str], encoding: str):
        check(arguments, encoding)

    holds()


def check(arguments: list[str], encoding: str) -> None:
    code, said, complained = called(arguments, encoding)
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in complained
    assert "\x1b" not in complained
    if code == 2:
        assert complained.count("\n") == 1, complained
        assert len(complained) < 800
        assert said == ""
    elif ["--json", "-"] in [
        arguments[place : place + 2] for place in range(len(arguments))
    ] and "--help" not in arguments:
        json.loads(said)
