"""Every block of code in the documents runs here or elsewhere, or says why not.

Blocks with `>>>` are run by pytest as doctests, console blocks by docs/transcripts.py, the README's `sh` blocks by the
gate. Python without prompts is run here, page by page, in an empty folder. A comment just above a block may say
`not run: …`, or `set-up`, followed by code that a reader does not need to see.
"""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "frame" not in path.relative_to(ROOT / "docs").parts)
BLOCK = re.compile(r"(?:<!-- ((?:(?!-->).)*?)\s*-->\n)?^( *)```(\w+)\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)
RUN = ("python", "sh", "bash", "pycon", "console")  # other blocks are no code: text, json, html
SLOW = {"looking", "transformers", "pytorch"}  # they need PyTorch or Transformers


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
    return pytest.param(page, id=page.relative_to(ROOT / "docs").as_posix(), marks=marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
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
