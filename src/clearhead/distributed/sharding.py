"""Cutting a sequence into shards, and putting it together again."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.arrays import read, to_torch
from clearhead.distributed.exchange import everywhere
from clearhead.distributed.layouts import Layout, Pieces, pieces
from clearhead.distributed.ranks import Ranks


def positions(length: int, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Positions (own,) that this rank holds of a sequence of `length`: what rotary turns and embeddings need."""
    own = _pieces(length, group, layout)[dist.get_rank(group)]
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in own])


def shard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Take this rank's part of a whole tensor along `dim`; shards differ by one position at most, two in zigzag."""
    return x.index_select(dim, positions(x.shape[dim], group=group, layout=layout).to(x.device))


def unshard(x: Tensor, dim: int = -2, *, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """The whole tensor on every rank, from everybody's shard along `dim`; shards may be of any lengths."""
    ranks = Ranks.of(group, None)
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


def _pieces(length: int, group: Any, layout: Layout) -> list[Pieces]:
    world = dist.get_world_size(group)
    return pieces([length // world + (rank < length % world) for rank in range(world)], layout)
