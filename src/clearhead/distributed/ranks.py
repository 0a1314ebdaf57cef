"""The other ranks: who is there, whether all want the same, and what went wrong when one is gone."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from clearhead.errors import DistributedError, DtypeError, RuleError, shown
from clearhead.values import read_number

OWN = ("queries", "keys")  # what ranks tell each other and need not have in common
_calls: dict[str, int] = {}
_ROLL_CALL = 10.0  # seconds, of the timeout's last third, in which the ranks that are alive say so after a failure
_LONGEST = 1e9  # seconds: thirty years; PyTorch counts a longer wait wrongly
_ANEW = "the process group is broken: end it and make a new one."
_NEVER = 40417  # the tag of a message that nobody sends
_STORE = (RuntimeError, dist.DistError)  # what the store raises when its holder is gone


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
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise DistributedError("this process is not in the group.", "call it on the group's own ranks only.")
        if not isinstance(group, dist.ProcessGroup):
            raise DtypeError(
                f"group is {shown(group)}: expected a process group of PyTorch's.",
                "torch.distributed.new_group([0, 1])",
            )
        seconds = read_number("timeout", timeout, 300.0)
        if not 0 < seconds <= _LONGEST:
            raise RuleError(f"timeout is {seconds:g}: expected seconds, more than 0 and at most {_LONGEST:g}.")
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group), seconds)

    @property
    def device(self) -> torch.device:
        """Where messages must lie: NCCL sends from the memory of the current GPU, gloo from the CPU's."""
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def peer(self, rank: int) -> int:
        """A rank of the group as PyTorch counts it among all."""
        return dist.get_global_rank(self.group, rank)

    @property
    def patience(self) -> timedelta:
        """How long a message is waited for; the rest of the timeout is for the roll call."""
        return timedelta(seconds=self.timeout - self._roll_call)

    @property
    def _roll_call(self) -> float:
        return min(_ROLL_CALL, self.timeout / 3)

    @property
    def _key(self) -> str:
        name = self.group.group_name
        return f"clearhead/{name}/{_calls.get(name, 0)}"

    def agree(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everybody's `mine`, by rank; raises on every rank when one is missing after the timeout.

        Numbers and words only. Goes through the store and not through the group, so that a rank that is gone is known
        by name and does not leave the others in a collective. Where all tell the same but for "queries" and "keys",
        each rank reads those numbers of the others and no more.
        """
        store, name = _get_default_store(), self.group.group_name
        last = self._key
        _calls[name] = _calls.get(name, 0) + 1
        key, everyone = self._key, range(self.world)
        same = json.dumps({"what": what, **{n: x for n, x in mine.items() if n not in OWN}}, sort_keys=True)
        try:
            store.set(f"{key}/told/{self.rank}", same)
            first = store.compare_set(f"{key}/same", "", sha256(same.encode()).hexdigest()).decode()
            if first != sha256(same.encode()).hexdigest():
                store.add(f"{key}/others", 1)
            store.set(f"{key}/{self.rank}", json.dumps([mine.get(n) for n in OWN]))
            missing = self._verdict(store)
            own = [] if missing else [json.loads(x) for x in store.multi_get([f"{key}/{rank}" for rank in everyone])]
            words = [same] * self.world
            if not missing and store.add(f"{key}/others", 0):
                words = [x.decode() for x in store.multi_get([f"{key}/told/{rank}" for rank in everyone])]
            failed = self._failed(store, last, missing)
            if not missing:  # all came to this call, so all have read what was told in the one before
                self._forget(store, last)
        except _STORE as error:
            raise self._lost(what, error) from None
        if missing:
            self.part([rank for rank in everyone if rank not in missing])
            told = "; ".join([f"{_named(missing)} did not call within {self.timeout:g} s", *failed])
            raise DistributedError(f"{what}: {told}.")
        everybody = [json.loads(x) | dict(zip(OWN, sizes, strict=True)) for x, sizes in zip(words, own, strict=True)]
        for rank, other in enumerate(everybody):
            if other.pop("what") != what:
                self.part(everyone)
                raise DistributedError(f"{what}: rank {rank} called something else at the same time.")
        return everybody

    def _verdict(self, store: Any) -> list[int]:
        """The ranks that have not come to this call: what the first said who saw all, or waited long enough."""
        if store.add(f"{self._key}/came", 1) == self.world:
            store.compare_set(f"{self._key}/verdict", "", "[]")
        try:
            store.wait([f"{self._key}/verdict"], timedelta(seconds=self.timeout))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # not all came in time
            missing = [rank for rank in range(self.world) if not store.check([f"{self._key}/{rank}"])]
            store.compare_set(f"{self._key}/verdict", "", json.dumps(missing))
        found: list[int] = json.loads(store.get(f"{self._key}/verdict"))
        return found

    def _forget(self, store: Any, call: str) -> None:
        shared = ("same", "others", "came", "verdict") if self.rank == 0 else ()
        for one in (self.rank, f"told/{self.rank}", *shared):
            store.delete_key(f"{call}/{one}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that needs every rank: one that fails in it says so to the others and lets none of them wait."""
        try:
            yield
        except DistributedError:
            raise
        except Exception as error:
            with suppress(*_STORE):
                _get_default_store().set(f"{self._key}/failed/{self.rank}", json.dumps(f"{what}: {error!r}"))
                self._hang_up()
                self._wait(_get_default_store(), range(self.world), "/failed", self._roll_call)
                self.part(range(self.world))
            raise

    def lost(self, what: str, error: Exception) -> DistributedError:
        """A message failed: call the roll, and say which ranks failed or no longer answer."""
        told = str(error).splitlines()[0]
        store = _get_default_store()
        try:
            store.set(f"{self._key}/failed/{self.rank}", json.dumps(""))
            self._hang_up()
            gone = self._wait(store, range(self.world), "/failed", self._roll_call)
            here = [rank for rank in range(self.world) if rank not in gone]
            failed = self._failed(store, self._key, here)
            self.part(here)
        except _STORE as other:
            return self._lost(what, other)
        if gone:
            failed.append(f"{_named(gone)} no longer answer{'s' * (len(gone) == 1)}")
        names = "; ".join(failed) or "all ranks still answer"
        return DistributedError(f"{what}: a message to rank {self.rank} failed: {names} ({told}).", _ANEW)

    def _failed(self, store: Any, call: str, ranks: Sequence[int]) -> list[str]:
        """What these ranks said that went wrong in a call."""
        keys = {rank: f"{call}/failed/{rank}" for rank in ranks}
        words = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        return [f"rank {rank} failed in {word}" for rank, word in words.items() if word]

    def part(self, present: Sequence[int] | range) -> None:
        """Before an error: whoever holds the store stays until all who are there have read what it says."""
        with suppress(*_STORE):
            _get_default_store().set(f"{self._key}/parted/{self.rank}", "")
            if dist.get_rank() == 0:
                self._wait(_get_default_store(), present, "/parted", self._roll_call)

    def _lost(self, what: str, error: Exception) -> DistributedError:
        told = str(error).splitlines()[0]
        return DistributedError(f"{what}: rank 0, which holds the store, no longer answers ({told}).", _ANEW)

    def _hang_up(self) -> None:
        """Close this rank's connections, so that ranks that wait for it hear at once."""
        if self.world == 1:
            return
        with suppress(*_STORE):
            if self.device.type == "cuda":
                self.group.abort()
                return
            other = (self.rank + 1) % self.world
            never: Any = dist.irecv(torch.empty(1), self.peer(other), self.group, tag=_NEVER)
            never.wait(timedelta(milliseconds=1))  # in gloo a wait that runs out closes every connection of this rank

    def _wait(self, store: Any, ranks: Sequence[int] | range, place: str, seconds: float) -> list[int]:
        """The ranks that have not come after so many seconds."""
        keys = {rank: f"{self._key}{place}/{rank}" for rank in ranks}
        try:
            store.wait(list(keys.values()), timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # not all came in time
            return [rank for rank, one in keys.items() if not store.check([one])]
        return []


def must_equal(what: str, everybody: list[dict[str, Any]], names: Iterable[str]) -> None:
    """Raise where ranks were called with different things."""
    for name in names:
        first = everybody[0][name]
        for rank, other in enumerate(everybody):
            if other[name] != first:
                raise DistributedError(
                    f"{what}: rank {rank} has {name} {other[name]}, but rank 0 has {first}: they must be equal."
                )


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
