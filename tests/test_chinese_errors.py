"""The errors that the command line prints in Chinese: every one has an entry, and every entry an error."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import clearhead
import test_check_file
import test_cli
import test_diagnosis
import test_explain_edits
import test_malformed_files
import test_why
from clearhead.words.errors import CHINESE, HOLE, in_chinese
from english_errors import NAMES, NOT_REACHED, PARTS, REACHED
from terminal import call

SOURCES = Path(clearhead.__file__).parent
HAN = re.compile(r"[\u4e00-\u9fff]")


def texts(node: ast.expr | None, scope: ast.AST) -> Iterator[str]:
    """The texts that an expression can be, with {} for what varies; none where it is computed elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body, scope)
        yield from texts(node.orelse, scope)
    elif isinstance(node, ast.Name):
        for found in ast.walk(scope):
            if isinstance(found, ast.Assign) and any(getattr(t, "id", "") == node.id for t in found.targets):
                yield from (text for text in texts(found.value, ast.Module([], [])) if " " in text)


def raised(path: Path) -> Iterator[str]:
    """What a module's errors say, and their hints."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.endswith("Error") or name == "error":
                for argument in node.args[:2]:
                    yield from texts(argument, module)


@cache
def all_texts() -> frozenset[str]:
    """Every text of the modules whose errors a command reaches."""
    paths = [path for part in ("errors.py", *REACHED.split()) for path in SOURCES.glob(part)]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = (text for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr)) for text in texts(node, node))
    return frozenset(text.removeprefix("{}: ") for text in found)


def english(text: str) -> list[str]:
    """The English words in a Chinese text; names, numbers, quotations and code are none."""
    code = (r"`[^`]*`", r"'(?:\\.|[^'\\])*'", r'"(?:\\.|[^"\\])*"', r"--[a-z-]+", r"\w+\([^()]*\)", r"\([^()]*\)")
    text = re.sub("(?<=可用：).*|(?<=词元为：).*", "", text)
    for pattern in (*code, r"[\x21-\x7e]*[_.=()\[\]/+@><0-9][\x21-\x7e]*"):
        text = re.sub(pattern, " ", text)
    return [word for word in re.findall(r"[A-Za-z]{2,}", text) if word.islower() and word not in NAMES.split()]


def is_code(hint: str) -> bool:
    """Is this what to type, and no sentence?"""
    bare = re.sub(r"""'[^']*'|"[^"]*"|\([^()]*\)""", "", hint)
    return not re.search(r"[a-z]+,? [a-z]+ [a-z]+", bare) and not bare.endswith(".")


def test_every_error_that_a_command_reaches_is_in_chinese():
    excused = {text for group in NOT_REACHED.values() for text in group}
    said = {text for part in REACHED.split() for path in SOURCES.glob(part) for text in raised(path)}
    assert len(said) > 250
    assert excused <= said
    parts = "\n".join(PARTS)
    for text in sorted(said - excused):
        sample = " ".join(text.replace("{}", "7").split())
        chinese = in_chinese(sample)
        if is_code(sample) or (HAN.search(chinese) and not english(chinese)):
            continue
        pattern = ".*?".join(map(re.escape, text.split("{}")))
        assert re.search(pattern, parts), f"no Chinese for: {text}"


def test_sentences_that_are_put_together_are_in_chinese():
    for sentence in PARTS:
        assert HAN.search(in_chinese(sentence)), sentence
        assert not english(in_chinese(sentence)), in_chinese(sentence)


def test_every_entry_is_an_error_that_is_raised():
    templates = [t.split("{}") for t in all_texts() if len(t.replace("{}", "")) > 12 and " " in t]
    for entry in CHINESE:
        sample = HOLE.sub("7", entry)
        near = [template for template in templates if all(part in sample for part in template)]
        found = any(re.fullmatch(".*".join(map(re.escape, template)), sample) for template in near)
        parts = ".+?".join(map(re.escape, HOLE.split(entry)[::2]))
        found = found or HOLE.sub("{}", entry) in all_texts() or any(re.search(parts, sentence) for sentence in PARTS)
        assert found, f"nothing raises: {entry}"


def test_an_entry_keeps_what_varies_and_is_found_before_others():
    for sentence, chinese in CHINESE.items():
        assert set(HOLE.findall(sentence)) == set(HOLE.findall(chinese)), sentence
        assert in_chinese(HOLE.sub("7", sentence)) == HOLE.sub("7", chinese)


def test_a_sentence_without_an_entry_stays_as_it_is():
    for sentence in ("", "x", "a: b: c: the moon is made of cheese.", "{name} {", ": " * 200):
        assert in_chinese(sentence) == sentence


def cases(test) -> list[tuple]:
    """What a test of another file is called with."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return mark.args[1]


def check(*arguments: object) -> str:
    """The command ends with one line in Chinese."""
    done = call(*arguments, "--lang", "zh")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    _, said = done.stderr.split(": ", 1)
    assert HAN.search(said)
    assert "hint:" not in said
    said = re.sub(r"(?<=可读的 \.npz 文件：).*", "", said)  # what another library says
    for path in (path for path in arguments if isinstance(path, Path)):
        said = said.replace(str(path), "").replace(path.name, "")
    assert not english(said), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            c[0]
            for c in cases(test_cli.test_bad_input_is_one_line_and_exit_code_two)
            if not {"bench", "info"} & {*c[0]}
        ),
        *(["explain", *c[0]] for c in cases(test_why.test_options_that_do_not_go_with_why_are_refused)),
        *(
            ["explain", "humpty dumpty sat on", f"--{option}", value]
            for option, value, _ in cases(test_explain_edits.test_an_edit_that_cannot_act_is_refused_by_name)
        ),
        *(["shapes", "nn=3"], ["shapes", "n=0"], ["shapes", "d_model=3", "h=2"], ["scale", "--widths", "a"]),
        *(["scale", "--widths", "0"], ["scale", "--keys", "0"], ["learn", "--step", "-1"], ["view", "--port", "-1"]),
        *(
            ["view"],
            ["view", "none.safetensors"],
            ["explain", "a", "--generate", "-1"],
            ["trace", "."],
        ),
        *(["explain", "--file", "none.txt"], ["explain", "a", "--exact", "0.0"], ["explain", "a", "--windows"]),
        *(["explain", "a", "--why", "zebra crossing"], ["explain", "a", "--json", "/", "--html", "/"]),
    ],
)
def test_wrong_arguments_are_refused_in_chinese(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "README.md"):
        (tmp_path / name).write_text("mary had a little\n", encoding="utf-8")
    check(*arguments)


@pytest.mark.parametrize("command", ["trace", "diagnose"])
def test_wrong_files_are_refused_in_chinese(command, tmp_path):
    own = test_check_file if command == "trace" else test_diagnosis
    basis = {} if command == "trace" else test_diagnosis.WRONG
    contents = [
        *(c[0] for c in cases(own.test_files_with_wrong_contents_are_refused)),
        *(c[0] for c in cases(test_cli.test_a_file_that_cannot_be_computed_is_a_one_line_error)),
        *(c[0] for c in cases(test_malformed_files.test_json_with_false_claims_is_refused) if command in "trace"),
    ]
    for number, content in enumerate(contents):
        place = tmp_path / f"{number}.json"
        place.write_text(content if isinstance(content, str) else json.dumps(basis | content), encoding="utf-8")
        check(command, place)
    for number, (data, _) in enumerate(cases(test_malformed_files.test_npz_with_false_claims_is_refused)):
        square = test_malformed_files.header((2, 2)) + bytes(32)
        check(command, test_malformed_files.packed(tmp_path / f"{number}.npz", q=data, k=square, v=square))
    for number, (data, _) in enumerate(cases(test_malformed_files.test_safetensors_with_false_claims_are_refused)):
        place = tmp_path / f"{number}.safetensors"
        place.write_bytes(data)
        check(command, place)


def test_wrong_models_are_refused_in_chinese(tmp_path):
    model = Path(shutil.copytree(test_malformed_files.SHIPPED, tmp_path / "model"))
    whole = (model / "config.json").read_text()
    for changes, _ in cases(test_malformed_files.test_a_gpt2_config_with_false_claims_is_refused):
        check("explain", "humpty", "--model", test_malformed_files.rewritten(model, **changes))
        (model / "config.json").write_text(whole)


def test_shapes_of_theirs_are_refused_in_chinese(tmp_path):
    q, k = np.ones((2, 3, 7, 4)), np.ones((2, 3, 5, 4))
    for shape, _ in cases(test_diagnosis.test_a_wrong_shape_error_says_which_shape_is_expected):
        np.savez(tmp_path / "case.npz", q=q, k=k, v=k, theirs=np.ones(shape))
        assert "theirs" in check("diagnose", tmp_path / "case.npz")


def test_english_and_poor_encodings_stay_english():
    assert call("explain").stderr.startswith("clearhead explain: expected TEXT or --file, one of them. hint: clear")
    assert call("explain", "--lang", "zh", encoding="cp1252").stderr.startswith("clearhead explain: expected TEXT")
    assert "提示：" in call("explain", "--lang", "zh", encoding="gbk").stderr
