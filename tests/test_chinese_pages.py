"""Each Chinese page of docs has the code, the numbers and the tables of the English page, and links that lead to files.

The site's first page says other things in each language: of it only the links are looked at. Lessons count in words.
"""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
CHINESE = DOCS / "zh"
ALL = sorted(path.relative_to(CHINESE).as_posix() for path in CHINESE.rglob("*.md"))
NAMES = [name for name in ALL if (DOCS / name).exists() and name != "index.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)]*)\)")
COMMENT = re.compile(r"(^|\s+)# (?!doctest).*|(?<=    )\"\"\".*?\"\"\"$", re.MULTILINE)  # one-line docstrings too
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)  # for the tests: set-ups and reasons
FILTER = re.compile(r" \| (head|tail|grep|sed) .*")
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
DECIMAL = re.compile(r"\d+\.\d+")


def both(name):
    """A page in English and in Chinese, without its hidden comments."""
    return [HIDDEN.sub("", (folder / name).read_text(encoding="utf-8")) for folder in (DOCS, CHINESE)]


def comparable(blocks, others):
    """Blocks without what may differ from those of the other language."""
    for (kind, block), (_, other) in zip(blocks, others, strict=True):
        if kind == "console" and "--lang zh" in block + other:
            lines = block.replace(" --lang zh", "").splitlines()  # a filter picks other lines of a Chinese output
            yield kind, [FILTER.sub("", line) for line in lines if line.startswith("$ ")]
        elif kind:
            yield kind, COMMENT.sub("", block).replace(" --lang zh", "")
        else:  # a drawing or a formula, with words of the page's language
            yield kind, NUMBER.findall(block)


def as_english(text):
    """Chinese counts in ten thousands: 200 万 is 2 million."""
    return re.sub(r"(\d+)00 万", r"\1 million", text)


def numbers(text, form=NUMBER):
    """Every number outside code blocks and addresses; sorted, since the two languages order them differently."""
    return sorted(form.findall(as_english(LINK.sub("]", FENCE.sub("", text)))))


def anchors(page):
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def cells(text):
    """The number of cells of each row of each table."""
    return [line.count(" |") for line in FENCE.sub("", text).splitlines() if line.startswith("| ")]


def test_the_pages_are_found():
    assert len(NAMES) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_a_chinese_page_has_the_code_of_the_english_page(name):
    english, chinese = map(FENCE.findall, both(name))
    assert [kind for kind, _ in chinese] == [kind for kind, _ in english]
    assert list(comparable(chinese, english)) == list(comparable(english, chinese))


@pytest.mark.parametrize("name", NAMES)
def test_a_chinese_page_has_the_numbers_of_the_english_page(name):
    english, chinese = (numbers(text, DECIMAL if name.startswith("lessons/") else NUMBER) for text in both(name))
    assert chinese == english


@pytest.mark.parametrize("name", NAMES)
def test_a_chinese_page_has_the_sections_and_tables_of_the_english_page(name):
    english, chinese = both(name)
    assert cells(chinese) == cells(english)
    levels = [re.findall(r"^#+(?= )", FENCE.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert levels[1] == levels[0]


@pytest.mark.parametrize("name", ALL)
def test_the_links_of_a_chinese_page_lead_to_files_and_to_chinese_pages_where_they_exist(name):
    page = CHINESE / name
    for address in LINK.findall(page.read_text(encoding="utf-8")):
        if address.startswith("http"):
            continue
        file, _, anchor = address.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), address
        assert not anchor or anchor in anchors(target), address
        if target.suffix == ".md" and target.is_relative_to(DOCS) and not target.is_relative_to(CHINESE):
            other = CHINESE / target.relative_to(DOCS)
            assert other == page or not other.exists(), f"{address} is there in Chinese"
