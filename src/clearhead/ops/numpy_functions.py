"""What NumPy's functions and Python's operators do with a matrix that is never stored, and its transpose.

np.asarray(A) computes and stores every weight, and so does torch.as_tensor(A). Functions that need no stored weight are
answered: np.sum, mean, max, min, argmax, argmin, np.matmul, np.shape, np.ndim, np.size. All others, and arithmetic, are
refused by name, since they would store every weight without being asked to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from clearhead.core.arrays import as_host_array, as_rule_array
from clearhead.core.axes import Array
from clearhead.core.rule_values import read_flag
from clearhead.digits import significant
from clearhead.errors import DtypeError, RuleError, shown
from clearhead.tables import QUICK, Table, Tabular
from clearhead.words import Language, say

_SYMBOLS = {
    "add": "+", "subtract": "-", "multiply": "*", "true_divide": "/", "divide": "/", "floor_divide": "//",
    "remainder": "%", "power": "**", "matmul": "@", "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=",
}  # fmt: skip
M_co = TypeVar("M_co", bound="Refusing", covariant=True)


class Words(NamedTuple):
    """How errors speak of a matrix: its letter, what it is made of, and what to write instead of a function."""

    letter: str
    one: str
    instead: Mapping[str, str]


def words(letter: str, one: str, right: str, left: str, **more: str) -> Words:
    """How errors speak of a matrix that is multiplied by `right`, its transpose by `left`; more: other functions."""
    product, transposed = f"{letter} @ {right}", f"{letter}.T @ {left}"
    instead = {
        **dict.fromkeys(
            ("sort", "argsort", "partition", "argpartition"), f"{letter}.top(8): each query's strongest keys."
        ),
        **dict.fromkeys(("transpose", "swapaxes", "moveaxis", "matrix_transpose"), f"{letter}.T"),
        **dict.fromkeys(("dot", "inner", "tensordot", "einsum", "vdot"), f"{product}, {transposed}"),
        "matmul": f"{product}, and {transposed} for what stands on the left: {left}.mT @ {letter} is ({transposed}).mT",
    }
    return Words(letter, one, instead | more)


_DIAGONAL = "A.diagonal(): the weight that each query gives the key at its own position."
WEIGHTS = words(
    "A", "weight", "v", "g",
    reduce="np.sum(A, axis=-1), and mean, max, min, argmax, argmin", diagonal=_DIAGONAL, trace=_DIAGONAL,
)  # fmt: skip


class Refusing(NDArrayOperatorsMixin):
    """What every matrix refuses, those of shards too: comparisons and arithmetic; each subclass has what follows."""

    _words: Words = WEIGHTS

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> np.dtype[Any]: ...

        def __matmul__(self, v: Any) -> Any: ...

        def _transposed(self, g: Any) -> Any: ...

        def _by_index(self, key: Any, *, transposed: bool = False) -> Any: ...

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of weights."""
        return prod(self.shape)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc is np.matmul and method == "__call__" and inputs[0] is self and not options:
            return self @ inputs[1]
        name = f"np.{ufunc.__name__}" if method == "__call__" else f"np.{ufunc.__name__}.{method}"
        symbol = _SYMBOLS.get(ufunc.__name__)
        return self._refuse(f"{name} ({symbol})" if symbol and method == "__call__" else name)

    def __eq__(self, other: object) -> bool:
        """Refused for numbers, lists, arrays and matrices, where a False would be taken for an answer."""
        numbers = isinstance(other, (Number, np.generic, Sequence)) and not isinstance(other, (str, bytes))
        if numbers or hasattr(other, "__array__") or hasattr(other, "shape"):
            return self._refuse("==", "`A is B` asks whether they are one object.")
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        result = self.__eq__(other)
        return result if result is NotImplemented else not result

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self._refuse("bool", "`A is None` asks whether there is one, A.size how many weights it has.")

    def __contains__(self, value: object) -> bool:
        return self._refuse("in")

    def _refuse(self, name: str, instead: str = "") -> NoReturn:
        last = name.split(" ")[0].split(".")[-1]
        letter, one, others = self._words
        instead = instead or others.get(last, "")
        raise DtypeError(
            f"{name} would need every {one} of {self!r}.",
            f"{letter}[...] is a stored copy, {self.size:,} {one}s, {letter}[..., :512, :512] a tile of it. "
            f"{instead}".strip(),
        )


class NumpyFunctions(Refusing):
    """Reductions and protocols; each subclass has `[…]` and `_reduced` as well."""

    if TYPE_CHECKING:

        def __getitem__(self, key: Any) -> Any: ...

        def _reduced(self, name: str, axis: Any, *, keepdims: bool, swapped: bool = False) -> Any:
            """The reduction of that name; arguments are not checked yet, except keepdims."""

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """A[0], A[1], …: each computed and stored when its turn comes."""
        return (self[place] for place in range(len(self)))

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """The sum of the weights over some axes, as np.sum(A[...], axis) without storing them.

        axis      -1 (keys), -2 (queries), a tuple of one of them or both with further axes, or None: all
        keepdims  keep the axes with size 1

        Over keys it is 1, less a sink's share, and 0 for a query that sees no key; of a CauseMatrix it is by_query(),
        over queries by_key(). Returns what NumPy does, of q's kind, in the matrix's dtype; summed in float64 beyond one
        pass. np.sum(A, …) is the same. Differentiable as `observe` is. Raises SelectionError for other axes, RuleError
        unless keepdims is True or False, SizeError where the result does not fit in memory. O(queries·keys·d_k) time,
        O(queries + keys) memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.sum(axis=-1), np.sum(A, axis=-2), float(np.sum(A))
        (array([1., 1.]), array([1.5, 0.5]), 2.0)
        """
        return self._reduced("sum", axis, keepdims=read_flag("keepdims", keepdims))

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """The mean weight over some axes, as np.mean; all else as `sum`, the mean of no weights is NaN.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).mean(axis=0)
        array([0.75, 0.25])
        """
        return self._reduced("mean", axis, keepdims=read_flag("keepdims", keepdims))

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """The largest weight over some axes, as np.max; all else as `sum`. Raises ShapeError where there is none.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).max(axis=-1)
        array([1. , 0.5])
        """
        return self._reduced("max", axis, keepdims=read_flag("keepdims", keepdims))

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """The smallest weight over some axes, as np.min: 0 where a key is forbidden. All else as `max`.

        It has no derivative: RuleError while PyTorch records a graph.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).min(axis=-1)
        array([0. , 0.5])
        """
        return self._reduced("min", axis, keepdims=read_flag("keepdims", keepdims))

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """The index of the largest weight along keys (-1) or queries (-2), or among all weights (None), as np.argmax.

        int64; of equal weights the first. Errors and cost as `min`. A.top(1) has each query's in one pass.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True).argmax(axis=-1)
        array([0, 1, 2])
        """
        return self._reduced("argmax", axis, keepdims=read_flag("keepdims", keepdims))

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """The index of the smallest weight; all else as `argmax`.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True).argmin(axis=-1)
        array([1, 2, 0])
        """
        return self._reduced("argmin", axis, keepdims=read_flag("keepdims", keepdims))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001  NumPy's protocol
        if copy is False:
            raise RuleError("the weights are computed when asked for: an array of them is always a copy.")
        return np.asarray(as_rule_array(self[...], "weights"), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """For torch.as_tensor(A) and whatever else reads DLPack: every weight, computed and stored."""
        if options.get("copy") is False:
            raise RuleError("the weights are computed when asked for: an array of them is always a copy.")
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        result: tuple[int, int] = self[(slice(0),) * self.ndim].__dlpack_device__()
        return result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        del types
        answer = _ANSWERED.get(func)
        if answer is None:
            self._refuse(_full_name(func))
        return answer(self, **_arguments(func, args, kwargs))


class TransposedMatrix(Tabular, NumpyFunctions, Generic[M_co]):
    """Aᵀ, (…, heads, keys, queries): the matrix with its last two axes swapped, never stored. Made by `A.T`.

    T, mT     the matrix itself

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.zeros((2, 1)), np.zeros((4, 1)))
    >>> A.T.shape, A.T @ np.ones(2)
    ((4, 2), array([0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(self, matrix: M_co) -> None:
        self.T = self.mT = matrix
        self._words = matrix._words

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, queries, keys = self.T.shape
        return (*lead, keys, queries)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.T.dtype

    def _reduced(self, name: str, axis: Any, *, keepdims: bool, swapped: bool = False) -> Any:
        if not isinstance(self.T, NumpyFunctions):
            raise DtypeError(f"{name} is not answered by {self!r}.", "received() and peak() are, of the matrix itself.")
        return self.T._reduced(name, axis, keepdims=keepdims, swapped=not swapped)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.T!r}"

    def _tables(self, language: Language) -> list[Table]:
        table = Table(say(language, "transposed table"), notes=[repr(self)])
        if not (isinstance(self.T, NumpyFunctions) and 0 < self.size <= QUICK):
            return [table]
        result = self.sum(axis=-1)
        result = result.detach() if hasattr(result, "detach") else result  # from PyTorch's graph
        sums = as_host_array(result, "sum")[0].astype(np.float64).reshape(-1, self.shape[-2])
        order = np.argsort(-np.abs(sums), axis=None, kind="stable")[:10]
        places = np.transpose(np.unravel_index(order, sums.shape)).tolist()
        rows = [(str(head), str(key), significant(float(sums[head, key]), 4)) for head, key in places]
        names = [say(language, f"column {name}") for name in ("head", "key", "sum")]
        return [table._replace(columns=names, rows=rows, bars=sums.flat[order].tolist())]

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
        return self.T._transposed(g)


_REDUCTIONS = ("sum", "mean", "max", "min", "argmax", "argmin")
_ANSWERED: dict[Any, Callable[..., Any]] = {
    **{getattr(np, name): getattr(NumpyFunctions, name) for name in _REDUCTIONS},
    np.amax: NumpyFunctions.max,
    np.amin: NumpyFunctions.min,
    np.shape: lambda matrix: matrix.shape,
    np.ndim: lambda matrix: matrix.ndim,
    np.size: lambda matrix, axis=None: np.size(np.broadcast_to(0, matrix.shape), axis),
}


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments after the matrix that were given and say something. Raises RuleError for what is not taken."""
    expected = signature(func)
    values = expected.bind(*args, **kwargs).arguments
    usual = {name: (None, parameter.default) for name, parameter in expected.parameters.items()}
    _, *others = values
    said = {name: values[name] for name in others if not any(values[name] is one for one in usual[name])}
    for name, value in said.items():
        if name not in ("axis", "keepdims"):
            raise RuleError(f"{name} is {shown(value)}: {_full_name(func)} of a matrix takes axis and keepdims.")
    return said


def _full_name(func: Any) -> str:
    home = getattr(func, "__module__", "") or ""
    return f"{home.replace('numpy', 'np', 1)}.{func.__name__}"
