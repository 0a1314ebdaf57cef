"""Reads and checks what a caller asks to observe; the table of what can be asked is in `statistics.py`.

ops/observation.py holds the answers; merging.py says how two partial answers become one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from typing import Any, cast

import numpy as np

from clearhead.core import room
from clearhead.core.arrays import as_rule_array, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.effects import EFFECTS, ORDERS, Order, WantedEffects
from clearhead.core.problem import Problem
from clearhead.core.rule_values import as_int64, whole_number
from clearhead.core.statistics import PER_KEY, PER_QUERY, STATISTICS, Groups, Table, Wanted, arrays_of, askable, listed
from clearhead.errors import DtypeError, RuleError, ShapeError, shown, unknown

_PER_QUERY, _PER_KEY = listed(axes=PER_QUERY), listed(axes=PER_KEY)


def wanted(problem: Problem, asked: Mapping[str, Any], *, output: bool = False) -> Wanted:
    """Read the keywords of `observe` for this problem; `output` says whether A·v is asked for too.

    Raises UnknownNameError for a statistic that is not in the table, and RuleError, DtypeError or ShapeError for a
    value that is not what the statistic takes.
    """
    return Wanted(output=output, **_with_labels(problem, check_asked(asked)))


def wanted_effects(problem: Problem, asked: Mapping[str, Any], order: Any = "magnitude") -> WantedEffects:
    """Read the keywords of `EffectMatrix.observe` for this problem; raises as `wanted`.

    SizeError where the answers and the sums they come from exceed free memory.
    """
    read = _read("effect", EFFECTS, asked, EFFECTS, ("order",))
    if not isinstance(order, str) or order not in ORDERS:
        raise RuleError(f"order is {shown(order)}: expected one of {', '.join(ORDERS)}.", 'order="magnitude"')
    if read.get("strongest"):
        read["strongest"] = min(read["strongest"], problem.queries * problem.keys)
    want = WantedEffects(**_with_labels(problem, read), order=cast("Order", order))
    check_effects_room(problem, want)
    return want


def check_effects_room(problem: Problem, want: WantedEffects) -> None:
    """Raise SizeError where the answers about effects and the sums they come from exceed free memory."""
    itemsize = statistics_dtype(problem.dtype).itemsize
    sizes = {axis: getattr(problem, axis) for axis in WEIGHTS}
    for name in want.names():
        shape = want.shape(name, sizes)
        taken = len(arrays_of(name, EFFECTS)) * room.array_bytes(shape, 8 + itemsize)
        room.check_room(f"{name} of shape {shape}", taken, "ask for fewer at a time.", problem.device)


def check_asked(
    asked: Mapping[str, Any], known: Collection[str] = (), others: Iterable[str] = ("queries",)
) -> dict[str, Any]:
    """Validate what can be checked without a problem: everything but the labels of groups.

    known     the statistics that can be asked for here; empty means all of the table
    others    further keywords of the caller, which the error lists as well

    Returns the keywords with their checked values. Raises UnknownNameError or RuleError.
    """
    return _read("statistic", STATISTICS, asked, known or askable(), others)


def _read(
    kind: str, table: Table, asked: Mapping[str, Any], known: Collection[str], others: Iterable[str]
) -> dict[str, Any]:
    for name in asked:
        if name not in known:
            raise unknown(kind, name, (*known, *others))
    return {name: _READERS[table[name].asked](name, value) for name, value in asked.items()}


def _with_labels(problem: Problem, asked: dict[str, Any]) -> dict[str, Any]:
    groups = asked.get("groups")
    return asked if groups is None else asked | {"groups": read_groups(problem, groups)}


def check_room(problem: Problem, want: Wanted, width: int = 0) -> None:
    """Raise SizeError where the answers and the buffers they are summed in exceed free memory; `width` is d_v.

    No other memory grows with the input, so this can be checked before any work.
    """
    cells, pixels = problem.batch * problem.heads, (0 if want.image is None else prod(want.image))
    labels, top = 0 if want.groups is None else prod(want.groups.counts), want.top or 0
    per_row = width + len(_PER_QUERY) + top
    if 16 * cells * (problem.queries * per_row + len(_PER_KEY) * problem.keys + pixels + labels) <= room.SMALL:
        return  # a short call spends no time here
    itemsize = statistics_dtype(problem.dtype).itemsize
    rows, summed = cells * problem.queries, itemsize + 8  # sums are float64 until they are complete
    counts = "" if want.groups is None else " by ".join(f"{count:,}" for count in want.groups.counts)
    fewer = "fewer queries at a time: q[..., :4096, :]."
    size = {
        ("the output", fewer): rows * width * (itemsize if want.keep_float32 else problem.dtype.itemsize) * want.output,
        ("statistics per query", fewer): rows * itemsize * len(_PER_QUERY),
        ("statistics per key", "fewer keys."): cells * problem.keys * summed * len({*want.names()} & {*_PER_KEY}),
        (f"top={top:,}", "top=8"): rows * top * (itemsize + 8),
        (f"image={want.image}", "image=(256, 256)"): cells * pixels * summed,
        (f"groups of {counts} labels", "labels are 0, 1, 2, …, one per group."): cells * labels * summed,
    }
    what, hint = max(size, key=lambda name: size[name])
    room.check_room(f"{what} of {named(problem.shape, WEIGHTS)}", sum(size.values()), hint, problem.device)


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


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise RuleError(f"{name} is {shown(value)}: expected True or False.")
    return bool(value)


def _count(name: str, value: Any) -> int | None:
    return None if value is None else whole_number(name, value, 1, hint=f"{name}=8")


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


_READERS: dict[str, Callable[[str, Any], Any]] = {"flag": _flag, "count": _count, "size": _size, "labels": _two_sides}


def read_groups(problem: Problem, value: Any) -> Groups:
    """Read (query_groups, key_groups): one label per token, below 0 for none. Raises as `wanted`."""
    sides = (("query_groups", value[0], problem.queries), ("key_groups", value[1], problem.keys))
    queries, keys = (_label_row(problem, name, labels, size) for name, labels, size in sides)
    return Groups(queries, keys, (int(queries.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1))


def _label_row(problem: Problem, name: str, value: Any, size: int) -> Array:
    labels = as_rule_array(value, name)
    if labels.dtype.kind not in "iu" and labels.size:
        raise DtypeError(f"{name} is {labels.dtype}: expected whole numbers, one label per token, below 0 for none.")
    lead = problem.prefix[:-1]
    if labels.shape not in ((size,), (*lead, size)):
        raise ShapeError(f"{name} has shape {labels.shape}: expected ({size},), one label per token.")
    spread = np.broadcast_to(as_int64(name, labels), (*lead, size)).reshape(problem.batch, size)
    if spread.max(initial=-1) >= max(size, 1 << 20):
        raise RuleError(f"{name} goes up to {spread.max()}: labels are 0, 1, 2, …, one per group.")
    return spread
