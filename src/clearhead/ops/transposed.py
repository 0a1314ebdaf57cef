"""TransposedMatrix: the products Aᵀ·g and weights with the last two axes swapped."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from clearhead.core.axes import TRANSPOSED, as_slice
from clearhead.errors import DtypeError
from clearhead.ops.indexing import expand
from clearhead.ops.numpy_functions import WEIGHTS, NumpyFunctions, Words


class Matrix(Protocol):
    """A matrix that can be transposed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


M_co = TypeVar("M_co", bound=Matrix, covariant=True)


class TransposedMatrix(NumpyFunctions, Generic[M_co]):
    """Aᵀ, (…, heads, keys, queries): the matrix with its last two axes swapped, never stored. Made by `A.T`.

    T, mT     the matrix itself
    weights   (index into the matrix, whether to swap the result's last two axes) → weights
    product   g → Aᵀ·g
    reduced   (name, axis of Aᵀ, keepdims, swapped=True) → np.sum and its like; None: refused
    words     how errors speak of the matrix

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 1)), np.zeros((4, 1)))
    >>> A.T.shape, A.T @ np.ones(2)
    ((4, 2), array([0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(
        self,
        matrix: M_co,
        weights: Callable[[Any, bool], Any],
        product: Callable[[Any], Any],
        reduced: Callable[..., Any] | None = None,
        words: Words = WEIGHTS,
    ) -> None:
        self.T = self.mT = matrix
        self._weights, self._product, self._reduce, self._words = weights, product, reduced, words

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, queries, keys = self.T.shape
        return (*lead, keys, queries)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.T.dtype

    def _reduced(self, name: str, axis: Any, *, keepdims: bool) -> Any:
        if self._reduce is None:
            raise DtypeError(f"{name} is not answered by {self!r}.", "received() and peak() are, of the matrix itself.")
        return self._reduce(name, axis, keepdims=keepdims, swapped=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.T!r}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights: A[…] with its last two axes swapped; indices and errors as in the matrix."""
        return self._weights(*index_of_matrix(key, self.shape))

    def __matmul__(self, g: Any) -> Any:
        """Aᵀ·g: g (…, heads, queries, d), or one for all heads, (queries,) or (queries, d); gives (…, heads, keys, d).

        The result is in the weights' dtype. For a sharded sequence, g holds this rank's queries and the result this
        rank's keys, summed over the queries of all ranks. Raises ShapeError or DtypeError for a g that does not fit,
        SizeError when the result does not fit in memory. O(queries·keys·(d_k + d)) time, less where blocks of rows of
        g are zero; O(queries + keys) memory.
        """
        return self._product(g)


def index_of_matrix(key: Any, shape: tuple[int, ...]) -> tuple[tuple[int | slice, ...], bool]:
    """The index into a matrix for one into its transpose of this shape, and whether to swap the result's last two axes.

    Raises as `expand`.
    """
    picked = expand(key, shape, TRANSPOSED)
    picked[-1], picked[-2] = picked[-2], picked[-1]
    both = not isinstance(picked[-1], int) and not isinstance(picked[-2], int)
    return tuple(p if isinstance(p, int) else as_slice(p) for p in picked), both
