"""Cuts a sequence into shards, and puts it together again."""

from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import as_host_array, check_tensor, to_torch
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import FAR, read_place, whole_number
from clearhead.distributed.exchange import everywhere
from clearhead.distributed.layouts import Layout, pieces
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.shards import agreed


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
    own = pieces(sizes, layout)[ranks.rank]
    check_room("positions", array_bytes([sum(map(len, own))], 8), "give a shorter length.")
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in own])


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

    def axis() -> int:
        check_tensor(x, "x")
        pieces([0] * ranks.world, layout)  # raises UnknownNameError for another layout
        return read_place("dim", dim, x.ndim)

    def told(dim: int) -> dict[str, Any]:
        rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
        alike = {"dim": dim, "x's shape without its length": rest, "dtype": str(x.dtype), "layout": layout}
        return {"keys": x.shape[dim]} | alike

    dim, everybody = agreed(ranks, "unshard", axis, told)
    sizes = [one["keys"] for one in everybody]
    mine = as_host_array(x.detach().movedim(dim, 0).contiguous(), "x")[0]
    parts = everywhere(ranks, "unshard", mine, [(size, *mine.shape[1:]) for size in sizes])
    whole = torch.empty(sum(sizes), *mine.shape[1:], dtype=x.dtype)
    for own, part in zip(pieces(sizes, layout), parts, strict=True):
        start = 0
        for piece in own:
            whole[piece.start : piece.stop] = to_torch(torch, part[start : start + len(piece)])
            start += len(piece)
    return whole.to(x.device).movedim(0, dim)
