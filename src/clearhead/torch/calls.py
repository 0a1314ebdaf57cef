"""Where PyTorch's attention calls went while clearhead was active: counted by reason, with the latest shapes."""

from collections import deque
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

LATEST = 4  # calls of each reason whose shapes are kept
_Seen = tuple[torch.dtype, tuple[tuple[int, ...] | str | None, ...], str]  # of a call, with a note; not its tensors


@dataclass(frozen=True, slots=True)
class Route:
    """The calls that clearhead, or PyTorch, computed for one reason.

    computed_by   "clearhead" or "PyTorch"
    reason        through which of PyTorch's operators the call came, or why it was left to PyTorch
    count         how many calls
    latest        dtype and shapes of the latest few that differ, the last one first
    """

    computed_by: str
    reason: str
    count: int
    latest: tuple[str, ...]

    def __str__(self) -> str:
        calls = "1 call" if self.count == 1 else f"{self.count:,} calls"
        return "\n".join([f"{self.computed_by}, {calls}: {self.reason}.", *(f"    {one}" for one in self.latest)])


@dataclass(frozen=True, slots=True)
class Calls:
    """What `explain` returns: all routes, those of clearhead first, the most frequent first. It prints as a list."""

    active: bool
    routes: tuple[Route, ...]

    def __str__(self) -> str:
        state = "active" if self.active else "not active"
        return "\n".join([f"clearhead is {state}.", *map(str, self.routes)])


_lock = Lock()
_routes: dict[tuple[str, str], tuple[int, deque[_Seen]]] = {}  # how many calls, and the latest


def count(computed_by: str, reason: str, query: Tensor, *others: Tensor | None, note: str = "") -> None:
    """Count a call with this query, key, value and mask. There are few reasons, and each is kept."""
    route, seen = (computed_by, reason), (query.dtype, tuple(map(_shape, (query, *others))), note)
    with _lock:
        number, latest = _routes.get(route, (0, deque(maxlen=LATEST)))
        if seen in latest:
            latest.remove(seen)
        latest.appendleft(seen)
        _routes[route] = number + 1, latest


def _shape(x: Tensor | None) -> tuple[int, ...] | str | None:
    return None if x is None else "nested" if x.is_nested else tuple(x.shape)


def _words(seen: _Seen) -> str:
    dtype, shapes, note = seen
    named = zip(("query", "key", "value", "mask"), shapes, strict=False)
    sizes = [f"{name} {shape}" for name, shape in named if shape is not None]
    return ", ".join([str(dtype).removeprefix("torch."), *sizes]) + (f": {note}" if note else "")


def counted() -> tuple[Route, ...]:
    """All routes, those of clearhead first, the most frequent first."""
    with _lock:
        routes = [Route(*route, number, tuple(map(_words, latest))) for route, (number, latest) in _routes.items()]
    return tuple(sorted(routes, key=lambda route: (route.computed_by != "clearhead", -route.count)))


def forget() -> None:
    """Start counting anew."""
    with _lock:
        _routes.clear()
