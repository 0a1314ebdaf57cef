"""The command line, run as a user runs it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache, partial

import numpy as np
import pytest
from rich.cells import cell_len

from clearhead.explaining.explain import explain
from dense_gpt2 import COLOUR, LONG
from diagnosing import WRONG, written
from problems import in_the_gate
from seeds import fresh
from terminal import call, fitting, loaded, refused

PLAIN = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM", "COLUMNS")}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments, text=True, **environment):
    """The command as a process of its own."""
    command = [sys.executable, "-m", "clearhead", *(x if isinstance(x, bytes) else str(x) for x in arguments)]
    options = {"env": {**PLAIN, **environment}, "text": text, "encoding": "utf-8" if text else None}
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)


def test_explain_prints_every_section():
    done = run("explain", "humpty dumpty sat on", "--steps")
    assert (done.returncode, done.stderr) == (0, "")
    sections = ["humpty   1 ␣dumpty   2 ␣sat   3 ␣on", "most likely next", "S = Q·Kᵀ", "S' = S/√d_k", "A = softmax(M)"]
    sections += ["O = A·V", "U = H·W^O + b^O", "(heads 8, queries 4, keys 4)", "· masked", "Σ = o", "rows sum to 1"]
    assert [words for words in sections if words not in done.stdout] == []
    assert re.search(r"most likely next\n +␣a +9\d\.\d+%", done.stdout)


REPORTS = {  # the options of each | Chinese words that it has | and English ones that it may not have (_ is a space)
    "steps": "--steps|逐步计算 最大偏差 不可关注处为 softmax(M)，逐行|forbidden row largest chosen",
    "why": "--why|为什么是 原文 作用 重新运行 隐藏 几率 未能解释|Why part effect hidden again edges heads layer points",
    "edits": "--cut=-1>0 --boost 0=1.5 --off 1.2|改动前 改动后 变化 下一个词元|before after moved change layer_0",
}
TEXTS = ("mary", "猫 sat on", "你好，世界 🙂", LONG, f"{LONG} {LONG} {LONG}")


SHADED = [("why", {}), ("edits", {}), ("why", COLOUR), ("steps", {}), ("steps", COLOUR)]  # edits have no matrix


@cache
def explained(text):
    """The explanation of a text, and what is told of it before its end: computed once, printed often."""
    stages = []
    return explain(text, told=stages.append), stages


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shown", in_the_gate(SHADED, *SHADED[2:]))
def test_a_report_fits_80_columns_and_its_chinese_is_complete(shown, language, text, monkeypatch):
    def again(text, model, *, told, **asked):
        return [*map(told, explained(text)[1])] and explained(text)[0]

    monkeypatch.setattr("clearhead.explaining.explain.explain", again)
    report, colour = shown
    options, chinese, english = map(str.split, REPORTS[report].split("|"))
    text = f"{text} a wall" if report == "why" and text == "mary" else text  # of one token nothing can be hidden
    plain = fitting("explain", text, *options, "--lang", language, environment=colour)
    if language == "zh":
        assert [words for words in chinese if words not in plain] == []
        assert [words for words in english if words.replace("_", " ") in plain.replace("layers=", "")] == []
        assert "注意" not in plain.replace("注意力", "")


@pytest.mark.gate
def test_the_environment_turns_colour_on_and_off():
    steps = partial(call, "explain", LONG, "--steps")
    assert "\x1b" not in steps().stdout
    coloured = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert "\x1b[48;2;" in steps(environment=coloured | {"COLORTERM": "truecolor"}).stdout
    limited = run("explain", LONG, "--steps", **coloured).stdout  # in a process: Rich keeps a style's colours
    assert [each in limited for each in ("48;5;", "48;2;")] == [True, False]
    none = steps(environment=coloured | {"NO_COLOR": "1"}).stdout
    assert [each in none for each in ("48;", ".:-=+*#%@")] == [False, True]


def test_up_to_twelve_columns_are_numbers_and_more_are_a_picture():
    from clearhead.models.model import load

    words, model = LONG.split(), load()
    texts = [" ".join(words[:count]) for count in range(1, len(words))]
    sizes = {len(model.tokenizer.tokens(text)): text for text in texts}
    for size in (12, 13):
        said = call("explain", sizes[size], "--steps").stdout
        assert ("each cell" in said or "«" in said) == (size > 12)


def test_control_characters_in_tokens_are_escaped():
    done = run("explain", "a\x1b[31mred\x07\u202e<b>\r\nend", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0
    left = ESCAPE.sub("", done.stdout)
    assert not set(left) & {"\x1b", "\x07", "\r", "\u202e"}


@pytest.fixture
def wrong(tmp_path):
    return written(tmp_path / "wrong.json", WRONG)


def test_trace_finds_the_error_in_the_wrong_example(wrong):
    done = call("trace", wrong)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "the first wrong step is scores, by up to 3: it is Q·K, not Q·Kᵀ: K is not transposed" in said
    assert "weights: wrong too, by up to 0.008807 from what the claimed scores would give" in said
    for row in ("6.5000  10.0000", "2.0000   3.5000", "0.0050   0.9950", "0.0558   0.9442", "0.9224   2.1553"):
        assert row in done.stdout
    assert "K 没有转置" in call("trace", wrong, "--lang", "zh").stdout
    data = json.loads(call("trace", wrong, "--json", "-").stdout)
    assert data["first_wrong"] == "scores"
    assert data["claims"][0]["mistake"] == "transpose missing"


def traced(place, *options, **arrays):
    """`trace` of a file with these arrays."""
    np.savez(place / "case.npz", **arrays)
    return call("trace", place / "case.npz", *options)


def test_trace_of_a_layer_prints_every_step(tmp_path):
    rng = fresh()
    w = {name: rng.standard_normal((6, 6)) for name in ("w_q", "w_k", "w_v", "w_o")}
    done = traced(tmp_path, x=rng.standard_normal((20, 6)), **w, num_heads=2, causal=True)
    assert done.returncode == 0, done.stderr
    for words in ("Q = X·W^Q", "U = H·W^O", "this is head 0 of 2", "the first 8 × 8 of 20 × 20", "nothing to check"):
        assert words in done.stdout
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80


@pytest.fixture
def batches(tmp_path):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((3, 4, 5, 2)).round(2) + np.arange(12).reshape(3, 4, 1, 1)
    k, v = rng.standard_normal((2, 3, 2, 5, 2)).round(2)
    np.savez(tmp_path / "batches.npz", q=q, k=k, v=v)
    return tmp_path / "batches.npz", q, k


def test_trace_shows_the_head_and_batch_entry_asked_for(batches):
    place, q, k = batches
    for batch, head in ((0, 0), (2, 1), (1, 3)):
        said = call("trace", place, "--batch", batch, "--head", head).stdout
        assert f"this is batch entry {batch} of 3, " in said
        assert f"this is head {head} of 4, " in said
        for array in (q[batch, head], k[batch, head // 2], q[batch, head] @ k[batch, head // 2].T):
            assert "\n".join("  " + " ".join(f"{x:8.4f}" for x in row) for row in array) in said
        assert "--head N shows another" in said
        assert "--batch N shows another" in said
    assert "head 4 is outside 0..3" in refused("trace", place, "--head", 4)
    assert "batch -1 is outside 0..2" in refused("trace", place, "--batch", -1)
    assert "query 5 is outside 0..4: the file has 5 queries" in refused("trace", place, "--query", 5)


def test_trace_shows_the_head_whose_claim_is_wrong(batches):
    place, q, k = batches
    scores = q @ np.repeat(k, 2, axis=1).swapaxes(-1, -2)
    scores[2, 1, 3, 4] += 5
    np.savez(place, **{**np.load(place), "scores": scores})
    said = call("trace", place).stdout
    assert all(words in said for words in ("this is batch entry 2 of 3, ", "this is head 1 of 4, "))


def test_trace_says_where_a_large_claimed_array_is_most_wrong(tmp_path):
    q, k, v = np.random.default_rng(0).standard_normal((3, 20, 4)).round(3)
    scores = q @ k.T
    right, scores[17, 11] = scores[17, 11], scores[17, 11] + 2
    said = traced(tmp_path, q=q, k=k, v=v, scores=scores).stdout
    assert f"furthest off at row 17, column 11: claimed {right + 2:.6g}, right {right:.6g}" in " ".join(said.split())


@pytest.mark.parametrize("size", [6, 40, 200])
def test_nan_is_shown_in_its_row_and_no_other_row(tmp_path, size):
    q, k, v = np.random.default_rng(0).standard_normal((3, size, 4))
    q[2, 1] = np.nan
    done = traced(tmp_path, q=q, k=k, v=v, causal=True, scores=q @ k.T)
    assert done.returncode == 0
    assert "min NaN" not in done.stdout
    assert "? NaN" in " ".join(done.stdout.split()) or size == 6
    assert size == 200 or re.search(r"^q_2 .*(NaN|\?)", done.stdout, re.MULTILINE)
    assert re.search(r"^q_[05] .*(@|1\.000)", done.stdout, re.MULTILINE)  # of 200, three rows make one line


def test_small_weights_are_not_printed_as_zero(tmp_path):
    q, k = np.ones((1, 1)), np.array([[0.0], [-3], [-8], [-20], [-60]])
    weights = np.exp(k[:, 0]) / np.exp(k[:, 0]).sum()
    said = traced(tmp_path, q=q, k=k, v=k * 1e-7, scale=1.0).stdout
    shown = re.search(r"^q_0 +(.*)", said, re.MULTILINE).group(1).split()
    np.testing.assert_allclose([float(x) for x in shown], weights, rtol=0.05)
    values = re.search(r"^V .*?\n.*?\n((?: +\S+\n)+)", said, re.MULTILINE).group(1).split()
    np.testing.assert_allclose([float(x) for x in values], k[:, 0] * 1e-7, rtol=0.01)


REFUSED = {  # commands, and what each is refused with
    "--json - explain a": "--json stands before the command",
    "--lang zh info": "info prints English only",
    "explain a --model ''": "--model: it is empty",
    "explain a --json - --html -": "standard output",
    "bench --threads 0": "number of threads is 0",
    "explain ''": "the text is empty",
    "explain": "expected either TEXT or --file",
    "explain 'mary had' --head 8": "head 8 is outside 0..7",
    "explain 'mary had' --html page.txt": "must end in .html",
    "explain a --token zebra": "'zebra' is neither a position",
    f"explain '{'la ' * 400}'": "but the model has 256 positions",
    "explain a --model no/such/place": "there is no such file or folder",
    "explain a --json no/such/place.json": "cannot be written",
    "trace no-such-file.json": "does not exist",
    "explain --why 'mary had'": "expected TEXT: 'mary had' follows --why",
    "explain 'mary had' --why ''": "it is empty",
    "explain 'mary had' --why --token mary": "cannot go with --token. hint: end TEXT with that token",
    "explain mary --chat had": "TEXT and --chat are given together",
    "explain mary --system had": "--system needs --chat",
    "explain mary --why lamb --answer lamb": "--why lamb and --answer",
    "explain 'mary had' --way --token mary": "--way explains what follows the whole text, so it cannot go with --token",
    "explain mary --file text.txt": "expected either TEXT or --file",
    "explain --file none.txt": "does not exist",
    "explain --file text.txt --cut 'had>mary' --html page.html": "--cut, --boost and --off cannot go with --html",
    "scale --widths 1,x": "--widths: expected whole numbers separated by commas",
    "shapes n=3 n=4": "n is given twice.",
    "view": "--file",
    "view --file none.txt": "does not exist",
    "view --text-file=text.txt": "hint: did you mean --file?",
    "explain mary had": 'hint: quotes make one text of several words: clearhead explain "mary had"',
}
EDITS = {
    "--cut on": "expected QUERIES>KEYS",
    "--cut 'on>egg'": "no such word",
    "--cut 'on>Sat'": "did you mean 'sat'",
    "--cut '4>0'": "position 4, but the text has 4 tokens. hint: positions are 0 to 3",
    "--cut 'humpty>on'": "none of its queries sees any of its keys",
    "--cut 'on>sat@2'": "there is no layer 2 in rhymes",
    "--cut 'on>sat@0.8'": "there is no head 8 in layer 0, which has 8",
    "--boost sat": "expected KEYS=NUMBER",
    "--off x": "expected LAYER.HEAD",
}
REFUSED |= {f"explain 'humpty dumpty sat on' {edit}": words for edit, words in EDITS.items()}


@pytest.mark.parametrize("encoding", ["utf-8", "gbk"])
def test_errors_are_in_english_also_where_reports_are_in_chinese(encoding):
    said = call("explain", "--lang", "zh", encoding=encoding).stderr
    assert said.startswith("clearhead explain: expected either TEXT or --file. hint: clearhead explain ")
    assert call("trace", "none.json", "--lang", "zh", encoding=encoding).stderr.startswith("clearhead trace: none.json")


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_are_one_line_and_code_2_and_write_no_file(command, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("mary had a little\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    said = refused(*shlex.split(command))
    assert REFUSED[command] in said
    assert command.split(" --")[-1].split(" ")[0] in said or "'humpty dumpty" not in command  # the edit by its name
    assert os.listdir(tmp_path) == ["text.txt"]
    if command.startswith("explain") and "--json" not in command:
        refused(*shlex.split(command), "--json", "seen.json")
        assert os.listdir(tmp_path) == ["text.txt"]


def test_a_file_that_cannot_be_computed_is_a_one_line_error(tmp_path):
    (tmp_path / "case.json").write_text(json.dumps({"q": [[1]], "k": [[1], [2]], "v": [[1], [2]], "causal": True}))
    said = refused("trace", tmp_path / "case.json", "--json", tmp_path / "out.json")
    assert "query_offset=1 aligns the last query" in said
    assert not (tmp_path / "out.json").exists()


@pytest.mark.gate
@pytest.mark.parametrize("encoding", ["gbk", "cp1252", "ascii"])
@pytest.mark.parametrize("words", ["explain --steps 猫_sat_on_two", "trace examples/wrong.json", "explain --help"])
def test_every_encoding_prints_the_numbers(encoding, words):
    code, said, complaint = call(*[word.replace("_", " ") for word in words.split()], encoding=encoding)
    assert (code, complaint) == (1 if "wrong" in words else 0, "")
    assert "A = softmax(" in said or "usage:" in said
    if encoding == "ascii" and "explain" in words and "usage:" not in said:
        assert "0 \\u732b1/3" in said
        assert re.search(r"^  _sat|^  \d _sat +-?\d", said, re.MULTILINE)
        assert max(map(len, said.splitlines())) <= 80


def test_the_c_locale_prints_the_numbers():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "S = Q.KT" in run("explain", "humpty dumpty", "--steps", **plain).stdout


def test_chinese_is_refused_where_the_encoding_lacks_it(tmp_path):
    for encoding, code in (("gbk", 0), ("cp1252", 2)):
        done = run("--lang", "zh", "explain", "humpty", "--steps", text=False, PYTHONIOENCODING=encoding)
        assert done.returncode == code
        assert ("逐步计算" in done.stdout.decode(encoding)) == (code == 0)
    numbers = run("explain", "humpty", "--lang", "zh", "--json", "-", PYTHONIOENCODING="ascii").stdout
    assert json.loads(numbers)["text"] == "humpty"


def test_text_that_is_not_utf8_is_refused():
    done = run("explain", b"caf\xe9 sat", text=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"TEXT is not UTF-8: character 3 is byte 0xe9." in done.stderr
    assert done.stderr.count(b"\n") == 1


NO_ROOM = "clearhead: standard output: No space left on device.\n"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("{} explain humpty > /dev/full", 2, NO_ROOM),
        ("{} info --json > /dev/full", 2, NO_ROOM),
        ("{} --help > /dev/full", 2, NO_ROOM),
        ("{} explain humpty >&-", 0, ""),
        (f"{{}} explain '{LONG}' | head -n 1", 0, ""),
    ],
)
def test_full_disks_and_closed_streams_and_pipes_cause_no_crash(command, code, said):
    command = command.format(f'"{sys.executable}" -m clearhead')
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=PLAIN, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("gone", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(gone):
    code = f"import sys; sys.modules[{gone!r}] = None; from clearhead.cli import main; sys.exit(main(['view']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert 'hint: pip install "clearhead[view]"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_tokens_that_are_part_of_a_character_show_that_character():
    for language, words in (("en", "does not know 猫 and splits it into bytes"), ("zh", "没有学过“猫”")):
        said = call("explain", "猫 sat", "--steps", "--lang", language).stdout
        assert "0 猫1/3   1 猫2/3   2 猫3/3   3 ␣sat" in said
        assert words in " ".join(said.split())
        assert not set("çĮ«") & set(said)
    assert "bytes" not in call("explain", "a cat sat").stdout


def test_ctrl_c_ends_without_a_traceback(tmp_path):
    started = tmp_path.parent / f"{tmp_path.name}-started"
    code = "import sys, time, pathlib, clearhead.cli, clearhead.models.model as m\n"
    code += f"m.load = lambda place=None: (pathlib.Path({str(started)!r}).touch(), time.sleep(30))\n"
    code += "sys.exit(clearhead.cli.main(['explain', 'a']))"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True, cwd=tmp_path, env=PLAIN)
    while not started.exists():
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


EVERY_EDIT = ["--cut", "little>mary", "--off", "0.3", "--boost", "had=1", "--json", "seen.json"]


@pytest.mark.parametrize("more", [[], ["--why"], EVERY_EDIT], ids=str)
def test_explain_loads_no_heavy_package(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, heavy = loaded("explain", "mary had a little", *more)
    assert "␣lamb" in said
    assert heavy == ""


@pytest.mark.parametrize("command", [("explain", "humpty dumpty sat on"), ("trace", "examples/wrong.json")])
def test_html_writes_one_page_that_is_the_same_every_time(tmp_path, command):
    pages = []
    for name in ("a.html", "b.html"):
        done = call(*command, "--html", tmp_path / name, "--lang", "zh")
        assert done.stderr == ""
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert pages[0].startswith(b'<!doctype html>\n<html lang="zh-Hans">')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]
