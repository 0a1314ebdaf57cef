"""What the labels of segments and of spans tell the kernels, computed once per problem on the CPU.

For each token of packed segments the range of the other side's tokens that it may see or be seen by, so that a kernel
skips what is outside before it reads a label. They take O(queries + keys) memory, never queries × keys.
"""

import numpy as np

from clearhead.core.arrays import statistics_dtype, unrepeated
from clearhead.core.axes import Array
from clearhead.core.problem import Problem

RANGES = ("first_key", "end_key", "first_query", "end_query")
Fields = dict[str, Array]


def segments(problem: Problem) -> tuple[Fields, bool]:
    """Make the RuleArguments of segments: labels as small numbers, and for each token the range of its segment.

    And say whether all tokens in a range have its label, as they do where documents are packed one after the other.
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
    """The fields of RuleArguments about spans; tokens without a label have the last row and column of the table, zeros.

    `table` has size 1 along batch and heads where they share it.
    """
    queries, keys = problem.query_spans, problem.key_spans
    if queries is None or keys is None or problem.span_table is None:
        return {}
    table = unrepeated(problem.span_table, 2)
    most = np.finfo(statistics_dtype(problem.dtype)).max / 2  # so that a finite number stays finite in units of ln 2
    table = np.where(np.isneginf(table), table, np.clip(table, -most, most))
    labels = (np.where(x < 0, size, x) for x, size in zip((queries, keys), table.shape[2:], strict=True))
    table = np.pad(table, ((0, 0), (0, 0), (0, 1), (0, 1)))
    return dict(zip(("query_spans", "key_spans", "table"), (*labels, table), strict=True))
