"""Validates and answers the requests for weights that a page sends to its server."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.rule_values import whole_number
from clearhead.errors import SelectionError
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view.long import ShownLayer, ShownRun

MASKED = -1.0  # stands for a masked weight; page/src/attention.js has the same number
_MOST = 16384  # queries or keys of a tile


def answer(what: str, asked: Any, runs: Sequence[ShownRun]) -> bytes:
    """Return the requested weights as little-endian float32 bytes, MASKED where forbidden.

    Raises SelectionError, which says why, for an invalid request.
    """
    if what not in ANSWERS:
        raise SelectionError(f"there is no request {what!r}: expected {', '.join(ANSWERS)}")
    if not isinstance(asked, dict):
        raise SelectionError("the request is not a JSON object")
    run = runs[_number(asked, "run", len(runs))]
    layer = run.layers[_number(asked, "layer", len(run.layers))]
    weights = ANSWERS[what](asked, layer, _number(asked, "head", len(layer.heads)))
    return np.ascontiguousarray(weights, "<f4").tobytes()


def tile(matrix: AttentionMatrix, head: int, rows: slice, cols: slice, step: int) -> Array:
    """Return the largest of every step × step weights, float32; MASKED where all of them are masked.

    O(rows·cols·d_k) time.
    """
    rows, cols = (slice(*part.indices(size)) for part, size in zip((rows, cols), matrix.shape[2:], strict=True))
    weights = as_host_array(matrix[0, head, rows, cols], "weights")[0].astype(np.float32)
    shown = np.where(visibility.tile(matrix.call.problem, 0, head, rows, cols), weights, np.float32(MASKED))
    tall, wide = (np.arange(0, size, step) for size in shown.shape)
    return np.maximum.reduceat(np.maximum.reduceat(shown, wide, 1), tall, 0)


def _tile(asked: dict[str, Any], layer: ShownLayer, head: int) -> Array:
    rows, cols = (
        _range(asked, name, size) for name, size in zip(("rows", "cols"), layer.matrix.shape[2:], strict=True)
    )
    return tile(layer.matrix, head, rows, cols, max(1, _number(asked, "step", _MOST)))


def _row(asked: dict[str, Any], layer: ShownLayer, head: int) -> Array:
    i = _number(asked, "at", layer.matrix.shape[2])
    return tile(layer.matrix, head, slice(i, i + 1), slice(None), 1)


def _column(asked: dict[str, Any], layer: ShownLayer, head: int) -> Array:
    j = _number(asked, "at", layer.matrix.shape[3])
    return tile(layer.matrix, head, slice(None), slice(j, j + 1), 1)


ANSWERS: dict[str, Callable[[dict[str, Any], ShownLayer, int], Array]] = {"row": _row, "column": _column, "tile": _tile}


def _number(asked: dict[str, Any], name: str, size: int) -> int:
    return whole_number(name, asked.get(name), 0, size - 1, error=SelectionError)


def _range(asked: dict[str, Any], name: str, size: int) -> slice:
    ends = asked.get(name)
    if not isinstance(ends, list) or len(ends) != 2:
        raise SelectionError(f"{name}: expected two whole numbers, the first and the end")
    start, stop = (_number({name: end}, name, size + 1) for end in ends)
    if not 0 < stop - start <= _MOST:
        raise SelectionError(f"{name}: expected 1 to {_MOST} of them")
    return slice(start, stop)
