"""One call: the caller's arrays and rules, read and validated once, in one value that everything below takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import Restore, as_array, autocast, device_of, same, torch_of
from clearhead.core.axes import Array, as_places, as_slice, heads_first
from clearhead.core.problem import Arrays, Problem, problem_of
from clearhead.core.rule_values import read_threads
from clearhead.core.rules import Rules, check_names


class Given(NamedTuple):
    """What a caller gave, before it is read: a matrix may be asked much later what it is made of."""

    q: Any
    k: Any
    rules: Rules
    engine: str | None = None
    num_threads: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A problem with its arrays, and what turns a result into the kind of array that q is; made by `describe`."""

    problem: Problem
    q: Array  # (batch, heads, queries, d_k)
    k: Array  # (batch, kv_heads, keys, d_k)
    v: Array | None = None  # (batch, any number of heads that divides the query heads, keys, d_v)
    restore: Restore = same

    def give(self, result: Array) -> Any:
        """Give back a result (batch, heads, …): with the caller's own leading axes, as the kind of array that q is."""
        return self.restore(self.problem.restore(result))

    def give_all(self, results: Mapping[str, Array]) -> dict[str, Any]:
        """Give back every result, by name."""
        return {name: self.give(x) for name, x in results.items()}

    def with_values(self, v: Array | None) -> "Call":
        """Replace the values."""
        return replace(self, v=v)

    def astype(self, dtype: np.dtype[Any]) -> "Call":
        """Convert the arrays to another dtype."""
        q, k = self.q.astype(dtype, copy=False), self.k.astype(dtype, copy=False)
        v = None if self.v is None else self.v.astype(dtype, copy=False)
        return replace(self, problem=replace(self.problem, dtype=dtype), q=q, k=k, v=v)

    def take(
        self,
        *,
        queries: range | None = None,
        keys: range | None = None,
        batches: Array | None = None,
        heads: range | None = None,
    ) -> "Call":
        """Take some queries, keys, batches or heads only; what is left out stays whole.

        Choosing heads gives each of them a key head of its own. Slices of arrays are views; `batches` may copy.
        """
        problem = self.problem.take(queries=queries, keys=keys, batches=batches, heads=heads)
        batch = slice(None) if batches is None else as_places(batches)
        rows, cols = (slice(None) if part is None else as_slice(part) for part in (queries, keys))
        q, k, v = self.q, self.k, self.v
        if heads is not None:
            chosen = np.asarray(heads)
            q, k = q[:, as_slice(heads)], k[:, as_places(self.problem.kv_head_of(chosen))]
            v = None if v is None else v[:, as_places(chosen * v.shape[1] // self.problem.heads)]
        values = None if v is None else v[:, :, cols][batch]
        return Call(problem, q[:, :, rows][batch], k[:, :, cols][batch], values, self.restore)


def describe(q: Any, k: Any, v: Any, rules: Rules, num_threads: int | None = None) -> Call:
    """Read and validate all arguments of a call before any work; every public call comes through here.

    q (…, heads, queries, d_k), k (…, kv_heads, keys, d_k), v (…, kv_heads, keys, d_v) or None; 2-D is one head.

    Raises ShapeError where shapes do not fit each other, DtypeError unless they are arrays of one float dtype on
    one device, RuleError for a wrong value of a rule or of num_threads, UnknownNameError for a keyword that is no rule.
    O(1), plus reading the rules that are arrays.
    """
    check_names(rules)
    num_threads, library = read_threads(num_threads), "torch" if torch_of(q) else ""
    q, restore = as_array(autocast(q), "q")
    device = device_of(q)
    k = as_array(autocast(k), "k", device)[0]
    shapes: tuple[tuple[int, ...], ...] = q.shape, k.shape
    dtypes: tuple[np.dtype[Any], ...] = q.dtype, k.dtype
    if v is not None:
        v = as_array(autocast(v), "v", device)[0]
        shapes, dtypes = (*shapes, v.shape), (*dtypes, v.dtype)
    problem = problem_of(Arrays(shapes, dtypes, device, library, num_threads), rules)
    return Call(problem, heads_first(q), heads_first(k), None if v is None else heads_first(v), restore)


def describe_whole(q: Any, k: Any, v: Any, rules: Rules, num_threads: int | None = None) -> tuple[Call, Array]:
    """As `describe`, for calls that need v, which is returned second. Raises DtypeError where v is None."""
    if v is None:
        as_array(v, "v")  # raises: it is no array
    call = describe(q, k, v, rules, num_threads)
    assert call.v is not None
    return call, call.v
