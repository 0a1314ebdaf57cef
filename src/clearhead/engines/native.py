"""The native engine: passes arrays to the compiled kernel; no arithmetic of its own.

The kernel computes in float32 (float64 for float64; pairs of bfloat16 where the processor multiplies them), packs keys
once for all the queries that read them, and splits work among threads without changing a bit of the result.
"""

import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from clearhead.core import rules, visibility
from clearhead.core.arrays import bfloat16, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import (
    Upstream,
    elsewhere,
    narrowed,
    one_scale,
    room_for_columns,
    room_for_rows,
    scales_differ,
    unsupported,
    widened,
)
from clearhead.engines.threads import get_num_threads, openmp_of_torch
from clearhead.errors import SizeError

_native: Any
_import_error = ""
try:
    from clearhead import _native  # type: ignore[no-redef]
except ImportError as error:
    _native, _import_error = None, str(error)

STATISTICS: frozenset[str] = (
    frozenset() if _native is None else frozenset(_native.statistics())
)  # as the kernel lists them
RULES = frozenset({
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip
_TYPES = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, bfloat16: 2, np.dtype(np.float16): 3}
_NO_LIMIT = 1 << 62
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # limits within which the row pass computes `received`
_described: WeakKeyDictionary[Problem, Any] = WeakKeyDictionary()  # problems already converted for the kernel


def level() -> str:
    """The instruction set in use, such as "avx2"; "" if the kernel cannot run."""
    return "" if _native is None else _native.level()


def levels() -> list[str]:
    """The instruction sets that both this build and this processor support, fastest first."""
    return [] if _native is None else _native.levels().split()


def engine_named() -> bool:
    """Does CLEARHEAD_ENGINE name an engine? The kernel asks in a twentieth of the time that os.environ takes."""
    return bool(_native.engine_named())


def peak_multiply_adds(threads: int) -> float:
    """The peak rate in float32 multiply-adds per second on so many threads; measuring takes about half a second."""
    rates = []
    for rounds in (1_000_000, *[4_000_000] * 6):
        start = perf_counter()
        rates.append(_native.exercise(threads, rounds) / (perf_counter() - start))
    return float(max(rates))


def bytes_read(threads: int) -> float:
    """The memory bandwidth in bytes per second on so many threads: the best of seven reads of 512 MiB."""
    data = np.ones(1 << 27, np.float32)
    times = []
    for _ in range(7):
        start = perf_counter()
        _native.read(threads, data)
        times.append(perf_counter() - start)
    return float(data.nbytes / min(times))


def missing() -> str:
    """Why the kernel cannot run at all, as a sentence; "" if it can."""
    if _native is None:
        return _why_absent()
    if not _native.level():
        asked = os.environ.get("CLEARHEAD_ISA", "")
        return f"CLEARHEAD_ISA is {asked!r}, but this processor and this build have {', '.join(levels()) or 'none'}."
    return ""


@cache
def _why_absent() -> str:
    """Why the compiled kernel could not be imported, as a sentence."""
    if find_spec("clearhead._native"):
        return f"the compiled kernel cannot be loaded: {' '.join(_import_error.split())}."
    folder = Path(__file__).parents[1]
    others = sorted(path.name for pattern in ("_native*.so", "_native*.pyd") for path in folder.glob(pattern))
    if others:
        return f"the compiled kernel was built for another Python: {', '.join(others)}."
    why = "no C++ compiler (GCC or Clang) built it when clearhead was installed"
    return f"the compiled kernel is missing: {why}; `pip install --verbose` shows what failed."


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: no kernel, arrays not in the CPU's memory, or a rule it does not support."""
    against = [reason for reason in (missing(), elsewhere(problem)) if reason]
    return against + unsupported("the native engine", RULES, problem)


def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    if want.output and v is not None and v.dtype != problem.dtype:
        return _rows_in_common(problem, q, k, v, want)
    dtype = statistics_dtype(problem.dtype)
    found = room_for_rows(problem, v, want, STATISTICS)
    answers: dict[str, Any] = dict(found)
    if "output" in found:
        answers["output"] = _bits(found["output"])
    if _receives(problem, want):
        answers["received"] = np.zeros((problem.batch, problem.heads, problem.keys))
        answers.setdefault("logsumexp", np.empty((problem.batch, problem.heads, problem.queries), dtype))
    _call("rows", problem, _bits(q), _bits(k), _bits(v) if "output" in found else None, answers)
    if "received" in answers:
        found["received"] = answers["received"].astype(dtype, copy=False)
    return found


def _receives(problem: Problem, want: Wanted) -> bool:
    """Whether the row pass computes `received` too: not if a column pass follows anyway, nor beyond _MANY_*."""
    few_rows = problem.queries < _MANY_QUERIES or problem.keys > _MANY_KEYS
    return want.received and not few_rows and want.columns() == ["received"]


def _rows_in_common(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> dict[str, Array]:
    """For v of another dtype: convert q, k and v to a common dtype, and the results to the problem's."""
    wide = widened(problem, v)
    found = rows(wide, q.astype(wide.dtype), k.astype(wide.dtype), v.astype(wide.dtype), want)
    return narrowed(problem, found, keep_float32=want.keep_float32)


def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the log-sum-exp."""
    found = room_for_columns(problem, want, STATISTICS)
    more: dict[str, Any] = {}
    if want.groups is not None:
        sides = {"query_labels": want.groups.queries, "key_labels": want.groups.keys}
        more = {name: np.ascontiguousarray(side, np.int64) for name, side in sides.items()}
    _columns(problem, q, k, logsumexp, found, **more)
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in found.items()}


def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    found = {"weights": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, found)
    return found["weights"]


def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    shape = (problem.batch, problem.heads, problem.keys, g.shape[-1])
    found = {"transposed": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, found, g=_bits(g), g_type=_TYPES[g.dtype])
    return found["transposed"]


def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The gradients of q, k, v and the bias, in one pass over the blocks of keys."""
    dtype, output = statistics_dtype(problem.dtype), upstream.output
    if v is not None and output is not None and not v.dtype == output.dtype == problem.dtype:
        return _gradients_in_common(problem, q, k, v, logsumexp, upstream)
    found = {"q": np.zeros(q.shape, dtype), "k": np.zeros(k.shape, dtype)}
    if output is not None and v is not None:
        found["v"] = np.zeros(v.shape, dtype)
    bias = None
    if upstream.bias is not None:  # the kernel sums over keys where the bias is broadcast; the rest below
        full = (problem.batch, problem.heads, problem.queries, 1)
        bias = np.zeros(full if upstream.bias[3] == 1 else upstream.bias, dtype)
    per_line = {"rows": upstream.rows, "keys": upstream.keys}
    per_line |= {"entropy": upstream.entropy, "distance": upstream.distance, "logsumexp": logsumexp}
    known = {name: np.ascontiguousarray(x, dtype) for name, x in per_line.items() if x is not None}
    values = {} if output is None else {"v": _bits(v), "output": _bits(output)}
    tables = (
        {} if upstream.spans is None else {"span_table": np.zeros((problem.batch, problem.heads, *upstream.spans[2:]))}
    )
    answers = {**found, **({} if bias is None else {"bias": bias}), **tables}
    _call("gradients", problem, _bits(q), _bits(k), {**known, **values}, answers)
    own = dtype if upstream.keep_float32 else problem.dtype
    answers = {name: array.astype(own, copy=False) for name, array in found.items()}
    if bias is not None and upstream.bias is not None:
        answers["bias"] = _summed(bias, upstream.bias)
    if upstream.spans is not None:
        answers["spans"] = _summed(tables["span_table"], upstream.spans).astype(dtype, copy=False)
    return answers


@np.errstate(invalid="ignore")  # inf - inf
def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which what x is the gradient of was broadcast from `shape`."""
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    total: Array = x.sum(axis=shared, keepdims=True) if shared else x
    return total


def _gradients_in_common(
    problem: Problem, q: Array, k: Array, v: Array, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """For v or dO of another dtype: as `_rows_in_common`."""
    assert upstream.output is not None
    wide = widened(problem, v)
    told = replace(upstream, output=upstream.output.astype(wide.dtype))
    q, k, v = (x.astype(wide.dtype) for x in (q, k, v))
    return narrowed(problem, gradients(wide, q, k, v, logsumexp, told), keep_float32=upstream.keep_float32)


def _columns(problem: Problem, q: Array, k: Array, logsumexp: Array, answers: dict[str, Array], **more: Any) -> None:
    """Run the column pass, which fills `answers`; `more` holds the labels of groups, or g and its type."""
    known = {"logsumexp": np.ascontiguousarray(logsumexp, statistics_dtype(problem.dtype)), **more}
    _call("columns", problem, _bits(q), _bits(k), known, answers)


def _call(name: str, problem: Problem, *given: Any) -> None:
    """Call the kernel, which fills the arrays given. Raises SizeError if its working memory cannot be allocated."""
    threads = get_num_threads() if problem.num_threads is None else problem.num_threads
    try:
        getattr(_native, name)(threads, described(problem), *given)
    except MemoryError:
        raise SizeError(
            "what the kernel needs to work in is larger than the machine's memory.",
            "observe(queries=slice(0, 4096)) takes a part; merge_keys joins what disjoint keys answered.",
        ) from None


def repeatable(tensor_type: type | None) -> Any:
    """Room for checked calls on NumPy arrays, or on tensors of this type (see `ops/repeated.py`)."""
    return _native.Repeatable(tensor_type)


def described(problem: Problem) -> Any:
    """The problem as the kernel reads it, converted once and cached; contiguous arrays are not copied."""
    found = _described.get(problem)
    if found is None:
        found = _described[problem] = _describe(problem)
    return found


def _describe(problem: Problem) -> Any:
    """Pass every field by name: the kernel raises for an unknown name and for a missing one."""
    left, right = visibility.reach(problem)
    arrays = {field: _readable(getattr(problem, field), axes) for field, axes in _arrays(RULES - {"scale", "spans"})}
    arrays |= _spans(problem)
    arrays["scales"] = np.ascontiguousarray(problem.scale) if scales_differ(problem) else None
    return _native.describe(
        type=_TYPES[problem.dtype],
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        queries=problem.queries,
        keys=problem.keys,
        d_k=problem.d_k,
        row_start=problem.rows.start,
        row_step=problem.rows.step,
        column_start=problem.cols.start,
        column_step=problem.cols.step,
        left=_NO_LIMIT if left is None else left,
        right=_NO_LIMIT if right is None else right,
        scale=one_scale(problem),
        softcap=problem.softcap or 0.0,
        team=problem.library == "torch" and _has_team(),
        bias_type=1 if problem.bias is None else _TYPES[problem.bias.dtype],
        kept=arrays,
        **arrays,
    )


def _spans(problem: Problem) -> dict[str, Array | None]:
    """The labels, and the table in the numbers that the kernel computes with, each row contiguous, not broadcast."""
    table = problem.span_table
    if table is None or problem.query_spans is None or problem.key_spans is None:
        return dict.fromkeys(("query_spans", "key_spans", "span_table"))
    own = tuple(slice(None, 1) if step == 0 else slice(None) for step in table.strides[:2])
    return {
        "query_spans": np.ascontiguousarray(problem.query_spans),
        "key_spans": np.ascontiguousarray(problem.key_spans),
        "span_table": np.ascontiguousarray(table[own], statistics_dtype(problem.dtype)),
    }


@cache
def _has_team() -> bool:
    """Whether PyTorch's OpenMP threads can run the kernel, which is told of them here."""
    functions = openmp_of_torch()
    if functions is not None:
        _native.use_team(*functions)
    return functions is not None


@cache
def _arrays(supported: frozenset[str]) -> list[tuple[str, rules.Axes]]:
    """The fields of a problem that hold arrays for these rules, with their axes."""
    fields = (field for rule in supported for field in rules.RULES[rule].fields)
    return [(field, rules.FIELDS[field]) for field in fields if rules.FIELDS[field]]


def _readable(x: Array | None, axes: rules.Axes) -> Array | None:
    """A rule's array for the bindings: arrays over queries and keys keep their strides, others become contiguous."""
    if x is None:
        return None
    if axes != WEIGHTS:
        return np.ascontiguousarray(x)
    return x.view(np.uint8) if x.dtype == np.bool_ else _bits(x)


def _bits(x: Array | None) -> Array | None:
    """An array for the bindings: bfloat16 as uint16; copied if unaligned or if strides are no multiple of the item."""
    if x is None:
        return None
    layout = x.flags
    if not (layout.c_contiguous and layout.aligned) and (
        not layout.aligned or any(step % x.itemsize for step in x.strides)
    ):
        x = x.copy()
    return x.view(np.uint16) if x.dtype == bfloat16 else x
