"""Which positions of the whole sequence each rank holds, and the functions that cut a sequence into such shards."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array, check_tensor, to_torch
from clearhead.core.axes import Array, as_places, as_slice
from clearhead.core.problem import Problem
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import FAR, read_place, whole_number
from clearhead.distributed.messages import everywhere
from clearhead.distributed.ranks import Ranks, agreed
from clearhead.errors import check_known

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")
Pieces = tuple[range, ...]  # one rank's positions, in the order in which its shard holds them
Placed = list[tuple[slice, range]]  # where pieces lie in an array, and their positions


def pieces(sizes: Sequence[int], layout: Layout) -> list[Pieces]:
    """The positions that each rank holds, from their numbers `sizes`, by rank. Raises UnknownNameError.

    contiguous  rank after rank
    zigzag      rank r holds the r-th chunk and the r-th from the end, so that a causal rule gives all ranks equal work
    """
    check_known("layout", [layout], LAYOUTS)
    if layout == "contiguous":
        return [(chunk,) for chunk in _chunks(sizes)]
    chunks = _chunks([(size + 1) // 2 for size in sizes] + [size // 2 for size in reversed(sizes)])
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(len(sizes))]


def _chunks(sizes: Sequence[int]) -> list[range]:
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def placed(rows: Sequence[range]) -> Placed:
    """For each of these pieces where it lies in an array that holds one after the other, and its positions."""
    return [(slice(end - len(piece), end), piece) for end, piece in zip(accumulate(map(len, rows)), rows, strict=True)]


def count(parts: Placed) -> int:
    """How many positions these pieces have."""
    return sum(len(piece) for _, piece in parts)


def positions_of(parts: Iterable[range]) -> Array:
    """The positions in these ranges, one range after the other."""
    return np.concatenate([np.arange(0), *(np.arange(part.start, part.stop, part.step) for part in parts)])


def places(parts: Placed) -> slice | Array:
    """An index of these places of an array: a slice where they are evenly spaced."""
    return as_places(positions_of(range(where.start, where.stop) for where, _ in parts))


def within(chosen: range, piece: range) -> range:
    """The chosen positions that lie in a piece; `chosen` steps forwards."""
    first, last = (max(0, -((chosen.start - end) // chosen.step)) for end in (piece.start, piece.stop))
    return chosen[first:last]


def visible(problem: Problem, rows: range) -> range:
    """The keys that these queries may attend to, judged by position; mask, bias and segments are not looked at.

    `problem` is that of the whole sequence.
    """
    each = [visibility.key_span(problem, batch, as_slice(rows)) for batch in range(problem.batch) if rows]
    seen = [span for span in each if span.start < span.stop]
    return range(min((s.start for s in seen), default=0), max((s.stop for s in seen), default=0))


def union(spans: Sequence[range]) -> list[range]:
    """The positions in any of these ranges, as sorted ranges that neither overlap nor touch."""
    merged: list[range] = []
    for span in sorted(filter(None, spans), key=lambda s: s.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


def common(a: range, b: range) -> range:
    """The positions in both ranges."""
    return range(max(a.start, b.start), max(max(a.start, b.start), min(a.stop, b.stop)))


def positions(length: int, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """The positions that this rank holds of a sequence of `length`, for position embeddings such as rotary ones.

    length    how many positions the whole sequence has
    group     a process group of PyTorch's; None is the default group
    layout    contiguous or zigzag, as in `clearhead.distributed.attention`

    Returns int64 (own positions,) on the CPU, in the shard's order. Ranks hold equally many, but for one more on the
    first ones. Nothing is communicated. O(own positions). Raises RuleError for a length that is no whole number from 0
    up, UnknownNameError for another layout, SizeError where the positions are larger than memory, DistributedError
    where no process group is initialised or this process is not in it.

    >>> import torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.positions(4).tolist()
    [0, 1, 2, 3]
    >>> dist.destroy_process_group()
    """
    ranks, length = Ranks.of(group, None), whole_number("length", length, 0, FAR)
    sizes = [length // ranks.world + (rank < length % ranks.world) for rank in range(ranks.world)]
    held = pieces(sizes, layout)[ranks.rank]
    check_room("positions", array_bytes([sizes[ranks.rank]], 8), "give a shorter length.")
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in held])


def shard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Cut this rank's shard out of a whole tensor along `dim`: a copy of the entries at `positions`.

    x         the whole tensor, of any dtype and number of axes, such as (…, heads, positions, d)
    dim       the axis of positions; a negative one counts from the end

    Returns x's shard, in its dtype and on its device, with x's graph. Shards differ by one position at most. Nothing is
    communicated. O(shard). Raises DtypeError for what is no tensor, SelectionError where it has no such axis, and what
    `positions` raises.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.shard(torch.eye(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> dist.destroy_process_group()
    """
    check_tensor(x, "x")
    dim = read_place("dim", dim, x.ndim)
    return x.index_select(dim, positions(x.shape[dim], group=group, layout=layout).to(x.device))


def unshard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """The whole tensor on every rank, from each rank's shard along `dim`; the inverse of `shard`.

    x         this rank's shard; shards may differ in length along `dim`, in nothing else
    dim       the axis of positions; a negative one counts from the end

    Returns the whole tensor in x's dtype and on its device, without a graph. All ranks must call it. O(whole tensor)
    memory and traffic for each rank. Raises on every rank: DtypeError, SelectionError or UnknownNameError on the rank
    whose argument is wrong, and DistributedError on the others; DistributedError on all where dims, dtypes, layouts or
    the other axes differ.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.unshard(ch.distributed.shard(torch.eye(2))).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> dist.destroy_process_group()
    """
    ranks = Ranks.of(group, None)

    def read() -> tuple[int, dict[str, Any]]:
        check_tensor(x, "x")
        pieces([0] * ranks.world, layout)  # raises UnknownNameError for another layout
        axis = read_place("dim", dim, x.ndim)
        rest = [*x.shape[:axis], *x.shape[axis + 1 :]]
        alike = {"dim": axis, "x's shape without its length": rest, "dtype": str(x.dtype), "layout": layout}
        return axis, {"keys": x.shape[axis]} | alike

    axis, everybody = agreed(ranks, "unshard", read)
    sizes = [one["keys"] for one in everybody]
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    check_room("x of all ranks", array_bytes([sum(sizes), *rest], x.element_size()), "gather a part of it.")
    local = as_host_array(x.detach().movedim(axis, 0).contiguous(), "x")[0]
    parts = everywhere(ranks, "unshard", local, [(size, *local.shape[1:]) for size in sizes])
    whole = torch.empty(sum(sizes), *local.shape[1:], dtype=x.dtype)
    for held, part in zip(pieces(sizes, layout), parts, strict=True):
        for where, piece in placed(held):
            whole[piece.start : piece.stop] = to_torch(torch, part[where])
    return whole.to(x.device).movedim(0, axis)
