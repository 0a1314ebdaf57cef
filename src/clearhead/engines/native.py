"""The native engine: passes arrays to the compiled kernel; no arithmetic of its own.

The kernel computes in float32 (float64 for float64; pairs of bfloat16 where the processor multiplies them), packs keys
once for all the queries that read them, and splits work among threads without changing a bit of the result.
"""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import (
    Upstream,
    converted,
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
    "ALL_LEVELS", "RULES", "STATISTICS", "absent_levels", "column_tangents", "columns", "compiled_levels", "described",
    "effect_product", "effect_tile", "effects", "engine_named", "gradient_tangents", "gradients", "level",
    "levels", "missing", "others", "reasons_not", "repeatable", "rows", "tangents", "transposed", "weights",
]  # fmt: skip
STATISTICS: frozenset[str] = (
    frozenset() if _native is None else frozenset(_native.statistics())
)  # as the kernel lists them
ALL_LEVELS = "pip install . -C cmake.define.CLEARHEAD_LEVELS=all compiles every instruction set"
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # limits within which the row pass computes `received`


def level() -> str:
    """The instruction set in use, such as "avx2"; "" if the kernel cannot run."""
    return "" if _native is None else _native.level()


def levels() -> list[str]:
    """The instruction sets that both this build and this processor support, fastest first."""
    return [] if _native is None else _native.levels().split()


def compiled_levels() -> list[str]:
    """The instruction sets that this build has, fastest first, whatever this processor has."""
    return [] if _native is None else _native.compiled_levels().split()


def absent_levels() -> list[str]:
    """The instruction sets that there are for this kind of processor and that this build lacks."""
    present = compiled_levels()
    return [] if _native is None else [name for name in _native.all_levels().split() if name not in present]


def engine_named() -> bool:
    """Does CLEARHEAD_ENGINE name an engine? The kernel asks in a twentieth of the time that os.environ takes."""
    return bool(_native.engine_named())


def missing() -> str:
    """Why the kernel cannot run at all, as a sentence; "" if it can."""
    if _native is None:
        return _why_absent()
    if not _native.level():
        asked = os.environ.get("CLEARHEAD_ISA", "")
        if not asked:
            return f"this build has {', '.join(compiled_levels())}, and the processor none of these: {ALL_LEVELS}."
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
    results = room_for_rows(problem, v, want, STATISTICS)
    answers: dict[str, Any] = dict(results)
    if "output" in results:
        answers["output"] = bits(results["output"])
    if _receives(problem, want):
        answers["received"] = np.zeros((problem.batch, problem.heads, problem.keys))
        answers.setdefault("logsumexp", np.empty((problem.batch, problem.heads, problem.queries), dtype))
    call("rows", problem, bits(q), bits(k), bits(v) if "output" in results else None, answers)
    if "received" in answers:
        results["received"] = answers["received"].astype(dtype, copy=False)
    return results


def _receives(problem: Problem, want: Wanted) -> bool:
    """Whether the row pass computes `received` too: not if a column pass follows anyway, nor beyond _MANY_*."""
    few_rows = problem.queries < _MANY_QUERIES or problem.keys > _MANY_KEYS
    return want.received and not few_rows and want.columns() == ["received"]


def _rows_in_common(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> dict[str, Array]:
    """For v of another dtype: convert q, k and v to a common dtype, and the results to the problem's."""
    wide = widened(problem, v)
    q, k, v = converted(wide, q, k, v)
    return narrowed(problem, rows(wide, q, k, v, want), keep_float32=want.keep_float32)


def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the log-sum-exp."""
    results = room_for_columns(problem, want, STATISTICS)
    _columns(problem, q, k, logsumexp, results, **labels(want.groups))
    dtype = statistics_dtype(problem.dtype)
    return {name: array.astype(dtype, copy=False) for name, array in results.items()}


def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    results = {"weights": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, results)
    return results["weights"]


def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    shape = (problem.batch, problem.heads, problem.keys, g.shape[-1])
    results = {"transposed": np.zeros(shape, statistics_dtype(problem.dtype))}
    _columns(problem, q, k, logsumexp, results, x=bits(g), x_type=TYPES[g.dtype])
    return results["transposed"]


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
    wide = widened(problem, v)
    q, k, v, loss = converted(wide, q, k, v, upstream)
    return narrowed(problem, gradients(wide, q, k, v, logsumexp, loss), keep_float32=upstream.keep_float32)


def _columns(problem: Problem, q: Array, k: Array, logsumexp: Array, answers: dict[str, Array], **more: Any) -> None:
    """Run the column pass, which fills `answers`; `more` holds the labels of groups, or x and its type."""
    known = {"logsumexp": np.ascontiguousarray(logsumexp, statistics_dtype(problem.dtype)), **more}
    call("columns", problem, bits(q), bits(k), known, answers)


def repeatable(tensor_type: type | None) -> Any:
    """Room for checked calls on NumPy arrays, or on tensors of this type (see `ops/fast_calls.py`)."""
    return _native.Repeatable(tensor_type)
