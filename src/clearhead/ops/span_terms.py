"""Rules that edits make: several `spans` that act on the same logits, as one rule.

A rule `spans` is a term: labels of queries and keys, and a table of what is added for each pair of labels. Queries that
have the same label in every term get one label together, keys likewise, and the tables are added: O(queries + keys)
memory.
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
    """table[batch, head, query label, key label] is added to a logit; a label of -1 adds nothing."""

    query_labels: Array  # (batch or 1, queries)
    key_labels: Array  # (batch or 1, keys)
    table: Any  # (batch or 1, heads or 1, query labels, key labels), an array or a tensor
    by_row: bool = False  # each query has a label of its own, its place among the queries

    @staticmethod
    def of(spans: Any) -> "SpanTerm":
        """The value of a rule `spans`, whose axes before queries may be left out."""
        query_labels, key_labels, table = spans
        queries, keys = (np.atleast_2d(host(labels)).astype(np.int64) for labels in (query_labels, key_labels))
        return SpanTerm(np.maximum(queries, -1), np.maximum(keys, -1), table[(None,) * (4 - table.ndim)])

    def kept(self, keys: slice, before: "SpanTerm | None") -> "SpanTerm":
        """The term as a recording keeps it, with the labels of these keys only and without PyTorch's graph.

        before   the same edit's term of an earlier step, whose table it shares where rows have none of their own
        """
        table = self.table.detach() if hasattr(self.table, "detach") else self.table
        table = table if before is None or self.by_row else before.table
        return SpanTerm(self.query_labels.copy(), self.key_labels[:, keys].copy(), table, self.by_row)


def combined(terms: Sequence[SpanTerm]) -> tuple[Array, Array, Any] | None:
    """The terms as one value of the rule `spans`; None where they add nothing to any of these queries and keys."""
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
    ):  # a last row and column of zeros are for the label -1
        pad = np.pad if (torch := torch_of(one)) is None else torch.nn.functional.pad
        wide = pad(one, ((0, 0), (0, 0), (0, 1), (0, 1)) if torch is None else (0, 1, 0, 1))
        table = table + wide[:, :, row[:, None], column]
    return _plain(queries, 1), _plain(keys, 1), _plain(table, 2)


def joined(steps: Sequence[Sequence[SpanTerm]]) -> list[SpanTerm]:
    """The terms of steps that follow one another along the queries, as those of one call.

    Every step has terms of the same edits in the same order, and each has the labels of those keys only that the steps
    before it did not have.
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
    """Labels that are equal where all sides' labels are, (batch or 1, length), and each side's label of each."""
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
    """Tensors where any of them is one, else arrays."""
    kind = next((table for table in tables if not isinstance(table, np.ndarray)), tables[0])
    return [table if type(table) is type(kind) else numbers_like(table, kind) for table in tables]


def _plain(x: Any, most: int) -> Any:
    """Labels or a table without leading axes of length 1, down to `most` axes."""
    while x.ndim > most and x.shape[0] == 1:
        x = x[0]
    return x


def host(x: Any) -> Array:
    """Numbers, of a tensor without its graph, in the CPU's memory."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
