"""LazyMatrix: a matrix that is never stored, with indices, products and a transpose; other NumPy calls are refused.

Weights and effects of edges are such matrices; they differ in how a tile of them is computed.
"""

from collections.abc import Sequence
from importlib import import_module
from math import prod
from numbers import Number
from operator import index as as_index
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from clearhead.core import room
from clearhead.core.arrays import as_array, as_rule_array, to_device_of
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.call import Call
from clearhead.core.effects import Terms
from clearhead.core.observations import operand
from clearhead.core.state import State
from clearhead.engines.base import Engine
from clearhead.errors import DtypeError, RuleError, SelectionError


class LazyMatrix(NDArrayOperatorsMixin):
    """Weights or effects of edges, (…, heads, queries, keys); subclasses compute tiles and products.

    words     the name of its numbers in errors, and the hint where too many are asked for
    instead   the hint where NumPy asks for every number, which is refused
    """

    words: tuple[str, str]
    instead: str
    _engine: Engine

    if TYPE_CHECKING:  # each subclass has these

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> np.dtype[Any]: ...

        @property
        def call(self) -> Call: ...

        @property
        def observe(self) -> Any: ...

        def _known(self, batches: Array | None, heads: range | None, rows: range, cols: range) -> State | Terms:
            """What the engine needs of these rows to compute a tile of these keys; None means all."""

        def _multiply(self, columns: Array, *, transposed: bool) -> Array:
            """The product with columns (batch, 1, kv_heads or heads, keys, d), or (…, queries, d) if transposed."""

    else:  # a type checker would take every misspelt name for one of these

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse by name what only a stored array has: sum, argmin, reshape, …"""
            known = hasattr(np.ndarray, name) and not name.startswith("_")
            raise AttributeError(str(self._refusal(name)) if known else f"{type(self)} has no attribute {name!r}")

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, str]]:
        """For copies and pickles, in which engines stand by their names: a module cannot be pickled."""
        modules = {name: x.__name__ for name, x in self.__dict__.items() if isinstance(x, ModuleType)}
        return {name: x for name, x in self.__dict__.items() if name not in modules}, modules

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, str]]) -> None:
        self.__dict__.update(state[0], **{name: import_module(module) for name, module in state[1].items()})

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
            raise RuleError("the weights are not stored: an array of them is always a copy.", "np.asarray(A)")
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
            raise self._refusal("==")  # False would look like an answer
        return NotImplemented

    __ne__, __hash__ = object.__ne__, object.__hash__

    def __bool__(self) -> bool:
        raise self._refusal("bool")

    def _refusal(self, name: str) -> DtypeError:
        hint = f"{self.instead}; np.asarray of the matrix stores all {self.size:,} numbers."
        return DtypeError(f"{name} would need every number of {self!r}.", hint)

    @property
    def T(self) -> "LazyMatrix":  # noqa: N802
        """The last two axes swapped: (…, heads, keys, queries), for A.T @ g."""
        return TransposedMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        """Exact weights or effects by integers, slices with steps and Ellipsis; only those asked for are computed.

        Returns an array of the indexed shape in the matrix's dtype, of q's kind. Raises SelectionError for any other
        index or one outside its axis, SizeError for more numbers than fit in memory, RuleError while PyTorch records a
        graph. The first time, O(rows·keys·d_k) for the log-sum-exp, or O(queries·keys·(d_k + d_v)) for the row terms of
        cuts; then O(numbers·d_k), for effects O(numbers·(d_k + d_v)).

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)[1:, :2].round(3)
        array([[0.36 , 0.64 ],
               [0.264, 0.264]])
        >>> v, ones = np.array([[1.0], [0.0], [4.0]]), np.ones((3, 1))
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(v, ones)[0, ::-1].round(3)
        array([1.058, 0.   , 0.471])
        """
        call = self.call
        problem = call.problem
        ranges, shape = read_index(key, self.shape)
        if 0 in shape:
            tile = to_device_of(np.empty(shape, self.dtype), call.q)
        else:
            if prod(shape) * 8 > room.SMALL:
                what, instead = self.words
                size = prod(shape) * self.dtype.itemsize
                room.check_room(f"{what} of shape {shape}", size, instead, problem.device)
            *lead, rows, cols = ranges
            *places, heads = lead or [range(1)]
            batches = np.arange(problem.batch).reshape(problem.prefix[:-1])[np.ix_(*places)].reshape(-1)
            every = heads == range(problem.heads) and np.array_equal(batches, np.arange(problem.batch))
            chosen: tuple[Any, Any] = (None, None) if every else (batches, heads)
            known = self._known(*chosen, rows, cols)
            tile = self._engine.weights(call.take(*chosen, rows, cols), known).reshape(shape)
        return call.restore(tile)

    def __matmul__(self, v: Any) -> Any:
        """Return A·v or E·v, (…, heads, queries, d_v); A·v equals `attention` bit for bit.

        v (…, kv_heads or heads, keys, d_v), or one for all heads, (keys,) or (keys, d_v). The result is the kind of
        array that v is, for effects in E's dtype; A.T @ g and E.T @ g take g (…, heads, queries, d). Raises ShapeError
        or DtypeError for a v that does not fit, SizeError if the result is larger than memory. O(queries·keys·(d_k +
        d_v)) time, O(queries + keys) memory. Under torch.compile, write `A.observe(v).output`: it cannot trace `A @ v`.

        >>> import numpy as np, clearhead as ch
        >>> (ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True) @ np.arange(3.0)).round(3)
        array([0.   , 0.64 , 1.207])
        """
        return self._product(v)

    def top(self, k: int) -> Any:
        """Return each query's k strongest weights or effects and their keys, (…, heads, queries, k) each.

        A Top of weights, largest first, or a Ranked of effects, largest magnitude first; of equal ones the earlier key
        comes first. Lists only keys that the rules allow, and no effect that is NaN; places left over hold 0 and index
        -1. Raises RuleError unless k is a whole number from 1 up. O(queries·keys·d_k) time, for effects
        O(queries·keys·(d_k + d_v)); O(queries·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
        >>> A.top(2).indices.tolist(), A.cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3)).top(2).indices.tolist()
        ([[0, -1], [1, 0], [2, 0]], [[0, -1], [1, 0], [2, 1]])
        """
        return self.observe(top=0 if k is None else k).top  # None would ask for nothing

    def image(self, height: int, width: int) -> Any:
        """Return the matrix as a picture, (…, heads, height, width): each pixel is the mean of the area it covers.

        The picture's mean is that of the matrix. Raises RuleError unless both sides are whole numbers from 1 up.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.image(1, 1)
        array([[0.5]])
        """
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """The sum of weights or effects between labelled spans, (…, heads, query groups, key groups).

        query_groups is (queries,) or (…, queries), key_groups (keys,) or (…, keys): whole numbers 0, 1, 2, …; a token
        whose label is below 0 belongs to no group. Effects of cutting single edges do not add up to that of cutting a
        span: `A.cut(keys=span) @ v` is the output without it. Raises DtypeError, ShapeError or RuleError.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).groups([0, 0], [0, 1])
        array([[1.5, 0.5]])
        """
        return self.observe(groups=(query_groups, key_groups)).groups

    def _product(self, x: Any, *, transposed: bool = False) -> Any:
        problem = self.call.problem
        name, length, heads, result = "v", problem.keys, (problem.kv_heads, problem.heads), problem.queries
        if transposed:
            name, length, heads, result = "g", problem.queries, (problem.heads, 1), problem.keys
        array, restore = as_array(x, name, problem.device)
        columns, vector = operand(problem, array, name, length, heads)
        shape = (problem.batch, problem.heads, result, columns.shape[-1])
        size = room.array_bytes(shape, self.dtype.itemsize)
        room.check_room(f"a product of shape {shape}", size, f"give fewer columns of {name}.", problem.device)
        whole = problem.restore(self._multiply(columns, transposed=transposed))
        return restore(whole[..., 0] if vector else whole)

    def _restore(self, x: Array) -> Any:
        """Turn a result in the caller's axes into the kind of array that q is, where q lies."""
        return self.call.restore(to_device_of(x, self.call.q) if isinstance(x, np.ndarray) else x)


class TransposedMatrix(LazyMatrix):
    """Aᵀ, (…, heads, keys, queries): the matrix with its last two axes swapped, never stored. Made by `A.T`.

    T         the matrix itself, which can be indexed: A[..., 3] is a column
    A.T @ g   Σ_i a_ij·g_i: g (…, heads, queries, d), or one for all heads, (queries,) or (queries, d); gives (…, heads,
              keys, d) in the weights' dtype. O(queries·keys·(d_k + d)) time, less where blocks of rows of g are zero

    Raises as A @ v.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 1)), np.zeros((4, 1)))
    >>> A.T.shape, A.T @ np.ones(2)
    ((4, 2), array([0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(self, matrix: LazyMatrix) -> None:
        self._matrix, self.instead = matrix, matrix.instead

    @property
    def T(self) -> LazyMatrix:  # noqa: N802
        return self._matrix

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
        raise SelectionError("the transpose has no index, only A.T @ g.", "A[..., 3] is a column of the matrix.")

    def _product(self, x: Any, *, transposed: bool = False) -> Any:
        return self.T._product(x, transposed=not transposed)


def read_index(key: Any, shape: tuple[int, ...]) -> tuple[list[range], tuple[int, ...]]:
    """Read an index of a matrix of this shape: return the range that it picks along each axis, and the tile's shape.

    Raises SelectionError for anything else, for too many indices, and for an integer outside its axis.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis] or [len(parts)]
    parts[dots[0] : dots[0] + 1] = []
    absent = len(shape) - len(parts)
    if len(dots) > 1:
        raise SelectionError("an index can have only one Ellipsis (`...`).")
    if absent < 0:
        raise SelectionError(f"{len(parts)} indices for {len(shape)} axes: the matrix is {named(shape, WEIGHTS)}.")
    parts[dots[0] : dots[0]] = [slice(None)] * absent
    ranges: list[range] = []
    tile: list[int | None] = []  # the length of each axis, None for an axis that an integer drops
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        try:
            if isinstance(part, bool):
                raise TypeError
            picked: Any = range(size)[part if isinstance(part, slice) else as_index(part)]
        except IndexError:
            what = f"index {part} is outside axis {axis}: the matrix is {named(shape, WEIGHTS)}."
            raise SelectionError(what) from None
        except Exception:  # another library's __index__ may raise anything
            kind = part if isinstance(part, slice) else type(part).__name__
            raise SelectionError(
                f"axis {axis} is indexed by {kind}: expected integers, slices and `...`.",
                "A[...][that] indexes a stored copy.",
            ) from None
        ranges.append(picked if isinstance(part, slice) else range(picked, picked + 1))
        tile.append(len(picked) if isinstance(part, slice) else None)
    return ranges, tuple(length for length in tile if length is not None)
