"""A page's requests, from its server, validated here: weights, and what one is computed from."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clearhead.core.arrays import on_cpu
from clearhead.core.axes import Array, blocks
from clearhead.errors import SelectionError
from clearhead.view.container import framed
from clearhead.view.long import ShownLayer, ShownRun, packed
from clearhead.view.pooling import MASKED, tile

_MOST_UNITS = 2048  # along each side of a tile
_MOST_TOKENS = 16384
_MOST_NUMBERS = 2**22  # of a head's q, k, v and rules, to be sent whole: 16 MiB in float32, 10,000 tokens of 128
_BLOCK = 4096  # keys that are summed at a time


def answer(what: str, asked: Any, runs: Sequence[ShownRun]) -> bytes:
    """The requested weights as little-endian float32 bytes, MASKED where forbidden; of operands, a frame of arrays.

    Raises SelectionError, which says why, for a request that is not valid.
    """
    if what not in ANSWERS:
        raise SelectionError(f"{what!r} cannot be asked for: expected {', '.join(ANSWERS)}")
    if not isinstance(asked, dict):
        raise SelectionError("the request is no JSON object")
    run = runs[_number(asked, "run", len(runs))]
    layer = run.layers[_number(asked, "layer", len(run.layers))]
    return ANSWERS[what](asked, layer, _number(asked, "head", len(layer.heads)))


def _tile(asked: dict[str, Any], layer: ShownLayer, head: int) -> bytes:
    queries, keys = layer.matrix.shape[2:]
    rows, cols = _edges(asked, "rows", queries), _edges(asked, "cols", keys)
    rule = asked.get("rule")
    if rule not in ("most", "mean"):
        raise SelectionError(f"rule is {rule!r}: expected most or mean")
    step = _number(asked, "step", _MOST_UNITS + 1)
    return _floats(tile(layer.matrix, head, rows, cols, max(step, 1), rule))


def _column(asked: dict[str, Any], layer: ShownLayer, head: int) -> bytes:
    queries, keys = layer.matrix.shape[2:]
    j = _number(asked, "at", keys)
    return _floats(tile(layer.matrix, head, range(queries + 1), [j, j + 1], 1, "most"))


def _row_of(layer: ShownLayer, head: int, i: int) -> Array:
    return tile(layer.matrix, head, [i, i + 1], range(layer.matrix.shape[3] + 1), 1, "most")


def _floats(weights: Array) -> bytes:
    return np.ascontiguousarray(weights, "<f4").tobytes()


def _operands(asked: dict[str, Any], layer: ShownLayer, head: int) -> bytes:
    """A head's q, k, v, g, log-sum-exp and rules; where these are too many numbers, one query's and one key's.

    Then also the query's weights and output, and by what the page bounds its error: Σ_j a_ij·|v_j|, and the length of
    the head's longest key. O(keys·(d_k + d_v)) time.
    """
    queries, keys = layer.matrix.shape[2:]
    i, j = _number(asked, "query", queries), _number(asked, "key", keys)
    part, kv_head = layer.matrix.part(0, head), layer.matrix.call.problem.kv_head_of(head)
    call = part.call
    operands = {"q": call.q, "k": call.k}
    if layer.v is not None:
        operands["v"] = layer.v[:, kv_head : kv_head + 1]
    if layer.g is not None:
        operands["g"] = layer.g[:, head : head + 1]
    arrays = {name: on_cpu(x)[0] for name, x in operands.items()}
    rules = packed(call.problem)[1]
    whole = sum(x.size for x in (*arrays.values(), *rules.values())) <= _MOST_NUMBERS
    arrays["logsumexp"] = on_cpu(part.state.logsumexp)[0]
    if not whole:
        row = _row_of(layer, head, i)
        sums = _sums(row[0], arrays["k"][0], arrays["v"][0] if "v" in arrays else None)
        places = {"q": i, "g": i, "logsumexp": i, "k": j, "v": j}
        arrays = {name: x[:, places[name] : places[name] + 1] for name, x in arrays.items()} | {"row": row} | sums
        rules = packed(call.problem.take(queries=range(i, i + 1), keys=range(j, j + 1)))[1]
    return framed({"whole": whole}, arrays | rules)


def _sums(row: Array, k: Array, v: Array | None) -> dict[str, Array]:
    """The length of the longest key; with v, Σ_j a_j·v_j and Σ_j a_j·|v_j| over the keys that are seen, in float64."""
    longest, output, size = 0.0, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for some in blocks(len(k), _BLOCK):
            longest = np.maximum(longest, np.linalg.norm(k[some].astype(np.float64), axis=-1).max())
            if v is not None:
                seen = row[some] != MASKED
                weights, values = row[some][seen].astype(np.float64), v[some][seen].astype(np.float64)
                output, size = output + weights @ values, size + weights @ np.abs(values)
    sums = {"longest": np.array([longest])}
    return sums if v is None else sums | {"output": np.asarray(output), "size": np.asarray(size)}


ANSWERS: dict[str, Callable[[dict[str, Any], ShownLayer, int], bytes]] = {
    "row": lambda asked, layer, head: _floats(_row_of(layer, head, _number(asked, "at", layer.matrix.shape[2]))),
    "column": _column,
    "tile": _tile,
    "operands": _operands,
}


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
