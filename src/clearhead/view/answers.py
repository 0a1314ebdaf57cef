"""What a page may ask of whoever holds q and k: rows, columns and tiles, each request read and checked here."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clearhead.errors import SelectionError
from clearhead.view.long import Run, Sight
from clearhead.view.tiles import tile

_MOST_UNITS = 2048  # along each side of a tile
_MOST_TOKENS = 16384


def answer(what: str, asked: Any, runs: Sequence[Run]) -> bytes:
    """The weights as float32, little-endian; MASKED where nothing may look. Raises SelectionError with a reason."""
    if what not in ANSWERS:
        raise SelectionError(f"{what!r} cannot be asked for: expected {', '.join(ANSWERS)}")
    if not isinstance(asked, dict):
        raise SelectionError("the request is no JSON object")
    run = runs[_number(asked, "run", len(runs))]
    sight = run.sights[_number(asked, "layer", len(run.sights))]
    head = _number(asked, "head", len(sight.heads))
    return np.ascontiguousarray(ANSWERS[what](asked, sight, head), "<f4").tobytes()


def _tile(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    queries, keys = sight.matrix.shape[2:]
    rows, cols = _edges(asked, "rows", queries), _edges(asked, "cols", keys)
    rule = asked.get("rule")
    if rule not in ("most", "mean"):
        raise SelectionError(f"rule is {rule!r}: expected most or mean")
    step = _number(asked, "step", _MOST_UNITS + 1)
    return tile(sight.matrix, head, rows, cols, max(step, 1), rule)


def _row(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    i = _number(asked, "at", sight.matrix.shape[2])
    return tile(sight.matrix, head, [i, i + 1], range(sight.matrix.shape[3] + 1), 1, "most")


def _column(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    j = _number(asked, "at", sight.matrix.shape[3])
    return tile(sight.matrix, head, range(sight.matrix.shape[2] + 1), [j, j + 1], 1, "most")


ANSWERS: dict[str, Callable[[dict[str, Any], Sight, int], Any]] = {"tile": _tile, "row": _row, "column": _column}


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
