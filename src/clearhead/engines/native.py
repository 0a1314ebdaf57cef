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

from clearhead.core.arrays import import_error, statistics_dtype
from clearhead.core.arrays import kernel as _native
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.effects import Others, Terms, no_keys
from clearhead.core.problem import Problem
from clearhead.core.state import State
from clearhead.core.statistics import ORDERS, Wanted, listed
from clearhead.core.statistics import STATISTICS as TABLE
from clearhead.engines.base import Upstream, in_one_dtype, kinds, room_for_sums, row_kinds, unsupported
from clearhead.engines.native_calls import RULES as RULES
from clearhead.engines.native_calls import TYPES, bits, run
from clearhead.engines.native_calls import described as described
from clearhead.engines.native_calls import output as output
from clearhead.engines.native_calls import step as step

_EFFECTS = ("by_key", "by_query", "strongest")
STATISTICS = frozenset(  # of weights as the kernel lists them; a row's state is two arrays
    "logsumexp" if name in State._fields else name
    for name in (() if _native is None else (*_native.statistics(), *_EFFECTS))
)
# effects in float64, since they are sums; the kernel fills all others in the statistics' dtype
_SUMMED = frozenset(x for x in listed("effects") if "added" in (TABLE[x].over_keys, TABLE[x].over_queries))
ALL_LEVELS = "pip install . -C cmake.define.CLEARHEAD_LEVELS=all compiles every instruction set"
_NUMBERS = (*State._fields, "rows", "keys", "entropy", "distance", "whole", "others")
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # limits within which the row pass computes `received`


def level() -> str:
    """The instruction set in use, such as "avx2"; "" if the kernel cannot run."""
    return "" if _native is None else _native.level()


def levels() -> list[str]:
    """The instruction sets that both this build and this processor support, fastest first."""
    return [] if _native is None else _native.levels().split()


def absent_levels() -> list[str]:
    """The instruction sets that there are for this kind of processor and that this build lacks."""
    if _native is None:
        return []
    return [name for name in _native.all_levels().split() if name not in _native.compiled_levels().split()]


def missing() -> str:
    """Why the kernel cannot run at all, as a sentence; "" if it can."""
    if _native is None:
        return _why_absent()
    if not _native.level():
        asked = os.environ.get("CLEARHEAD_ISA", "")
        if not asked:
            present = ", ".join(_native.compiled_levels().split())
            return f"this build has {present}, and the processor none of these: {ALL_LEVELS}."
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
    against = [reason] if (reason := missing()) else []
    if problem.device != "cpu":
        against.append(f"the arrays are on device {problem.device}: this engine runs on the CPU.")
    return against + unsupported("the native engine", RULES, problem)


def usable(problem: Problem) -> bool:
    """Has this engine nothing against the problem, and does the environment name no other one?"""
    if problem.described is None and not reasons_not(problem):
        described(problem)
    return problem.described is not None and not _native.engine_named()


@in_one_dtype
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    problem, q, k, v = call.problem, call.q, call.k, call.v
    dtype = statistics_dtype(problem.dtype)
    each = row_kinds(problem, v, want, STATISTICS)
    results = {name: np.empty(shape, kind) for name, (shape, kind) in each.items()}
    answers: dict[str, Any] = dict(results)
    if "output" in results:
        answers["output"] = bits(results["output"])
    few_rows = problem.queries < _MANY_QUERIES or problem.keys > _MANY_KEYS
    if want.received and not few_rows and want.columns() == ["received"]:  # else a column pass follows anyway
        answers["received"] = np.zeros((problem.batch, problem.heads, problem.keys))
        for name in State._fields:
            answers.setdefault(name, np.empty((problem.batch, problem.heads, problem.queries), dtype))
    run("rows", problem, bits(q), bits(k), bits(v) if "output" in results else None, answers)
    if "received" in answers:
        results["received"] = answers["received"].astype(dtype, copy=False)
    return results


def ragged(
    problem: Problem, q: Array, k: Array, v: Array, where: tuple[Array | None, ...], answers: dict[str, Array]
) -> None:
    """Fill in what `rows` and `columns` answer of each request alone, to the same bits: (tokens or keys, heads, …).

    q (tokens, heads, d_k); k and v (tokens, kv_heads, d), or pages (blocks, page, kv_heads, d). All tasks share the
    threads, and keys and values are read where they lie. `problem` is of one query and one key. `where` is cu_seq_q,
    cu_seq_k, seqused_k and block_table, as in clearhead.torch.varlen_attn. Raises ValueError where one does not fit.
    """
    if "received" in answers and "largest" not in answers:
        rooms = {name: np.empty(q.shape[:2], statistics_dtype(problem.dtype)) for name in State._fields}
        answers = {**answers, **rooms}
    room = {name: bits(x) for name, x in answers.items()}
    run("ragged", problem, bits(q), bits(k), bits(v), *where, room, _MANY_QUERIES, _MANY_KEYS)


def columns(call: Call, state: State | Terms, want: Wanted) -> dict[str, Array]:
    """The column statistics, or all that is wanted of effects, from weights recomputed with the rows' states."""
    dtype = statistics_dtype(call.problem.dtype)
    sides = () if want.groups is None else zip(("query_labels", "key_labels"), want.groups[:2], strict=True)
    more: dict[str, Any] = {name: np.ascontiguousarray(side, np.int64) for name, side in sides}
    results = room_for_sums(kinds(call.problem, want, want.columns(), STATISTICS))
    if want.of == "effects":
        rounded = {name: x for name, x in results.items() if x.dtype != np.int64 and name not in _SUMMED}
        results |= {name: np.zeros(x.shape, dtype) for name, x in rounded.items()}
        if want.top is not None:
            more["order"] = ORDERS.index(want.order)
    _edges(call, state, {"received" if name == "by_key" else name: x for name, x in results.items()}, **more)
    return {name: x if x.dtype == np.int64 else x.astype(dtype, copy=False) for name, x in results.items()}


def weights(call: Call, state: State | Terms) -> Array:
    """Every weight of this (small) problem, exp((logit - m) - l), or every effect."""
    problem = call.problem
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    tile = np.zeros(shape, statistics_dtype(problem.dtype))
    _edges(call, state, {"weights": tile})
    return tile


def transposed(call: Call, state: State | Terms, g: Array) -> Array:
    """Aᵀ·g, or of effects Eᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    problem = call.problem
    shape = (problem.batch, problem.heads, problem.keys, g.shape[-1])
    result = np.zeros(shape, statistics_dtype(problem.dtype))
    _edges(call, state, {"transposed": result}, x=bits(g), x_type=TYPES[g.dtype])
    return result


def product(call: Call, terms: Terms, x: Array) -> Array:
    """E·x, (batch, heads, queries, d)."""
    problem = call.problem
    result = np.zeros((problem.batch, problem.heads, problem.queries, x.shape[-1]))
    _edges(call, terms, {"product": result}, x=bits(x), x_type=TYPES[x.dtype])
    return result.astype(statistics_dtype(problem.dtype), copy=False)


def _edges(call: Call, known: State | Terms, answers: dict[str, Array], **more: Any) -> None:
    """Run the pass over weights or effects, which fills `answers`; `more` holds labels, an order, or x and its type.

    For effects, the kernel goes through the queries in segments that do not depend on the number of threads, and adds
    what each gives to the sums in their order; so no bit depends on it either.
    """
    problem, numbers = call.problem, _numbers(call.problem, known)
    if isinstance(known, State):
        run("columns", problem, bits(call.q), bits(call.k), {**numbers, **more}, answers)
        return
    if known.strongest is not None:
        numbers["strongest"] = np.ascontiguousarray(known.strongest, np.int64)
    numbers |= _numbers(problem, known.state)
    run("effects", problem, *map(bits, (call.q, call.k, call.v, known.g)), {**numbers, **more}, answers)


@in_one_dtype
def gradients(call: Call, state: State, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k, v, the bias and the table of spans, in one pass over the blocks of keys."""
    call = call if upstream.output is not None else call.with_values(None)
    problem, q, k, v = call.problem, call.q, call.k, call.v
    dtype = statistics_dtype(problem.dtype)
    room = {name: np.zeros(x.shape, dtype) for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    if upstream.bias is not None:  # the kernel sums over keys where the bias is broadcast
        full = (problem.batch, problem.heads, problem.queries, 1)
        room["bias"] = np.zeros(full if upstream.bias[3] == 1 else upstream.bias, dtype)
    if upstream.spans is not None:
        room["span_table"] = np.zeros((problem.batch, problem.heads, *upstream.spans[2:]))
    known: dict[str, Any] = {**_numbers(problem, state), **_numbers(problem, upstream)}
    if v is not None and upstream.output is not None:
        known["output"] = bits(upstream.output)
    run("gradients", problem, bits(q), bits(k), bits(v), known, room)
    answers = {name: array.astype(problem.dtype, copy=False) for name, array in room.items() if name in "qkv"}
    if upstream.bias is not None:
        answers["bias"] = _summed(room["bias"], upstream.bias)
    if upstream.spans is not None:
        answers["spans"] = _summed(room["span_table"], upstream.spans).astype(dtype, copy=False)
    return answers


@np.errstate(invalid="ignore")  # inf - inf
def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which what x is the gradient of was broadcast from `shape`."""
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    total: Array = x.sum(axis=shared, keepdims=True) if shared else x
    return total


def _numbers(problem: Problem, given: State | Terms | Upstream) -> dict[str, Array]:
    """The numbers per query and per key of a state, of terms or of an upstream gradient, by name."""
    dtype = statistics_dtype(problem.dtype)
    numbers = {name: getattr(given, name, None) for name in _NUMBERS}
    return {name: np.ascontiguousarray(x, dtype) for name, x in numbers.items() if x is not None}


def others(call: Call, g: Array) -> Others:
    """Each row's strongest key and what all its other keys answer, in one pass over the keys."""
    problem = call.problem
    results = no_keys((problem.batch, problem.heads, problem.queries))
    run("others", problem, *map(bits, (call.q, call.k, call.v, g)), results._asdict())
    return results
