"""The native engine: passes arrays to the compiled kernel, and does no arithmetic itself.

The kernel computes in float32 (float64 for float64; pairs of bfloat16 where the processor multiplies them), packs keys
once for all the queries that read them, and splits work among threads without changing a bit of the result.
"""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core import rules
from clearhead.core.arrays import bfloat16, import_error, kernel, statistics_dtype, unrepeated
from clearhead.core.axes import WEIGHTS, Array
from clearhead.core.call import Call
from clearhead.core.effects import Others, Terms, no_keys
from clearhead.core.problem import Problem
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Upstream, in_one_dtype, kinds, room_for_sums, row_kinds, unsupported
from clearhead.engines.threads import get_num_threads, openmp_of_torch
from clearhead.errors import SizeError

RULES = rules.EVERYWHERE
GRADIENTS = frozenset(("q", "k", "v", "sinks", "bias", "span_table"))
TYPES = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, bfloat16: 2, np.dtype(np.float16): 3}
_NO_LIMIT = 1 << 62
_ARRAYS = [pair for name in RULES - {"scale"} for pair in rules.RULES[name].fields.items() if pair[1]]  # field, axes
_EFFECTS = ("by_key", "by_query", "strongest")
STATISTICS = frozenset(  # as the kernel lists them; the log-sum-exp is two arrays there
    "logsumexp" if name in State._fields else name
    for name in (() if kernel is None else (*kernel.statistics(), *_EFFECTS))
)
ALL_LEVELS = "pip install . -C cmake.define.CLEARHEAD_LEVELS=all compiles every instruction set"
_NUMBERS = (*State._fields, "rows", "keys", "entropy", "distance", "whole", "others")
_MANY_QUERIES, _MANY_KEYS = 64, 1 << 15  # limits within which the row pass computes `received`


PACKINGS = {} if kernel is None else {name: place for place, name in enumerate(kernel.packings())}  # of weights
# A matrix as a file packs it: packing, rows as bytes, the order of these rows (None: as they are), columns; is it Wᵀ?
Packed = tuple[int, Array, Array | None, int, bool]


def level() -> str:
    """The instruction set in use, such as "avx2"; "" if the kernel cannot run."""
    return "" if kernel is None else kernel.level()


def levels() -> list[str]:
    """The instruction sets that both this build and this processor support, fastest first."""
    return [] if kernel is None else kernel.levels().split()


def absent_levels() -> list[str]:
    """The instruction sets that exist for this kind of processor but that this build lacks."""
    if kernel is None:
        return []
    return [name for name in kernel.all_levels().split() if name not in kernel.compiled_levels().split()]


def missing() -> str:
    """Why the kernel cannot run at all, as a sentence; "" if it can."""
    if kernel is None:
        return _why_absent()
    if not kernel.level():
        asked = os.environ.get("CLEARHEAD_ISA", "")
        if not asked:
            present = ", ".join(kernel.compiled_levels().split())
            return f"this build has {present}, and this processor has none of them: {ALL_LEVELS}."
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
    """Can this engine run the problem, and does the environment name no other engine?"""
    if problem.described is None and not reasons_not(problem):
        described(problem)
    return problem.described is not None and not kernel.engine_named()


def run(name: str, problem: Problem, *arguments: Any) -> None:
    """Call the kernel, which fills the arrays given. Raises SizeError if its working memory cannot be allocated."""
    try:
        getattr(kernel, name)(get_num_threads(), described(problem), *arguments)
    except MemoryError:
        raise SizeError(
            "the kernel's working memory would not fit in the machine's memory.",
            "observe(queries=slice(0, 4096)) computes a part.",
        ) from None


def output(problem: Problem, q: Any, k: Any, v: Any, *, state: bool = False) -> Any:
    """Compute only the output, as q's kind of array, straight from the caller's arrays; None if `rows` must read them.

    With `state`, return a tuple of the output and the two arrays of the rows' states.
    """
    return kernel.output(get_num_threads(), problem.described or described(problem), q, k, v, state)


def step(problem: Problem, q: Any, k: Any, v: Any, room: tuple[Any, Any], place: int, turns: Any) -> Any:
    """One step of decoding: write k and v at `place` of the cache, and attend to all keys up to it.

    problem   one query and any number of keys, without rules that depend on positions
    room      the cache's keys and values, (batch, kv_heads, places, d) each
    turns     rotary cosines and sines by which q and k are rotated first, (2, d_k): see nn/cache.py; None: no rotation

    Returns the output (batch, heads, 1, d_v), or None, before anything is changed, if the arrays do not fit this path.
    """
    return kernel.step(get_num_threads(), described(problem), q, k, v, *room, place, turns)


def described(problem: Problem) -> Any:
    """The problem as the kernel reads it, converted once and cached on it; contiguous arrays are not copied.

    Arrays over queries and keys keep their strides. The kernel raises for an unknown name and for a missing one.
    """
    if problem.described is not None:
        return problem.described
    arrays: dict[str, Any] = {}
    for field, axes in _ARRAYS:
        x = getattr(problem, field)
        if x is not None and axes == WEIGHTS:
            x = x.view(np.uint8) if x.dtype == np.bool_ else bits(x)
        elif x is not None:
            once = unrepeated(x, 2) if field == "span_table" else x  # size 1 along batch and heads that share a table
            x = np.ascontiguousarray(once, statistics_dtype(problem.dtype) if field == "span_table" else None)
        arrays[field] = x
    scale, (left, right) = problem.one_scale, problem.reach
    arrays["scales"] = np.ascontiguousarray(problem.scale) if scale is None else None
    made = kernel.describe(
        type=TYPES[problem.dtype],
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
        scale=float(problem.scale[0]) if scale is None else scale,
        softcap=problem.softcap or 0.0,
        team=problem.library == "torch" and _has_team(),
        bias_type=1 if problem.bias is None else TYPES[problem.bias.dtype],
        kept=arrays,
        **arrays,
    )
    object.__setattr__(problem, "described", made)
    return made


@cache
def _has_team() -> bool:
    """Tell the kernel about PyTorch's OpenMP threads; return whether they can run it."""
    functions = openmp_of_torch()
    if functions is not None:
        kernel.use_team(*functions)
    return functions is not None


def bits(x: Array | None) -> Array | None:
    """An array for the bindings: bfloat16 as uint16; copied if unaligned or if strides are no multiple of the item."""
    if x is None:
        return None
    layout = x.flags
    if not (layout.c_contiguous and layout.aligned) and (
        not layout.aligned or any(step % x.itemsize for step in x.strides)
    ):
        x = x.copy()
    return x.view(np.uint16) if x.dtype == bfloat16 else x


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
    """Compute packed requests: fill `answers` with what `rows` and `columns` give for each request, bit for bit.

    q (tokens, heads, d_k); k and v (tokens, kv_heads, d), or pages (blocks, page, kv_heads, d); answers (tokens or
    keys, heads, …). All requests share the threads; keys and values are read in place. `problem` has one query and one
    key. `where` is cu_seq_q, cu_seq_k, seqused_k and block_table, as in clearhead.torch.varlen_attn. Raises ValueError
    if one of them does not fit.
    """
    if "received" in answers and "largest" not in answers:
        rooms = {name: np.empty(q.shape[:2], statistics_dtype(problem.dtype)) for name in State._fields}
        answers = {**answers, **rooms}
    room = {name: bits(x) for name, x in answers.items()}
    run("ragged", problem, bits(q), bits(k), bits(v), *where, room, _MANY_QUERIES, _MANY_KEYS)


def columns(call: Call, state: State | Terms, want: Wanted) -> dict[str, Array]:
    """The column statistics, or all requested statistics of effects, from weights recomputed with the rows' states."""
    dtype = statistics_dtype(call.problem.dtype)
    sides = () if want.groups is None else zip(("query_labels", "key_labels"), want.groups[:2], strict=True)
    more: dict[str, Any] = {name: np.ascontiguousarray(side, np.int64) for name, side in sides}
    results = room_for_sums(kinds(call.problem, want, want.columns(), STATISTICS))
    if want.of == "effects":
        lists = {name: np.zeros(x.shape, dtype) for name, x in results.items() if name.endswith("_values")}
        results |= lists  # lists hold single effects, in their dtype; all else are sums
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
    """Run the pass over weights or effects, which fills `answers`; `more` holds labels, or x and its type.

    For effects, the kernel splits the queries into segments that do not depend on the number of threads, and adds their
    sums in order; so no bit of the result depends on it either.
    """
    problem, numbers = call.problem, _numbers(call.problem, known)
    if isinstance(known, State):
        run("columns", problem, bits(call.q), bits(call.k), {**numbers, **more}, answers)
        return
    if known.strongest is not None:
        numbers["strongest"] = np.ascontiguousarray(known.strongest, np.int64)
    numbers |= _numbers(problem, known.state)
    run("effects", problem, *map(bits, (call.q, call.k, call.v, known.g)), {**numbers, **more}, answers)


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
    """Sum a gradient x over the axes along which its input was broadcast from `shape`."""
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    total: Array = x.sum(axis=shared, keepdims=True) if shared else x
    return total


def _numbers(problem: Problem, given: State | Terms | Upstream) -> dict[str, Array]:
    """The numbers per query and per key of a state, of terms or of an upstream gradient, by name."""
    dtype = statistics_dtype(problem.dtype)
    numbers = {name: getattr(given, name, None) for name in _NUMBERS}
    return {name: np.ascontiguousarray(x, dtype) for name, x in numbers.items() if x is not None}


def others(call: Call, g: Array) -> Others:
    """Each row's strongest key and the softmax of its other keys, in one pass over the keys."""
    problem = call.problem
    results = no_keys((problem.batch, problem.heads, problem.queries))
    run("others", problem, *map(bits, (call.q, call.k, call.v, g)), results)
    return results


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """weight·x/√(mean(x²) + epsilon) over the last axis, in float32."""
    out = np.empty(x.shape, np.float32)
    kernel.norm(np.ascontiguousarray(x), weight, epsilon, out)
    return out


def multiply(x: Array, w: Packed, *, back: bool) -> Array:
    """x·Wᵀ, (…, rows), for x (…, columns); with `back`, x·W, (…, columns), for x (…, rows).

    Float32. Every number is the same chain of multiply-adds, whatever the other tokens and the number of threads.
    """
    packing, data, order, columns, turned = w
    back = back != turned
    width = columns if back else len(data if order is None else order)
    out = (np.zeros if back else np.empty)((*x.shape[:-1], width), np.float32)
    kernel.product(get_num_threads(), packing, data, order, columns, np.ascontiguousarray(x), out, back)
    return out
