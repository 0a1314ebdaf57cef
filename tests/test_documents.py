"""Both READMEs have the same code, figures and file tree, and their links lead to existing files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)]*)\)|<img src=\"([^\"]*)\"[^>]*>")


def code(text: str) -> list[tuple[str, str]]:
    """Every block in a language, without comments; the tree of files has no language."""
    return [(kind, re.sub(r" +# .*", "", block)) for kind, block in FENCE.findall(text) if kind]


def figures(text: str) -> list[str]:
    """Every number outside code blocks and addresses; sorted, since the two languages order them differently."""
    words = LINK.sub("]", FENCE.sub("", text))
    return sorted(re.findall(r"\d[\d,.]*(?<=\d)", words))


def test_both_readmes_have_the_same_code():
    assert code(README) == code(CHINESE)
    assert len(code(README)) >= 5


def test_both_readmes_have_the_same_figures():
    assert figures(README) == figures(CHINESE)
    assert len(figures(README)) > 50


def test_both_readmes_have_the_same_files_in_their_tree():
    trees = [next(block for kind, block in FENCE.findall(text) if not kind) for text in (README, CHINESE)]
    places = [re.findall(r"[\w./]+(?:/|\.py)(?=\s)", tree) for tree in trees]
    assert places[0] == places[1]
    for place in places[0]:
        assert (ROOT / place).exists() or (ROOT / "src/clearhead" / place).exists(), place


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_in_the_documents_lead_to_existing_files(page: Path):
    for address in map("".join, LINK.findall(page.read_text(encoding="utf-8"))):
        if not address.startswith(("http", "#")):
            assert (page.parent / address.split("#")[0]).exists(), address


def test_guides_that_read_files_of_the_checkout_say_so_first():
    for page in (ROOT / "docs").rglob("guides/*.md"):
        text = page.read_text(encoding="utf-8")
        if re.search(r"^>>> (from examples|.*training/)", text, re.MULTILINE) and "```" in text:
            first = text.split("\n\n")[1]
            assert "git clone" in first, f"{page.name} does not say that it needs a checkout"


def test_the_readme_has_the_two_commands_that_the_gate_runs():
    lines = [line for kind, block in FENCE.findall(README) if kind == "sh" for line in block.splitlines()]
    assert len(lines) == 2
    assert lines[0].startswith("pip install . && ")
    assert lines[1].endswith("&& pytest")
