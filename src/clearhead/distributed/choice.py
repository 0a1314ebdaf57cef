"""The choice of a method: the one that moves the fewest bytes."""

from dataclasses import dataclass
from typing import Literal

from clearhead.distributed import gather, merge, ring, ulysses
from clearhead.distributed.shards import Shards
from clearhead.errors import RuleError

Method = Literal["gather", "ring", "ulysses", "merge", "auto"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which method is taken, and why.

    method    the one asked for or chosen
    bytes     by method: what the busiest rank receives in a forward pass
    reasons   by method that cannot run: why
    """

    method: str
    bytes: dict[str, int]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"method: {self.method}"]
        lines += [f"{name}: {count:,} bytes to the busiest rank" for name, count in self.bytes.items()]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def choose(shards: Shards, method: str) -> Plan:
    """The method asked for, or for "auto" the one that moves the fewest bytes; of equals the first in METHODS.

    The same on every rank, without communication. Raises RuleError where ulysses is asked for and cannot run.
    """
    counted = {"gather": max(gather.bytes_fetched(shards)), "ring": max(ring.bytes_sent_on(shards))}
    against = ulysses.reason_not(shards)
    if against and method == "ulysses":
        raise RuleError(f"method is 'ulysses', but {against}.", 'method="auto" chooses one that can.')
    reasons = {"ulysses": against} if against else {}
    if not against:
        counted["ulysses"] = max(ulysses.bytes_moved(shards))
    counted["merge"] = max(merge.bytes_moved(shards))
    chosen = min(counted, key=lambda name: counted[name]) if method == "auto" else method
    return Plan(chosen, counted, reasons)
