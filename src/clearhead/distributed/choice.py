"""Which way of sharing keys moves the fewest bytes."""

from dataclasses import dataclass
from typing import Literal

from clearhead.distributed import gather, merge, ring, ulysses
from clearhead.distributed.shards import Shards
from clearhead.errors import RuleError

Method = Literal["gather", "ring", "ulysses", "merge", "auto"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The method, the bytes that the busiest rank receives by each in a forward pass, and why others cannot."""

    method: str
    bytes: dict[str, int]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"method: {self.method}"]
        lines += [f"{name}: {count:,} bytes to the busiest rank" for name, count in self.bytes.items()]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def choose(shards: Shards, method: str) -> Plan:
    """The method asked for, or the one with the fewest bytes; the first of equals in METHODS."""
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
