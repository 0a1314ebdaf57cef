"""One attention problem: shapes and score rules, validated once, in one frozen value that every engine reads.

A score is scale · q_i·k_j, then softcap, bias, ALiBi and spans; causal, window, mask, lengths and segments forbid
positions (visibility.py says which); sinks add one logit to each row's denominator. The rules act in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from operator import attrgetter
from types import NoneType
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.core.axes import KEY, QUERY, VALUE, Array, as_slice, group_size, named
from clearhead.core.rule_values import Extent, Window
from clearhead.core.rules import FIELDS, RULES, Rules, check_segments, read, read_one, take
from clearhead.errors import DtypeError, ShapeError

_ARRAYS = frozenset(name for name, rule in RULES.items() if any(rule.fields.values()))  # rules whose value may be one


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One attention problem over arrays viewed as (batch, heads, queries, d_k); made by `describe` (call.py)."""

    prefix: tuple[int, ...]  # the caller's axes before queries: () in 2-D, (heads,) in 3-D, (…, heads) beyond
    batch: int
    heads: int
    kv_heads: int
    d_k: int
    dtype: np.dtype[Any]
    device: str  # where the arrays are: "cpu", "cuda:0", …
    library: str  # whose arrays the caller gave: "torch", or "" for all others
    rows: range  # the indices of these queries and keys in the whole matrix, in which positions are counted
    cols: range
    scale: Array  # (heads,)
    softcap: float | None
    bias: Array | None  # (batch, heads, queries, keys), a broadcast view; a bias of -inf forbids
    alibi_slopes: Array | None  # (heads,)
    query_spans: Array | None  # (batch, queries): a row of the table, or -1
    key_spans: Array | None  # (batch, keys): a column of the table, or -1
    span_table: Array | None  # (batch, heads, query_spans, key_spans), a broadcast view; -inf forbids
    causal: bool
    window: Window
    mask: Array | None  # (batch, heads, queries, keys), True = may attend
    kv_lengths: Array | None  # (batch,)
    query_lengths: Array | None  # (batch,)
    query_segments: Array | None  # (batch, queries)
    kv_segments: Array | None  # (batch, keys)
    sinks: Array | None  # (heads,)
    query_offset: Array  # (batch,): query i stands at key position i + offset
    described: Any = field(default=None, init=False, repr=False)  # as the compiled kernel reads it, once it has

    def __getstate__(self) -> list[Any]:
        """For copies and pickles, which have no part of the compiled kernel."""
        return [None if one.name == "described" else getattr(self, one.name) for one in fields(self)]

    @property
    def queries(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> int:
        return len(self.cols)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights with the caller's own leading axes: (…, heads, queries, keys)."""
        return (*self.prefix, self.queries, self.keys)

    def restore(self, array: Array) -> Array:
        """Reshape an array (batch, heads, …) to the caller's own leading axes."""
        if len(self.prefix) == 2:
            return array
        return array.reshape(self.prefix + array.shape[2:])

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after its position a query may attend to, (left, right); causal makes right 0.

        None means no limit.
        """
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return group_size(self.heads, self.kv_heads)

    def kv_head_of(self, head: Any) -> Any:
        """The key head that a query head uses; for an array of query heads, the key head of each."""
        return head * self.kv_heads // self.heads

    @property
    def one_scale(self) -> float | None:
        """The scale of all heads; None where some differ."""
        scale = self.scale
        if len(scale) > 1 and (scale != scale[0]).any():
            return None
        return float(scale[0]) if len(scale) else 1.0

    def uses(self, rule: str) -> bool:
        """Is the rule in use: does its value differ from the value in a call without it?"""
        entry = RULES[rule]
        values = (getattr(self, field) for field in entry.fields)
        return entry.always or any(type(x) is not type(entry.unused) or x != entry.unused for x in values)

    def active_rules(self) -> list[str]:
        """The names of the rules in use."""
        return [name for name in RULES if self.uses(name)]

    def keywords(self) -> Rules:
        """The rules in use as the keywords that give them, for arrays with 4 axes."""
        result: Any = {}
        for name in self.active_rules():
            values = [getattr(self, field) for field in RULES[name].fields]
            result[name] = tuple(values) if len(values) > 1 else values[0]
        return cast("Rules", result)

    def take(
        self,
        batches: Array | None = None,
        heads: range | Array | None = None,
        queries: range | None = None,
        keys: range | None = None,
    ) -> "Problem":
        """Take some batches, heads, queries or keys of the problem; None takes all.

        Results for some keys are entries of the whole matrix only with the log-sum-exp over all keys. If heads are
        chosen, each gets its own key head. Slices of arrays are views; `batches` may copy.
        """
        chosen: dict[str, Any] = {"queries": queries, "keys": keys, "batch": batches, "heads": heads}
        changes = take(dict(zip(FIELDS, _fields(self), strict=True)), chosen)
        if queries is not None:
            changes["rows"] = self.rows[as_slice(queries)]
        if keys is not None:
            changes["cols"] = self.cols[as_slice(keys)]
        if batches is not None or heads is not None:
            batch = self.batch if batches is None else len(batches)
            count = self.heads if heads is None else len(heads)
            kv_heads = self.kv_heads if heads is None else count
            changes |= {"prefix": (batch, count), "batch": batch, "heads": count, "kv_heads": kv_heads}
        return replace(self, **changes)


_fields = attrgetter(*FIELDS)


def problem_of(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype[Any]], device: str, library: str, rules: Rules
) -> Problem:
    """The problem of q, k and perhaps v of these shapes and dtypes, with everything checked."""
    q, k, *v = shapes
    check_shapes(q, k, v[0] if v else None)
    _check_dtypes(dtypes)
    sizes = Extent(tuple(q[:-2]), q[-3] if len(q) > 2 else 1, q[-2], k[-2], q[-1], device)
    return Problem(
        prefix=sizes.prefix, batch=prod(sizes.lead), heads=sizes.heads, kv_heads=k[-3] if len(k) > 2 else 1,
        d_k=sizes.d_k, dtype=dtypes[0], device=device, library=library,
        rows=range(sizes.queries), cols=range(sizes.keys), **read(rules, sizes),
    )  # fmt: skip


def apart(rules: Rules) -> tuple[Rules, Rules] | None:
    """Split rules into those that are numbers and those that are arrays; None if some value is neither.

    Among the numbers, an array's name has None instead, and an offset's 0.
    """
    arrays = {name: value for name, value in rules.items() if name in _ARRAYS and not is_number(value)}
    rest: Any = {**rules, **dict.fromkeys(arrays, None)} if arrays else rules
    if "query_offset" in arrays:
        rest["query_offset"] = 0
    return (rest, cast("Rules", arrays)) if all(map(is_number, rest.values())) else None


def with_arrays(problem: Problem, arrays: Rules) -> Problem:
    """Add the rules that `apart` split off as arrays."""
    check_segments(arrays)
    lengths = len(problem.rows), len(problem.cols)
    sizes = Extent(problem.prefix, problem.heads, *lengths, problem.d_k, problem.device)
    fields: dict[str, Any] = {}
    for name, value in arrays.items():
        fields |= read_one(name, value, sizes, {"causal": problem.causal, "window": problem.window})
    return replace(problem, **fields)


def is_number(value: Any) -> bool:
    """Can the value be part of a key? It must be a number or a tuple of integers and None, which cannot change."""
    if type(value) is tuple:
        return all(type(side) in (int, NoneType) for side in value)
    return type(value) in (int, float, bool, NoneType)


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None) -> None:
    """Raise ShapeError unless the shapes of q, k and v fit each other."""
    for name, shape, axes in (("q", q, QUERY), ("k", k, KEY), ("v", v, VALUE)):
        if shape is not None and len(shape) < 2:
            raise ShapeError(
                f"{name} has shape {tuple(shape)}: expected at least two axes, ({axes[-2]}, {axes[-1]}).",
                f"{name}[None, :] makes one row of a vector.",
            )
        if shape is not None and len(shape) != len(q):
            raise ShapeError(
                f"{name} is {named(shape, axes)} but q is {named(q, QUERY)}: all need the same number of axes."
            )
    if q[-1] != k[-1]:
        raise ShapeError(
            f"q has d_k {q[-1]} but k has d_k {k[-1]}: the last axes must agree for q·kᵀ.",
            f"q is {named(q, QUERY)} and k is {named(k, KEY)}.",
        )
    for name, other, axes in (("k", k, KEY), ("v", v, VALUE)):
        if other is not None and tuple(other[:-3]) != tuple(q[:-3]):
            raise ShapeError(
                f"{name} has batch {tuple(other[:-3])} but q has batch {tuple(q[:-3])}: they must be equal.",
                f"q is {named(q, QUERY)} and {name} is {named(other, axes)}.",
            )
    if v is not None and v[-2] != k[-2]:
        raise ShapeError(
            f"v has {v[-2]} keys but k has {k[-2]}: each key needs its value.",
            f"k is {named(k, KEY)} and v is {named(v, VALUE)}.",
        )
    what = ""
    if len(q) > 2 and (q[-3] % k[-3] if k[-3] else q[-3]) != 0:
        what = f"k has {k[-3]} heads but q has {q[-3]}: query heads must be a multiple of key heads."
    elif len(q) > 2 and v is not None and v[-3] != k[-3]:
        what = f"v has {v[-3]} heads but k has {k[-3]}: each key head needs its value head."
    if what:
        raise ShapeError(what, f"q is {named(q, QUERY)}. If yours is (batch, length, heads, d), swap axes 1 and 2.")


def _check_dtypes(dtypes: Sequence[np.dtype[Any]]) -> None:
    for name, dtype in zip("qkv", dtypes, strict=False):
        if dtype not in FLOATS:
            raise DtypeError(
                f"{name} is {dtype}: expected float64, float32, bfloat16 or float16.",
                f"{name}.astype(np.float32), or {name}.float() for a tensor.",
            )
        if dtype != dtypes[0]:
            what = f"{name} is {dtype} but q is {dtypes[0]}: q, k and v must have one dtype."
            raise DtypeError(what, f"{name}.astype(q.dtype), or {name}.to(q.dtype) for a tensor.")
