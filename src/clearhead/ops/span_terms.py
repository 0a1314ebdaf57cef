"""Merges several values of the rule `spans`, which edits make, into one.

Each value is a term: labels of queries and keys, and a table of what each pair of labels adds to a logit. Queries with
equal labels in every term get one new label, keys likewise, and the tables are added up: O(queries + keys) memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.arrays import torch_of
from clearhead.core.axes import Array
from clearhead.core.namespace import numbers_like


@dataclass(frozen=True, eq=False)
class SpanTerm:
    """A term that adds table[batch, head, query label, key label] to a logit; a label of -1 adds nothing."""

    query_labels: Array  # (batch or 1, queries)
    key_labels: Array  # (batch or 1, keys)
    table: Any  # (batch or 1, heads or 1, query labels, key labels), an array or a tensor
    by_row: bool = False  # each query has a label of its own, its place among the queries

    @staticmethod
    def of(spans: Any) -> "SpanTerm":
        """Read a value of the rule `spans`; its batch axis may be missing."""
        query_labels, key_labels, table = spans
        queries, keys = (np.atleast_2d(host(labels)).astype(np.int64) for labels in (query_labels, key_labels))
        return SpanTerm(np.maximum(queries, -1), np.maximum(keys, -1), table[(None,) * (4 - table.ndim)])

    def kept(self, keys: slice, before: "SpanTerm | None") -> "SpanTerm":
        """Copy the term for a recording: the labels of these keys only, and no graph.

        before   the same edit's term of an earlier step; its table is shared unless each row has its own
        """
        table = self.table.detach() if hasattr(self.table, "detach") else self.table
        table = table if before is None or self.by_row else before.table
        return SpanTerm(self.query_labels.copy(), self.key_labels[:, keys].copy(), table, self.by_row)


def combined(terms: Sequence[SpanTerm]) -> tuple[Array, Array, Any] | None:
    """Merge terms into one value of the rule `spans`; None if they add nothing to any of these queries and keys."""
    terms = [term for term in terms if (term.query_labels >= 0).any() and (term.key_labels >= 0).any()]
    if not terms:
        return None
    if len(terms) == 1:
        return _plain(terms[0].query_labels, 1), _plain(terms[0].key_labels, 1), _plain(terms[0].table, 2)
    queries, rows = _refined([term.query_labels for term in terms])
    keys, columns = _refined([term.key_labels for term in terms])
    tables = _of_one_kind([term.table for term in terms])
    table: Any = 0
    for one, row, column in zip(
        tables, rows, columns, strict=True
    ):  # a last row and column of zeros serve the label -1
        pad = np.pad if (torch := torch_of(one)) is None else torch.nn.functional.pad
        wide = pad(one, ((0, 0), (0, 0), (0, 1), (0, 1)) if torch is None else (0, 1, 0, 1))
        table = table + wide[:, :, row[:, None], column]
    return _plain(queries, 1), _plain(keys, 1), _plain(table, 2)


def joined(steps: Sequence[Sequence[SpanTerm]]) -> list[SpanTerm]:
    """Concatenate the terms of consecutive steps along the queries, as if they were one call.

    Every step has the terms of the same edits in the same order; its key labels are those of the keys it added.
    """
    result = []
    for parts in zip(*steps, strict=True):
        queries, keys = [part.query_labels for part in parts], _cat([part.key_labels for part in parts])
        table = parts[-1].table
        if parts[0].by_row:
            starts = np.cumsum([0, *(side.shape[1] for side in queries[:-1])])
            queries = [np.where(side < 0, -1, side + start) for side, start in zip(queries, starts, strict=True)]
            tables = _of_one_kind([part.table for part in parts])
            table = np.concatenate(tables, 2) if (torch := torch_of(tables[0])) is None else torch.cat(tables, 2)
        result.append(SpanTerm(_cat(queries), keys, table, parts[0].by_row))
    return result


def _refined(sides: Sequence[Array]) -> tuple[Array, list[Array]]:
    """New labels, (batch or 1, length), equal where every side's labels are, and each side's old label for each."""
    sides = np.broadcast_arrays(*sides)
    index, first = np.zeros(sides[0].shape, np.int64), np.zeros(1, np.int64)
    for side in sides:
        codes = index.reshape(side.shape) * (side.max() + 2) + side + 1
        _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return index.reshape(sides[0].shape), [side.reshape(-1)[first] for side in sides]


def _cat(labels: Sequence[Array]) -> Array:
    lead = max(part.shape[0] for part in labels)
    return np.concatenate([np.broadcast_to(part, (lead, part.shape[1])) for part in labels], axis=1)


def _of_one_kind(tables: Sequence[Any]) -> list[Any]:
    """Convert all tables to tensors if any is a tensor."""
    kind = next((table for table in tables if not isinstance(table, np.ndarray)), tables[0])
    return [table if type(table) is type(kind) else numbers_like(table, kind) for table in tables]


def _plain(x: Any, most: int) -> Any:
    """Drop leading axes of length 1 from labels or a table, down to `most` axes."""
    while x.ndim > most and x.shape[0] == 1:
        x = x[0]
    return x


def host(x: Any) -> Array:
    """Copy an array or a tensor to NumPy, without a graph."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
