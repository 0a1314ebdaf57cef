"""The other ranks: who is there, whether all want the same, and what went wrong when one is gone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from clearhead.errors import DistributedError

_calls: dict[str, int] = {}
_AFTER = 10.0  # seconds in which the ranks that are alive say so, after something failed


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group as one rank sees it; `timeout` in seconds."""

    group: Any
    rank: int
    world: int
    timeout: float

    @staticmethod
    def of(group: Any, timeout: float | None) -> "Ranks":
        if not dist.is_available() or not dist.is_initialized():
            raise DistributedError(
                "no process group is initialised.", 'torch.distributed.init_process_group("gloo"), under torchrun.'
            )
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0:
            raise DistributedError("this process is not in the group.", "call it on the group's own ranks only.")
        return Ranks(group, rank, dist.get_world_size(group), 300.0 if timeout is None else timeout)

    def agree(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everybody's `mine`, by rank; raises on every rank when one is missing after the timeout.

        Numbers and words only. Goes through the store and not through the group, so that a rank that is gone is known
        by name and does not leave the others in a collective.
        """
        store, name = _get_default_store(), self.group.group_name
        call = _calls[name] = _calls.get(name, 0) + 1
        key = f"clearhead/{name}/{call}"
        try:
            store.delete_key(f"clearhead/{name}/{call - 2}/{self.rank}")  # everybody has read it: all came to call - 1
            store.set(f"{key}/{self.rank}", json.dumps({"what": what, **mine}))
            found = self._collect(store, key, self.timeout)
        except (RuntimeError, dist.DistError) as error:
            raise DistributedError(
                f"{what}: rank {self.rank} lost the store, which the first rank holds: {error}"
            ) from None
        missing = [rank for rank in range(self.world) if rank not in found]
        if missing:
            raise DistributedError(f"{what}: {_named(missing)} did not call within {self.timeout:g} s.")
        everybody = [found[rank] for rank in range(self.world)]
        for rank, other in enumerate(everybody):
            if other.pop("what") != what:
                raise DistributedError(f"{what}: rank {rank} called something else at the same time.")
        return everybody

    def guard(self, what: str, work: Callable[[], Any]) -> Any:
        """Run collectives; when they fail, raise with the names of the ranks that no longer answer."""
        try:
            return work()
        except (RuntimeError, dist.DistError) as error:
            told = str(error).splitlines()[0]
        gone = self._gone(what)
        names = f"{_named(gone)} no longer answers" if gone else "all ranks still answer"
        raise DistributedError(f"{what}: a message to rank {self.rank} failed, and {names}: {told}")

    def _gone(self, what: str) -> list[int]:
        store, key = _get_default_store(), f"clearhead/{self.group.group_name}/failed {what}"
        try:
            store.set(f"{key}/{self.rank}", json.dumps({}))
            found = self._collect(store, key, min(_AFTER, self.timeout))
        except (RuntimeError, dist.DistError):
            return [0]  # the first rank holds the store
        return [rank for rank in range(self.world) if rank not in found]

    def _collect(self, store: Any, key: str, seconds: float) -> dict[int, dict[str, Any]]:
        keys = {rank: f"{key}/{rank}" for rank in range(self.world)}
        try:
            store.wait(list(keys.values()), timedelta(seconds=seconds))
        except dist.DistStoreError:  # not all came in time
            keys = {rank: one for rank, one in keys.items() if store.check([one])}
        return {rank: json.loads(store.get(one)) for rank, one in keys.items()}


def must_equal(what: str, everybody: list[dict[str, Any]], names: Mapping[str, str]) -> None:
    """Raise where ranks were called with different things; `names` says what each entry is."""
    for name, meaning in names.items():
        first = everybody[0][name]
        for rank, other in enumerate(everybody):
            if other[name] != first:
                raise DistributedError(
                    f"{what}: rank {rank} has {meaning} {other[name]}, but rank 0 has {first}: they must be equal."
                )


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
