"""Finds the queries and keys of an edit in the text: positions, slices or words."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from typing import Any
from unicodedata import east_asian_width

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import is_whole, listed
from clearhead.errors import DtypeError, SelectionError, expected, shown

One = int | str | slice
Places = One | tuple[One, ...] | None

WANTED = "a position, a slice, a word, or a list of these"
_OPEN = 2**62  # a slice without a stop includes the tokens that the model generates


@dataclass(frozen=True, eq=False)
class Text:
    """The text that positions and words refer to: what a model is given first, before it generates.

    pieces   (batch, length): each token's piece of the text; None if unknown
    why      why they are unknown
    """

    length: int
    pieces: Sequence[Sequence[str]] | None = None
    why: str = "there is no tokenizer"
    searched: dict[int, tuple[Any, "Positions"]] = field(default_factory=dict, repr=False)  # by the id of the places


@dataclass(frozen=True, eq=False)
class Place:
    """The place of an attention call in a model's run.

    layer             the layer's name, as in other runs
    queries, keys     the positions of the call's queries and keys in their sequences
    query_text, key_text   the texts that an edit's positions and words refer to
    real              (batch or 1, queries), False where a query is padding; None if none is
    """

    layer: str
    queries: range
    keys: range
    query_text: Text
    key_text: Text
    real: Any = None


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of an edit's queries or keys: one row per sequence of the batch, or one for all."""

    points: tuple[Array, ...]
    slices: tuple[range, ...]

    def labels(self, positions: range) -> Array:
        """(batch or 1, positions), 0 where chosen and -1 elsewhere."""
        return self.members(positions).astype(np.int64) - 1

    def members(self, positions: range) -> Array:
        """(batch or 1, positions), True where chosen."""
        index = np.arange(positions.start, positions.stop)
        inside = np.zeros(len(index), bool)
        for part in self.slices:
            inside |= (index >= part.start) & (index < part.stop) & ((index - part.start) % part.step == 0)
        return np.stack([inside | np.isin(index, points) if len(points) else inside for points in self.points])


def read_places(name: str, value: Any) -> Places:
    """Read an edit's queries or keys; lists become tuples.

    Raises DtypeError for a value of another kind, SelectionError if it is empty.
    """
    if value is None:
        return None
    one = _read_place(name, value)
    if one is not None:
        return one
    try:
        if isinstance(value, dict):
            raise TypeError
        members = listed(value)
        members = [x.item() for x in members] if getattr(value, "ndim", 0) == 1 else members
    except (TypeError, RuntimeError):  # the latter from a tensor without numbers
        raise DtypeError(expected(name, value, WANTED), f"{name}=[3, 4]") from None
    places = tuple(_read_place(name, x) for x in members)
    wrong = next((x for x, place in zip(members, places, strict=True) if place is None), None)
    if any(place is None for place in places):
        raise DtypeError(f"{name} holds {shown(wrong)}: expected {WANTED}.", f"{name}=[3, 4]")
    if not places:
        raise SelectionError(f"{name} is empty: it chooses nothing.", f"leave {name} out for all.")
    return tuple(place for place in places if place is not None)


def _read_place(name: str, value: Any) -> One | None:
    """Read one position, word or slice; None for anything else."""
    if is_whole(value):
        return int(value)
    if isinstance(value, str):
        if not value.strip():
            raise SelectionError(f"{name} is {value!r}: expected a word of the text.")
        return str(value)
    if not isinstance(value, slice):
        return None
    sides = value.start, value.stop, value.step
    if not all(side is None or is_whole(side) for side in sides) or (value.step is not None and value.step < 1):
        raise DtypeError(expected(name, value, "a slice of whole numbers that goes forward"))
    start, stop = value.start or 0, value.stop
    if stop is not None and (start >= 0) == (stop >= 0) and start >= stop:
        raise SelectionError(f"{name} is {shown(value)}: it chooses nothing.")
    return slice(*(None if side is None else int(side) for side in sides))


def find(name: str, places: Places, text: Text) -> Positions:
    """Find an edit's queries or keys in this text, which caches the positions for the next layer.

    Negative positions count from the text's end; a slice without a stop, or with a stop beyond the text, includes
    generated tokens. Raises SelectionError for a position or word that is not in the text, and for a word that occurs
    several times.
    """
    if id(places) not in text.searched:
        text.searched[id(places)] = places, _search(name, places, text)
    return text.searched[id(places)][1]


def _search(name: str, places: Places, text: Text) -> Positions:
    if places is None:
        return Positions((np.empty(0, np.int64),), (range(_OPEN),))
    listed: tuple[Any, ...] = places if isinstance(places, tuple) else (places,)
    slices = tuple(_range(place, text.length) for place in listed if isinstance(place, slice))
    shared = [_position(name, place, text.length) for place in listed if isinstance(place, int)]
    words = [place for place in listed if isinstance(place, str)]
    if not words:
        return Positions((np.array(shared, np.int64),), slices)
    if text.pieces is None:
        raise SelectionError(f"{name} is the word {words[0]!r}, but {text.why}.", "give positions, or tokenizer=…")
    rows = []
    for number, pieces in enumerate(text.pieces):
        which = f" of sequence {number}" if len(text.pieces) > 1 else ""
        tokens = [place for word in words for place in _find_word(name, word, pieces, which)]
        rows.append(np.array(shared + tokens, np.int64))
    return Positions(tuple(rows), slices)


def _position(name: str, place: int, length: int) -> int:
    if not -length <= place < length:
        raise SelectionError(
            f"{name} has position {place}, but the text has {length} tokens.",
            f"{name}=slice({place}, {place + 1}) waits until the model has generated it." if place >= 0 else "",
        )
    return place % length


def _range(place: slice, length: int) -> range:
    start, stop = place.start or 0, place.stop
    start = max(0, start + length) if start < 0 else start
    stop = _OPEN if stop is None else max(0, stop + length) if stop < 0 else stop
    return range(start, stop, place.step or 1)


def _find_word(name: str, word: str, pieces: Sequence[str], which: str) -> list[int]:
    """Find the tokens that make up a word of the text."""
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    starts = list(_whole_words(text, word))
    numbered = re.fullmatch(r"(.+)#(\d+|all)", word, re.DOTALL)
    chosen = ""
    if not starts and numbered:
        word, chosen = numbered.groups()
        starts = list(_whole_words(text, word))
    if not starts:
        near = [other for other in get_close_matches(word, set(re.findall(r"\w+", text)), n=1) if other != word]
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise SelectionError(
            f"{name} is the word {word!r}, but the text{which} has no such word.",
            f"{meant}Give whole words, with upper and lower case as in the text.",
        )
    if chosen == "all":
        return [token for start in starts for token in _tokens(pieces, ends, start, start + len(word))]
    if not chosen and len(starts) > 1:
        raise SelectionError(
            f"{name} is the word {word!r}, but the text{which} has it {len(starts)} times.",
            f"{word + '#1'!r} is the first, {word + '#all'!r} means all of them.",
        )
    number = int(chosen or 1)
    if not 1 <= number <= len(starts):
        times = f"{len(starts)} times" if len(starts) > 1 else "once"
        raise SelectionError(f"{name} is {f'{word}#{chosen}'!r}, but the text{which} has {word!r} {times}.")
    start = starts[number - 1]
    return _tokens(pieces, ends, start, start + len(word))


def _whole_words(text: str, word: str) -> Iterator[int]:
    """Yield where the text has this word, but not as part of a longer one."""
    start = text.find(word)
    while start >= 0:
        stop = start + len(word)
        if not _joined(text[start - 1 : start], word[0]) and not _joined(word[-1], text[stop : stop + 1]):
            yield start
        start = text.find(word, start + 1)


def _joined(a: str, b: str) -> bool:
    """Do these neighbours belong to one word? Chinese, Japanese and Korean do not separate words by spaces."""
    letters = bool(a and b) and all(x.isalnum() or x == "_" for x in (a, b))
    return letters and not any(east_asian_width(x) in "WF" for x in (a, b))


def _tokens(pieces: Sequence[str], ends: list[int], start: int, stop: int) -> list[int]:
    """The tokens that overlap text[start:stop], and those before that hold part of its first character."""
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    while first and not pieces[first - 1]:
        first -= 1
    return list(range(first, last + 1))
