"""Names a text's tokens for readers, finds the token of a word, and cuts texts into parts: words, sentences, turns."""

import re
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from clearhead.core.rule_values import is_whole
from clearhead.errors import DtypeError, SelectionError, expected
from clearhead.models.protocol import LanguageModel, Token, first_letter
from clearhead.models.tokenizer import Reading
from clearhead.spelling import spelled
from clearhead.watching.pieces import DIVISIONS, SENTENCE_END


class Parts(NamedTuple):
    """The tokens' names, and how characters were split into bytes."""

    names: list[str]
    split: "Split | None"


class Split(NamedTuple):
    """The first character that is split into bytes, and how many such characters there are."""

    first: str  # the name of its first part, such as 猫1/3
    character: str
    parts: int
    characters: int


def read(model: LanguageModel, text: Any) -> Reading:
    """Split a text, or messages in the model's template, into tokens; a Reading is returned unchanged.

    Raises DtypeError for anything else, FileError for text that is not Unicode, and as `Tokenizer.tokens` and `.chat`.
    """
    if isinstance(text, Reading):
        return text
    if isinstance(text, str):
        return Reading(text, model.tokenizer.tokens(text))
    if not isinstance(text, (list, tuple)):
        raise DtypeError(expected("text", text, "a string or a list of messages"), 'explain("humpty dumpty sat on")')
    made: Reading = model.tokenizer.chat(text)
    return made


def continued(model: LanguageModel, reading: Reading, ids: Sequence[int]) -> Reading:
    """Append what the model says to a reading; the `start` and `stop` of new tokens go on where the text ends."""
    tokens, whole = list(reading.tokens), reading.text
    for token in ids:
        text, end = model.tokenizer.text(token), tokens[-1].stop
        tokens.append(Token(token, text, end, end + len(text), template=bool(reading.turns)))
        whole += text
    return reading._replace(text=whole, tokens=tokens)


def parts_of(tokens: list[Token], text: str) -> Parts:
    """Name every token by its text; a token of some bytes of a character is named like 猫1/3."""
    names: list[str] = []
    firsts: list[Split] = []
    for (start, stop), group in groupby(tokens, lambda token: token[2:4]):
        parts = [token.text for token in group]
        character, whole = text[start:stop], not parts[0].startswith(("⟨", "<0x"))
        if len(character) == 1 and len(parts) > 1 and not whole:
            parts = [f"{character}{part}/{len(parts)}" for part in range(1, len(parts) + 1)]
            firsts.append(Split(parts[0], character, len(parts), 0))
        names += parts
    count = len({split.character for split in firsts})
    return Parts(names, firsts[0]._replace(characters=count) if firsts else None)


def token_name(seen: Any, token: int) -> str:
    """Name a token by its position and text: 3 ␣sat. `seen` has the tokens and the text."""
    return f"{token} {spelled(parts_of(seen.tokens, seen.text).names[token])}"


def pieces(tokens: list[Token], text: str) -> list[str]:
    """Cut the text into one piece per token; a character split into bytes belongs to the last of its tokens."""
    last = [token.stop != after.stop for token, after in pairwise(tokens)] + [True]
    parts, reached = [], 0
    for token, ends in zip(tokens, last, strict=True):
        if token.stop <= token.start:  # a special token
            parts.append(token.text)
            continue
        parts.append(text[reached : token.stop] if ends else "")
        reached = token.stop if ends else reached
    return parts


def find_token(tokens: list[Token], text: str, wanted: int | str | None) -> int:
    """Find a token by its position, or by a word of the text: the last token of the word's last occurrence."""
    if wanted is None:
        return len(tokens) - 1
    if not is_whole(wanted) and not isinstance(wanted, str):
        raise SelectionError(expected("token", wanted, "a position or a word of the text"))
    with suppress(ValueError):
        if -len(tokens) <= int(wanted) < len(tokens):
            return int(wanted) % len(tokens)
    word = re.escape(str(wanted).strip())
    for pattern in (rf"(?<!\w){word}(?!\w)", word):  # a whole word first, then any part of the text
        ends = [match.end() for match in re.finditer(pattern, text, re.IGNORECASE)] if word else []
        places = [place for place, token in enumerate(tokens) if ends and token.start < ends[-1] <= token.stop]
        if places:
            return places[-1]
    names = " ".join(map(spelled, parts_of(tokens, text).names))
    raise SelectionError(
        f"token {wanted!r} is neither a position 0..{len(tokens) - 1} nor a word of the text.",
        f"the tokens are: {names}",
    )


KINDS = ("tokens", *DIVISIONS, "turns")
_KINDS = f"one of {', '.join(KINDS)}, or (start, stop) pairs"
Slice = tuple[int, int]


class Part(NamedTuple):
    """A part of a text: its characters from `start` to `stop`, and the positions of its tokens that can be hidden."""

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]


def parts_of_text(
    kind: str | Sequence[Any],
    text: str,
    tokens: Sequence[Token],
    turns: Sequence[Slice],
    hide: Sequence[Slice],
) -> list[Part]:
    """Cut a text into parts, and return those with a token that can be hidden, in the order of the text.

    kind     one of `KINDS`, or slices of the text: (start, stop) pairs or slice objects that do not overlap
    turns    the spans of a chat's messages; () for a plain text
    hide     the spans in which tokens can be hidden: neither the question nor the template

    The last token, which answers, and tokens of a template are in no part. A token belongs to the part with its first
    character other than a space. Raises SelectionError for an unknown kind, and for slices that overlap or lie outside
    the text.
    """
    letters = [first_letter(token, text) for token in tokens]
    turn = [_inside(turns, letter) for letter in letters]
    if kind == "turns" and max(turn, default=-1) < 0:
        raise SelectionError("parts='turns' needs a chat, and this is a plain text.", 'parts="sentences"')
    if not isinstance(kind, str):
        spans = read_slices("parts", kind, text)
        labels = [_inside(spans, letter) for letter in letters]
    elif kind in DIVISIONS:
        labels = DIVISIONS[kind](pieces(list(tokens), text))
    elif kind in KINDS:
        labels = turn if kind == "turns" else [token.start for token in tokens]
    else:
        raise SelectionError(expected("parts", kind, _KINDS), 'parts="words"')
    held: dict[tuple[int, int], list[int]] = {}
    for place, label in enumerate(labels):
        token, letter = tokens[place], letters[place]
        can = place < len(tokens) - 1 and not token.template and token.stop > token.start
        if can and label >= 0 and _inside(hide, letter) >= 0:
            held.setdefault((turn[place], label), []).append(place)
    parts = []
    for those in held.values():
        start, stop = letters[those[0]], max(tokens[place].stop for place in those)
        stop = start + max(1, len(text[start:stop].rstrip()))
        parts.append(Part(text[start:stop], start, stop, tuple(those)))
    return parts


def read_slices(name: str, value: Any, text: str) -> list[Slice]:
    """Read and sort (start, stop) pairs or slices. Raises SelectionError if they overlap or lie outside the text."""
    spans = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        pair = (each.start or 0, len(text) if each.stop is None else each.stop) if isinstance(each, slice) else each
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(is_whole(end) for end in pair):
            raise SelectionError(expected(name, value, _KINDS), "parts=[(0, 12), (13, 40)]")
        if not 0 <= pair[0] < pair[1] <= len(text):
            raise SelectionError(f"{name}: {pair[0]}:{pair[1]} is outside the text of {len(text)} characters.")
        spans.append((int(pair[0]), int(pair[1])))
    spans.sort()
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise SelectionError(f"{name} overlap at character {start}.")
    return spans


def grouped(parts: Sequence[Any], text: str, most: int) -> list[list[int]]:
    """Group the places of parts, each with a `start` and a `stop`, by sentences.

    A sentence of more than `most` parts is divided by its lines, then evenly. Text that is in no part, such as a chat's
    template, also ends a group.
    """
    marks = [match.end() for match in SENTENCE_END.finditer(text)]
    gaps = (bool(text[before.stop : part.start].strip()) for before, part in pairwise(parts))
    apart = [0, *accumulate(gaps)]
    made: list[list[int]] = []
    for _, sentence in groupby(range(len(parts)), lambda i: (bisect(marks, parts[i].start), apart[i])):
        places = list(sentence)
        lines = [text.count("\n", 0, parts[i].start) if len(places) > most else 0 for i in places]
        for _, line in groupby(zip(lines, places, strict=True), lambda pair: pair[0]):
            some = [place for _, place in line]
            count = -(-len(some) // most)
            made += [some[len(some) * i // count : len(some) * (i + 1) // count] for i in range(count)]
    return made


def _inside(spans: Sequence[Slice], letter: int) -> int:
    """Return which span has the character; -1 for none."""
    return next((number for number, (start, stop) in enumerate(spans) if start <= letter < stop), -1)
