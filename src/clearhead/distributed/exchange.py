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
    in errors. What is sent to the own rank is handed over without a copy. Raises DistributedError, here or in `arrays`,
    where a message fails or does not arrive in time.
    """

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
        """Wait for all messages; the arrays received, by rank. Raises DistributedError."""
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
    """All-to-all: send[r] goes to rank r, and arrays of shapes[r] come from rank r; all of one dtype.

    Returns what came, by rank. Waits for all messages. Raises DistributedError where one fails.
    """
    kinds = {rank: [(shape, dtype) for shape in part] for rank, part in enumerate(shapes)}
    given = {rank: [x.astype(dtype, copy=False) for x in part] for rank, part in enumerate(send)}
    found = Messages(ranks, what, given, kinds).arrays()
    return [found[rank] for rank in range(ranks.world)]


def everywhere(ranks: Ranks, what: str, mine: Array, shapes: Sequence[Shape]) -> list[Array]:
    """All-gather: the array of every rank, by rank; shapes[r] is that of rank r. Raises DistributedError."""
    return [part[0] for part in swap(ranks, what, [[mine]] * ranks.world, [[shape] for shape in shapes], mine.dtype)]


def total(ranks: Ranks, what: str, mine: Array, merged: Callable[[Array, Array], Array] = np.add) -> Array:
    """All-reduce: the sum over ranks of arrays of one shape, added in rank order, so that bits are reproducible.

    merged   merges two ranks' arrays, where they are not added: element by element

    Each rank sums one slice and sends it to all (reduce-scatter, then all-gather), and so receives twice the bytes.
    """
    cuts = np.array_split(mine.reshape(-1), ranks.world)
    parts = swap(ranks, what, [[cut] for cut in cuts], [[cuts[ranks.rank].shape]] * ranks.world, mine.dtype)
    own = parts[0][0].copy()
    for part in parts[1:]:
        own = merged(own, part[0])
    sums = everywhere(ranks, what, own, [cut.shape for cut in cuts])
    return np.concatenate(sums).reshape(mine.shape)


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
    found, at = [], 0
    for kind in kinds:
        stop = at + _bytes(kind)
        found.append(memory[at:stop].view(kind[1]).reshape(kind[0]))
        at = stop
    return found
