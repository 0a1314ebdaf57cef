"""A page's requests for weights, from a server or a notebook kernel: rows, columns and tiles, validated here."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clearhead.errors import SelectionError
from clearhead.view.long import ShownLayer, ShownRun
from clearhead.view.tiles import tile

_MOST_UNITS = 2048  # along each side of a tile
_MOST_TOKENS = 16384


def answer(what: str, asked: Any, runs: Sequence[ShownRun]) -> bytes:
    """The requested weights as little-endian float32 bytes, MASKED where forbidden.

    Raises SelectionError, which says why, for a request that is not valid.
    """
    if what not in ANSWERS:
        raise SelectionError(f"{what!r} cannot be asked for: expected {', '.join(ANSWERS)}")
    if not isinstance(asked, dict):
        raise SelectionError("the request is no JSON object")
    run = runs[_number(asked, "run", len(runs))]
    layer = run.layers[_number(asked, "layer", len(run.layers))]
    head = _number(asked, "head", len(layer.heads))
    return np.ascontiguousarray(ANSWERS[what](asked, layer, head), "<f4").tobytes()


def _tile(asked: dict[str, Any], layer: ShownLayer, head: int) -> Any:
    queries, keys = layer.matrix.shape[2:]
    rows, cols = _edges(asked, "rows", queries), _edges(asked, "cols", keys)
    rule = asked.get("rule")
    if rule not in ("most", "mean"):
        raise SelectionError(f"rule is {rule!r}: expected most or mean")
    step = _number(asked, "step", _MOST_UNITS + 1)
    return tile(layer.matrix, head, rows, cols, max(step, 1), rule)


def _row(asked: dict[str, Any], layer: ShownLayer, head: int) -> Any:
    i = _number(asked, "at", layer.matrix.shape[2])
    return tile(layer.matrix, head, [i, i + 1], range(layer.matrix.shape[3] + 1), 1, "most")


def _column(asked: dict[str, Any], layer: ShownLayer, head: int) -> Any:
    j = _number(asked, "at", layer.matrix.shape[3])
    return tile(layer.matrix, head, range(layer.matrix.shape[2] + 1), [j, j + 1], 1, "most")


ANSWERS: dict[str, Callable[[dict[str, Any], ShownLayer, int], Any]] = {"tile": _tile, "row": _row, "column": _column}


def _number(asked: dict[str, Any], name: str, size: int) -> int:
    value = asked.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise SelectionError(f"{name} is {value!r}: expected a whole number from 0 to {size - 1}")
    return value


def _edges(asked: dict[str, Any], name: str, size: int) -> list[int]:
    edges = asked.get(name)
    whole = isinstance(edges, list) and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in edges)
    if not isinstance(edges, list) or not whole or not 2 <= len(edges) <= _MOST_UNITS + 1:
        raise SelectionError(f"{name}: expected 2 to {_MOST_UNITS + 1} whole numbers, where units begin and end")
    if edges[0] < 0 or edges[-1] > size or any(a >= b for a, b in pairwise(edges)):
        raise SelectionError(f"{name}: expected rising numbers from 0 to {size}")
    if edges[-1] - edges[0] > _MOST_TOKENS:
        raise SelectionError(f"{name}: one tile has at most {_MOST_TOKENS} tokens")
    return edges
