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

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import (
    Upstream,
    elsewhere,
    narrowed,
    room_for_columns,
    room_for_rows,
    unsupported,
    widened,
)
from clearhead.engines.native_calls import (
    RULES,
    TYPES,
    bits,
    call,
    described,
    gradients_of,
    import_error,
    labels,
    room_for_gradients,
)
from clearhead.engines.native_calls import kernel as _native
from clearhead.engines.native_effects import effect_product, effect_tile, effects, others
from clearhead.engines.native_tangents import column_tangents, gradient_tangents, tangents

__all__ = [  # what an engine answers, and what only this one has
    "RULES", "STATISTICS", "bytes_read", "column_tangents", "columns", "described", "effect_product", "effect_tile",
    "effects", "engine_named", "gradient_tangents", "gradients", "level", "levels", "missing", "others",
    "peak_multiply_adds", "reasons_not", "repeatable", "rows", "tangents", "transposed", "weights",
]  # fmt: skip
STATISTICS: frozenset[str] = (
    frozenset() if _native is None else frozenset(_native.statistics())
)  # as the kernel lists them
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # limits within which the row pass computes `received`


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
        return f"the compiled kernel cannot be loaded: {' '.join(import_error.split())}."
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
        answers["output"] = bits(found["output"])
    if _receives(problem, want):
        answers["received"] = np.zeros((problem.batch, problem.heads, problem.keys))
        answers.setdefault("logsumexp", np.empty((problem.batch, problem.heads, problem.queries), dtype))
    call("rows", problem, bits(q), bits(k), bits(v) if "output" in found else None, answers)
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
    _columns(problem, q, k, logsumexp, found, **labels(want.groups))
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
    _columns(problem, q, k, logsumexp, found, x=bits(g), x_type=TYPES[g.dtype])
    return found["transposed"]


def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The gradients of q, k, v and the bias, in one pass over the blocks of keys."""
    dtype, output = statistics_dtype(problem.dtype), upstream.output
    if v is not None and output is not None and not v.dtype == output.dtype == problem.dtype:
        return _gradients_in_common(problem, q, k, v, logsumexp, upstream)
    values = None if output is None else v
    room = room_for_gradients(problem, q, k, values, upstream)
    per_line = {"rows": upstream.rows, "keys": upstream.keys}
    per_line |= {"entropy": upstream.entropy, "distance": upstream.distance, "logsumexp": logsumexp}
    known: dict[str, Any] = {name: np.ascontiguousarray(x, dtype) for name, x in per_line.items() if x is not None}
    if values is not None:
        known |= {"v": bits(values), "output": bits(output)}
    call("gradients", problem, bits(q), bits(k), known, room)
    return gradients_of(problem, room, upstream)


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
    """Run the column pass, which fills `answers`; `more` holds the labels of groups, or x and its type."""
    known = {"logsumexp": np.ascontiguousarray(logsumexp, statistics_dtype(problem.dtype)), **more}
    call("columns", problem, bits(q), bits(k), known, answers)


def repeatable(tensor_type: type | None) -> Any:
    """Room for checked calls on NumPy arrays, or on tensors of this type (see `ops/repeated.py`)."""
    return _native.Repeatable(tensor_type)
