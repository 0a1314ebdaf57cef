"""How a token is spelled, all its characters visible: terminal, pictures and page (numbers.js) print the same."""

import re

_SPACES = re.compile("^ +| +$|  +")
_ONE_BY_ONE = 3  # spaces that are marked each; longer runs are counted


def spelled(token: str) -> str:
    r"""The token on one line: outer and repeated spaces marked, newlines as ⏎, the invisible escaped, ∅ for no text.

    >>> [spelled(token) for token in (" wall", "  ", "        return", "a b", "\n", "\u200b", "")]
    ['␣wall', '␣␣', '␣×8return', 'a b', '⏎', '\\u200b', '∅']
    """
    return visible(_SPACES.sub(lambda run: _marks(len(run[0])), token)) or "∅"


def bare(token: str) -> str:
    """The token as a row's or a column's name: without its outer spaces, unless it is nothing else.

    >>> [bare(token) for token in (" wall", "  ")]
    ['wall', '␣␣']
    """
    return spelled(token.strip(" ") or token)


def visible(text: str) -> str:
    """The text without anything that moves a cursor or cannot be seen: newlines as ⏎, such characters escaped."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _marks(spaces: int) -> str:
    return "␣" * spaces if spaces <= _ONE_BY_ONE else f"␣×{spaces}"
