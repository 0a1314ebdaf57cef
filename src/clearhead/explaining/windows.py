"""A text cut into windows of a model's positions."""

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from clearhead.errors import SelectionError
from clearhead.explaining.gpt2 import Model, Token
from clearhead.explaining.texts import find_token

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel


class Window(NamedTuple):
    """The part of a longer text that was run: window `number`, from 1, tokens `first` to `stop` - 1, from 0."""

    number: int
    windows: int  # in all
    first: int
    stop: int
    tokens: int  # of the whole text


class TextWindow(NamedTuple):
    """A window of a text: its own text, its tokens with their positions in that, and which window it is."""

    text: str
    tokens: list[Token]
    window: Window


def windows(model: "Model | HubModel", text: str) -> list[TextWindow]:
    """A text cut into windows that do not overlap; special tokens, which each window has, are not counted."""
    cut = model.windows(text)
    sizes = [sum(token.stop > token.start for token in tokens) for tokens in cut]
    found, first = [], 0
    for number, (tokens, size) in enumerate(zip(cut, sizes, strict=True), start=1):
        start = min((token.start for token in tokens if token.stop > token.start), default=0)
        stop = max((token.stop for token in tokens), default=0)
        moved = [token._replace(start=max(0, token.start - start), stop=max(0, token.stop - start)) for token in tokens]
        found.append(TextWindow(text[start:stop], moved, Window(number, len(cut), first, first + size, sum(sizes))))
        first += size
    return found


def token_in(part: TextWindow, token: str | None) -> int | None:
    """The index in a window of a token that is given for the whole text; None where the window does not hold it."""
    if token is None:
        return len(part.tokens) - 1
    own = [place for place, each in enumerate(part.tokens) if each.stop > each.start]
    with suppress(ValueError):
        number = int(token)
        if -part.window.tokens <= number < part.window.tokens:
            place = number % part.window.tokens - part.window.first
            return own[place] if 0 <= place < len(own) else None
    with suppress(SelectionError):
        return find_token(part.tokens, part.text, token)
    return None
