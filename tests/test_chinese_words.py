"""Every sentence is there in both languages; Chinese calls one thing by one name, and sets Latin words off."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from clearhead.words import REPORTS, table

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


def prose(path):
    """A page without blocks of code, hidden comments and addresses; what stands in `…` is x."""
    return WITHIN.sub(lambda match: "`x`" if match[0][0] == "`" else "]", NOT_PROSE.sub("", text_of(path)))


def test_spacing_is_found():
    for wrong in ("用NumPy算", "第3个", "对了,再来", "一个 ，两个", "占 6 %", "用`x`算"):
        assert SPACING.search(wrong), wrong
    for right in ("用 NumPy 算", "第 3 个，对了", "`x` 表示", "（heads 2）", "占 6%"):
        assert not SPACING.search(right), right


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_thing_has_one_name(path):
    text = text_of(path)
    assert [f"{wrong}: write {right}" for wrong, right in ONE_NAME.items() if wrong in text] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_latin_words_and_punctuation_are_set_off(path):
    assert [line for line in prose(path).splitlines() if SPACING.search(line)] == []


@pytest.mark.parametrize("subject", [*REPORTS, "diagnose", "help", "page"])
def test_a_sentence_has_both_languages_with_the_same_values(subject):
    for key, sentence in table(subject).items():
        assert set(sentence) == {"en", "zh"}, key
        names = [set(re.findall(r"(?<!\{)\{(\w+)", text)) for text in sentence.values()]
        assert names[0] == names[1] or subject in ("help", "diagnose"), key  # those count rows in words, or are code


def test_every_key_of_the_reports_is_asked_for_and_stands_in_one_file():
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
