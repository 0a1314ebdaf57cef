"""The command line, run as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.cells import cell_len

from seeds import fresh

PLAIN = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM", "COLUMNS")}
LONG = "there was an old woman who lived in a shoe she had so many children she didn't know what to do"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments, **environment):
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env={**PLAIN, **environment}, timeout=60, check=False
    )


def test_explain_prints_the_whole_story():
    done = run("explain", "humpty dumpty sat on")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "humpty   1 ␣dumpty   2 ␣sat   3 ␣on",
        "most likely next",
        "S = Q·Kᵀ",
        "S' = S/√d_k",
        "A = softmax(M)",
    ):
        assert words in done.stdout
    for words in ("O = A·V", "U = H·W^O + b^O", "(heads 8, queries 4, keys 4)", "· masked", "Σ = o", "rows sum to 1"):
        assert words in done.stdout
    assert re.search(r"most likely next +␣a +9\d\.\d+%", done.stdout)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", ["humpty dumpty sat on", LONG, f"{LONG} {LONG} {LONG}", "你好，世界 🙂", "a"])
@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}])
def test_eighty_columns_hold_every_line(language, text, colour):
    done = run("explain", text, "--lang", language, COLUMNS="80", **colour)
    assert done.returncode == 0, done.stderr
    assert max(cell_len(ESCAPE.sub("", line)) for line in done.stdout.splitlines()) <= 80


def test_chinese_is_chinese_throughout():
    done = run("explain", "humpty dumpty sat on", "--lang", "zh")
    for words in ("逐步计算", "M = S'，禁止处为 -∞ (causal)", "A = softmax(M)，逐行", "被遮蔽", "最大偏差"):
        assert words in done.stdout
    for english in ("forbidden", "each row", "largest", "chosen"):
        assert english not in done.stdout


def test_colour_follows_the_environment():
    assert "\x1b" not in run("explain", LONG).stdout
    full = run("explain", f"{LONG} {LONG} {LONG}", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color").stdout
    assert "▀" in full
    assert "\x1b[38;2;" in full
    limited = run("explain", f"{LONG} {LONG} {LONG}", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "38;5;" in limited
    assert "38;2;" not in limited
    none = run("explain", LONG, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color").stdout
    assert "38;" not in none
    assert "▀" not in none
    assert ".:-=+*#%@" in none


def test_numbers_to_twelve_columns_and_pixels_beyond():
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
    ]
    from clearhead.model import load

    model = load()
    for count in range(1, len(words) + 1):
        text = " ".join(words[:count])
        size = len(model.tokens(text))
        if size in (12, 13):
            assert ("each cell" in run("explain", text).stdout or "«" in run("explain", text).stdout) == (size > 12)


def test_hostile_tokens_are_text():
    done = run("explain", "a\x1b[31mred\x07\u202e<b>\r\nend", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0
    left = ESCAPE.sub("", done.stdout)
    assert not set(left) & {"\x1b", "\x07", "\r", "\u202e"}


def test_json_goes_to_a_file_or_to_the_pipe(tmp_path):
    place = tmp_path / "out.json"
    done = run("explain", "jack and jill", "--json", place)
    assert done.returncode == 0
    data = json.loads(place.read_text(encoding="utf-8"))
    assert [t["text"] for t in data["tokens"]] == ["jack", " and", " jill"]
    assert json.loads(run("explain", "jack and jill", "--json", "-").stdout) == data
    assert list(tmp_path.iterdir()) == [place]


@pytest.fixture
def wrong(tmp_path):
    place = tmp_path / "wrong.json"
    case = {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]]}
    case |= {"scores": [[3.5, 11], [1.5, 5.5]], "weights": [[0.006, 0.994], [0.047, 0.953]]}
    place.write_text(json.dumps(case))
    return place


def test_trace_tells_the_wrong_example_from_the_truth(wrong):
    done = run("trace", wrong)
    assert done.returncode == 1
    assert "the first wrong step is scores, by up to 3: it is Q·K, not Q·Kᵀ: K is not transposed" in done.stdout
    assert "weights: wrong too, and off from its own scores by up to 0.0088" in done.stdout
    for row in ("6.5000  10.0000", "2.0000   3.5000", "0.0050   0.9950", "0.0558   0.9442", "0.9224   2.1553"):
        assert row in done.stdout
    assert "K 没有转置" in run("trace", wrong, "--lang", "zh").stdout
    data = json.loads(run("trace", wrong, "--json", "-").stdout)
    assert data["first_wrong"] == "scores"
    assert data["claims"][0]["mistake"] == "transpose missing"


def test_trace_of_a_layer_prints_every_step(tmp_path):
    rng = fresh()
    w = {name: rng.standard_normal((6, 6)) for name in ("w_q", "w_k", "w_v", "w_o")}
    np.savez(tmp_path / "layer.npz", x=rng.standard_normal((20, 6)), **w, num_heads=2, causal=True)
    done = run("trace", tmp_path / "layer.npz")
    assert done.returncode == 0, done.stderr
    for words in ("Q = X·W^Q", "U = H·W^O", "head 0 of 2", "the first 8 × 8 of 20 × 20", "nothing to check"):
        assert words in done.stdout
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", ""], "the text is empty"),
        (["explain", "  \n"], "the text is empty"),
        (["explain"], "expected TEXT or --file"),
        (["explain", "a", "--layer", "two"], "invalid int value: 'two'"),
        (["explain", "a", "--layer", "2"], "layer 2 is outside 0..1"),
        (["explain", "a", "--head", "8"], "head 8 is outside 0..7"),
        (["explain", "a", "--token", "zebra"], "'zebra' is neither a position"),
        (["explain", "a", "--lang", "fr"], "invalid choice: 'fr'"),
        (["explain", "la " * 400], "but the model has 256 positions"),
        (["explain", "a", "--model", "no/such/place"], "is not a directory"),
        (["explain", "a", "--json", "no/such/place.json"], "cannot be written"),
        (["trace", "no-such-file.json"], "does not exist"),
        (["trace"], "required: FILE"),
        (["unknown"], "invalid choice: 'unknown'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(arguments, words, tmp_path):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"q": [[1.0, 2]], "k": [[1.0]], "v": [[1.0]]}, "q has d_k 2 but k has d_k 1"),
        ({"q": [[[1.0]]] * 3, "k": [[[1.0]]] * 2, "v": [[[1.0]]] * 2}, "query heads must be a multiple of key heads"),
        ({"q": [[1.0]], "k": [[1.0]], "v": [[1.0]], "casual": True}, "did you mean `causal`?"),
        (
            {"q": [[1.0]], "k": [[1.0], [2.0]], "v": [[1.0], [2.0]], "causal": True},
            "query_offset=1 aligns the last query",
        ),
    ],
)
def test_a_file_that_cannot_be_computed(tmp_path, case, words):
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = run("trace", tmp_path / "case.json", "--json", tmp_path / "out.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("command", [[], ["explain"], ["trace"]])
def test_help_shows_examples(command):
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout or not command
    assert run("--version").stdout.startswith("clearhead ")


def test_a_closed_pipe_is_no_error():
    command = f'"{sys.executable}" -m clearhead explain "{LONG}" | head -n 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=PLAIN, timeout=60, check=False)
    assert done.stderr == ""


def test_ctrl_c_leaves_no_mess(tmp_path):
    code = "import sys, time, clearhead.cli, clearhead.model as model; model.load = lambda place=None: time.sleep(30); "
    code += "sys.exit(clearhead.cli.main(['explain', 'a']))"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True, cwd=tmp_path, env=PLAIN)
    time.sleep(2)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_no_heavy_package_is_loaded_for_the_main_job():
    code = (
        "import sys; from clearhead.cli import main; main(['explain', 'humpty dumpty']); print([m for m in ('torch', "
    )
    code += "'transformers', 'triton', 'scipy', 'matplotlib') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=PLAIN, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [("explain", "humpty dumpty sat on"), ("trace", "examples/wrong.json")])
def test_html_writes_one_page_that_is_the_same_every_time(tmp_path, command):
    pages = []
    for name in ("a.html", "b.html"):
        done = run(*command, "--html", tmp_path / name, "--lang", "zh")
        assert done.stderr == ""
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert pages[0].startswith(b'<!doctype html>\n<html lang="zh-Hans">')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]
