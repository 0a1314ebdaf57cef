"""A text's tokens as a reader sees them: their names, and the token that a word or a number stands for."""

import re
from contextlib import suppress
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from clearhead.core.rule_values import is_whole
from clearhead.errors import DtypeError, FileError, SelectionError, expected
from clearhead.models.chat import places, read_messages
from clearhead.models.protocol import LanguageModel, Token
from clearhead.spelling import spelled


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


class Reading(NamedTuple):
    """What a model is given: a text or a chat's, its tokens, and where the contents of a chat's messages stand."""

    text: str
    tokens: list[Token]
    turns: list[tuple[int, int]]


def read(model: LanguageModel, text: Any) -> Reading:
    """A text as it is, or a list of messages by the model's template.

    Raises DtypeError for anything else, FileError for what is not Unicode, and what `model.tokens` and `model.chat` do.
    """
    if isinstance(text, str):
        check_unicode("text", text)
        return Reading(text, model.tokenizer.tokens(text), [])
    if not isinstance(text, (list, tuple)):
        raise DtypeError(expected("text", text, "a string or a list of messages"), 'explain("humpty dumpty sat on")')
    messages = read_messages(text)
    for message in messages:
        check_unicode("text", message["content"])
    whole, tokens = model.tokenizer.chat(messages)
    return Reading(whole, tokens, places(whole, messages))


def check_unicode(name: str, text: str) -> None:
    """Raise FileError for text that is not Unicode: a shell may pass bytes of another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        kind = f"byte {byte:#04x}" if 0x80 <= byte <= 0xFF else "a lone surrogate"
        raise FileError(f"{name} is not UTF-8: character {error.start} is {kind}.", "save it as UTF-8.") from None


def parts_of(tokens: list[Token], text: str) -> Parts:
    """Every token's text; a token that is some bytes of one character is named after it, as 猫1/3."""
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
    """A token's position and text: 3 ␣sat. `seen` has the tokens and the text."""
    return f"{token} {spelled(parts_of(seen.tokens, seen.text).names[token])}"


def pieces(tokens: list[Token], text: str) -> list[str]:
    """Each token's part of the text, which follow one another; of a character's bytes, the last token has it."""
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
    """The index of a token given by number or by a word of the text: the last token of the word's last occurrence."""
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
