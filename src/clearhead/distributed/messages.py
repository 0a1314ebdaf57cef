"""Messages of arrays between ranks. Shapes and dtypes are known in advance; empty messages are skipped."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clearhead.core.axes import Array
from clearhead.distributed.ranks import Ranks

Shape = tuple[int, ...]
Kind = tuple[Shape, np.dtype[Any]]
_ready: set[str] = set()  # names of the groups whose NCCL connections are open; see _meet


class Messages:
    """Starts sending `send[r]` to each rank r and receiving arrays of the kinds `expect[r]` from it; `arrays` waits.

    Creating it returns at once, so that the caller can compute while messages are under way. `what` names the exchange
    in errors. What is sent to the rank itself is handed over without a copy. Raises DistributedError, here or in
    `arrays`, where a message fails or does not arrive in time.
    """

    def __init__(
        self, ranks: Ranks, what: str, send: Mapping[int, Sequence[Array]], expect: Mapping[int, Sequence[Kind]]
    ) -> None:
        self.ranks, self.what, self.expect = ranks, what, expect
        self.local = list(send.get(ranks.rank, ()))
        _meet(ranks)
        self.sent = {peer: _packed(arrays, ranks.device) for peer, arrays in send.items() if peer != ranks.rank}
        self.received = {
            peer: torch.empty(sum(map(_bytes, kinds)), dtype=torch.uint8, device=ranks.device)
            for peer, kinds in expect.items()
            if peer != ranks.rank
        }
        operations = [
            dist.P2POp(how, memory, ranks.peer(peer), ranks.group)
            for how, all_memory in ((dist.isend, self.sent), (dist.irecv, self.received))
            for peer, memory in all_memory.items()
            if memory.numel()
        ]
        try:
            self.work: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        except (RuntimeError, dist.DistError) as error:
            raise ranks.lost(what, error) from None

    def arrays(self) -> dict[int, list[Array]]:
        """Wait for all messages; the arrays received, by rank. Raises DistributedError."""
        try:
            for work in self.work:
                work.wait(self.ranks.patience)
        except (RuntimeError, dist.DistError) as error:
            raise self.ranks.lost(self.what, error) from None
        arrays = {peer: _unpacked(memory.cpu().numpy(), self.expect[peer]) for peer, memory in self.received.items()}
        return arrays | {self.ranks.rank: self.local}


def everywhere(ranks: Ranks, what: str, local: Array, shapes: Sequence[Shape]) -> list[Array]:
    """All-gather: the array of every rank, by rank; shapes[r] is that of rank r. Raises DistributedError."""
    expect = {rank: [(shape, local.dtype)] for rank, shape in enumerate(shapes)}
    came = Messages(ranks, what, {rank: [local] for rank in expect}, expect).arrays()
    return [came[rank][0] for rank in expect]


def total(ranks: Ranks, what: str, local: Array, merged: Callable[[Array, Array], Array] = np.add) -> Array:
    """All-reduce: the sum over ranks of arrays of one shape, added in rank order, so that bits are reproducible.

    merged   merges two ranks' arrays, where they are not added: element by element

    Each rank sums one slice and sends it to all (reduce-scatter, then all-gather), and so receives twice the bytes.
    """
    cuts = np.array_split(local.reshape(-1), ranks.world)
    expect = {rank: [(cuts[ranks.rank].shape, local.dtype)] for rank in range(ranks.world)}
    came = Messages(ranks, what, {rank: [cut] for rank, cut in enumerate(cuts)}, expect).arrays()
    part = came[0][0].copy()
    for rank in range(1, ranks.world):
        part = merged(part, came[rank][0])
    sums = everywhere(ranks, what, part, [cut.shape for cut in cuts])
    return np.concatenate(sums).reshape(local.shape)


def _meet(ranks: Ranks) -> None:
    """Open NCCL's connections by one collective of all ranks, since later messages are between some of them only."""
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
    arrays, start = [], 0
    for kind in kinds:
        stop = start + _bytes(kind)
        arrays.append(memory[start:stop].view(kind[1]).reshape(kind[0]))
        start = stop
    return arrays
