"""The score rules as a page carries them: plain numbers, and arrays."""

from itertools import product
from typing import Any

import numpy as np

from clearhead import visibility
from clearhead.axes import Array
from clearhead.problem import Problem

_BLOCK = 1024


def packed(problem: Problem) -> tuple[dict[str, Any], dict[str, Array]]:
    """(rules of plain numbers, rules that are arrays); docs/page-format.md names them."""
    left, right = problem.window
    plain = {
        "scale": problem.scale,
        "softcap": problem.softcap,
        "causal": problem.causal,
        "window": [left, right],
        "query_offset": problem.query_offset.tolist(),
        "kv_lengths": None if problem.kv_lengths is None else problem.kv_lengths.tolist(),
        "query_lengths": None if problem.query_lengths is None else problem.query_lengths.tolist(),
    }
    found = {
        "bias": problem.bias,
        "mask": problem.mask,
        "alibi_slopes": problem.alibi_slopes,
        "sinks": problem.sinks,
        "query_segments": problem.query_segments,
        "kv_segments": problem.kv_segments,
    }
    return plain, {name: _once(array) for name, array in found.items() if array is not None}


def forbids(problem: Problem) -> bool:
    """Do the rules forbid any weight of the first sequence? O(queries·keys) where a mask or a bias must be read."""
    each_head = any(x is not None and _once(x).shape[1] > 1 for x in (problem.mask, problem.bias))
    heads = problem.heads if each_head else 1
    blocks = (range(0, size, _BLOCK) for size in (problem.queries, problem.keys))
    return any(
        visibility.tile(problem, 0, head, slice(i, i + _BLOCK), slice(j, j + _BLOCK)) is not True
        for head, i, j in product(range(heads), *blocks)
    )


def _once(array: Array) -> Array:
    """An axis that a rule only repeats is stored once."""
    picks = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in np.broadcast_to(array, array.shape).strides)
    return array[picks]
