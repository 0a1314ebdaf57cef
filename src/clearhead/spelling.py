"""Spells a token with all its characters visible, alike in terminal, notebooks, pictures and page (numbers.js)."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from unicodedata import east_asian_width

_SPACES = re.compile("^ +| +$|  +")
_MANY = re.compile(" {4,}(?![ 0-9])")  # written as a count; a digit after it would read as part of the count
_MARKS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_NUL = re.compile("\0")
_ALIKE = re.compile("[\0␣⏎⇥␍]|(?<= )×(?=[0-9])|\\A∅\\Z")  # characters that mean something else here
_WIDE = "\u2e80-\uffef"  # Chinese characters and punctuation
_UNIT = re.compile(f"[（“]*(?:[^\\s“”{_WIDE}]{{1,40}}|[{_WIDE}])[，。；：、）”]*\\s*")
_BACKSLASHES = re.compile(r"\\+(?=\0|[xuU][0-9a-f])")  # before an escape, or what looks like one


def spelled(token: str) -> str:
    r"""Spell a token on one line, unlike any other: spaces are marked, invisible characters escaped, ∅ is "".

    >>> [spelled(token) for token in (" wall", "  ", "        return", "a b", "\n", "\t", "\u200b", "")]
    ['␣wall', '␣␣', '␣×8return', 'a b', '⏎', '⇥', '\\u200b', '∅']
    >>> [spelled(token) for token in ("␣", r"\t", r"\u200b")]
    ['\\u2423', '\\t', '\\\\u200b']
    """
    escaped = _BACKSLASHES.sub(r"\g<0>\g<0>", _escaped(token, _ALIKE))
    counted = _MANY.sub(lambda run: f"␣×{len(run[0])}", escaped)
    return _SPACES.sub(lambda run: "␣" * len(run[0]), counted).replace("\0", "\\") or "∅"


def bare(token: str) -> str:
    """Spell a token as the name of a row or column: without its outer spaces, unless it has nothing else.

    >>> [bare(token) for token in (" wall", "  ")]
    ['wall', '␣␣']
    """
    return spelled(token.strip(" ") or token)


def visible(text: str) -> str:
    """Escape whatever would move the cursor or is invisible; newlines become ⏎."""
    return _escaped(text, _NUL).replace("\0", "\\")


def cells(text: str) -> Iterator[int]:
    """Yield how many terminal columns each character takes."""
    return (2 if east_asian_width(character) in "WF" else 1 for character in text)


def cut(text: str, width: int) -> str:
    """Cut a text to `width` terminal columns, with … for the rest.

    >>> cut("international", 6), cut("词元词元", 6)
    ('inter…', '词元…')
    """
    used = list(accumulate(cells(text)))
    return text if not used or used[-1] <= width else f"{text[: bisect_right(used, width - 1)]}…"


def breaks(text: str, width: int) -> list[int]:
    """Find where the lines after the first begin, in `width` columns: not within a name or before punctuation.

    >>> breaks("权重为 0.9224，总和为 1", 10)
    [4, 12]
    """
    places, used = list[int](), 0
    for unit in _UNIT.finditer(text):
        if used and used + sum(cells(unit[0].rstrip())) > width:
            places.append(unit.start())
            used = 0
        used += sum(cells(unit[0]))
    return places


def _escaped(text: str, alike: re.Pattern[str]) -> str:
    """Escape characters, with a NUL in place of each escape's backslash."""
    text = alike.sub(lambda match: _code(match[0]), text)
    kept = (c == "\0" or (c.isprintable() and not _BLANK.match(c)) for c in text)
    return "".join(_MARKS.get(c) or (c if keep else _code(c)) for c, keep in zip(text, kept, strict=True))


def _code(character: str) -> str:
    return f"\0{character.encode('unicode_escape').decode()[1:]}"
