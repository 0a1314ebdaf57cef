"""What is to be computed: the shapes and the score rules, validated once, in one frozen value that every engine reads.

A score is scale · q_i·k_j, then softcap, bias and ALiBi; causal, window, mask, lengths and segments forbid positions
(visibility.py says which); sinks add one logit to each row's denominator. The rules act in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import Any, TypedDict

import numpy as np

from clearhead.arrays import FLOATS, Restore, adopt, autocast, plain
from clearhead.axes import KEY, QUERY, VALUE, WEIGHTS, Array, as_places, as_slice, named
from clearhead.errors import DtypeError, RuleError, ShapeError, unknown

Window = tuple[int | None, int | None]
FAR = 2**53  # positions beyond this are no use to anybody, and would overflow


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


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One attention problem over arrays viewed as (batch, heads, queries, d_k); made by `describe`."""

    prefix: tuple[int, ...]  # the caller's axes before queries: () in 2-D, (heads,) in 3-D, (…, heads) beyond
    batch: int
    heads: int
    kv_heads: int
    d_k: int
    dtype: np.dtype[Any]
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
    k = adopt(autocast(k), "k")[0]
    v = None if v is None else adopt(autocast(v), "v")[0]
    check_shapes(q.shape, k.shape, None if v is None else v.shape)
    _check_dtypes(q, k, v)
    problem = _apply_rules(q.shape, k.shape, q.dtype, rules)
    return Described(problem, heads_first(q), heads_first(k), None if v is None else heads_first(v), restore)


def heads_first(x: Array) -> Array:
    """View (…, heads, length, d) as (batch, heads, length, d)."""
    if x.ndim == 2:
        return x[None, None]
    return x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


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


def _check_dtypes(q: Array, k: Array, v: Array | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise DtypeError(
                f"{name} is {x.dtype}: expected float64, float32, bfloat16 or float16.",
                f"{name}.astype(np.float32), or {name}.float() for a tensor.",
            )
        if x.dtype != q.dtype:
            raise DtypeError(f"{name} is {x.dtype} but q is {q.dtype}: q, k and v must have one dtype.")


def _apply_rules(q: Sequence[int], k: Sequence[int], dtype: np.dtype[Any], rules: Rules) -> Problem:
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
        rows=range(n),
        cols=range(m),
        scale=read_number("scale", get("scale"), default=1 / d_k**0.5 if d_k else 1.0),
        softcap=read_softcap(get("softcap")),
        bias=_matrix("bias", get("bias"), (*prefix, n, m)),
        alibi_slopes=one_per_head("alibi_slopes", get("alibi_slopes"), heads, len(q)),
        causal=causal,
        window=window,
        mask=_matrix("mask", get("mask"), (*prefix, n, m)),
        kv_lengths=_lengths("kv_lengths", get("kv_lengths"), lead, m, "keys"),
        query_lengths=_lengths("query_lengths", get("query_lengths"), lead, n, "queries"),
        query_segments=_segments("query_segments", segments[0], lead, n, "queries"),
        kv_segments=_segments("kv_segments", segments[1], lead, m, "keys"),
        sinks=one_per_head("sinks", get("sinks"), heads, len(q)),
        query_offset=_offset(get("query_offset"), lead, n, m, positional=causal or window != (None, None)),
    )


def read_number(name: str, value: Any, default: float) -> float:
    """Validate a finite number."""
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RuleError(f"{name} is {value!r}: expected a number.") from None
    if not isfinite(number):
        raise RuleError(f"{name} is {number}: expected a finite number.", f"leave {name} out for its default.")
    return number


def read_softcap(value: Any) -> float | None:
    """Validate c of c·tanh(s/c)."""
    if value is None:
        return None
    cap = read_number("softcap", value, 0.0)
    if cap <= 0:
        raise RuleError(
            f"softcap is {cap}: expected a positive number c, for c·tanh(s/c).", "softcap=None turns it off."
        )
    return cap


def read_flag(name: str, value: Any) -> bool:
    """Validate True or False; None is False."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise RuleError(f"{name} is {value!r}: expected True or False.")


def read_window(value: Any) -> Window:
    """Validate (left, right)."""
    if value is None:
        return (None, None)
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    whole = all(s is None or (isinstance(s, (int, np.integer)) and not isinstance(s, bool) and s >= 0) for s in sides)
    if len(sides) != 2 or not whole:
        raise RuleError(
            f"window is {value!r}: expected (left, right), each a whole number of keys from 0 up, or None.",
            "window=(255, 0) sees the last 256 keys, itself included.",
        )
    left, right = (None if side is None else min(int(side), 4 * FAR) for side in sides)
    return left, right


def _matrix(name: str, value: Any, shape: tuple[int, ...]) -> Array | None:
    """Bias and mask: broadcast to the weights' shape, as a view where NumPy can."""
    if value is None:
        return None
    array = plain(value, name)
    if name == "mask" and array.dtype != np.bool_:
        raise DtypeError(
            f"mask is {array.dtype}: expected bool, True = may attend.",
            "numbers to add to the scores go in `bias`; mask.astype(bool) makes 1/0 a mask.",
        )
    if name == "bias" and array.dtype not in FLOATS:
        raise DtypeError(f"bias is {array.dtype}: expected a float dtype.", "True/False per position goes in `mask`.")
    try:
        np.broadcast_to(array, shape)
    except ValueError:
        raise ShapeError(
            f"{name} has shape {array.shape}, which does not broadcast to {named(shape, WEIGHTS)}.",
            f"one {name} per batch is {name}[:, None, None, :] for keys alone.",
        ) from None
    own = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    lead = shape[:-3]  # joining the batch axes may copy: before the other axes are broadcast, it copies little
    joined = heads_first(np.broadcast_to(own, lead + own.shape[len(lead) :]))
    return np.broadcast_to(joined, (prod(lead), *(1, *shape)[-3:]))


def one_per_head(name: str, value: Any, heads: int, ndim: int) -> Array | None:
    """Validate one number per query head, (heads,) in float64; for inputs of 2 axes a single number will do."""
    if value is None:
        return None
    array = plain(value, name)
    if array.shape != (heads,) and not (ndim == 2 and array.ndim == 0):
        raise ShapeError(f"{name} has shape {array.shape}: expected one number per query head, (heads {heads},).")
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected a float dtype.")
    numbers = array.reshape(heads).astype(np.float64)
    none = np.isneginf(numbers) & (name == "sinks")  # a sink of -inf adds nothing
    if not (np.isfinite(numbers) | none).all():
        raise RuleError(f"{name} is {numbers.tolist()}: expected finite numbers.")
    return numbers


def _whole(name: str, value: Any, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    array = plain(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{name} is {array.dtype}: expected whole numbers.")
    try:
        return np.broadcast_to(array, shape).astype(np.int64)
    except ValueError:
        want = named(shape, axes) if shape else "a single number"
        raise ShapeError(f"{name} has shape {array.shape}: expected {want}.") from None


def _lengths(name: str, value: Any, lead: tuple[int, ...], most: int, of: str) -> Array | None:
    if value is None:
        return None
    lengths = _whole(name, value, lead, ("batch",)).reshape(-1)
    if ((lengths < 0) | (lengths > most)).any():
        raise RuleError(f"{name} is {lengths.tolist()}: each must lie between 0 and the number of {of}, {most}.")
    return lengths


def _segments(name: str, value: Any, lead: tuple[int, ...], size: int, axis: str) -> Array | None:
    if value is None:
        return None
    return _whole(name, value, (*lead, size), ("batch", axis)).reshape(prod(lead), size)


def _offset(value: Any, lead: tuple[int, ...], n: int, m: int, *, positional: bool) -> Array:
    if value is None:
        if positional and n != m:
            raise RuleError(
                f"causal and window need query_offset when queries ({n}) and keys ({m}) differ: "
                "peers disagree about it.",
                f"query_offset=0 aligns the first query with the first key (PyTorch, JAX); query_offset={m - n} aligns "
                "the last query with the last key (FlashAttention, a key-value cache).",
            )
        value = 0
    offset = _whole("query_offset", value, lead, ("batch",)).reshape(-1)
    if (offset > FAR).any() or (offset < -FAR).any():
        raise RuleError(f"query_offset is {value}: expected positions between -2^53 and 2^53.")
    return offset


def _all(size: int) -> slice:
    return slice(0, size, 1)
