"""Answers about the whole matrix, the same on every rank: image and groups, which are rowsᵀ·A·values."""

from dataclasses import dataclass

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.room import check_room
from clearhead.core.statistics import Groups
from clearhead.distributed import methods
from clearhead.distributed.exchange import total
from clearhead.distributed.shards import Shards


@dataclass(frozen=True, eq=False, slots=True)
class Pooled:
    """An answer (batch, heads, height, width), and this rank's factors of it, which the backward pass needs."""

    answer: Array
    rows: Array  # each own query's share in the answer's rows, (batch or 1, own queries, height)
    values: Array  # each own key's share in the answer's columns, (batch or 1, own keys, width)
    mixed: Array  # A·values, (batch, heads, own queries, width)
    logsumexp: Array  # (batch, heads, own queries)


def check_sums(problem: Problem, what: str, shape: tuple[int, int]) -> None:
    """Raise SizeError where a rank's buffers for an answer of this shape (height, width) exceed free memory."""
    height, width = shape
    hint = "ask for a smaller picture, or for fewer groups."
    rows = problem.queries * (height + problem.batch * problem.heads * width)
    check_room(f"{what}, summed on this rank,", 8 * (rows + problem.batch * problem.keys * width), hint)


def image(method: str, shards: Shards, chosen: range, shape: tuple[int, int]) -> Pooled:
    """The picture of the chosen queries and all keys; shape is (height, width) in pixels."""
    height, width = shape
    rows = np.zeros((1, shards.q.shape[2], height))
    for at, own in shards.own_rows():
        if own:
            first = chosen.index(own[0])
            pixels, shares = areas(height, len(chosen), slice(first, first + len(own)))
            rows[0, at, pixels] = shares.T
    values = np.zeros((1, shards.k.shape[2], width))
    for at, own in shards.own_keys():
        if own:
            pixels, shares = areas(width, shards.whole.keys, slice(own.start, own.stop))
            values[0, at, pixels] = shares.T
    return _pooled("sum of pictures", method, shards, rows, values)


def groups(method: str, shards: Shards, labels: Groups) -> Pooled:
    """Sums of weights between groups of queries and of keys; labels are those of own positions, < 0 for no group."""
    rows, values = (
        (own[..., None] == np.arange(count)).astype(np.float64)
        for own, count in zip(labels[:2], labels.counts, strict=True)
    )
    return _pooled("sum of groups", method, shards, rows, values)


def _pooled(what: str, method: str, shards: Shards, rows: Array, values: Array) -> Pooled:
    spread = np.broadcast_to(values, (shards.whole.batch, *values.shape[1:]))
    mixed, logsumexp = methods.mixed(method, shards, spread[:, None])
    return Pooled(total(shards.ranks, what, rows[:, None].swapaxes(-1, -2) @ mixed), rows, values, mixed, logsumexp)
