"""Reads which queries or keys are meant: one position, several, a slice, or True and False for each; None is all."""

from math import prod
from typing import Any

import numpy as np

from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import Array, named
from clearhead.core.rule_values import is_whole, read_slice
from clearhead.errors import SelectionError, shape_of, shown

WANTED = "a position, a list of positions, a slice, or True and False for each"


def members(name: str, value: Any, size: int, lead: tuple[int, ...] = ()) -> Array:
    """Which of the positions 0 … size-1 are chosen, bool (batch, size); (1, size) where that holds for every batch.

    name    what is chosen and how errors call it: "queries" or "keys"
    value   None for all; a whole number, or several in a list or an array of one axis, where negative ones count from
            the end; a slice; bool (size,), or bool (…, size) with a row for each batch
    lead    the caller's axes before heads, along which a bool array may differ

    Raises SelectionError for a position outside, for any other value, and for one that chooses nothing. O(size).
    """
    if value is None:
        return np.ones((1, size), bool)
    chosen = np.zeros((1, size), bool)
    if isinstance(value, slice):
        chosen[0, read_slice(name, value, size)] = True
    elif is_whole(value):
        chosen[0, _inside(name, np.array([value]), size)] = True
    else:
        listed = _array(name, value, size)
        if listed.dtype == bool:
            chosen = _flags(name, listed, size, lead)
        elif listed.dtype.kind in "iu" and listed.ndim < 2:
            chosen[0, _inside(name, listed, size)] = True
        elif listed.size:
            kind = f", {listed.dtype}" if listed.ndim else ""
            raise SelectionError(f"{name} is {shown(value)}{kind}: expected {WANTED}.", f"{name}=[3, 4]")
    if not chosen.any():
        raise SelectionError(f"{name} is {shown(value)}: it chooses none of {size} {name}.", f"{name}=None is all.")
    return chosen


def in_words(value: Any, chosen: Array) -> str:
    """What was given as one writes it in an index, such as 4:8 or [0, 3]; many positions as their number.

    chosen   what `members` read
    """
    if isinstance(value, slice):
        sides = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return ":".join("" if side is None else str(side) for side in sides)
    if is_whole(value):
        return str(value)
    places = np.flatnonzero(chosen)
    if len(chosen) == 1 and len(places) <= 8:
        return str(places.tolist())
    return f"{len(places)} of {chosen.shape[1] if len(chosen) == 1 else chosen.shape}"


def _array(name: str, value: Any, size: int) -> Array:
    mixed = isinstance(value, (list, tuple)) and len({isinstance(x, (bool, np.bool_)) for x in value}) > 1
    listed = isinstance(value, (list, tuple, range)) or shape_of(value) is not None
    if mixed or not listed or isinstance(value, np.bool_):
        hint = "ch.change finds the words of a text." if isinstance(value, str) else f"{name}=[3, 4]"
        raise SelectionError(f"{name} is {shown(value)}: expected {WANTED}.", hint)
    return as_rule_array(list(value[: size + 1]) if isinstance(value, range) else value, name)


def _inside(name: str, places: Array, size: int) -> Array:
    """Positions from 0 up. Raises SelectionError for one outside, and for more than there are."""
    if places.size > max(1, size):
        raise SelectionError(
            f"{name} has {places.size} positions, and the matrix has {size} {name}.", "give each once."
        )
    for place in (int(places.min()), int(places.max())) if places.size else ():
        if not -size <= place < size:
            raise SelectionError(
                f"{name} has position {place}, and the matrix has {size} {name}.", "0 is the first, -1 the last."
            )
    return places.astype(np.int64) % max(1, size)


def _flags(name: str, flags: Array, size: int, lead: tuple[int, ...]) -> Array:
    if flags.shape not in ((size,), (*lead, size)):
        each = f", or {named((*lead, size), ('batch', name))}" if lead else ""
        raise SelectionError(
            f"{name} is bool of shape {flags.shape}: expected {named((size,), (name,))}{each}.",
            "bool has True or False for each; positions are whole numbers.",
        )
    return flags.reshape(prod(flags.shape[:-1]), size)
