"""What is to be computed: the shapes and the score rules, validated once, in one frozen value that every engine reads.

A score is scale · q_i·k_j, then softcap, bias and ALiBi; causal, window, mask, lengths and segments forbid positions
(visibility.py says which); sinks add one logit to each row's denominator. The rules act in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import NoneType
from typing import Any, TypedDict

import numpy as np

from clearhead.arrays import FLOATS, Restore, adopt, autocast, device_of
from clearhead.axes import KEY, QUERY, VALUE, Array, as_places, as_slice, heads_first, named
from clearhead.errors import DtypeError, RuleError, ShapeError, unknown
from clearhead.values import (
    Window,
    one_per_head,
    read_flag,
    read_lengths,
    read_matrix,
    read_number,
    read_offset,
    read_segments,
    read_softcap,
    read_window,
)


class Rules(TypedDict, total=False):
    """The score rules: the same keywords everywhere, all optional, in the order in which they act."""

    scale: float | None
    softcap: float | None
    bias: Any
    alibi_slopes: Any
    causal: bool
    window: Window | None
    mask: Any
    kv_lengths: Any
    query_lengths: Any
    query_segments: Any
    kv_segments: Any
    sinks: Any
    query_offset: Any


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Problem:
    """One attention problem over arrays viewed as (batch, heads, queries, d_k); made by `describe`."""

    prefix: tuple[int, ...]  # the caller's axes before queries: () in 2-D, (heads,) in 3-D, (…, heads) beyond
    batch: int
    heads: int
    kv_heads: int
    d_k: int
    dtype: np.dtype[Any]
    device: str  # where the arrays are: "cpu", "cuda:0", …
    rows: range  # which queries and keys of the whole matrix these are: positions are counted there
    cols: range
    scale: float
    softcap: float | None
    bias: Array | None  # (batch, heads, queries, keys), a broadcast view; a bias of -inf forbids
    alibi_slopes: Array | None  # (heads,)
    causal: bool
    window: Window
    mask: Array | None  # (batch, heads, queries, keys), True = may attend
    kv_lengths: Array | None  # (batch,)
    query_lengths: Array | None  # (batch,)
    query_segments: Array | None  # (batch, queries)
    kv_segments: Array | None  # (batch, keys)
    sinks: Array | None  # (heads,)
    query_offset: Array  # (batch,): query i stands at key position i + offset

    @property
    def queries(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> int:
        return len(self.cols)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weights' shape as the caller counts axes."""
        return (*self.prefix, self.queries, self.keys)

    def restore(self, array: Array) -> Array:
        """An array (batch, heads, …) with the caller's own leading axes."""
        if len(self.prefix) == 2:
            return array
        return array.reshape(self.prefix + array.shape[2:])

    def take(self, queries: range | None = None, keys: range | None = None) -> "Problem":
        """The same problem for some queries and keys only; a key left out is out of the result, not of the softmax."""
        rows = _all(self.queries) if queries is None else as_slice(queries)
        cols = _all(self.keys) if keys is None else as_slice(keys)
        return replace(
            self,
            rows=self.rows[rows],
            cols=self.cols[cols],
            bias=None if self.bias is None else self.bias[:, :, rows, cols],
            mask=None if self.mask is None else self.mask[:, :, rows, cols],
            query_segments=None if self.query_segments is None else self.query_segments[:, rows],
            kv_segments=None if self.kv_segments is None else self.kv_segments[:, cols],
        )

    def take_heads(self, batches: Array, heads: range) -> "Problem":
        """The same problem for some batches and heads only, one key head for each query head."""
        chosen, places = as_slice(heads), as_places(batches)

        def per_batch(x: Array | None) -> Array | None:
            return None if x is None else x[places]

        def per_head(x: Array | None) -> Array | None:
            return None if x is None else x[chosen]

        def both(x: Array | None) -> Array | None:
            return None if x is None else x[:, chosen][places]

        return replace(
            self,
            prefix=(len(batches), len(heads)),
            batch=len(batches),
            heads=len(heads),
            kv_heads=len(heads),
            bias=both(self.bias),
            mask=both(self.mask),
            alibi_slopes=per_head(self.alibi_slopes),
            sinks=per_head(self.sinks),
            kv_lengths=per_batch(self.kv_lengths),
            query_lengths=per_batch(self.query_lengths),
            query_segments=per_batch(self.query_segments),
            kv_segments=per_batch(self.kv_segments),
            query_offset=self.query_offset[places],
        )


@dataclass(frozen=True, eq=False, slots=True)
class Described:
    """A problem with its arrays: q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v or None."""

    problem: Problem
    q: Array
    k: Array
    v: Array | None
    restore: Restore


def describe(q: Any, k: Any, v: Any, rules: Rules) -> Described:
    """Read and validate everything, before any work: the one gate that all calls go through.

    q (…, heads, queries, d_k), k (…, kv_heads, keys, d_k), v (…, kv_heads, keys, d_v) or None; 2-D is one head.
    Raises ShapeError, DtypeError, RuleError or UnknownNameError.
    """
    check_names(rules)
    q, restore = adopt(autocast(q), "q")
    device = device_of(q)
    k = adopt(autocast(k), "k", device)[0]
    shapes, dtypes = [q.shape, k.shape], [q.dtype, k.dtype]
    if v is not None:
        v = adopt(autocast(v), "v", device)[0]
        shapes.append(v.shape)
        dtypes.append(v.dtype)
    plain_rules = _without_arrays(rules)
    if plain_rules is None:
        problem = _checked(tuple(shapes), tuple(dtypes), device, rules)
    else:
        problem = _known(tuple(shapes), tuple(dtypes), device, *plain_rules)
    return Described(problem, heads_first(q), heads_first(k), None if v is None else heads_first(v), restore)


def describe_whole(q: Any, k: Any, v: Any, rules: Rules) -> tuple[Described, Array]:
    """As `describe`, where there must be values; they come second."""
    if v is None:
        adopt(v, "v")  # says what v is and should be
    given = describe(q, k, v, rules)
    assert given.v is not None
    return given, given.v


def _without_arrays(rules: Rules) -> list[Any] | None:
    """Names and values, if all values are plain numbers and windows of them: such problems can be known again."""
    found: list[Any] = []
    for name, value in rules.items():
        whole = type(value) is tuple and all(type(side) in (int, NoneType) for side in value)
        if not whole and type(value) not in (int, float, bool, NoneType):
            return None
        found += name, value
    return found


def _checked(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], device: str, rules: Rules
) -> Problem:
    check_shapes(shapes[0], shapes[1], shapes[2] if len(shapes) > 2 else None)
    _check_dtypes(dtypes)
    return _apply_rules(shapes[0], shapes[1], dtypes[0], device, rules)


@lru_cache(maxsize=512, typed=True)  # a short call takes as long as this; typed, since True is no 1 here
def _known(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], device: str, *plain_rules: Any
) -> Problem:
    rules: Any = dict(zip(plain_rules[::2], plain_rules[1::2], strict=True))
    return _checked(shapes, dtypes, device, rules)


def check_names(rules: Rules) -> None:
    """Every rule must be one of `Rules`."""
    for name in rules:
        if name not in Rules.__annotations__:
            raise unknown("rule", name, Rules.__annotations__)


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None) -> None:
    """The shapes of q, k and v must fit each other."""
    for name, shape, axes in (("q", q, QUERY), ("k", k, KEY), ("v", v, VALUE)):
        if shape is not None and len(shape) < 2:
            raise ShapeError(
                f"{name} has {len(shape)} axes: expected at least two, ({axes[-2]}, {axes[-1]}).",
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
    if len(q) > 2:
        _check_heads(q, k, v)


def _check_heads(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None) -> None:
    hint = f"q is {named(q, QUERY)}. If yours is (batch, length, heads, d), swap axes 1 and 2."
    if (q[-3] % k[-3] if k[-3] else q[-3]) != 0:
        raise ShapeError(f"k has {k[-3]} heads but q has {q[-3]}: query heads must be a multiple of key heads.", hint)
    if v is not None and v[-3] != k[-3]:
        raise ShapeError(f"v has {v[-3]} heads but k has {k[-3]}: each key head needs its value head.", hint)


def _check_dtypes(dtypes: Sequence[np.dtype[Any]]) -> None:
    for name, dtype in zip("qkv", dtypes, strict=False):
        if dtype not in FLOATS:
            raise DtypeError(
                f"{name} is {dtype}: expected float64, float32, bfloat16 or float16.",
                f"{name}.astype(np.float32), or {name}.float() for a tensor.",
            )
        if dtype != dtypes[0]:
            raise DtypeError(f"{name} is {dtype} but q is {dtypes[0]}: q, k and v must have one dtype.")


def _apply_rules(q: Sequence[int], k: Sequence[int], dtype: np.dtype[Any], device: str, rules: Rules) -> Problem:
    get = rules.get
    lead, prefix = tuple(q[:-3]), tuple(q[:-2])
    heads, kv_heads = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
    n, m, d_k = q[-2], k[-2], q[-1]
    causal, window = read_flag("causal", get("causal")), read_window(get("window"))
    segments = get("query_segments"), get("kv_segments")
    if (segments[0] is None) != (segments[1] is None):
        given, other = ("query_segments", "kv_segments")[:: 1 if segments[1] is None else -1]
        raise RuleError(f"{given} is given but {other} is not: a segment needs both sides.", f"{other}={given}?")
    return Problem(
        prefix=prefix,
        batch=prod(lead),
        heads=heads,
        kv_heads=kv_heads,
        d_k=d_k,
        dtype=dtype,
        device=device,
        rows=range(n),
        cols=range(m),
        scale=read_number("scale", get("scale"), default=1 / d_k**0.5 if d_k else 1.0),
        softcap=read_softcap(get("softcap")),
        bias=read_matrix("bias", get("bias"), (*prefix, n, m), device),
        alibi_slopes=one_per_head("alibi_slopes", get("alibi_slopes"), heads, len(q)),
        causal=causal,
        window=window,
        mask=read_matrix("mask", get("mask"), (*prefix, n, m), device),
        kv_lengths=read_lengths("kv_lengths", get("kv_lengths"), lead, m, "keys"),
        query_lengths=read_lengths("query_lengths", get("query_lengths"), lead, n, "queries"),
        query_segments=read_segments("query_segments", segments[0], lead, n, "queries"),
        kv_segments=read_segments("kv_segments", segments[1], lead, m, "keys"),
        sinks=one_per_head("sinks", get("sinks"), heads, len(q)),
        query_offset=read_offset(get("query_offset"), lead, n, m, positional=causal or window != (None, None)),
    )


def _all(size: int) -> slice:
    return slice(0, size, 1)
