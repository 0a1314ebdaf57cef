"""The generated pages in Chinese: every piece of their English prose by its translation in docs/zh/reference/*.po.

A piece is a paragraph, what a parameter means, a cell of a table, or a title, on one line and as the docstring has it.
Code, signatures and examples are taken from the English page. A piece that changes in English no longer has a
translation, so the site is not built before somebody has looked at the Chinese.
"""

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from unicodedata import east_asian_width

from babel.messages.pofile import read_po

from frame.docstrings import inline

CATALOGUES = Path(__file__).parent.parent / "zh/reference"
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?:\{[\w:]+\})?`[^`]*`|\[[^\]]*\]\([^)]*\)")  # or a link
KINDS = {"|": "row", "#": "title", "- ": "item", ": ": "meaning", "::": "kept", "<!--": "kept"}
WIDE = 5 / 3  # how wide a Chinese character is beside a letter of a browser's monospaced font
Say = Callable[..., str]


def catalogue() -> dict[str, str]:
    """English pieces and their Chinese. ValueError for a piece that is translated twice, or not at all."""
    known: dict[str, str] = {}
    for path in sorted(CATALOGUES.glob("*.po")):
        with path.open("rb") as file:
            for each in read_po(file, abort_invalid=True):
                if not each.id:
                    continue
                if each.id in known or each.fuzzy or not each.string:
                    raise ValueError(f"{path.name}: {each.id!r} is translated twice, or not at all")
                known[str(each.id)] = str(each.string)
    return known


def pages(english: dict[str, str]) -> dict[str, str]:
    """The pages in Chinese. ValueError lists English without Chinese, and Chinese of what no page says any more."""
    known = catalogue()
    missing: dict[str, None] = {}
    left = dict.fromkeys(known)

    def say(piece: str, *, needed: bool = True) -> str:
        left.pop(piece, None)
        if needed and piece not in known:
            missing[piece] = None
        return known.get(piece, piece)

    made = {name: page(text, say) for name, text in english.items()}
    wrong = [f"docs/zh/reference: no Chinese for {piece!r}" for piece in missing]
    wrong += [f"docs/zh/reference: no page says any more {piece!r}" for piece in left]
    if wrong:
        raise ValueError("\n".join(wrong))
    return made


def page(text: str, say: Say) -> str:
    """A page with every piece as `say` says it; a title or a column of plain text may have no translation."""
    parts = FENCE.split(text)
    parts[::2] = [_prose(part, say) for part in parts[::2]]
    parts[1::2] = [_columns(part, say) if part.startswith("```text\n") else part for part in parts[1::2]]
    return "".join(parts)


def _prose(text: str, say: Say) -> str:
    made: list[str] = []
    for kind, some in groupby(text.split("\n"), key=_kind):
        if kind == "paragraph":
            made.append(_piece(" ".join(some), say))
        else:
            made += [_line(kind, line, say) for line in some]
    return "\n".join(made)


def _kind(line: str) -> str:
    if not line.strip() or re.match(r":\w+:", line):
        return "kept"
    return next((kind for sign, kind in KINDS.items() if line.startswith(sign)), "paragraph")


def _line(kind: str, line: str, say: Say) -> str:
    if kind == "row":
        return "|".join(f" {_piece(cell.strip(), say)} " if cell else "" for cell in re.split(r"(?<!\\)\|", line))
    if kind == "title":
        signs, _, words = line.partition(" ")
        return f"{signs} {say(words, needed=False)}"
    if kind == "meaning":
        return f": {_piece(line[2:], say)}"
    if kind == "item" and (result := re.fullmatch(r"- \[(.*?)\]\((.*?)\)(?:: (.*))?", line)):
        words, address, about = result.groups()
        return f"- [{say(words, needed=False)}]({address})" + (f"：{_piece(about, say)}" if about else "")
    return line


def _piece(text: str, say: Say) -> str:
    """A piece, unless it is code and signs only."""
    plain = re.sub(r"\\([\\*_<\[\]|>#])", r"\1", text)
    return inline(say(plain)) if re.search(r"[A-Za-z]", CODE.sub("", plain)) else text


def _columns(fence: str, say: Say) -> str:
    """A table of plain text: each column that is prose, as wide as it was."""
    start, *lines, end = fence.split("\n")
    for place, line in enumerate(lines):
        made = ""
        for column in re.findall(r" *\S+(?: \S+)* *", line):
            words = say(column.strip(), needed=False)
            wide = sum(WIDE if east_asian_width(sign) in "WF" else 1 for sign in words)
            made += words + " " * max(2, round(len(column) - wide))
        lines[place] = made.rstrip()
    return "\n".join((start, *lines, end))
