"""Tokens as pieces of a text: each token's own text, and the words and sentences that they belong to."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from unicodedata import category, name

import numpy as np

from clearhead.errors import DtypeError

_UNREADABLE = "\ufffd"  # decoders write it for a part of a character
_APART = ("CJK", "HIRAGANA", "KATAKANA", "THAI")  # written without spaces
SENTENCE_END = re.compile(
    r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*|\n\s*\n\s*"
)  # the end of a sentence and the white space after it
_GAP = re.compile(r"\n\s*\n\s*")  # the white space between paragraphs


def pieces_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Decode each token so that the pieces join to the text, with spaces that decoding a single token drops.

    Where several tokens hold one character, the last gets the character and the others "". O(tokens).
    """
    pieces: list[str] = []
    start = read = 0  # the text of ids[start:read] is known; the next tokens are decoded after it
    for stop in range(1, len(ids) + 1):
        before, now = decode(list(ids[start:read])), decode(list(ids[start:stop]))
        if now.endswith(_UNREADABLE) and stop < len(ids) and stop - read < 4:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        start, read = read, stop
    return pieces


def words(pieces: Sequence[str]) -> list[int]:
    r"""The number of each token's word. A token continues a word if letters, digits or an apostrophe meet there.

    Any other token begins a word: punctuation and line breaks are words too, as is each token of a script without
    spaces.

    >>> words(["He", " doesn", "'t", " know", ",", "\n", "我", "们"])
    [0, 1, 1, 2, 3, 4, 5, 6]
    """
    numbers: list[int] = []
    number, before, parts = -1, "", 0
    for piece in pieces:
        if not piece:  # part of a character that a later token completes
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
    belongs to the sentence of its first letter or mark.

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
    """Number the parts of a text that end as `end` matches, and return the part of each token's first mark."""
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
    """Raise DtypeError unless the tokenizer has decode(list of ids); None means no tokenizer."""
    decodes = callable(getattr(tokenizer, "decode", None)) and not isinstance(tokenizer, (bytes, bytearray))
    if tokenizer is not None and not decodes:
        raise DtypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected something with decode(list of ids).",
            "tokenizer=transformers.AutoTokenizer.from_pretrained(…)",
        )
