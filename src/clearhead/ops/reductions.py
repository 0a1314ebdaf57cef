"""Sums, means and extremes over the axes of a matrix that is never stored, in O(queries + keys) memory.

Sums over keys come from a row pass, those over queries are what the keys receive; the largest weights are `top` and
`peak`. What no statistic answers (min, argmin, argmax) goes over the weights tile by tile.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import Restore, as_host_array, on_cpu, to_device_of, torch_of
from clearhead.core.axes import WEIGHTS, Array, blocks, named
from clearhead.core.rule_values import is_whole
from clearhead.errors import SelectionError, ShapeError, shown
from clearhead.ops.matrix_data import Answers, MatrixData

_TILE, _WIDTH = 2**20, 4096  # weights in a tile, and keys


class Plain(NamedTuple):
    """A NumPy array, or a tensor with its graph, and the function that gives it the kind that the caller has."""

    x: Any
    restore: Restore


def reduced(
    answers: Callable[[], Answers],
    factors: Callable[[], MatrixData],
    name: str,
    axis: Any,
    *,
    ndim: int,
    keepdims: bool,
    swapped: bool = False,
) -> Any:
    """What NumPy's function of that name (sum, mean, max, min, argmax, argmin) gives for the stored weights.

    answers, factors  who answers for the matrix, and its weights; one of them is called
    ndim              of the matrix
    swapped           axis and result are those of the transpose

    Raises SelectionError for an axis that is not there, or where the result has a number for each query and key;
    ShapeError for the largest or smallest of no weights.
    """
    places = name.startswith("arg")
    if places and axis is not None and not is_whole(axis):
        raise SelectionError(f"axis is {shown(axis)}: {name} takes one axis, or None.", "axis=-1 is the keys.")
    axes = read_axes(axis, ndim, swapped=swapped)
    if places:
        result = place_of(factors(), name, axes[0] if axis is not None else None, swapped=swapped)
    elif name == "min":
        result = smallest(factors(), axes)
    elif name == "max":
        result = largest(answers(), axes)
    else:
        source = answers()
        by_key = lambda: source.observe(None, {"received": True}).received  # noqa: E731
        result = total(source.shape, source.row_sums, by_key, axes, mean=name == "mean")
    return shaped(result, axes, keepdims=keepdims, swapped=swapped)


def shaped(reduced: Plain, axes: tuple[int, ...], *, keepdims: bool, swapped: bool) -> Any:
    """What was reduced over these axes, of the caller's kind: without them or with size 1, swapped as the transpose."""
    x = reduced.x
    if not keepdims:
        x = x.reshape(tuple(size for axis, size in enumerate(x.shape) if axis not in axes))
    elif swapped:
        x = x.swapaxes(-1, -2)
    x = reduced.restore(x)
    return x[()] if type(x) is np.ndarray else x


def read_axes(axis: Any, ndim: int, *, swapped: bool = False) -> tuple[int, ...]:
    """The axes, counted from 0; None is all, and with `swapped` they are given as those of the transpose.

    Raises SelectionError unless queries or keys are among them.
    """
    asked = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(sorted(int(one) % ndim for one in asked if is_whole(one) and -ndim <= one < ndim))
    if len(set(axes)) < len(asked):
        raise SelectionError(
            f"axis is {shown(axis)}: expected one of {ndim} axes, a tuple of them, or None.", "axis=-1 is the keys."
        )
    if not {ndim - 2, ndim - 1} & set(axes):
        raise SelectionError(
            f"axis is {shown(axis)}: the result would have a number for each query and each key, and be stored.",
            "add axis -1 (keys) or -2 (queries), or reduce a stored copy or tile: A[...], A[..., :512, :512].",
        )
    turned = {ndim - 1: ndim - 2, ndim - 2: ndim - 1} if swapped else {}
    return tuple(sorted(turned.get(one, one) for one in axes))


def total(
    shape: tuple[int, ...], by_query: Callable[[], Any], by_key: Callable[[], Any], axes: tuple[int, ...], *, mean: bool
) -> Plain:
    """The sum or the mean, with size 1 in place of the axes, added in float64 from the sums of each query or key."""
    if len(shape) - 1 in axes:
        sums, restore = _plain(by_query())
        x = sums[..., None]
    else:
        sums, restore = _plain(by_key())
        x = sums[..., None, :]
    divisor = prod(shape[axis] for axis in axes) if mean else 1
    if isinstance(x, np.ndarray):
        whole = x.sum(axis=axes, keepdims=True, dtype=np.float64)
        return Plain((whole / np.float64(divisor)).astype(x.dtype), restore)
    wide = sys.modules["torch"].float64
    return Plain((x.sum(axes, keepdim=True, dtype=wide) / divisor).to(x.dtype), restore)


def largest(answers: Answers, axes: tuple[int, ...]) -> Plain:
    """The largest weight, with size 1 in place of the axes; NaN where there is a NaN. Raises ShapeError for none."""
    _check_some(answers.shape, axes, "max")
    if len(answers.shape) - 1 not in axes:
        peaks, restore = _plain(answers.observe(None, {"peak": True}).peak)
        x = peaks[..., None, :]
    else:
        seen = answers.observe(None, {"top": 1})
        assert seen.top is not None
        x, restore = _plain(seen.top.weights)
    return Plain(x.max(axis=axes, keepdims=True) if isinstance(x, np.ndarray) else x.amax(axes, keepdim=True), restore)


def smallest(factors: MatrixData, axes: tuple[int, ...]) -> Plain:
    """The smallest weight, as `largest`; 0 where a key is forbidden."""
    shape = factors.shape
    _check_some(shape, axes, "min")
    result = np.full([1 if axis in axes else size for axis, size in enumerate(shape)], np.inf, factors.dtype)
    for place, tile in _tiles(factors):
        part = tuple(slice(1) if axis in axes else one for axis, one in enumerate(place))
        result[part] = np.minimum(result[part], tile.min(axis=axes, keepdims=True))
    return _of(factors, result)


def place_of(factors: MatrixData, name: str, axis: int | None, *, swapped: bool = False) -> Plain:
    """The index of the largest or smallest weight ("argmax", "argmin"), with size 1 in place of the axis.

    Of equal weights the first, and the first NaN, as NumPy has it. axis None is the index among all weights, or with
    `swapped` among all of the transpose.
    """
    shape = factors.shape
    along = axis if axis is not None else len(shape) - (2 if swapped else 1)
    _check_some(shape, range(len(shape)) if axis is None else (axis,), name)
    small = [1 if part == along else size for part, size in enumerate(shape)]
    best, index = np.zeros(small, factors.dtype), np.full(small, -1)
    for place, tile in _tiles(factors):
        part = tuple(slice(1) if one == along else chosen for one, chosen in enumerate(place))
        here = getattr(np, name)(tile, axis=along, keepdims=True)
        value = np.take_along_axis(tile, here, axis=along)
        better = value > best[part] if name == "argmax" else value < best[part]
        better |= (index[part] < 0) | (np.isnan(value) & ~np.isnan(best[part]))
        best[part] = np.where(better, value, best[part])
        index[part] = np.where(better, here + place[along].start, index[part])
    if axis is None:
        line = int(getattr(np, name)(best))
        index = (line * shape[along] + index.reshape(-1)[line]).reshape((1,) * len(shape))
    return _of(factors, index)


def _check_some(shape: tuple[int, ...], axes: Iterable[int], name: str) -> None:
    if not prod(shape[axis] for axis in axes):
        raise ShapeError(
            f"{name} of no weights: the matrix is {named(shape, WEIGHTS)}, and an axis to reduce is empty."
        )


def _plain(x: Any) -> Plain:
    if torch_of(x) is not None:
        return Plain(x, lambda tensor: tensor)
    return Plain(*as_host_array(x, "part"))


def _of(factors: MatrixData, result: Array) -> Plain:
    return Plain(result, lambda array: factors.restore(to_device_of(array, factors.q)))


def _tiles(factors: MatrixData) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """All weights in tiles that cover all batch items and heads, with their place; tiles ascend along each axis."""
    *lead, queries, keys = factors.shape
    width = max(1, min(_WIDTH, _TILE // max(1, prod(lead))))
    height = max(1, _TILE // (width * max(1, prod(lead))))
    for rows, cols in product(blocks(queries, height), blocks(keys, width)):
        place = (*(slice(0, size) for size in lead), rows, cols)
        yield place, on_cpu(factors.weights([range(one.start, one.stop) for one in place]))
