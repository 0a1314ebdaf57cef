"""The rule `spans`: labels for queries and keys, and a table of what is added to a score for each pair of labels.

With query_spans (batch, queries), key_spans (batch, keys) and span_table (batch, heads, query_spans, key_spans), the
logit of query i and key j gains span_table[query_spans[i], key_spans[j]]; -inf forbids, a label of -1 adds nothing.
Everything here reads the labels and the table only, so a forbidden block is known before any score is computed.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import Array, named
from clearhead.core.namespace import namespace, take
from clearhead.core.rule_values import check_numbers, limited, read_wholes, spread
from clearhead.errors import RuleError, ShapeError, expected

TABLE = ("batch", "heads", "query_spans", "key_spans")
_TABLE = "spans[2]"
_HINT = "spans=(query_spans, key_spans, table): a label per query, a label per key, and what each pair of labels adds."


def parts_of(value: Any) -> tuple[Any, Any, Any]:
    """The three parts of the rule's value. Raises RuleError for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise RuleError(expected("spans", value, "three arrays"), _HINT)
    return value[0], value[1], value[2]


def read_spans(value: Any, prefix: tuple[int, ...], sizes: Sequence[int]) -> tuple[Array, Array, Array]:
    """Read (query_spans, key_spans, table) as labels (batch, queries), (batch, keys) and a table (batch, heads, …).

    prefix    the caller's axes before queries: (…, heads), or () where there is one head
    sizes     how many queries and keys there are

    Labels become int64, those below 0 become -1; the table becomes float64, a view broadcast over batch and heads.
    Raises RuleError for a label that the table does not have, and for NaN or +inf in the table; ShapeError, DtypeError.
    """
    *sides, third = parts_of(value)
    table = _read_table(third, prefix)
    labels = [
        _read_labels(place, side, (*prefix[:-1], size), table.shape[place - 2])
        for place, (side, size) in enumerate(zip(sides, sizes, strict=True))
    ]
    return labels[0], labels[1], table


def _read_labels(place: int, value: Any, shape: tuple[int, ...], most: int) -> Array:
    name = f"spans[{place}]"
    labels = np.maximum(read_wholes(name, value, shape, ("batch", ("queries", "keys")[place])), -1)
    if (labels >= most).any():
        raise RuleError(
            f"{name} goes up to {labels.max()}: the table has {TABLE[place + 2]} {most}, so each must be below {most}.",
            "a label below 0 adds nothing.",
        )
    return labels.reshape(prod(shape[:-1]), shape[-1])


def _read_table(value: Any, prefix: tuple[int, ...]) -> Array:
    array = as_rule_array(value, _TABLE)
    check_numbers(_TABLE, array)
    if array.ndim < 2:
        raise ShapeError(
            f"{_TABLE} has shape {array.shape}: expected (query_spans, key_spans), or one per head.", _HINT
        )
    shape = (*prefix, *array.shape[-2:])
    numbers = array.astype(np.float64)
    if not (numbers < np.inf).all():
        raise RuleError(f"{_TABLE} holds NaN or +inf: expected finite numbers, or -inf, which forbids.")
    try:
        return spread(limited(numbers), shape)
    except ValueError:
        raise ShapeError(
            f"{_TABLE} has shape {array.shape}, which does not broadcast to {named(shape, TABLE)}.", _HINT
        ) from None


def added(query_spans: Any, key_spans: Any, table: Any) -> Any:
    """Look up what the rule adds to each logit, (…, heads, queries, keys), in NumPy or PyTorch.

    Takes labels (…, 1, queries, 1) and (…, 1, 1, keys), and a table (…, heads, query_spans, key_spans).
    """
    xp = namespace(table)
    there = (query_spans >= 0) & (key_spans >= 0)
    if 0 in table.shape[-2:]:
        return xp.where(there, 0.0, 0.0)
    found = take(take(table, xp.clip(query_spans, 0, None), -2), xp.clip(key_spans, 0, None), -1)
    return xp.where(there, found, 0.0)
