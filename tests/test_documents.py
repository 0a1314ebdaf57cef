"""The documents: links lead to files, Chinese pages have what the English have, and code runs or says why not.

Both READMEs are such a pair. The site's first page says other things in each language: of it only the links are looked
at. Lessons count in words. Blocks with `>>>` are run by pytest as doctests, console blocks by docs/transcripts.py, the
README's `sh` blocks by the gate. Python without prompts is run here, page by page, in an empty folder. A comment just
above a block may say `not run: …`, or `set-up`, followed by code that a reader does not need to see.
"""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS, CHINESE = ROOT / "docs", ROOT / "docs/zh"
ALL = sorted(path.relative_to(CHINESE).as_posix() for path in CHINESE.rglob("*.md"))
NAMES = ["README", *(name for name in ALL if (DOCS / name).exists() and name != "index.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)]*)\)|<img src=\"([^\"]*)\"[^>]*>")
COMMENT = re.compile(r"(^|\s+)# (?!doctest).*|(?<=    )\"\"\".*?\"\"\"$", re.MULTILINE)  # one-line docstrings too
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)  # for the tests: set-ups and reasons
FILTER = re.compile(r" \| (head|tail|grep|sed) .*")
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
DECIMAL = re.compile(r"\d+\.\d+")


def both(name):
    """A page in English and in Chinese, without its hidden comments."""
    pair = (DOCS / name, CHINESE / name) if name != "README" else (ROOT / "README.md", ROOT / "README.zh-CN.md")
    return [HIDDEN.sub("", path.read_text(encoding="utf-8")) for path in pair]


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
    assert len(NAMES) > 10
    english = both("README")[0]
    assert (len(FENCE.findall(english)) > 5, len(numbers(english)) > 30) == (True, True)


@pytest.mark.parametrize("name", NAMES)
def test_a_chinese_page_has_the_code_numbers_sections_and_tables_of_the_english(name):
    english, chinese = map(FENCE.findall, both(name))
    assert [kind for kind, _ in chinese] == [kind for kind, _ in english]
    assert list(comparable(chinese, english)) == list(comparable(english, chinese))
    english, chinese = both(name)
    form = DECIMAL if name.startswith("lessons/") else NUMBER
    assert numbers(chinese, form) == numbers(english, form)
    assert cells(chinese) == cells(english)
    levels = [re.findall(r"^#+(?= )", FENCE.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert levels[1] == levels[0]


def test_both_readmes_have_the_same_files_in_their_tree():
    trees = [next(block for kind, block in FENCE.findall(text) if not kind) for text in both("README")]
    places = [re.findall(r"[\w./]+(?:/|\.py)(?=\s)", tree) for tree in trees]
    assert places[0] == places[1]
    for place in places[0]:
        assert (ROOT / place).exists() or (ROOT / "src/clearhead" / place).exists(), place


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_in_chinese_where_there_are_any(page):
    for address in map("".join, LINK.findall(page.read_text(encoding="utf-8"))):
        if address.startswith("http"):
            continue
        file, _, anchor = address.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), address
        assert not anchor or anchor in anchors(target), address
        if page.is_relative_to(CHINESE) and target.suffix == ".md" and target.is_relative_to(DOCS):
            other = CHINESE / target.relative_to(DOCS)
            assert target.is_relative_to(CHINESE) or other == page or not other.exists(), f"{address} is in Chinese too"


def test_pages_that_read_files_of_the_checkout_say_so_first():
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if re.search(r"^>>> (from examples|.*training/)", text, re.MULTILINE):
            assert "git clone" in text.split("\n\n")[1], f"{page.name} does not say that it needs a checkout"


def test_the_readme_has_the_two_commands_that_the_gate_runs():
    lines = [line for kind, block in FENCE.findall(both("README")[0]) if kind == "sh" for line in block.splitlines()]
    assert len(lines) == 2
    assert lines[0].startswith("pip install . && ")
    assert lines[1].endswith("&& pytest")


PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"(?:<!-- ((?:(?!-->).)*?)\s*-->\n)?^( *)```(\w+)\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)
RUN = ("python", "sh", "bash", "pycon", "console")  # other blocks are no code: text, json, html
SLOW = {"looking", "pytorch"}  # they need PyTorch or Transformers


class Block(NamedTuple):
    kind: str
    code: str
    note: str  # the comment above it


def blocks(page: Path) -> list[Block]:
    result = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(each[3], each[4], each[1] or "") for each in result if each[3] in RUN]


def plain(block: Block) -> bool:
    """Is it Python that runs here?"""
    return block.kind == "python" and ">>>" not in block.code and not block.note.startswith("not run: ")


def named(page: Path) -> object:
    marks = [pytest.mark.gate] if page.stem in SLOW else []
    return pytest.param(page, id=page.relative_to(DOCS).as_posix(), marks=marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_block_of_code_runs_or_says_why_not(page: Path):
    for kind, code, note in blocks(page):
        if note.startswith("not run: "):
            assert len(note) > len("not run: a reason"), note
        elif kind == "pycon":
            assert ">>> " in code, code
        elif kind == "console":
            assert code.startswith("$ "), code
        else:
            assert kind == "python", f"{page.name}: write <!-- not run: why --> above\n{code}"


@pytest.mark.parametrize("page", [named(page) for page in PAGES if any(map(plain, blocks(page)))])
def test_python_without_prompts_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    here: dict[str, object] = {"__name__": page.stem}
    for block in filter(plain, blocks(page)):
        exec(compile(block.note.removeprefix("set-up"), f"{page.name}, set-up", "exec"), here)
        exec(compile(block.code, page.name, "exec"), here)


def test_a_transcript_may_differ_in_last_digits_only():
    alike = runpy.run_path(str(ROOT / "docs/transcripts.py"))["alike"]
    for old, new in (("a 78.15% 3e-17", "a 78.16% 5e-16"), ("0.99", "1.00")):
        assert alike(old, new)
    for old, new in (
        ("78.15", "78.17"),
        ("3 x", "4 x"),
        ("1.5", "1.50"),
        ("a 1.5", "b 1.5"),
        ("1.5", "1.5 2"),
        ("0", "3e-17"),
    ):
        assert not alike(old, new)
