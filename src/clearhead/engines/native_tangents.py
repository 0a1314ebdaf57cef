"""The native engine's derivatives along a direction, by the formulas in core/directions.py.

They are computed in the passes that compute the results and the gradients themselves, and in the same numbers.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.core.statistics import ROW_TERMS, Wanted, smooth
from clearhead.engines.base import Kept, Upstream, converted, narrowed, room_for_columns, room_for_rows, widened
from clearhead.engines.native_calls import TYPES, bits, call, gradients_of, labels, room_for_gradients

_ROWS, _COLUMNS = frozenset(smooth(computed="rows")), frozenset(smooth(computed="columns"))
_PER_QUERY = ("rows", *ROW_TERMS)  # what `Upstream` has of them


def tangents(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    want: Wanted,
    logsumexp: Array | None = None,
    output: Array | None = None,
) -> dict[str, Array]:
    """The row statistics and their tangents, in one pass over the keys; with the log-sum-exp, only the tangents."""
    if v is not None and v.dtype != problem.dtype:
        wide = widened(problem, v)
        q, k, v, along = converted(wide, q, k, v, along)
        results = tangents(wide, q, k, v, along, want, logsumexp, output)
        dtype = statistics_dtype(problem.dtype) if want.keep_float32 else problem.dtype
        if "output_tangent" in results:
            results["output_tangent"] = results["output_tangent"].astype(dtype, copy=False)
        return narrowed(problem, results, keep_float32=want.keep_float32)
    results = room_for_rows(problem, v, replace(want, logsumexp=True), _ROWS)
    moved = {name: np.empty_like(x) for name, x in results.items()}
    answers, asked = ({name: bits(x) for name, x in side.items()} for side in (results, moved))
    values = v if "output" in results else None
    direction = _direction(problem, along if values is not None else replace(along, v=None))
    exact = output is not None and output.dtype == statistics_dtype(problem.dtype) == problem.dtype
    if exact and logsumexp is not None and values is not None:  # a rounded output would lose digits
        direction["known"] = np.ascontiguousarray(output)
        del answers["output"]
    call("rows", problem, bits(q), bits(k), bits(values), answers, direction | asked)
    known = {} if logsumexp is not None else results
    return known | {f"{name}_tangent": x for name, x in moved.items()}


def column_tangents(
    problem: Problem, q: Array, k: Array, along: Directions, kept: Kept, want: Wanted
) -> dict[str, Array]:
    """The tangents of the column statistics, from tangents of weights."""
    results = room_for_columns(problem, want, _COLUMNS)
    dtype = statistics_dtype(problem.dtype)
    known = {"logsumexp": np.ascontiguousarray(kept.logsumexp, dtype), **labels(want.groups)}
    direction = _direction(problem, replace(along, v=None), kept)
    call("columns", problem, bits(q), bits(k), known, results, direction)
    return {name: array.astype(dtype, copy=False) for name, array in results.items()}


def gradient_tangents(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    kept: Kept,
    upstream: Upstream,
    changing: Upstream,
) -> dict[str, Array]:
    """The tangents of the gradients, in one pass over the blocks of keys."""
    values = v if upstream.output is not None or changing.output is not None else None
    output_gradient, moving = (None if values is None else x.output for x in (upstream, changing))
    outputs = values, output_gradient, moving
    if values is not None and any(x is not None and x.dtype != problem.dtype for x in outputs):
        wide = widened(problem, values)
        q, k, values, along, by, moved = converted(wide, q, k, values, along, upstream, changing)
        result = gradient_tangents(wide, q, k, values, along, kept, by, moved)
        return narrowed(problem, result, keep_float32=upstream.keep_float32)
    room = room_for_gradients(problem, q, k, values, upstream)
    dtype = statistics_dtype(problem.dtype)
    known: dict[str, Any] = {"logsumexp": np.ascontiguousarray(kept.logsumexp, dtype), **_per_query(upstream, dtype)}
    if values is not None:
        none = np.broadcast_to(np.zeros((), q.dtype), (*q.shape[:3], values.shape[-1]))
        known |= {"v": bits(values), "output": bits(none if output_gradient is None else output_gradient)}
    direction = _direction(problem, along if values is not None else replace(along, v=None), kept)
    each = _per_query(changing, dtype)
    direction |= {name if name == "rows" else f"{name}_gradient": x for name, x in each.items()}
    if moving is not None:
        direction["output_gradient"] = bits(moving)
    call("gradients", problem, bits(q), bits(k), known, room, direction)
    return gradients_of(problem, room, upstream)


def _per_query(upstream: Upstream, dtype: Any) -> dict[str, Array]:
    """The upstream gradient's numbers per query, by name."""
    numbers = {name: getattr(upstream, name) for name in _PER_QUERY}
    return {name: np.ascontiguousarray(x, dtype) for name, x in numbers.items() if x is not None}


def _direction(problem: Problem, along: Directions, kept: Kept | None = None) -> dict[str, Any]:
    """The direction as the kernel reads it."""
    dtype = statistics_dtype(problem.dtype)
    moved: dict[str, Any] = {name: bits(along.nonzero[name]) for name in "qkv" if name in along.nonzero}
    if along.bias is not None:
        bias = along.bias if along.bias.dtype in TYPES else along.bias.astype(dtype)
        moved |= {"bias": bits(bias), "bias_type": TYPES[bias.dtype]}
    if along.spans is not None:
        moved["spans"] = _rows_contiguous(along.spans, dtype)
    if along.sinks is not None and problem.sinks is not None:
        moved["sinks"] = np.ascontiguousarray(along.sinks, np.float64)
    if kept is not None:
        moved["kept"] = np.ascontiguousarray(kept.tangent, dtype)
    return moved


def _rows_contiguous(table: Array, dtype: Any) -> Array:
    """A table of spans in the kernel's numbers, each row contiguous; axes that are broadcast stay so."""
    stored = tuple(slice(None, 1) if step == 0 else slice(None) for step in table.strides[:2])
    return np.broadcast_to(np.ascontiguousarray(table[stored], dtype), table.shape)
