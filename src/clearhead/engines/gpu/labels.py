"""What the labels of segments and of spans tell the kernels, computed once per problem on the CPU.

The fields of `Rules` (rules.py) made here let a kernel skip a block of keys before it reads one: for each token the
range of the other side's tokens that its label may see or be seen by, and for each block of keys the set of the query
labels that may see some of it. They take O(queries + keys) memory and the size of the table, never queries × keys.
"""

import numpy as np

from clearhead.core.arrays import statistics_dtype, unrepeated
from clearhead.core.axes import Array
from clearhead.core.problem import Problem

BLOCK = 32  # keys that share a set; every tile's keys are whole blocks
RANGES = ("first_key", "end_key", "first_query", "end_query")
Fields = dict[str, Array]


def segments(problem: Problem) -> tuple[Fields, bool]:
    """The fields of Rules about segments: each label as a small number, and for each token the range of its segment.

    And whether all tokens in a range have its label, as they do where documents are packed one after the other.
    Computed from runs of equal labels, since packed documents have few of them.
    """
    queries, keys = problem.query_segments, problem.kv_segments
    if queries is None or keys is None:
        return {}, True
    sides, runs = (queries, keys), (_runs(queries), _runs(keys))
    labels = np.concatenate([side.reshape(-1)[starts] for side, (starts, _) in zip(sides, runs, strict=True)])
    batch = np.concatenate([starts // side.shape[1] for side, (starts, _) in zip(sides, runs, strict=True)])
    ranks = np.unique(labels, return_inverse=True)[1]
    numbers = np.unique(ranks + batch * len(ranks), return_inverse=True)[1]
    by_side = np.split(numbers, [len(runs[0][0])])
    fields: Fields = {}
    for side, other, name, kind in ((0, 1, "query_segments", "query"), (1, 0, "kv_segments", "key")):
        (starts, lengths), size = runs[side], sides[side].shape[1]
        first, end = np.full(len(numbers), size), np.zeros(len(numbers), np.int64)
        np.minimum.at(first, by_side[side], starts % max(1, size))
        np.maximum.at(end, by_side[side], starts % max(1, size) + lengths)
        fields[name] = np.repeat(by_side[side], lengths)
        fields[f"first_{kind}"] = np.repeat(first[by_side[other]], runs[other][1])
        fields[f"end_{kind}"] = np.repeat(end[by_side[other]], runs[other][1])
    return fields, all(len(np.unique(one)) == len(one) for one in by_side)


def _runs(labels: Array) -> tuple[Array, Array]:
    """The starts of runs of equal labels in (batch, tokens), as flat indices, and their lengths."""
    new = np.ones(labels.shape, bool)
    new[:, 1:] = labels[:, 1:] != labels[:, :-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=labels.size)


def spans(problem: Problem) -> Fields:
    """The fields of Rules about spans, with a last row and column of zeros in the table for tokens without a label.

    `table` has size 1 along batch and heads where they share it. The ranges and sets are there where it forbids pairs.
    """
    queries, keys = problem.query_spans, problem.key_spans
    if queries is None or keys is None or problem.span_table is None:
        return {}
    table = unrepeated(problem.span_table, 2)
    no_query, no_key = table.shape[2:]
    most = np.finfo(statistics_dtype(problem.dtype)).max / 2  # so that a finite number stays finite in units of ln 2
    table = with_none(np.where(np.isneginf(table), table, np.clip(table, -most, most)))
    queries, keys = np.where(queries < 0, no_query, queries), np.where(keys < 0, no_key, keys)
    fields = {"query_spans": queries, "key_spans": keys, "table": table}
    allowed = np.isfinite(table)
    if queries.size and keys.size and not allowed.all():
        fields |= dict(zip(RANGES, _ranges(queries, keys, np.any(allowed, axis=1)), strict=True))
        fields["key_sets"], fields["sets"] = _sets(keys, allowed)
    return fields


def with_none(table: Array) -> Array:
    """The table with a last row and column of zeros, for tokens without a label."""
    return np.pad(table, ((0, 0), (0, 0), (0, 1), (0, 1)))


def _ranges(queries: Array, keys: Array, allowed: Array) -> list[Array]:
    """RANGES: for each query the first key and the end of the keys that its label may see, and so for each key."""
    ranges = []
    for side, other, tables in ((queries, keys, allowed), (keys, queries, allowed.swapaxes(1, 2))):
        firsts, ends = [], []
        for batch, tokens in enumerate(other):
            table, places = tables[batch % len(tables)], np.arange(len(tokens))
            first, end = np.full(table.shape[1], len(tokens)), np.zeros(table.shape[1], np.int64)
            np.minimum.at(first, tokens, places)
            np.maximum.at(end, tokens, places + 1)
            firsts.append(_best(table, first, np.argsort(first), len(tokens))[side[batch]])
            ends.append(_best(table, end, np.argsort(-end), 0)[side[batch]])
        ranges += [np.stack(firsts), np.stack(ends)]
    return ranges


def _best(allowed: Array, values: Array, order: Array, none: int) -> Array:
    """For each row of `allowed`, the value of the allowed column that comes first in this order."""
    columns = order[allowed[:, order].argmax(axis=1)]
    return np.where(allowed.any(axis=1), values[columns], none)


def _sets(keys: Array, allowed: Array) -> tuple[Array, Array]:
    """For each block of keys, (batch, blocks), the number of its set; and the sets, (sets, heads or 1, bytes).

    Bit g of a set says whether query label g may see some key of the block. Blocks with the same labels share a set.
    """
    batch, blocks = len(keys), -(-keys.shape[1] // BLOCK)
    whole = np.pad(keys, ((0, 0), (0, blocks * BLOCK - keys.shape[1])), mode="edge")
    labels = np.sort(whole.reshape(-1, BLOCK), axis=1)
    labels[:, 1:] = np.where(labels[:, 1:] == labels[:, :-1], labels[:, -1:], labels[:, 1:])
    labels.sort(axis=1)  # each label once, then copies of the last
    item = np.arange(batch * blocks) // blocks % len(allowed)
    rows, numbers = np.unique(np.column_stack([item, labels]), axis=0, return_inverse=True)
    item, labels = rows[:, 0], rows[:, 1:]
    seen_by = np.packbits(np.moveaxis(allowed, 3, 1), axis=-1, bitorder="little")  # (batch, key labels, heads, bytes)
    sets = seen_by[item, labels[:, -1]]
    for column in labels[:, : (labels != labels[:, -1:]).sum(axis=1).max()].T:
        sets |= seen_by[item, column]
    return numbers.reshape(batch, blocks), sets
