"""A text cut into parts: tokens, words, sentences, paragraphs, turns of a chat, or slices; and the tokens of each."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from clearhead.core.rule_values import is_whole
from clearhead.errors import SelectionError, expected
from clearhead.models.protocol import Token, first_letter

_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff66-\uff9f"  # written without spaces: each character is a word here
_PATTERNS = {
    "words": rf"[{_CJK}]|[^\s{_CJK}]+",
    "sentences": r"\S(?:[^.!?。！？\n]|[.!?](?!\s|$))*[.!?。！？]*[\"'”’)」』]*",
    "paragraphs": r"\S(?:[^\n]|\n(?![^\S\n]*\n))*",
}
KINDS = ("tokens", *_PATTERNS, "turns")
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
    first: int,
) -> list[Part]:
    """The parts that hold a token which can be hidden, in the order of the text.

    kind     one of `KINDS`, or slices of the text: (start, stop) pairs or slice objects, that do not overlap
    turns    where the contents of a chat's messages stand; () for a plain text
    hide     where tokens can be hidden: what of the text is neither the question nor a template
    first    the first token that can be

    The last token, which answers, and those of a template are in no part. A token is of the part that holds its first
    character which is no space. Raises SelectionError for another kind, and for
    slices that overlap or are outside the text.
    """
    spans = read_slices("parts", kind, text) if not isinstance(kind, str) else _spans(kind, text, tokens, turns)
    held: dict[Slice, list[int]] = {span: [] for span in spans}
    for place, token in enumerate(tokens[:-1]):
        if place < first or token.template or token.stop <= token.start:
            continue
        letter = first_letter(token, text)
        span = next((span for span in spans if span[0] <= letter < span[1]), None)
        if span is not None and any(start <= letter < stop for start, stop in hide):
            held[span].append(place)
    return [Part(text[slice(*span)], *span, tuple(places)) for span, places in held.items() if places]


def read_slices(name: str, value: Any, text: str) -> list[Slice]:
    """Pairs (start, stop) or slice objects, in order; SelectionError where they overlap or are outside the text."""
    spans = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        pair = (each.start or 0, len(text) if each.stop is None else each.stop) if isinstance(each, slice) else each
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(is_whole(end) for end in pair):
            wanted = f"one of {', '.join(KINDS)}, or (start, stop) pairs"
            raise SelectionError(expected(name, value, wanted), "parts=[(0, 12), (13, 40)]")
        if not 0 <= pair[0] < pair[1] <= len(text):
            values = {"name": name, "start": pair[0], "stop": pair[1], "length": len(text)}
            raise SelectionError("{name}: {start}:{stop} is outside the text of {length} characters.", **values)
        spans.append((int(pair[0]), int(pair[1])))
    spans.sort()
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise SelectionError("{name} overlap at character {start}.", name=name, start=start)
    return spans


def _spans(kind: str, text: str, tokens: Sequence[Token], turns: Sequence[Slice]) -> list[Slice]:
    if kind not in KINDS:
        wanted = f"one of {', '.join(KINDS)}, or (start, stop) pairs"
        raise SelectionError(expected("parts", kind, wanted), 'parts="words"')
    if kind == "turns":
        if not turns:
            raise SelectionError("parts='turns' is for a chat, and this is a text.", 'parts="sentences"')
        return list(turns)
    if kind == "tokens":
        return list(dict.fromkeys((token.start, token.stop) for token in tokens if token.stop > token.start))
    within = turns or [(0, len(text))]
    pattern = re.compile(_PATTERNS[kind])
    return [match.span() for start, stop in within for match in pattern.finditer(text, start, stop)]
