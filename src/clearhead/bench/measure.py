"""Fair timing: every contestant in turn, round after round, in one process; medians, and ratios within a round.

A peer's threads go on spinning for tens of milliseconds after its last call, on the cores that the next contestant
needs: so each waits for quiet, and warms up, before its time counts.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Call = Callable[[], object]
SLOW_ROUNDS = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call in each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


def interleaved(calls: Mapping[str, Call], *, rounds: int, slice_seconds: float) -> dict[str, Timing]:
    """Time each call in every round, in an order that turns, each for about `slice_seconds`; the first is ours.

    Half the rounds do where our own call is longer than a slice; what takes over a second, and four times as long as
    ours, takes part in the first only.
    """
    once = {name: _once(call) for name, call in calls.items()}
    own = next(iter(once.values()))
    slow = {name for name in calls if once[name] > max(1.0, 4 * own)}
    rounds = rounds if own < slice_seconds else (rounds + 1) // 2
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name in slow and turn >= SLOW_ROUNDS:
                continue
            _wait_for_quiet()
            if once[name] < 2 * slice_seconds:
                calls[name]()
            repeats = max(1, min(10_000, round(slice_seconds / max(once[name], 1e-7))))
            found[name].append(_timed(calls[name], repeats))
    return {name: Timing(seconds) for name, seconds in found.items()}


def ratio(theirs: Timing, ours: Timing) -> float:
    """How many times as fast ours is: the median of their time over ours, over the rounds that both took part in."""
    return median(a / b for a, b in zip(theirs.seconds, ours.seconds, strict=False))


def _once(call: Call) -> float:
    """About how long a call takes, once caches, compilers and thread pools are awake."""
    first = _timed(call, 1)
    return min(first, _timed(call, 1)) if first < 10.0 else first


def _wait_for_quiet(step: float = 0.01, most: int = 100) -> None:
    """Until this process's threads sleep: hardly any processor time in a short wait."""
    for _ in range(most):
        before = time.process_time()
        time.sleep(step)
        if time.process_time() - before < step / 10:
            return


def _timed(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
