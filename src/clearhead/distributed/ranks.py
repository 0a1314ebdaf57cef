"""The other ranks of a call: whether all of them came, whether all were called alike, and which one failed.

Ranks agree through the process group's key-value store, not through collectives, so that a missing rank is known by
number and leaves nobody waiting in a collective. Every key begins with clearhead/GROUP/N/, where N counts the calls of
`agree` in this group and is the same on every rank as long as all make the same calls. RANK is a rank in the group.

    called/RANK    what this rank was called with, in JSON, but for its own numbers of queries and keys
    same           SHA-256 of the first called/RANK; set once, by whichever rank comes first
    others         how many ranks' called/RANK has another SHA-256; missing while all are alike
    RANK           [queries, keys] of this rank, in JSON; also says that it came to the call
    came           how many ranks came
    verdict        JSON list of the ranks that did not come; set once, by the last rank to come ("[]") or by the first
                   whose timeout ran out
    failed/RANK    this rank gave the call up: its error as JSON text, "" where it only lost a message
    parted/RANK    this rank has read all that it needs and is about to raise

One call on one rank goes through these states:

    agree      set called, same, RANK, came; wait for verdict
                 verdict []           all came: read the others' numbers (and `called`, if `others` is there), compare
                 verdict [2, 5]       part, DistributedError: these ranks did not call
                 called differently   part, DistributedError
    together   compute and exchange messages
                 done                 the next `agree` to which all ranks come deletes this call's keys
                 own error            set failed; hang up, so that waiting ranks hear; wait for all failed; part; raise
                 message lost         the same; DistributedError names the ranks that failed or no longer answer
    part       set parted; the process that holds the store waits for parted of the others, since the store ends with it
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from clearhead.core.rule_values import read_number
from clearhead.errors import ClearheadError, DistributedError, DtypeError, RuleError, shown

SIZES = ("queries", "keys")  # what ranks tell each other that may differ between them
_calls: dict[str, int] = {}  # by group, how often `agree` was called: N in the keys
_ROLL_CALL = 10.0  # seconds, at most a third of the timeout, in which ranks that are alive report after a failure
_LONGEST = 1e9  # seconds, thirty years; longer waits overflow in PyTorch
_ANEW = "the process group is broken: end it and make a new one."
_NEVER = 40417  # the tag of a message that nobody sends
_STORE = (RuntimeError, dist.DistError)  # what the store raises when its holder is gone
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group as one rank sees it.

    rank, world    this rank in the group, and how many ranks that has
    timeout        seconds to wait for the other ranks
    refused        the error for a wrong timeout, which `agreed` raises
    """

    group: Any
    rank: int
    world: int
    timeout: float
    refused: ClearheadError | None = None

    @staticmethod
    def of(group: Any, timeout: float | None) -> "Ranks":
        """Read a call's group and timeout.

        Raises DistributedError where no process group is initialised or this process is not in it, DtypeError for what
        is no group. A wrong timeout is kept in `refused`: `agreed` raises it, so that the other ranks are told.
        """
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
        place = group, dist.get_rank(group), dist.get_world_size(group)
        try:
            return Ranks(*place, _seconds(timeout))
        except ClearheadError as error:
            return Ranks(*place, _seconds(None), error)

    @property
    def device(self) -> torch.device:
        """Where messages must lie: in the memory of the current GPU for NCCL, in the CPU's for gloo."""
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def peer(self, rank: int) -> int:
        """The global rank of a rank of this group."""
        return dist.get_global_rank(self.group, rank)

    @property
    def patience(self) -> timedelta:
        """How long to wait for a message; the rest of the timeout is kept for finding out who failed."""
        return timedelta(seconds=self.timeout - self._roll_call)

    @property
    def _roll_call(self) -> float:
        return min(_ROLL_CALL, self.timeout / 3)

    @property
    def _key(self) -> str:
        name = self.group.group_name
        return f"clearhead/{name}/{_calls.get(name, 0)}"

    def agree(self, what: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Wait for all ranks to make this call, and return what each was called with, by rank.

        what        the public function's name
        arguments   this rank's, by name, as JSON can write them

        Raises DistributedError on every rank that came where one did not call within the timeout, where one called
        another function, or where the store's process no longer answers. O(ranks) keys are read: where all arguments
        are alike but for "queries" and "keys", only these two are read of each rank.
        """
        store, name = _get_default_store(), self.group.group_name
        last = self._key
        _calls[name] = _calls.get(name, 0) + 1
        key, everyone = self._key, range(self.world)
        same = json.dumps({"what": what, **{n: x for n, x in arguments.items() if n not in SIZES}}, sort_keys=True)
        digest = sha256(same.encode()).hexdigest()
        try:
            store.set(f"{key}/called/{self.rank}", same)
            if store.compare_set(f"{key}/same", "", digest).decode() != digest:
                store.add(f"{key}/others", 1)
            store.set(f"{key}/{self.rank}", json.dumps([arguments.get(n) for n in SIZES]))
            missing, sizes, calls = self._verdict(store), [], [same] * self.world
            if not missing:
                sizes = [json.loads(x) for x in store.multi_get([f"{key}/{rank}" for rank in everyone])]
                if store.add(f"{key}/others", 0):
                    calls = [x.decode() for x in store.multi_get([f"{key}/called/{rank}" for rank in everyone])]
            failed = self._failed(last, missing)
            if not missing:  # all came to this call, so all have read what was said in the one before
                self._forget(store, last)
        except _STORE as error:
            raise self._lost(what, error) from None
        if missing:
            self.part([rank for rank in everyone if rank not in missing])
            reasons = "; ".join([f"{_named(missing)} did not call within {self.timeout:g} s", *failed])
            raise DistributedError(f"{what}: {reasons}.")
        everybody = [json.loads(x) | dict(zip(SIZES, pair, strict=True)) for x, pair in zip(calls, sizes, strict=True)]
        for rank, other in enumerate(everybody):
            if other.pop("what") != what:
                raise self.disagreement(f"{what}: rank {rank} called something else at the same time.")
        return everybody

    def disagreement(self, words: str) -> DistributedError:
        """The error for ranks that were called differently, for all of them to raise once all have read why."""
        self.part(range(self.world))
        return DistributedError(words)

    def _verdict(self, store: Any) -> list[int]:
        """The ranks that did not come to this call, as the last to come decided, or the first that timed out."""
        if store.add(f"{self._key}/came", 1) == self.world:
            store.compare_set(f"{self._key}/verdict", "", "[]")
        try:
            store.wait([f"{self._key}/verdict"], timedelta(seconds=self.timeout))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # not all came in time
            missing = [rank for rank in range(self.world) if not store.check([f"{self._key}/{rank}"])]
            store.compare_set(f"{self._key}/verdict", "", json.dumps(missing))
        verdict: list[int] = json.loads(store.get(f"{self._key}/verdict"))
        return verdict

    def _forget(self, store: Any, call: str) -> None:
        shared = ("same", "others", "came", "verdict") if self.rank == 0 else ()
        for one in (self.rank, f"called/{self.rank}", *shared):
            store.delete_key(f"{call}/{one}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context for work that needs every rank: a rank whose work fails tells the others, so that none waits."""
        try:
            yield
        except DistributedError:
            raise
        except Exception as error:
            with suppress(*_STORE):
                self._give_up(f"{what}: {error!r}")
                self.part(range(self.world))
            raise

    def lost(self, what: str, error: Exception) -> DistributedError:
        """The error for a failed message: asks all ranks to report, and names those that failed or no longer answer."""
        reason = str(error).splitlines()[0]
        try:
            gone = self._give_up("")
            here = [rank for rank in range(self.world) if rank not in gone]
            failed = self._failed(self._key, here)
            self.part(here)
        except _STORE as other:
            return self._lost(what, other)
        if gone:
            failed.append(f"{_named(gone)} no longer answer{'s' * (len(gone) == 1)}")
        names = "; ".join(failed) or "all ranks still answer"
        return DistributedError(f"{what}: a message to rank {self.rank} failed: {names} ({reason}).", _ANEW)

    def _give_up(self, error: str) -> list[int]:
        """Report this rank's error, and wait until all ranks have reported theirs; the ranks that have not."""
        _get_default_store().set(f"{self._key}/failed/{self.rank}", json.dumps(error))
        self._hang_up()
        return self._without("failed", range(self.world))

    def _failed(self, call: str, ranks: Sequence[int]) -> list[str]:
        """The errors that these ranks reported in a call, as text."""
        store = _get_default_store()
        keys = {rank: f"{call}/failed/{rank}" for rank in ranks}
        words = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        return [f"rank {rank} failed in {word}" for rank, word in words.items() if word]

    def part(self, present: Sequence[int]) -> None:
        """Called before raising: the process that holds the store waits until all present ranks have read from it."""
        with suppress(*_STORE):
            _get_default_store().set(f"{self._key}/parted/{self.rank}", "")
            if dist.get_rank() == 0:
                self._without("parted", present)

    def _lost(self, what: str, error: Exception) -> DistributedError:
        reason = str(error).splitlines()[0]
        return DistributedError(f"{what}: rank 0, which holds the store, no longer answers ({reason}).", _ANEW)

    def _hang_up(self) -> None:
        """Close this rank's connections, so that ranks waiting for it fail at once."""
        if self.world == 1:
            return
        with suppress(*_STORE):
            if self.device.type == "cuda":
                self.group.abort()
                return
            other = (self.rank + 1) % self.world
            never: Any = dist.irecv(torch.empty(1), self.peer(other), self.group, tag=_NEVER)
            never.wait(timedelta(milliseconds=1))  # gloo closes all connections of a rank whose wait times out

    def _without(self, place: str, ranks: Sequence[int]) -> list[int]:
        """Wait for these ranks' keys at `place`; the ranks whose key is still missing when the time for it is over."""
        store, keys = _get_default_store(), {rank: f"{self._key}/{place}/{rank}" for rank in ranks}
        try:
            store.wait(list(keys.values()), timedelta(seconds=self._roll_call))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # not all came in time
            return [rank for rank, one in keys.items() if not store.check([one])]
        return []


def _seconds(timeout: float | None) -> float:
    seconds = read_number("timeout", timeout, 300.0)
    if not 0 < seconds <= _LONGEST:
        raise RuleError(f"timeout is {seconds:g}: expected seconds, more than 0 and at most {_LONGEST:g}.")
    return seconds


def agreed(
    ranks: Ranks, what: str, read: Callable[[], tuple[Result, dict[str, Any]]]
) -> tuple[Result, list[dict[str, Any]]]:
    """Read this rank's arguments, and check that all ranks could read theirs and were given the same.

    read    reads this rank's arguments, and says by name what of them the ranks compare, as JSON can write it; only
            "queries" and "keys" may differ

    Returns the arguments, and what every rank said, by rank. Raises the error of this rank's own `read`, or
    DistributedError where another rank had one or said something else. All ranks must call it.
    """
    arguments, raised = None, None
    compared: dict[str, Any] = {}
    try:
        if ranks.refused is not None:
            raise ranks.refused
        arguments, compared = read()
    except (ClearheadError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raised = error
    refused = "" if raised is None else raised.one_line() if isinstance(raised, ClearheadError) else repr(raised)
    everybody = ranks.agree(what, compared | {"refused": refused})
    if raised is not None:
        ranks.part(range(ranks.world))
        raise raised
    for rank, other in enumerate(everybody):
        if other["refused"]:
            raise ranks.disagreement(f"{what}: rank {rank} was refused: {other['refused']}")
    must_equal(ranks, what, everybody, [name for name in compared if name not in SIZES])
    return arguments, everybody  # type: ignore[return-value]  # nothing was raised


def must_equal(ranks: Ranks, what: str, everybody: list[dict[str, Any]], names: Iterable[str]) -> None:
    """Raise DistributedError where ranks differ in one of these arguments; the error shows rank 0's and the other."""
    for name in names:
        first = everybody[0][name]
        for rank, other in enumerate(everybody):
            if other[name] != first:
                raise ranks.disagreement(
                    f"{what}: rank {rank} has {name} {other[name]}, but rank 0 has {first}: they must be equal."
                )


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
