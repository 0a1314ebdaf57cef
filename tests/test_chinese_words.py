"""Sentences are there in both languages, Chinese calls a thing by one name; printed numbers are right."""

import argparse
import ast
import re
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from clearhead.arguments import columns, command_line
from clearhead.digits import fixed, percent, significant
from clearhead.report.console import folded
from clearhead.spelling import breaks
from clearhead.textbook.trace import TokenTrace
from clearhead.watching.effects import HEADS, Head, Lines
from clearhead.words import REPORTS, of_locale, table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs/zh").rglob("*.md"))]
SOURCES = [
    path
    for folder in ("words", "diagnosing")
    for path in sorted((ROOT / "src/clearhead" / folder).rglob("*"))
    if path.suffix in (".py", ".toml")
]
ONE_NAME = {"你": "您", "计分": "得分", "集束搜索": "束搜索", "屏蔽": "遮蔽", "文件夹": "目录"}
HAN = "[\u4e00-\u9fff]"
SPACING = re.compile(
    rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9%`]{HAN}"  # Latin and digits stand apart from Chinese
    rf"|{HAN}[,;:!?](?= |{HAN})"  # punctuation behind Chinese is full width
    rf"| [，。；：、）]|[，。；：、（] |\d %"  # and brings its own space
)
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|<img .*?>", re.DOTALL | re.MULTILINE)
WITHIN = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")


def text_of(path):
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_thing_has_one_name(path):
    text = text_of(path)
    assert [f"{wrong}: write {right}" for wrong, right in ONE_NAME.items() if wrong in text] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_latin_words_and_punctuation_are_set_off(path):
    prose = WITHIN.sub(lambda match: "`x`" if match[0][0] == "`" else "]", NOT_PROSE.sub("", text_of(path)))
    assert [line for line in prose.splitlines() if SPACING.search(line)] == []


@pytest.mark.parametrize("subject", [*REPORTS, "diagnose", "help", "page"])
def test_a_sentence_has_both_languages_with_the_same_values(subject):
    for key, sentence in table(subject).items():
        assert set(sentence) == {"en", "zh"}, key
        assert subject != "help" or [bool(re.search(HAN, text)) for text in sentence.values()] == [False, True], key
        names = [set(re.findall(r"(?<!\{)\{(\w+)", text)) for text in sentence.values()]
        assert names[0] == names[1] or subject in ("help", "diagnose"), key  # those count rows in words, or are code


def test_every_key_of_the_reports_is_used_and_in_one_file():
    """A key is a text of the source, or fits an f-string of it, or is that of tokens as columns."""
    keys = Counter(key for subject in REPORTS for key in table(subject))
    assert [key for key, many in keys.items() if many > 1] == []
    texts, patterns = set(), []
    for path in (ROOT / "src/clearhead").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [x.value if isinstance(x, ast.Constant) else "" for x in node.values]
                if re.search(r"[a-z]+ | [a-z]+", "".join(parts)):
                    patterns.append("".join(re.escape(part) if part else ".+" for part in parts))
    known = re.compile("|".join(patterns))
    assert [key for key in keys if key.removesuffix(" columns") not in texts and not known.fullmatch(key)] == []


def parsers(language: str) -> dict[str, argparse.ArgumentParser]:
    parser = command_line(language)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


@pytest.mark.parametrize("command", list(parsers("en")))
def test_both_languages_show_the_same_commands_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    english, chinese = (parsers(language)[command].format_help() for language in ("en", "zh"))
    for form in (r"^  (?:clearhead|pip|python) .*$", r"--[a-z-]+", r'^  ["{].*$'):
        lines = [sorted(set(re.findall(form, text, re.MULTILINE))) for text in (english, chinese)]
        assert [re.sub(r"  +.*", "", line) for line in lines[0]] == [re.sub(r"  +.*", "", line) for line in lines[1]]
    assert english.startswith(f"usage: clearhead {command or 'COMMAND'} [")
    assert "usage:" not in chinese
    assert chinese.count("用法") == 1
    assert "options:" not in chinese
    assert max(map(columns, [*english.splitlines(), *chinese.splitlines()])) <= 80
    assert command not in ("", "view") or 'pip install "clearhead[view]"' in " ".join(english.split())


def test_a_line_is_not_broken_before_punctuation_or_in_a_name():
    text = "默认：最可能的 --against，TOKEN"
    lines = [text[start:end].rstrip() for start, end in pairwise([0, *breaks(text, 16), len(text)])]
    assert all(columns(line) <= 16 for line in lines)
    assert "".join(lines).replace(" ", "") == "默认：最可能的--against，TOKEN"
    assert not any(line.startswith(("，", "：")) for line in lines)
    assert any("--against" in line for line in lines)


def test_a_chinese_line_of_a_report_keeps_its_numbers_whole():
    text = "值的凸组合，所以每个数都在其间：0≤0.9224≤1.0000，2.0000≤2.1553≤4.0000，总和为 1"
    parts = folded(Console(width=40), Text(f"  {text}"))
    assert all(columns(part.plain) <= 40 for part in parts)
    assert "".join(part.plain.strip() for part in parts).replace(" ", "") == text.replace(" ", "")
    assert {"0≤0.9224≤1.0000", "2.0000≤2.1553≤4.0000"} <= set(re.findall(r"[0-9.≤]{9,}", " ".join(map(str, parts))))


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh:en"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8", "LANGUAGE": "zh"}, "en"),
        ({"LANG": "", "LC_ALL": ""}, "en"),
    ],
)
def test_the_locale_decides_as_gettext_reads_it(environment, language):
    assert of_locale(environment) == language


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(1e-9, 1) | st.floats(-1e5, 1e5)


def assert_says(text: str, number: float) -> None:
    read = Decimal(text)
    unit = Decimal(1).scaleb(int(read.as_tuple().exponent))
    assert abs(read - Decimal(number)) <= unit / 2, (text, number)
    assert (read == 0) == (number == 0), (text, number)
    assert text == "0" or number != 0


@given(NUMBERS, st.integers(1, 17))
def test_significant_digits_read_back_as_the_number(number, digits):
    text = significant(number, digits)
    assert_says(text, number)
    assert len(Decimal(text).as_tuple().digits) <= digits


@given(NUMBERS, st.integers(0, 6), st.integers(6, 12))
def test_digits_of_a_column_read_back_as_the_number(number, decimals, width):
    assert_says(fixed(number, decimals, width), number)
    share = min(abs(number), 1.0)
    assert_says(percent(share).removesuffix("%"), 100 * share)


@given(NUMBERS, st.integers(0, 4))
def test_eight_characters_hold_every_number(number, decimals):
    text = fixed(number, decimals, 8)
    assert len(text) <= 8
    digits = Decimal(text).as_tuple().digits
    assert number == 0 or "e" in text or abs(number) >= 1 or len(digits) >= 2


def test_nonfinite_numbers_are_printed_by_name():
    for way in (significant, lambda x: fixed(x, 2, 8)):
        assert [way(x) for x in (inf, -inf, nan, -0.0)] == ["∞", "-∞", "NaN", "0"]


@given(st.floats(1e-12, 1e-3))
def test_reports_of_heads_and_tokens_print_small_weights(weight):
    said = str(Lines([Head("0", 0, weight, weight, weight, 1.0, weight)], "summary table", HEADS))
    sink, previous, local, _, entropy = said.splitlines()[1].split()[2:]
    for text in (sink, previous, local, entropy):
        assert_says(text, weight)
    row = np.array([1 - weight, weight])
    token = TokenTrace(0, row, row, row, row[:, None], np.array([weight]), 0.0, 1.0, row, row)
    assert_says(token.written_out().split(" + ")[1].split("·")[0], weight)
