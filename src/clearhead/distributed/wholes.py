"""What is the same on every rank: pictures and sums between groups, the products rowsᵀ·A·values over all ranks."""

from dataclasses import dataclass

import numpy as np

from clearhead.axes import Array
from clearhead.distributed import methods
from clearhead.distributed.exchange import total
from clearhead.distributed.shards import Shards
from clearhead.observations import Groups, areas


@dataclass(frozen=True, eq=False, slots=True)
class Whole:
    """An answer (batch, heads, height, width), and what this rank has to do with it."""

    answer: Array
    rows: Array  # each own query's share in the cells' rows, (batch or 1, own queries, height)
    values: Array  # each own key's share in the cells' columns, (batch or 1, own keys, width)
    mixed: Array  # A·values, (batch, heads, own queries, width)
    logsumexp: Array  # (batch, heads, own queries)


def image(method: str, shards: Shards, chosen: range, shape: tuple[int, int]) -> Whole:
    """The picture of the chosen queries and all keys."""
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
    return _whole("sum of pictures", method, shards, rows, values)


def groups(method: str, shards: Shards, labels: Groups) -> Whole:
    """Sums between own queries' and own keys' labels; labels below 0 have no group."""
    rows, values = (
        (own[..., None] == np.arange(count)).astype(np.float64)
        for own, count in zip(labels[:2], labels.counts, strict=True)
    )
    return _whole("sum of groups", method, shards, rows, values)


def _whole(what: str, method: str, shards: Shards, rows: Array, values: Array) -> Whole:
    spread = np.broadcast_to(values, (shards.whole.batch, *values.shape[1:]))
    mixed, logsumexp = methods.mixed(method, shards, spread[:, None])
    return Whole(total(shards.ranks, what, rows[:, None].swapaxes(-1, -2) @ mixed), rows, values, mixed, logsumexp)
