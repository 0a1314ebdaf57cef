"""Tokens as pieces of a text: each token's own text, and the words and sentences that they belong to."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from unicodedata import category, name

import numpy as np

from clearhead.errors import DtypeError

_UNREADABLE = "\ufffd"  # what decoders write for a part of a character
_APART = ("CJK", "HIRAGANA", "KATAKANA", "THAI")  # written without spaces
SENTENCE_END = re.compile(
    r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*|\n\s*\n\s*"
)  # of a sentence, and the gap behind it
_GAP = re.compile(r"\n\s*\n\s*")  # between paragraphs


def pieces_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Each token's own text, so that together they are the text: with the spaces that decoding a token alone drops.

    A token that holds a part of a character has "", and the last one of these has the character. O(tokens).
    """
    pieces: list[str] = []
    start = read = 0  # the text of ids[start:read] is known, and what follows is decoded behind it
    for stop in range(1, len(ids) + 1):
        before, now = decode(list(ids[start:read])), decode(list(ids[start:stop]))
        if now.endswith(_UNREADABLE) and stop < len(ids) and stop - read < 4:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        start, read = read, stop
    return pieces


def words(pieces: Sequence[str]) -> list[int]:
    r"""The number of each token's word. A token goes on with a word whose letters, digits or apostrophe it follows.

    Every other token begins a word: marks and line breaks are words too, as is each token of a script that has no
    spaces. The page divides a text so as well (page/src/long/units.js).

    >>> words(["He", " doesn", "'t", " know", ",", "\n", "我", "们"])
    [0, 1, 1, 2, 3, 4, 5, 6]
    """
    numbers: list[int] = []
    number, before, parts = -1, "", 0
    for piece in pieces:
        if not piece:  # a part of the character that a later token has
            parts += 1
            continue
        letters = bool(before) and all(category(x)[0] in "LMN" or x in "'’" for x in (before[-1], piece[0]))
        number += not (letters and not name(piece[0], "").startswith(_APART))
        numbers += [number] * (parts + 1)
        before, parts = piece, 0
    return numbers + [max(number, 0)] * parts


def sentences(pieces: Sequence[str]) -> list[int]:
    r"""The number of each token's sentence.

    A sentence ends with . ! ? … before white space, with 。！？, and at an empty line; after "Mr." as well. A token
    belongs to the sentence in which its first letter or mark stands.

    >>> sentences(["Who", "?", " He", " said", " 3", ".", "5", ".", "\n", "Yes"])
    [0, 0, 1, 1, 1, 1, 1, 1, 1, 2]
    """
    return _numbered(pieces, SENTENCE_END)


def paragraphs(pieces: Sequence[str]) -> list[int]:
    r"""The number of each token's paragraph; an empty line ends one.

    >>> paragraphs(["One", "\n", "two", "\n\n", "Three"])
    [0, 0, 0, 0, 1]
    """
    return _numbered(pieces, _GAP)


def _numbered(pieces: Sequence[str], end: re.Pattern[str]) -> list[int]:
    """The number of the part, each of which ends so, in which each token's first letter or mark stands."""
    ends = [match.end() for match in end.finditer("".join(pieces))]
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    gaps = [len(piece) - len(piece.lstrip()) if piece.strip() else 0 for piece in pieces]
    number = np.searchsorted(ends, starts + gaps, side="right")
    numbered: list[int] = np.unique(number, return_inverse=True)[1].tolist()
    return numbered


DIVISIONS: dict[str, Callable[[Sequence[str]], list[int]]] = {
    "words": words,
    "sentences": sentences,
    "paragraphs": paragraphs,
}


def check_tokenizer(tokenizer: Any) -> None:
    """Raise DtypeError for something that makes no text of ids; None is no tokenizer."""
    decodes = callable(getattr(tokenizer, "decode", None)) and not isinstance(tokenizer, (bytes, bytearray))
    if tokenizer is not None and not decodes:
        raise DtypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected something with decode(list of ids).",
            "tokenizer=transformers.AutoTokenizer.from_pretrained(…)",
        )
