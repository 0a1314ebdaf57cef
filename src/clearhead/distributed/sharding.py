"""Cutting a sequence into shards, and putting it together again."""

from typing import Any

import torch
from torch import Tensor

from clearhead.arrays import check_tensor, read, to_torch
from clearhead.distributed.exchange import everywhere
from clearhead.distributed.layouts import Layout, pieces
from clearhead.distributed.ranks import Ranks
from clearhead.room import array_bytes, check_room
from clearhead.values import FAR, read_place, whole_number


def positions(length: int, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Positions (own,) that this rank holds of a sequence of `length`: what rotary turns and embeddings need."""
    ranks, length = Ranks.of(group, None), whole_number("length", length, 0, FAR)
    sizes = [length // ranks.world + (rank < length % ranks.world) for rank in range(ranks.world)]
    own = pieces(sizes, layout)[ranks.rank]
    check_room("positions", array_bytes([sum(map(len, own))], 8), "give a shorter length.")
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in own])


def shard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Take this rank's part of a whole tensor along `dim`; shards differ by one position at most, two in zigzag."""
    check_tensor(x, "x")
    dim = read_place("dim", dim, x.ndim)
    return x.index_select(dim, positions(x.shape[dim], group=group, layout=layout).to(x.device))


def unshard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """The whole tensor on every rank, from everybody's shard along `dim`; shards may be of any lengths."""
    ranks = Ranks.of(group, None)
    check_tensor(x, "x")
    dim = read_place("dim", dim, x.ndim)
    pieces([0] * ranks.world, layout)  # refuses a layout that is none
    sizes = [one["keys"] for one in ranks.agree("unshard", {"keys": x.shape[dim]})]
    mine = read(x.detach().movedim(dim, 0).contiguous(), "x")[0]
    parts = everywhere(ranks, "unshard", mine, [(size, *mine.shape[1:]) for size in sizes])
    whole = torch.empty(sum(sizes), *mine.shape[1:], dtype=x.dtype)
    for own, part in zip(pieces(sizes, layout), parts, strict=True):
        start = 0
        for piece in own:
            whole[piece.start : piece.stop] = to_torch(torch, part[start : start + len(piece)])
            start += len(piece)
    return whole.to(x.device).movedim(0, dim)
