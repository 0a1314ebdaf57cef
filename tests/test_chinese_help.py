"""The help of every command in Chinese: all of it, in 80 columns, with the same commands as in English."""

import argparse
import re
from collections.abc import Iterator

import pytest

from clearhead.arguments import broken, columns, command_line, of_locale

HAN = re.compile(r"[\u4e00-\u9fff]")


def parsers(language: str) -> dict[str, argparse.ArgumentParser]:
    parser = command_line(language)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


def sentences_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.description or ""
    yield parser.epilog or ""
    yield from (action.help for action in parser._actions if action.help not in (None, argparse.SUPPRESS))


@pytest.mark.parametrize("command", list(parsers("en")))
def test_every_sentence_of_the_help_is_in_chinese(command):
    assert all(HAN.search(sentence) for sentence in sentences_of(parsers("zh")[command]) if "n=12" not in sentence[:4])
    assert not any(HAN.search(sentence) for sentence in sentences_of(parsers("en")[command]))


@pytest.mark.parametrize("command", list(parsers("en")))
def test_both_languages_show_the_same_commands_and_codes(command):
    english, chinese = (parsers(language)[command].format_help() for language in ("en", "zh"))
    for form in (r"^  (?:clearhead|pip|python) .*$", r"--[a-z-]+", r'^  ["{].*$'):
        lines = [sorted(set(re.findall(form, text, re.MULTILINE))) for text in (english, chinese)]
        assert [re.sub(r"  +.*", "", line) for line in lines[0]] == [re.sub(r"  +.*", "", line) for line in lines[1]]
    assert "usage:" not in chinese
    assert chinese.count("用法") == 1
    assert "options:" not in chinese


@pytest.mark.parametrize("command", list(parsers("en")))
def test_chinese_help_fits_into_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(columns, parsers("zh")[command].format_help().splitlines())) <= 80


def test_a_line_is_not_broken_before_punctuation_or_within_a_name():
    lines = broken("默认：最可能的 --against，TOKEN", 16)
    assert all(columns(line) <= 16 for line in lines)
    assert "".join(lines).replace(" ", "") == "默认：最可能的--against，TOKEN"
    assert not any(line.startswith(("，", "：")) for line in lines)
    assert any("--against" in line for line in lines)


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
