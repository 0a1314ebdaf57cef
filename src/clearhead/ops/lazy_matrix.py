"""A matrix that is never stored: its indices, its transpose, and what NumPy may ask of it; all else is refused.

Weights and effects of edges are such matrices; they differ in how a tile of them is computed.
"""

from collections.abc import Sequence
from math import prod
from numbers import Number
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from clearhead.core import room
from clearhead.core.arrays import as_rule_array, to_device_of
from clearhead.core.axes import TRANSPOSED, WEIGHTS, Array, named
from clearhead.core.call import Call
from clearhead.core.rule_values import read_slice
from clearhead.errors import DtypeError, RuleError, SelectionError


class NeverStored(NDArrayOperatorsMixin):
    """Refuses what would need every number of a matrix, and says what to call instead."""

    instead: str
    __getitem__: Any

    if TYPE_CHECKING:  # each subclass has these

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> np.dtype[Any]: ...

    else:  # a type checker would take every misspelt name for one of these

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse by name what only a stored array has: sum, argmin, reshape, …"""
            known = hasattr(np.ndarray, name) and not name.startswith("_")
            raise AttributeError(str(self._refusal(name)) if known else f"{type(self)} has no attribute {name!r}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001  NumPy's protocol
        if copy is False:
            raise RuleError("the weights are computed when asked for: an array of them is always a copy.")
        return np.asarray(as_rule_array(self[...], "weights"), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:  # for torch.as_tensor
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self[(slice(0),) * self.ndim].__dlpack_device__()

    def __array_ufunc__(self, function: np.ufunc, *inputs: Any, **options: Any) -> Any:
        raise self._refusal(f"numpy.{function.__name__}")

    def __array_function__(self, function: Any, *inputs: Any) -> Any:
        raise self._refusal(f"{function.__module__}.{function.__name__}")

    def __eq__(self, other: object) -> bool:
        if hasattr(other, "shape") or (isinstance(other, (Number, Sequence)) and not isinstance(other, (str, bytes))):
            raise self._refusal("==")  # where a False would be taken for an answer
        return NotImplemented

    __ne__, __hash__ = object.__ne__, object.__hash__

    def __bool__(self) -> bool:
        raise self._refusal("bool")

    def _refusal(self, name: str) -> DtypeError:
        hint = f"{self.instead}; np.asarray stores all {self.size:,} numbers."
        return DtypeError(f"{name} would need every number of {self!r}.", hint)


class LazyMatrix(NeverStored):
    """Weights, or effects of edges, (…, heads, queries, keys); each subclass says how tiles and products are computed.

    words   what its numbers are called, and what to ask for instead of too many of them
    """

    words: tuple[str, str]

    if TYPE_CHECKING:

        @property
        def call(self) -> Call: ...

        def _tile(self, batches: Array, heads: range, rows: range, cols: range) -> Array: ...

        def _product(self, x: Any, *, transposed: bool = False) -> Any: ...

    @property
    def T(self) -> "TransposedMatrix":  # noqa: N802
        """The last two axes swapped: (…, heads, keys, queries), for A.T @ g. What NumPy calls `mT`."""
        return TransposedMatrix(self)

    mT = T  # noqa: N815

    def _by_index(self, key: Any, *, transposed: bool = False) -> Any:
        call = self.call
        ranges, shape, swap = read_index(key, self.shape, transposed=transposed)
        if 0 in shape:
            tile = to_device_of(np.empty(shape, self.dtype), call.q)
        else:
            if prod(shape) * 8 > room.SMALL:
                what, instead = self.words
                size = prod(shape) * self.dtype.itemsize
                room.check_room(f"{what} of shape {shape}", size, instead, call.problem.device)
            *lead, rows, cols = ranges
            *chosen, heads = lead or [range(1)]
            sizes = call.problem.prefix[:-1]
            batches = np.arange(call.problem.batch).reshape(sizes)[np.ix_(*chosen)].reshape(-1)
            tile = self._tile(batches, heads, rows, cols).reshape(shape)
        return call.restore(tile.swapaxes(-1, -2) if swap else tile)

    def _restore(self, x: Array) -> Any:
        """Turn a result in the caller's axes into the kind of array that q is, where q lies."""
        return self.call.restore(to_device_of(x, self.call.q) if isinstance(x, np.ndarray) else x)


class TransposedMatrix(NeverStored):
    """Aᵀ, (…, heads, keys, queries): the matrix with its last two axes swapped, never stored. Made by `A.T`.

    T, mT     the matrix itself

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 1)), np.zeros((4, 1)))
    >>> A.T.shape, A.T @ np.ones(2)
    ((4, 2), array([0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(self, matrix: LazyMatrix) -> None:
        self.T = self.mT = matrix
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
        return self.T._by_index(key, transposed=True)

    def __matmul__(self, g: Any) -> Any:
        """Aᵀ·g: g (…, heads, queries, d), or one for all heads, (queries,) or (queries, d); gives (…, heads, keys, d).

        The result is in the weights' dtype. For a sharded sequence, g holds this rank's queries and the result this
        rank's keys, summed over the queries of all ranks. Raises ShapeError or DtypeError for a g that does not fit,
        SizeError when the result does not fit in memory. O(queries·keys·(d_k + d)) time, less where blocks of rows of
        g are zero; O(queries + keys) memory.
        """
        return self.T._product(g, transposed=True)


def read_index(
    key: Any, shape: tuple[int, ...], *, transposed: bool = False
) -> tuple[list[range], tuple[int, ...], bool]:
    """Read a basic index: what it picks along each axis of a matrix of this shape, and the shape of the tile.

    transposed   it is an index into the transpose; the third answer says whether to swap the tile's last two axes

    Raises SelectionError for anything else, for too many indices, and for an integer outside its axis.
    """
    axes, sizes = (TRANSPOSED, (*shape[:-2], shape[-1], shape[-2])) if transposed else (WEIGHTS, shape)
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis] or [len(parts)]
    parts[dots[0] : dots[0] + 1] = []
    absent = len(shape) - len(parts)
    if len(dots) > 1:
        raise SelectionError("an index can have only one Ellipsis (`...`).")
    if absent < 0:
        raise SelectionError(f"{len(parts)} indices for {len(shape)} axes: the matrix is {named(sizes, axes)}.")
    ranges = [range(size) for size in sizes]
    tile: list[int | None] = [*sizes]  # the length of each axis, None for one that goes
    for place, part in enumerate(parts):
        axis = place if place < dots[0] else place + absent
        if isinstance(part, slice):
            ranges[axis] = read_slice(f"the slice of axis {axis}", part, sizes[axis])
            tile[axis] = len(ranges[axis])
            continue
        try:
            if isinstance(part, (bool, np.bool_)):
                raise TypeError
            one = as_index(part)
        except Exception:  # a stranger's __index__ may raise anything
            raise SelectionError(
                f"axis {axis} is indexed by {type(part).__name__}: expected integers, slices and `...`.",
                "A[...][that] indexes a stored copy.",
            ) from None
        if not -sizes[axis] <= one < sizes[axis]:
            raise SelectionError(f"index {one} is outside axis {axis}: the matrix is {named(sizes, axes)}.")
        ranges[axis], tile[axis] = range(one % sizes[axis], one % sizes[axis] + 1), None
    swap = transposed and None not in tile[-2:]
    if transposed:
        ranges[-2:], tile[-2:] = ranges[:-3:-1], tile[:-3:-1]
    return ranges, tuple(length for length in tile if length is not None), swap
