"""A sentence about the evidence, as data: known_words.py has the words."""

from typing import Any, NamedTuple


class Reason(NamedTuple):
    """A key in the table of words, and the values that the sentence names."""

    key: str
    values: dict[str, Any]
