"""Call: the caller's arrays and rules, read and validated once, in one value that everything below takes."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.arrays import (
    DeviceArray,
    Restore,
    as_array,
    as_tensor,
    autocast,
    device_of,
    key_of,
    numbers_of,
    same,
    torch_of,
)
from clearhead.core.axes import Array, as_places, as_slice, heads_first
from clearhead.core.problem import Problem, apart, is_number, problem_of, with_arrays
from clearhead.core.rules import Rules, check_names

_MOST = 512  # problems that are kept
_writing = Lock()
_problems: dict[Hashable, Problem] = {}  # of calls whose rules are numbers, by their shapes, dtypes and rules


class Given(NamedTuple):
    """A caller's unread arguments; a matrix keeps them to read later, when it is first asked for something."""

    q: Any
    k: Any
    rules: Rules
    engine: str | None = None


class Call:
    """A problem with its arrays, and a function that turns a result into the kind of array that q is.

    `describe` makes it.
    problem   shapes and rules
    given     q, k and v as the caller gave them, if they are plain arrays or tensors; else None
    q         (batch, heads, queries, d_k)
    k         (batch, kv_heads, keys, d_k)
    v         (batch, any number of heads that divides the query heads, keys, d_v), or None
    """

    __slots__ = ("_arrays", "given", "problem", "restore")

    def __init__(
        self, problem: Problem, q: Any, k: Any, v: Any = None, restore: Restore = same, *, read: bool = True
    ) -> None:
        self.problem = problem
        self.restore = restore
        self.given = None if read else (q, k, v)
        self._arrays: tuple[Array, Array, Array | None] | None = (q, k, v) if read else None

    @property
    def q(self) -> Array:
        return (self._arrays or self._read())[0]

    @property
    def k(self) -> Array:
        return (self._arrays or self._read())[1]

    @property
    def v(self) -> Array | None:
        return (self._arrays or self._read())[2]

    @property
    def d_v(self) -> int:
        """The width of a value; 0 where there are none."""
        v = (self.given or self._arrays or (None,) * 3)[2]
        return 0 if v is None else int(v.shape[-1])

    def _read(self) -> tuple[Array, Array, Array | None]:
        assert self.given is not None
        q, k, v = (None if x is None else heads_first(numbers_of(x)) for x in self.given)
        arrays: Any = q, k, v
        self._arrays = arrays
        return cast("tuple[Array, Array, Array | None]", arrays)

    def give(self, result: Array) -> Any:
        """Give back a result (batch, heads, …): with the caller's own leading axes, as the kind of array that q is."""
        return self.restore(self.problem.restore(result))

    def give_all(self, results: Mapping[str, Array]) -> dict[str, Any]:
        """Give back every result, by name."""
        return {name: self.give(x) for name, x in results.items()}

    def as_given(self, engine: str | None) -> Given:
        """Turn the call back into a caller's arguments, with 4 axes."""
        rules: Any = self.problem.keywords()
        rules |= {name: self.restore(cast("Array", x)) for name, x in rules.items() if isinstance(x, DeviceArray)}
        return Given(self.restore(self.q), self.restore(self.k), rules, engine)

    def with_values(self, v: Array | None) -> "Call":
        """Replace the values."""
        return Call(self.problem, self.q, self.k, v, self.restore)

    def giving_back(self, restore: Restore) -> "Call":
        """Let this function turn results into what the caller gets."""
        return Call(self.problem, self.q, self.k, self.v, restore)

    def astype(self, dtype: np.dtype[Any]) -> "Call":
        """Convert the arrays to another dtype."""
        q, k, v = (None if x is None else x.astype(dtype, copy=False) for x in (self.q, self.k, self.v))
        return Call(replace(self.problem, dtype=dtype), q, k, v, self.restore)

    def take(
        self,
        batches: Array | None = None,
        heads: range | Array | None = None,
        queries: range | None = None,
        keys: range | None = None,
    ) -> "Call":
        """Take some batches, heads, queries or keys of the call; None takes all.

        If heads are chosen, each gets its own key head. Slices of arrays are views; `batches` may copy.
        """
        problem = self.problem.take(batches, heads, queries, keys)
        batch = slice(None) if batches is None else as_places(batches)
        rows = slice(None) if queries is None else as_slice(queries)
        cols = slice(None) if keys is None else as_slice(keys)
        q, k, v = self._arrays or self._read()
        if heads is not None:
            chosen = np.asarray(heads)
            q, k = q[:, as_places(chosen)], k[:, as_places(self.problem.kv_head_of(chosen))]
            v = None if v is None else v[:, as_places(chosen * v.shape[1] // self.problem.heads)]
        values = None if v is None else v[:, :, cols][batch]
        return Call(problem, q[:, :, rows][batch], k[:, :, cols][batch], values, self.restore)


def known(q: Any, k: Any, v: Any, rules: Rules) -> Problem | None:
    """The problem that `describe` would read, if it was read before and the key of `_key` finds it; else None."""
    if rules and not all(map(is_number, rules.values())):
        return None
    key = _key(q, k, v, rules) if rules else key_of(q, k, v)
    return None if key is None else _problems.get(key)  # None while compiling: each problem would be a recompilation


def describe(q: Any, k: Any, v: Any, rules: Rules) -> Call:
    """Read and validate all arguments of a call before any work; every public call comes through here.

    q (…, heads, queries, d_k), k (…, kv_heads, keys, d_k), v (…, kv_heads, keys, d_v) or None; 2-D is one head.

    Raises ShapeError where shapes do not fit each other, DtypeError unless they are arrays of one float dtype on
    one device, RuleError for a wrong value of a rule, UnknownNameError for a keyword that is no rule.
    O(1), plus reading the rules that are arrays. What plain numbers say is read once for each combination of shapes.
    """
    numbers, arrays = (apart(rules) or (None, rules)) if rules else (rules, rules)
    key = None if numbers is None else _key(q, k, v, numbers)
    problem = _problems.get(key)
    if problem is not None:
        problem = with_arrays(problem, arrays) if arrays else problem
        return Call(problem, q, k, v, same if type(q) is np.ndarray else as_tensor, read=False)
    check_names(rules)
    of_q, restore = as_array(autocast(q), "q")
    device = device_of(of_q)
    of_k = as_array(autocast(k), "k", device)[0]
    of_v = None if v is None else as_array(autocast(v), "v", device)[0]
    shapes, dtypes = zip(*((x.shape, x.dtype) for x in (of_q, of_k, of_v) if x is not None), strict=True)
    library, told = "torch" if torch_of(q) else "", rules if numbers is None else numbers
    problem = problem_of(shapes, dtypes, device, library, told)
    if key is not None:
        with _writing:
            if len(_problems) >= _MOST:
                _problems.pop(next(iter(_problems)))
            _problems[key] = problem
    if arrays and numbers is not None:
        problem = with_arrays(problem, arrays)
    if key is not None:
        return Call(problem, q, k, v, restore, read=False)
    return Call(problem, heads_first(of_q), heads_first(of_k), None if of_v is None else heads_first(of_v), restore)


def _key(q: Any, k: Any, v: Any, numbers: Rules) -> Hashable:
    """The key under which calls share a problem, apart from rules that are arrays; None if a closer look is needed."""
    key = key_of(q, k, v)
    if key is None or not numbers:
        return key
    return (key, *numbers.items(), *map(type, numbers.values()))  # True equals 1


def describe_whole(q: Any, k: Any, v: Any, rules: Rules) -> Call:
    """As `describe`, for calls that need v. Raises DtypeError where v is None."""
    if v is None:
        as_array(v, "v")  # raises: it is no array
    return describe(q, k, v, rules)
