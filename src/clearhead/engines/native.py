"""The native engine: hands pointers to the compiled kernel; no arithmetic.

The kernel computes in float32 (float64 for float64; pairs of bfloat16 where the processor multiplies them), packs keys
once for all the queries that read them, and cuts the work so that the cut changes no bit of the result.
"""

import os
from dataclasses import replace
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from clearhead.arrays import bfloat16, statistics_dtype
from clearhead.axes import Array
from clearhead.engines.base import Upstream, elsewhere, narrowed, room_for_rows, widened
from clearhead.errors import SizeError
from clearhead.observations import Wanted
from clearhead.problem import Problem
from clearhead.threads import get_num_threads

_native: Any
try:
    from clearhead import _native  # type: ignore[no-redef]
except ImportError:
    _native = None

_TYPES = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, bfloat16: 2, np.dtype(np.float16): 3}
_NO_LIMIT = 1 << 62
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # the scores of a few rows are kept: they should fit a cache
_described: WeakKeyDictionary[Problem, Any] = WeakKeyDictionary()  # rules as the kernel reads them


def level() -> str:
    """The instruction set in use, "" where none is."""
    return "" if _native is None else _native.level()


def levels() -> list[str]:
    """The instruction sets that this build and this processor share, fastest first."""
    return [] if _native is None else _native.levels().split()


def peak_multiply_adds(threads: int) -> float:
    """Float32 multiply-adds a second that the processor can do at best, on so many threads; about half a second."""
    rates = []
    for rounds in (1_000_000, *[4_000_000] * 6):
        start = perf_counter()
        rates.append(_native.exercise(threads, rounds) / (perf_counter() - start))
    return float(max(rates))


def bytes_read(threads: int) -> float:
    """Bytes a second that so many threads can read: 512 MiB, more than any cache holds, the best of several times."""
    data = np.ones(1 << 27, np.float32)
    times = []
    for _ in range(7):
        start = perf_counter()
        _native.read(threads, data)
        times.append(perf_counter() - start)
    return float(data.nbytes / min(times))


def missing() -> str:
    """Why the kernel cannot run at all; "" where it can."""
    if _native is None:
        return "the compiled kernel is missing: no C++ compiler was found when clearhead was installed."
    if not _native.level():
        asked = os.environ.get("CLEARHEAD_ISA", "")
        return f"CLEARHEAD_ISA is {asked!r}, but this processor and this build have {', '.join(levels()) or 'none'}."
    return ""


def reasons_not(problem: Problem) -> list[str]:
    """Why not: the kernel is missing, or the arrays are elsewhere."""
    return [reason for reason in (missing(), elsewhere(problem)) if reason]


def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    if want.output and v is not None and v.dtype != problem.dtype:
        return _rows_in_common(problem, q, k, v, want)
    shape = (problem.batch, problem.heads, problem.queries)
    dtype = statistics_dtype(problem.dtype)
    found = room_for_rows(problem, v, want)
    get = found.get
    output = get("output")
    received, logsumexp = None, get("logsumexp")
    if _receives(problem, want):
        received = np.zeros((problem.batch, problem.heads, problem.keys))
        logsumexp = np.empty(shape, dtype) if logsumexp is None else logsumexp
    _call(
        "rows",
        _rules(problem),
        _bits(q),
        _bits(k),
        None if output is None else _bits(v),
        None if output is None else _bits(output),
        logsumexp,
        get("max_logit"),
        get("entropy"),
        get("distance"),
        get("top_weights"),
        get("top_indices"),
        want.top or 0,
        received,
    )
    if received is not None:
        found["received"] = received.astype(dtype, copy=False)
    return found


def _receives(problem: Problem, want: Wanted) -> bool:
    """Does the row pass finish `received` too? Not where a second pass must follow anyway, nor where rows are few."""
    more = want.peak or want.image is not None or want.groups is not None
    return want.received and not more and problem.queries >= _MANY_QUERIES and problem.keys <= _MANY_KEYS


def _rows_in_common(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> dict[str, Array]:
    """Values of another dtype: everything is read in one that holds both, and answered in the problem's."""
    wide = widened(problem, v)
    found = rows(wide, q.astype(wide.dtype), k.astype(wide.dtype), v.astype(wide.dtype), want)
    return narrowed(problem, found, unrounded=want.unrounded)


def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from the weights computed again."""
    shape = (problem.batch, problem.heads)
    found: dict[str, Array] = {}
    labels: list[Array | None] = [None, None]
    if want.received:
        found["received"] = np.zeros((*shape, problem.keys))
    if want.peak:
        found["peak"] = np.zeros((*shape, problem.keys))
    if want.image is not None:
        found["image"] = np.zeros(shape + want.image)
    if want.groups is not None:
        labels = [np.ascontiguousarray(side, np.int64) for side in (want.groups.queries, want.groups.keys)]
        found["groups"] = np.zeros(shape + want.groups.counts)
    _columns(problem, q, k, logsumexp, found, labels)
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in found.items()}


def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    found = {"weights": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, found)
    return found["weights"]


def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g: g (batch, heads or 1, queries, d) to (batch, heads, keys, d)."""
    shape = (problem.batch, problem.heads, problem.keys, g.shape[-1])
    found = {"transposed": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, found, g=g)
    return found["transposed"]


def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The loss's derivatives by q, k, v and the bias, in one pass over the blocks of keys."""
    dtype, output = statistics_dtype(problem.dtype), upstream.output
    if v is not None and output is not None and not v.dtype == output.dtype == problem.dtype:
        return _gradients_in_common(problem, q, k, v, logsumexp, upstream)
    found = {"q": np.zeros(q.shape, dtype), "k": np.zeros(k.shape, dtype)}
    if output is not None and v is not None:
        found["v"] = np.zeros(v.shape, dtype)
    bias = None
    if upstream.bias is not None:  # where it is broadcast over keys, the kernel sums over them only
        full = (problem.batch, problem.heads, problem.queries, 1)
        bias = np.zeros(full if upstream.bias[3] == 1 else upstream.bias, dtype)
    _call(
        "gradients",
        _rules(problem),
        _bits(q),
        _bits(k),
        None if output is None else _bits(v),
        _bits(output),
        np.ascontiguousarray(logsumexp, dtype),
        np.ascontiguousarray(upstream.rows, dtype),
        _whole(upstream.keys, dtype),
        _whole(upstream.entropy, dtype),
        _whole(upstream.distance, dtype),
        found["q"],
        found["k"],
        found.get("v"),
        bias,
    )
    own = dtype if upstream.unrounded else problem.dtype
    answers = {name: array.astype(own, copy=False) for name, array in found.items()}
    if bias is not None and upstream.bias is not None:
        shared = tuple(axis for axis in range(4) if upstream.bias[axis] == 1 != bias.shape[axis])
        with np.errstate(invalid="ignore"):  # infinities of both signs
            answers["bias"] = bias.sum(axis=shared, keepdims=True) if shared else bias
    return answers


def _gradients_in_common(
    problem: Problem, q: Array, k: Array, v: Array, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """Values of another dtype, as in `_rows_in_common`."""
    assert upstream.output is not None
    wide = widened(problem, v)
    told = replace(upstream, output=upstream.output.astype(wide.dtype))
    q, k, v = (x.astype(wide.dtype) for x in (q, k, v))
    return narrowed(problem, gradients(wide, q, k, v, logsumexp, told), unrounded=upstream.unrounded)


def _columns(
    problem: Problem,
    q: Array,
    k: Array,
    logsumexp: Array,
    found: dict[str, Array],
    labels: Any = (None, None),
    g: Array | None = None,
) -> None:
    get = found.get
    height, width = found["image"].shape[-2:] if "image" in found else (0, 0)
    high, wide = found["groups"].shape[-2:] if "groups" in found else (0, 0)
    _call(
        "columns",
        _rules(problem),
        _bits(q),
        _bits(k),
        np.ascontiguousarray(logsumexp, statistics_dtype(problem.dtype)),
        get("received"),
        get("peak"),
        get("image"),
        height,
        width,
        get("groups"),
        *labels,
        high,
        wide,
        get("weights"),
        get("transposed"),
        None if g is None else _bits(g),
        1 if g is None else _TYPES[g.dtype],
    )


def _call(name: str, *given: Any) -> None:
    """Let the kernel fill the arrays it is given; SizeError where the memory it works in cannot be had."""
    try:
        getattr(_native, name)(get_num_threads(), *given)
    except MemoryError:
        raise SizeError(
            "what the kernel needs to work in is larger than the machine's memory.",
            "observe(queries=slice(0, 4096)) takes a part; merge_keys joins what disjoint keys answered.",
        ) from None


def _rules(problem: Problem) -> Any:
    """The problem as the kernel reads it, read once; its arrays stay where they are."""
    rules = _described.get(problem)
    if rules is None:
        rules = _described[problem] = _describe(problem)
    return rules


def _describe(problem: Problem) -> Any:
    left, right = problem.window
    if problem.causal:
        right = 0
    bias, mask = problem.bias, problem.mask
    arrays = (
        _whole(problem.query_offset),
        _whole(problem.kv_lengths),
        _whole(problem.query_lengths),
        _whole(problem.query_segments),
        _whole(problem.kv_segments),
        _whole(problem.alibi_slopes),
        _whole(problem.sinks),
        None if bias is None else _bits(bias),
        1 if bias is None else _TYPES[bias.dtype],
        None if mask is None else mask.view(np.uint8),
    )
    return _native.describe(
        _TYPES[problem.dtype],
        (problem.batch, problem.heads, problem.kv_heads, problem.queries, problem.keys, problem.d_k),
        (
            problem.rows.start,
            problem.rows.step,
            problem.cols.start,
            problem.cols.step,
            _NO_LIMIT if left is None else left,
            _NO_LIMIT if right is None else right,
        ),
        problem.scale,
        problem.softcap or 0.0,
        *arrays,
        arrays,
    )


def _bits(x: Array | None) -> Array | None:
    """An array the bindings can read: bfloat16 as whole numbers, strides in whole elements."""
    if x is None:
        return None
    layout = x.flags
    if not (layout.c_contiguous and layout.aligned) and (
        not layout.aligned or any(step % x.itemsize for step in x.strides)
    ):
        x = x.copy()
    return x.view(np.uint16) if x.dtype == bfloat16 else x


def _whole(x: Array | None, dtype: np.dtype[Any] | None = None) -> Array | None:
    return None if x is None else np.ascontiguousarray(x, dtype)
