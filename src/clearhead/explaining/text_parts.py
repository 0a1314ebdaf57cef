"""A text cut into parts: tokens, words, sentences, paragraphs, turns of a chat, or slices; and the tokens of each."""

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from clearhead.core.rule_values import is_whole
from clearhead.errors import SelectionError, expected
from clearhead.explaining.texts import pieces
from clearhead.models.protocol import Token, first_letter
from clearhead.watching.pieces import DIVISIONS, SENTENCE_END

KINDS = ("tokens", *DIVISIONS, "turns")
Slice = tuple[int, int]


class Part(NamedTuple):
    """A part of a text: its characters from `start` to `stop`, and the places of its tokens that can be hidden."""

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
    """The parts that hold a token which can be hidden, in the order of the text.

    kind     one of `KINDS`, or slices of the text: (start, stop) pairs or slice objects, that do not overlap
    turns    where the contents of a chat's messages stand; () for a plain text
    hide     where tokens can be hidden: what of the text is neither the question nor a template

    The last token, which answers, and those of a template are in no part. A token is of the part that holds its first
    character which is no space. Raises SelectionError for another kind, and for slices that overlap or are outside the
    text.
    """
    letters = [first_letter(token, text) for token in tokens]
    turn = [_inside(turns, letter) for letter in letters]
    held: dict[tuple[int, int], list[int]] = {}
    for place, label in enumerate(_labels(kind, text, tokens, letters, turn)):
        token, letter = tokens[place], letters[place]
        can = place < len(tokens) - 1 and not token.template and token.stop > token.start
        if can and label >= 0 and _inside(hide, letter) >= 0:
            held.setdefault((turn[place], label), []).append(place)
    parts = []
    for places in held.values():
        start, stop = letters[places[0]], max(tokens[place].stop for place in places)
        stop = start + max(1, len(text[start:stop].rstrip()))
        parts.append(Part(text[start:stop], start, stop, tuple(places)))
    return parts


def read_slices(name: str, value: Any, text: str) -> list[Slice]:
    """Pairs (start, stop) or slice objects, in order; SelectionError where they overlap or are outside the text."""
    spans = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        pair = (each.start or 0, len(text) if each.stop is None else each.stop) if isinstance(each, slice) else each
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(is_whole(end) for end in pair):
            wanted = f"one of {', '.join(KINDS)}, or (start, stop) pairs"
            raise SelectionError(expected(name, value, wanted), "parts=[(0, 12), (13, 40)]")
        if not 0 <= pair[0] < pair[1] <= len(text):
            raise SelectionError(f"{name}: {pair[0]}:{pair[1]} is outside the text of {len(text)} characters.")
        spans.append((int(pair[0]), int(pair[1])))
    spans.sort()
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise SelectionError(f"{name} overlap at character {start}.")
    return spans


def grouped(parts: Sequence[Any], text: str, most: int) -> list[list[int]]:
    """Divide the places of parts, each with a `start` and a `stop`, by sentences.

    A sentence of more than `most` parts is divided by its lines, then evenly. What stands in no part, such as a chat's
    template, ends a group too.
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


def _labels(
    kind: str | Sequence[Any], text: str, tokens: Sequence[Token], letters: Sequence[int], turn: list[int]
) -> list[int]:
    """The number of each token's part; below 0 for none."""
    if not isinstance(kind, str):
        spans = read_slices("parts", kind, text)
        return [_inside(spans, letter) for letter in letters]
    if kind in DIVISIONS:
        return DIVISIONS[kind](pieces(list(tokens), text))
    if kind == "tokens":
        return [token.start for token in tokens]
    if kind != "turns":
        wanted = f"one of {', '.join(KINDS)}, or (start, stop) pairs"
        raise SelectionError(expected("parts", kind, wanted), 'parts="words"')
    if max(turn, default=-1) < 0:
        raise SelectionError("parts='turns' is for a chat, and this is a text.", 'parts="sentences"')
    return turn


def _inside(spans: Sequence[Slice], letter: int) -> int:
    """Which of these spans has the character; -1 for none."""
    return next((number for number, (start, stop) in enumerate(spans) if start <= letter < stop), -1)
