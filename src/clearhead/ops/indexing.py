"""Basic indexing of a matrix that is never stored, by integers, slices with steps and Ellipsis; and its transpose."""

from collections.abc import Callable, Sequence
from operator import index as as_index
from typing import Any, Generic, TypeVar

import numpy as np

from clearhead.core.axes import TRANSPOSED, WEIGHTS, named
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import read_slice
from clearhead.errors import SelectionError
from clearhead.ops.lazy_matrix import LazyMatrix

M_co = TypeVar("M_co", bound=LazyMatrix, covariant=True)


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


class TransposedMatrix(LazyMatrix, Generic[M_co]):
    """Aᵀ, (…, heads, keys, queries): the matrix with its last two axes swapped, never stored. Made by `A.T`.

    T, mT     the matrix itself

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 1)), np.zeros((4, 1)))
    >>> A.T.shape, A.T @ np.ones(2)
    ((4, 2), array([0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(self, matrix: M_co, entries: Callable[..., Any], product: Callable[[Any], Any]) -> None:
        self.T = self.mT = matrix
        self._entries, self._product = entries, product
        self.instead = matrix.instead

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, queries, keys = self.T.shape
        return (*lead, keys, queries)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.T.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.T!r}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights: A[…] with its last two axes swapped; indices and errors as in the matrix."""
        return self._entries(key, transposed=True)

    def __matmul__(self, g: Any) -> Any:
        """Aᵀ·g: g (…, heads, queries, d), or one for all heads, (queries,) or (queries, d); gives (…, heads, keys, d).

        The result is in the weights' dtype. For a sharded sequence, g holds this rank's queries and the result this
        rank's keys, summed over the queries of all ranks. Raises ShapeError or DtypeError for a g that does not fit,
        SizeError when the result does not fit in memory. O(queries·keys·(d_k + d)) time, less where blocks of rows of
        g are zero; O(queries + keys) memory.
        """
        return self._product(g)
