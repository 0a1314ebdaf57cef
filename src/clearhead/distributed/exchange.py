"""Moving arrays between ranks: every rank knows every shape beforehand, so only bytes travel, and none of nothing."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clearhead.axes import Array
from clearhead.distributed.ranks import Ranks

Shape = tuple[int, ...]
Kind = tuple[Shape, np.dtype[Any]]
_ready: set[str] = set()  # groups in which all ranks have met; see _meet


class Messages:
    """Arrays on their way: `send[r]` to rank r, and from rank r what `expect[r]` says; `arrays` waits for those."""

    def __init__(
        self, ranks: Ranks, what: str, send: Mapping[int, Sequence[Array]], expect: Mapping[int, Sequence[Kind]]
    ) -> None:
        self.ranks, self.what, self.expect = ranks, what, expect
        self.own = list(send.get(ranks.rank, ()))
        _meet(ranks)
        self.sent = {peer: _packed(arrays, ranks.device) for peer, arrays in send.items() if peer != ranks.rank}
        self.got = {
            peer: torch.empty(sum(map(_bytes, kinds)), dtype=torch.uint8, device=ranks.device)
            for peer, kinds in expect.items()
            if peer != ranks.rank
        }
        operations = [
            dist.P2POp(how, memory, ranks.peer(peer), ranks.group)
            for how, all_memory in ((dist.isend, self.sent), (dist.irecv, self.got))
            for peer, memory in all_memory.items()
            if memory.numel()
        ]
        try:
            self.work: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        except (RuntimeError, dist.DistError) as error:
            raise ranks.lost(what, error) from None

    def arrays(self) -> dict[int, list[Array]]:
        """What came, by rank."""
        try:
            for work in self.work:
                work.wait(self.ranks.patience)
        except (RuntimeError, dist.DistError) as error:
            raise self.ranks.lost(self.what, error) from None
        found = {peer: _unpacked(memory.cpu().numpy(), self.expect[peer]) for peer, memory in self.got.items()}
        return found | {self.ranks.rank: self.own}


def swap(
    ranks: Ranks, what: str, send: Sequence[Sequence[Array]], shapes: Sequence[Sequence[Shape]], dtype: np.dtype[Any]
) -> list[list[Array]]:
    """Give arrays to every rank and get theirs: send[r] goes to rank r; from rank r come arrays of shapes[r]."""
    kinds = {rank: [(shape, dtype) for shape in part] for rank, part in enumerate(shapes)}
    given = {rank: [x.astype(dtype, copy=False) for x in part] for rank, part in enumerate(send)}
    found = Messages(ranks, what, given, kinds).arrays()
    return [found[rank] for rank in range(ranks.world)]


def everywhere(ranks: Ranks, what: str, mine: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Everybody's array, by rank."""
    return [part[0] for part in swap(ranks, what, [[mine]] * ranks.world, [[shape] for shape in shapes], mine.dtype)]


def total(ranks: Ranks, what: str, mine: Array) -> Array:
    """The sum over ranks, added in their order, so that it is the same everywhere and every time.

    Each rank adds up its part of the numbers and gives the sums to all: twice the array's bytes for each rank.
    """
    cuts = np.array_split(mine.reshape(-1), ranks.world)
    parts = swap(ranks, what, [[cut] for cut in cuts], [[cuts[ranks.rank].shape]] * ranks.world, mine.dtype)
    own = parts[0][0].copy()
    for part in parts[1:]:
        own += part[0]
    sums = everywhere(ranks, what, own, [cut.shape for cut in cuts])
    return np.concatenate(sums).reshape(mine.shape)


def _meet(ranks: Ranks) -> None:
    """NCCL opens its connections when all ranks of a group call together, and later messages are of some only."""
    if ranks.device.type == "cuda" and ranks.group.group_name not in _ready:
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=ranks.group)
        _ready.add(ranks.group.group_name)


def _bytes(kind: Kind) -> int:
    return prod(kind[0]) * kind[1].itemsize


def _packed(arrays: Sequence[Array], device: torch.device) -> torch.Tensor:
    memory = np.empty(sum(x.nbytes for x in arrays), np.uint8)
    for x, room in zip(arrays, _unpacked(memory, [(x.shape, x.dtype) for x in arrays]), strict=True):
        room[...] = x
    return torch.from_numpy(memory).to(device)


def _unpacked(memory: Array, kinds: Sequence[Kind]) -> list[Array]:
    found, at = [], 0
    for kind in kinds:
        stop = at + _bytes(kind)
        found.append(memory[at:stop].view(kind[1]).reshape(kind[0]))
        at = stop
    return found
