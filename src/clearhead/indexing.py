"""Weights by index: integers, slices with steps, Ellipsis; spelled out and checked before any work."""

from collections.abc import Sequence
from math import prod
from operator import index as as_index
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.arrays import plain
from clearhead.axes import Array, named
from clearhead.errors import RuleError, SelectionError
from clearhead.values import read_slice


class Indexed:
    """What a matrix that is never stored has in common with an array: sizes, and weights by index."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...

        def __getitem__(self, key: Any) -> Any: ...

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many weights there are."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001  NumPy's protocol
        if copy is False:
            raise RuleError("the weights are computed when asked for: an array of them is always a copy.")
        return np.asarray(plain(self[...], "weights"), dtype=dtype)


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
