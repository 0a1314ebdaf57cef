"""The score rules as a page stores them: plain numbers and arrays."""

from itertools import product
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import unrepeated
from clearhead.core.axes import Array, blocks
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE, FIELDS, check_supported, take

_BLOCK = 1024
RULES = EVERYWHERE  # that page/src/attention.js supports


def packed(problem: Problem, heads: list[int] | None = None) -> tuple[dict[str, Any], dict[str, Array]]:
    """(rules as plain numbers, rules as arrays), for some heads or all; docs/files.md names them.

    Raises RuleError for a rule that the page's program does not support.
    """
    check_supported("the page", RULES, problem.active_rules())
    plain: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for field, axes in FIELDS.items():
        value = getattr(problem, field)
        if axes in ((), ("batch",)):
            plain[field] = value.tolist() if isinstance(value, np.ndarray) else value
        elif value is not None:
            arrays[field] = unrepeated(value)  # each element is stored once
    return plain, arrays if heads is None else take(arrays, {"heads": heads})


def forbids(problem: Problem) -> bool:
    """Whether the rules mask any weight of the first batch item. O(queries·keys) to read mask, bias and spans."""
    rules = (unrepeated(x) for x in (problem.mask, problem.bias, problem.span_table) if x is not None)
    each_head = any(rule.shape[1] > 1 for rule in rules)
    heads = problem.heads if each_head else 1
    parts = product(range(heads), blocks(problem.queries, _BLOCK), blocks(problem.keys, _BLOCK))
    return any(visibility.tile(problem, 0, head, rows, cols) is not True for head, rows, cols in parts)
