"""Indexing that asks for weights: integers, slices with steps, Ellipsis; spelled out and checked before any work."""

from collections.abc import Sequence
from operator import index as as_index
from typing import Any

import numpy as np

from clearhead.axes import named
from clearhead.errors import SelectionError
from clearhead.values import read_slice


def expand(key: Any, shape: tuple[int, ...], axes: Sequence[str]) -> list[int | range]:
    """Basic indexing spelled out: one integer or range for every axis."""
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("an index can have only one Ellipsis (`...`).")
    at = dots[0] if dots else len(parts)
    given = len(parts) - len(dots)
    if given > len(shape):
        raise SelectionError(f"{given} indices for {len(shape)} axes: the matrix is {named(shape, axes)}.")
    parts[at : at + len(dots)] = [slice(None)] * (len(shape) - given)
    return [_pick(part, axis, shape, axes) for axis, part in enumerate(parts)]


def _pick(part: Any, axis: int, shape: tuple[int, ...], axes: Sequence[str]) -> int | range:
    size = shape[axis]
    if isinstance(part, slice):
        return read_slice(f"the slice of axis {axis}", part, size)
    try:
        if isinstance(part, (bool, np.bool_)):
            raise TypeError
        place = as_index(part)
    except TypeError:
        raise SelectionError(
            f"axis {axis} is indexed by {type(part).__name__}: expected integers, slices and `...`.",
            "A[...][that] indexes a stored copy.",
        ) from None
    if not -size <= place < size:
        raise SelectionError(f"index {place} is outside axis {axis}: the matrix is {named(shape, axes)}.")
    return place % size
