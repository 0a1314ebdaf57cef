"""Moving arrays between ranks: every rank knows every shape beforehand, so only bytes travel."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clearhead.axes import Array
from clearhead.distributed.ranks import Ranks

Shape = tuple[int, ...]


def swap(
    ranks: Ranks, what: str, send: Sequence[Sequence[Array]], shapes: Sequence[Sequence[Shape]], dtype: np.dtype[Any]
) -> list[list[Array]]:
    """Give arrays to every rank and get theirs: send[r] goes to rank r; from rank r come arrays of shapes[r]."""
    given = [b"".join(np.ascontiguousarray(x, dtype).tobytes() for x in part) for part in send]
    sizes = [sum(prod(shape) for shape in part) * dtype.itemsize for part in shapes]
    out = torch.empty(sum(sizes), dtype=torch.uint8)
    flat = (
        torch.frombuffer(bytearray(b"".join(given)), dtype=torch.uint8)
        if any(given)
        else torch.empty(0, dtype=torch.uint8)
    )
    lengths = [len(x) for x in given]
    ranks.guard(what, lambda: dist.all_to_all_single(out, flat, sizes, lengths, group=ranks.group))
    found, at = [], 0
    memory = out.numpy()
    for part in shapes:
        arrays = []
        for shape in part:
            stop = at + prod(shape) * dtype.itemsize
            arrays.append(memory[at:stop].view(dtype).reshape(shape))
            at = stop
        found.append(arrays)
    return found


def everywhere(ranks: Ranks, what: str, mine: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Everybody's array, by rank."""
    return [part[0] for part in swap(ranks, what, [[mine]] * ranks.world, [[shape] for shape in shapes], mine.dtype)]


def total(ranks: Ranks, what: str, mine: Array) -> Array:
    """The sum over ranks, added in their order, so that it is the same everywhere and every time."""
    parts = everywhere(ranks, what, mine, [mine.shape] * ranks.world)
    result = parts[0].copy()
    for part in parts[1:]:
        result += part
    return result


class Hop:
    """One step around the ring, under way: arrays go to the next rank, others come from the one before."""

    def __init__(
        self,
        ranks: Ranks,
        what: str,
        send: Sequence[Array] | None,
        shapes: Sequence[Shape] | None,
        dtype: np.dtype[Any],
    ) -> None:
        self.ranks, self.what, self.shapes, self.dtype = ranks, what, shapes, dtype
        after, before = ((ranks.rank + step) % ranks.world for step in (1, -1))
        operations: list[Any] = []
        if send is not None:
            memory = bytearray(b"".join(np.ascontiguousarray(x, dtype).tobytes() for x in send))
            self.sent = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
            operations.append((dist.isend, self.sent, after))
        if shapes is not None:
            self.got = torch.empty(sum(prod(shape) for shape in shapes) * dtype.itemsize, dtype=torch.uint8)
            operations.append((dist.irecv, self.got, before))
        self.work = ranks.guard(what, lambda: self._start(operations))

    def _start(self, operations: list[Any]) -> list[Any]:
        waiting = [
            dist.P2POp(how, x, group=self.ranks.group, group_peer=peer) for how, x, peer in operations if x.numel()
        ]
        return list(dist.batch_isend_irecv(waiting)) if waiting else []

    def arrays(self) -> list[Array]:
        """Wait for what comes."""
        self.ranks.guard(self.what, lambda: [work.wait() for work in self.work])
        if self.shapes is None:
            return []
        memory, found, at = self.got.numpy(), [], 0
        for shape in self.shapes:
            stop = at + prod(shape) * self.dtype.itemsize
            found.append(memory[at:stop].view(self.dtype).reshape(shape))
            at = stop
        return found
