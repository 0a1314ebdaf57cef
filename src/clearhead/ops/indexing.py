"""Basic indexing of a matrix that is not stored: integers, slices with steps, Ellipsis; checked before any work."""

from collections.abc import Sequence
from operator import index as as_index
from typing import Any

import numpy as np

from clearhead.core.axes import TRANSPOSED, WEIGHTS, named
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import read_slice
from clearhead.errors import SelectionError


def read_index(key: Any, shape: tuple[int, ...], *, transposed: bool = False) -> tuple[list[int | range], bool]:
    """A basic index as one integer or range per axis of a matrix of this shape; integers are counted from 0.

    transposed   it is an index into the transpose; the second answer says whether to swap the result's last two axes

    Raises SelectionError for anything else, for too many indices, and for an integer outside its axis.
    """
    if not transposed:
        return _expand(key, shape, WEIGHTS), False
    picked = _expand(key, (*shape[:-2], shape[-1], shape[-2]), TRANSPOSED)
    picked[-1], picked[-2] = picked[-2], picked[-1]
    both = not isinstance(picked[-1], int) and not isinstance(picked[-2], int)
    return picked, both


def _expand(key: Any, shape: tuple[int, ...], axes: Sequence[str]) -> list[int | range]:
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("an index can have only one Ellipsis (`...`).")
    place = dots[0] if dots else len(parts)
    count = len(parts) - len(dots)
    if count > len(shape):
        raise SelectionError(f"{count} indices for {len(shape)} axes: the matrix is {named(shape, axes)}.")
    parts[place : place + len(dots)] = [slice(None)] * (len(shape) - count)
    return [_pick(part, axis, shape, axes) for axis, part in enumerate(parts)]


_TILES = {
    "weights": "A[..., :512, :512] is a tile; A.image(256, 256) shows the whole, A.top(8) its strongest weights.",
    "effects": "E[..., :512, :512] is a tile; E.image(256, 256) shows the whole, E.strongest(20) its strongest edges.",
}


def check_weights(shape: tuple[int, ...], dtype: np.dtype[Any], device: str, what: str = "weights") -> None:
    """Raise SizeError when weights, or effects, of this shape do not fit in memory."""
    check_room(f"{what} of shape {shape}", array_bytes(shape, dtype.itemsize), _TILES[what], device)


def _pick(part: Any, axis: int, shape: tuple[int, ...], axes: Sequence[str]) -> int | range:
    size = shape[axis]
    if isinstance(part, slice):
        return read_slice(f"the slice of axis {axis}", part, size)
    try:
        if isinstance(part, (bool, np.bool_)):
            raise TypeError
        place = as_index(part)
    except Exception:  # a stranger's __index__ may raise anything
        raise SelectionError(
            f"axis {axis} is indexed by {type(part).__name__}: expected integers, slices and `...`.",
            "A[...][that] indexes a stored copy.",
        ) from None
    if not -size <= place < size:
        raise SelectionError(f"index {place} is outside axis {axis}: the matrix is {named(shape, axes)}.")
    return place % size
