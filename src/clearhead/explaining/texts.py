"""A text's tokens as a reader sees them: their names, and the token that a word or a number stands for."""

import re
from typing import NamedTuple

from clearhead.core.rule_values import is_whole
from clearhead.errors import FileError, SelectionError, shown
from clearhead.explaining.gpt2 import Token


class Parts(NamedTuple):
    """The tokens' names, and the characters that the tokenizer split into bytes."""

    names: list[str]
    split: "Split | None"


class Split(NamedTuple):
    """The first character that is split into bytes, and how many such characters there are."""

    first: str  # the name of its first part, such as 猫1/3
    character: str
    parts: int
    characters: int


def check_unicode(name: str, text: str) -> None:
    """Raise FileError for text that is not Unicode: a shell may pass bytes of another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        odd = text[error.start]
        byte = f"byte {ord(odd) - 0xDC00:#04x}" if "\udc80" <= odd <= "\udcff" else "a lone surrogate"
        raise FileError(f"{name} is not UTF-8: character {error.start} is {byte}.", "save it as UTF-8.") from None


def parts_of(tokens: list[Token], text: str) -> Parts:
    """Every token's text; a token that is some bytes of one character is named after it, as 猫1/3."""
    names, firsts = [token.text for token in tokens], []
    at = 0
    while at < len(tokens):
        span = tokens[at].start, tokens[at].stop
        after = next((j for j in range(at, len(tokens)) if (tokens[j].start, tokens[j].stop) != span), len(tokens))
        character, whole = text[slice(*span)], not names[at].startswith(("⟨", "<0x"))
        if len(character) == 1 and after - at > 1 and not whole:
            names[at:after] = [f"{character}{part + 1}/{after - at}" for part in range(after - at)]
            firsts.append(Split(names[at], character, after - at, 0))
        at = after
    count = len({found.character for found in firsts})
    return Parts(names, firsts[0]._replace(characters=count) if firsts else None)


def find_token(tokens: list[Token], text: str, wanted: int | str | None) -> int:
    """The index of a token given by number or by a word of the text: the last token of the word's last occurrence."""
    if wanted is None:
        return len(tokens) - 1
    if not is_whole(wanted) and not isinstance(wanted, str):
        raise SelectionError(f"token is {shown(wanted)}: expected a position or a word of the text.")
    try:
        number = int(wanted)
    except ValueError:
        number = None
    if number is not None and -len(tokens) <= number < len(tokens):
        return number % len(tokens)
    word = re.escape(str(wanted).strip())
    for pattern in (rf"(?<!\w){word}(?!\w)", word):  # a whole word first, then any part of the text
        ends = [found.end() for found in re.finditer(pattern, text, re.IGNORECASE)] if word else []
        places = [place for place, token in enumerate(tokens) if ends and token.start < ends[-1] <= token.stop]
        if places:
            return places[-1]
    said = " ".join(name.strip() for name in parts_of(tokens, text).names)
    raise SelectionError(
        f"token {wanted!r} is neither a position 0..{len(tokens) - 1} nor a word of the text.",
        f"the tokens are: {said}",
    )
