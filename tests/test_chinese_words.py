"""Chinese text calls one thing by one name, and sets Latin words and punctuation off as the house does."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs/zh").rglob("*.md"))]
SOURCES = [
    path for folder in ("words", "diagnosing") for path in sorted((ROOT / "src/clearhead" / folder).rglob("*.py"))
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
    return WITHIN.sub(lambda found: "`x`" if found[0][0] == "`" else "]", NOT_PROSE.sub("", text_of(path)))


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
