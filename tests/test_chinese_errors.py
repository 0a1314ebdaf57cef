"""The errors that the command line prints in Chinese: every template has its entry, and every entry its template."""

import ast
import json
import re
import shlex
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
import test_malformed_files
from clearhead.errors import RuleError, Sentence, expected, shown
from clearhead.words import table
from clearhead.words.errors import in_chinese
from terminal import call

SOURCES = Path(clearhead.__file__).parent
HAN = re.compile(r"[\u4e00-\u9fff]")
FIELD = re.compile(r"(?<!\{)\{(\w+)(?:![rsa])?(?::[^{}]*)?\}(?!\})")
REACHED = """
cli.py arguments.py lessons.py report/*.py explaining/*.py models/*.py textbook/*.py diagnosing/*.py
changing/edits_text.py changing/edits.py changing/places.py changing/applying.py core/files.py core/array_files.py
core/room.py core/problem.py core/rules.py core/rule_values.py core/spans.py core/arrays.py core/reference.py
layers/saved.py view/long.py view/names.py view/page.py view/server.py
"""  # whose errors a command that speaks Chinese can print
NAMES = """
batch bias biased bool boost by cap capped causal clearhead concat context convention cut dict dtype exact explain
fast float gelu generate heads inf int keys learn length list logit mask masked model models nan ndarray numbers off on
output pickle queries relu reshape rhymes rotary safetensors sat scale scaled scores shape share silu sinks softcap
softmax source spans stage str tanh tempered theirs token tokens torch trace transformers value view weights widths
window zip
"""  # words that Chinese text keeps: arrays, rules, options, functions and packages


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sentences(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call that are sentences of an error: what is wrong, and what to type instead."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "expected":
        return call.args[2:3]
    if name == "Sentence":
        return call.args[:1]
    same_kind = isinstance(call.func, ast.Call) and getattr(call.func.func, "id", "") == "type"
    return call.args[:2] if same_kind or (name in clearhead.errors.__dict__ and name.endswith("Error")) else []


def templates(node: ast.expr, module: ast.Module) -> Iterator[str]:
    """The templates that an expression can be; none where it is a sentence that was made elsewhere."""
    assert not isinstance(node, ast.JoinedStr), f"a template and its values, not {ast.unparse(node)}"
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from templates(node.body, module)
        yield from templates(node.orelse, module)
    elif isinstance(node, ast.BinOp):
        rights = list(templates(node.right, module))
        yield from (left + right for left in templates(node.left, module) for right in rights)
    elif isinstance(node, ast.Name):
        named = (x for x in ast.walk(module) if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == node.id)
        for value in (x.value for x in named if isinstance(x.value, (ast.Constant, ast.IfExp))):
            yield from (text for text in templates(value, module) if isinstance(text, str) and " " in text)


def is_code(text: str) -> bool:
    """Is this what to type, and no sentence?"""
    bare = re.sub(r"""'[^']*'|"[^"]*"|\([^()]*\)""", "", text)
    return not re.search(r"[a-z]+,? [a-z]+ [a-z]+", bare) and (not bare.endswith((".", "?")) or " " not in bare)


def test_every_template_that_a_command_reaches_has_its_chinese():
    said = set()
    for path in (path for part in ("errors.py", *REACHED.split()) for path in SOURCES.glob(part)):
        calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        said |= {text for call in calls for node in sentences(call) for text in templates(node, tree_of(path))}
    assert len(said) > 300
    chinese = table("errors") | table("python")
    assert [text for text in sorted(said) if text not in chinese and not is_code(text)] == []


def test_a_template_names_the_values_that_stand_beside_it():
    for path in (path for part in REACHED.split() for path in SOURCES.glob(part)):
        for node in ast.walk(tree_of(path)):
            names = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
            if names and None not in names:
                texts = {text for each in sentences(node) for text in templates(each, ast.Module([], []))}
                assert {name for text in texts for name in FIELD.findall(text)} <= names, ast.unparse(node)


def test_every_entry_is_a_template_and_keeps_its_values():
    nodes = (node for path in SOURCES.rglob("*.py") for node in ast.walk(tree_of(path)))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert [key for key in table("errors") if key not in constants] == []
    for english, entry in (table("errors") | table("python")).items():
        fields = [sorted({match[0] for match in FIELD.finditer(text)}) for text in (english, entry["zh"])]
        assert fields[0] == fields[1], english


def test_a_sentence_and_those_in_it_are_found_by_their_templates():
    error = RuleError(expected("scale", "x", "a finite number"), "leave {name} out for its default.", name="scale")
    assert str(error) == "scale is 'x': expected a finite number.\n\nhint: leave scale out for its default."
    assert in_chinese(error.what) == "scale 为 'x'：应为有限的数。"
    assert in_chinese(error.hint) == "去掉 scale 即使用默认值。"
    array = Sentence("{name} is {value}: expected {wanted}.", name="x", value=shown(np.ones(2)), wanted="f{4}")
    assert in_chinese(array) == "x 为形状为 (2,) 的 ndarray：应为 f{4}。"
    for text in ("", "x", "a: b: c: the moon is made of cheese.", "{name} {", ": " * 200):
        assert in_chinese(text) == text == Sentence(text)


@pytest.mark.parametrize("text", ["[1", '{"a" 1}', '{"a": 1} 2', '{"a', '{"a": "\t"}', '{"a": "\\x"}', "{1", '{"a": }'])
def test_what_json_says_is_in_chinese(text):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        json.loads(text)
    assert not english(in_chinese(str(error.value))), error.value


def english(text: str) -> list[str]:
    """The English words in a Chinese text; names, numbers, quotations and code are none."""
    code = (r"`[^`]*`", r"'(?:\\.|[^'\\])*'", r'"(?:\\.|[^"\\])*"', r"--[a-z-]+", r"\w+\([^()]*\)", r"\([^()]*\)")
    text = re.sub("(?<=可用：).*|(?<=词元为：).*", "", text)
    for pattern in (*code, r"[\x21-\x7e]*[_.=()\[\]/+@><0-9][\x21-\x7e]*"):
        text = re.sub(pattern, " ", text)
    return [word for word in re.findall(r"[A-Za-z]{2,}", text) if word.islower() and word not in NAMES.split()]


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
        *(shlex.split(each) for each in test_cli.REFUSED if not each.startswith(("bench", "--lang"))),
        *(["shapes", "nn=3"], ["shapes", "n=0"], ["shapes", "d_model=3", "h=2"], ["view", "--port", "-1"]),
        *(["trace", "."], ["explain", "a", "--generate", "-1"], ["explain", "a", "--why", "zebra crossing"]),
        *(
            ["explain", "a", "--way", "--windows"],
            ["explain", "--file", "none.txt"],
            ["explain", "a", "--exact", "0.0"],
            ["explain", "a", "--windows"],
        ),
        ["explain", "a", "--json", "/", "--html", "/"],
    ],
)
def test_wrong_arguments_are_refused_in_chinese(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("mary had a little\n", encoding="utf-8")
    check(*arguments)


@pytest.mark.parametrize("command", ["trace", "diagnose"])
def test_wrong_files_are_refused_in_chinese(command, tmp_path):
    module = test_check_file if command == "trace" else test_diagnosis
    basis = {} if command == "trace" else test_diagnosis.WRONG
    contents = [
        *(c[0] for c in cases(module.test_files_with_wrong_contents_are_refused)),
        *(c[0] for c in cases(test_cli.test_a_file_that_cannot_be_computed_is_a_one_line_error)),
        *(c[0] for c in cases(test_malformed_files.test_json_with_false_claims_is_refused) if command in "trace"),
    ]
    for number, content in enumerate(contents):
        place = tmp_path / f"{number}.json"
        data = json.dumps(basis | content) if isinstance(content, dict) else content
        place.write_bytes(data if isinstance(data, bytes) else data.encode())
        check(command, place)
    for number, (data, _) in enumerate(cases(test_malformed_files.test_npz_with_false_claims_is_refused)):
        square = test_malformed_files.header((2, 2)) + bytes(32)
        check(command, test_malformed_files.packed(tmp_path / f"{number}.npz", q=data, k=square, v=square))
    for number, (data, _) in enumerate(cases(test_malformed_files.test_safetensors_with_false_claims_are_refused)):
        place = tmp_path / f"{number}.safetensors"
        place.write_bytes(data)
        check(command, place)
    (tmp_path / "case.pkl").touch()
    check(command, tmp_path / "case.pkl")


@pytest.mark.parametrize("option", ["--batch", "--head", "--query"])
def test_a_place_that_a_file_has_not_is_refused_in_chinese(option):
    check("trace", SOURCES.parent.parent / "examples" / "weights.json", option, 4)


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
