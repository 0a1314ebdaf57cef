"""What NumPy may ask of a matrix that is never stored: an array of every weight. All else is refused."""

from collections.abc import Sequence
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import Array
from clearhead.errors import DtypeError, RuleError


class LazyMatrix(NDArrayOperatorsMixin):
    """A matrix that is never stored: refuses what would need every weight, and says what to call instead."""

    instead = "A @ np.ones(A.shape[-1]) sums over keys, A.received() over queries, A.top(1) has each query's largest"
    __getitem__: Any

    if TYPE_CHECKING:  # each subclass has these, and indices

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
