"""Interleaved timing: all contestants take turns in every round, in one process; medians, and ratios within a round.

A library's threads may keep spinning for tens of milliseconds after its last call, on cores that the next contestant
needs. So each contestant waits until the process is idle, and warms up, before it is timed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

Call = Callable[[], object]
SLOW_ROUNDS = 1


def interleaved(calls: Mapping[str, Call], *, rounds: int, slice_seconds: float) -> dict[str, list[float]]:
    """Time each call in every round, in rotating order, each for about `slice_seconds`; the first call is ours.

    Gives the seconds of a call in each round.

    If our call takes longer than a slice, half the rounds are run. A call that takes more than a second, and more than
    four times as long as ours, is timed in the first round only.
    """
    once = {name: _once(call) for name, call in calls.items()}
    local = next(iter(once.values()))
    slow = {name for name in calls if once[name] > max(1.0, 4 * local)}
    rounds = rounds if local < slice_seconds else (rounds + 1) // 2
    results: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name in slow and turn >= SLOW_ROUNDS:
                continue
            _wait_for_quiet()
            if once[name] < 2 * slice_seconds:
                calls[name]()
            repeats = max(1, min(10_000, round(slice_seconds / max(once[name], 1e-7))))
            results[name].append(_timed(calls[name], repeats))
    return results


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast ours is: the median of their time divided by ours, over the rounds that have both."""
    return median(a / b for a, b in zip(theirs, ours, strict=False))


def _once(call: Call) -> float:
    """Roughly the seconds of one call after warm-up of caches, compilers and thread pools."""
    first = _timed(call, 1)
    return min(first, _timed(call, 1)) if first < 10.0 else first


def _wait_for_quiet() -> None:
    """Wait until this process's threads sleep, that is, use less than a tenth of it as processor time; 1 s at most."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.001:
            return


def _timed(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
