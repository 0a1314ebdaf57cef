"""Reads and checks what a caller requests of a matrix: statistics, and right-hand sides of products, v and g.

statistics.py has the table of statistics; ops/observation.py holds the answers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from clearhead.core import room
from clearhead.core.arrays import FLOATS, as_array, autocast, broadcast, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_flag, read_wholes, whole_number
from clearhead.core.statistics import PER_QUERY, STATISTICS, Groups, Matrix, Wanted, arrays_of, askable
from clearhead.errors import DtypeError, RuleError, ShapeError, shown, unknown


def wanted(
    problem: Problem,
    asked: Mapping[str, Any],
    *,
    of: Matrix = "weights",
    output: bool = False,
) -> Wanted:
    """Read the keywords of `observe` for this problem.

    of       the matrix that is observed
    output   whether A·v is asked for too

    Raises UnknownNameError for a statistic that is not in the table, and RuleError, DtypeError or ShapeError for a
    value that the statistic does not take. SizeError if answers about effects and the sums they come from exceed free
    memory; for answers about weights, the caller calls `check_room`.
    """
    read = check_asked(asked, of=of)
    if read.get("strongest"):
        read["strongest"] = min(read["strongest"], problem.queries * problem.keys)
    if read.get("groups") is not None:
        read["groups"] = read_groups(problem, read["groups"])
    if of == "weights":
        return Wanted(output=output, **read)
    want = Wanted(of=of, **read)
    check_room(problem, want)
    return want


def check_asked(
    asked: Mapping[str, Any], known: Collection[str] = (), others: Iterable[str] | None = None, of: Matrix = "weights"
) -> dict[str, Any]:
    """Validate what can be checked without a problem: everything but the labels of groups.

    known     the statistics that can be asked for here; empty means all of the matrix
    others    further keywords of the caller for the error to list; None means those of `observe`

    Returns the keywords with their checked values. Raises UnknownNameError or RuleError.
    """
    known = known or askable(of)
    further = (("queries",) if of == "weights" else ()) if others is None else others
    for name in asked:
        if name not in known:
            raise unknown("statistic" if of == "weights" else "effect", name, (*known, *further))
    return {name: _READERS[STATISTICS[name].asked](name, value) for name, value in asked.items()}


def check_room(problem: Problem, want: Wanted, width: int = 0) -> None:
    """Raise SizeError where the answers and the buffers they are summed in exceed free memory; `width` is d_v.

    No other memory grows with the input, so this can be checked before any work.
    """
    axes, usual = {axis: getattr(problem, axis) for axis in WEIGHTS} | {"d_v": width}, statistics_dtype(problem.dtype)
    sizes: dict[str, int] = {}
    for name in want.names():
        shape, each = want.shape(name, axes), usual.itemsize
        if name == "output" and not want.keep_float32:
            each = problem.dtype.itemsize
        elif want.of == "effects" or STATISTICS[name].axes != PER_QUERY:
            each += 8  # a sum is float64 until it is complete, and an index has 8 bytes
        sizes[f"{name} of shape {shape}"] = room.array_bytes(shape, each) * len(arrays_of(name, want.of))
    if sum(sizes.values()) > room.SMALL:
        largest = max(sizes, key=lambda name: sizes[name])
        hint = "ask for less at a time, or of fewer queries: observe(queries=slice(0, 4096))."
        room.check_room(largest, sum(sizes.values()), hint, problem.device)


def areas(pixels: int, size: int, chosen: slice) -> tuple[slice, Array]:
    """The pixels along one axis that the cells `chosen` of `size` fall on, and each cell's share in a pixel's mean.

    Pixel r averages the cells from r·size/pixels to (r+1)·size/pixels; a cell that a pixel's border cuts counts in
    part, so that the picture's mean is the matrix's mean. Returns the slice of pixels, and the shares (pixels, cells)
    in float64. O(pixels touched · cells).
    """
    step = size / pixels
    first = min(int(chosen.start / step), pixels - 1)
    last = min(int(np.ceil(chosen.stop / step)), pixels)
    edges = np.arange(first, last + 1) * step
    cells = np.arange(chosen.start, chosen.stop)
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return slice(first, last), np.maximum(overlap, 0.0) / step


def _size(name: str, value: Any) -> tuple[int, int] | None:
    hint = f"{name}=(256, 256)"
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise RuleError(f"{name} is {shown(value)}: expected (height, width) in pixels.", hint)
    height, width = (
        whole_number(f"{name}'s {side}", pixels, 1, hint=hint)
        for side, pixels in zip(("height", "width"), value, strict=True)
    )
    return height, width


def _two_sides(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, (tuple, list)) or len(value) != 2):
        raise RuleError(f"{name} is {type(value).__name__}: expected (query_groups, key_groups).")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "flag": read_flag,
    "count": lambda name, value: None if value is None else whole_number(name, value, 1, hint=f"{name}=8"),
    "size": _size,
    "labels": _two_sides,
}


def read_groups(problem: Problem, value: Any) -> Groups:
    """Read (query_groups, key_groups): one label per token, below 0 for none. Raises as `wanted`."""
    sides = []
    for name, axis, given in zip(("query_groups", "key_groups"), ("queries", "keys"), value, strict=True):
        size = getattr(problem, axis)
        labels = read_wholes(name, given, (*problem.prefix[:-1], size), ("batch", axis)).reshape(problem.batch, size)
        if labels.max(initial=-1) >= max(size, 1 << 20):
            raise RuleError(f"{name} goes up to {labels.max()}: labels are 0, 1, 2, …, one per group.")
        sides.append(labels)
    queries, keys = sides
    return queries, keys, (int(queries.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1)


def operand(problem: Problem, x: Array, name: str, length: int, heads: tuple[int, ...]) -> tuple[Array, bool]:
    """Read the right-hand side of a product.

    x         (…, one of `heads`, length, d), or for all heads alike (length, d) or (length,)
    length    the number of keys for A·v, of queries for Aᵀ·g
    heads     the numbers of heads that it may have

    Returns it as (batch, its heads, length, d), its heads being 1 where it is for all alike, and whether it was a
    vector. Raises DtypeError for what is no float, ShapeError for another shape.
    """
    if x.dtype not in FLOATS:
        raise DtypeError(f"{name} is {x.dtype}: expected float64, float32, bfloat16 or float16.")
    vector = x.ndim == 1
    columns = x[:, None] if vector else x
    lead = problem.prefix[:-1]
    shared = columns.ndim == 2
    fits = columns.ndim >= 2 and columns.shape[-2] == length
    if not shared:
        fits = fits and columns.shape[:-3] == lead and len(problem.prefix) > 0 and columns.shape[-3] in heads
    if not fits:
        axes = f"({', '.join(map(str, (*lead, heads[0])))}, {length}, d)" if problem.prefix else f"({length}, d)"
        raise ShapeError(
            f"{name} has shape {x.shape}: expected {axes}, or one for all heads, ({length},) or ({length}, d).",
            f"the matrix is {named(problem.shape, WEIGHTS)}.",
        )
    if shared:
        return broadcast(columns, (problem.batch, 1, *columns.shape)), vector
    return columns.reshape(problem.batch, *columns.shape[-3:]), vector


def values_of(problem: Problem, v: Any, *heads: int) -> Array:
    """Read v, (batch, 1 or one of these numbers of heads, keys, d_v), cast by autocast like q and k.

    Raises ShapeError or DtypeError where it does not fit.
    """
    return operand(problem, as_array(autocast(v), "v", problem.device)[0], "v", problem.keys, heads)[0]
