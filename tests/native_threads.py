"""Calls from several Python threads while the kernel's number of threads changes: `python native_threads.py calls`.

Every result must have the bits that one thread gives.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.statistics import Wanted
from clearhead.engines import native, state_of
from clearhead.engines.base import Upstream

Ask = Callable[[], list[Array]]


def questions() -> list[Ask]:
    """Calls that the kernel cuts into tasks in each of its ways, large enough to be shared among threads."""
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    many, few, keys = make(1, 3, 150, 16), make(1, 3, 2, 16), make(1, 3, 2500, 16)
    want = Wanted(output=True, entropy=True, received=True, top=3)
    return [
        ask_rows(many, many, Wanted(output=True, logsumexp=True), {"causal": True}),  # whole rows
        ask_rows(few, keys, want, {}),  # spans of keys, merged
        ask_rows(many, many, want, {}),  # rows and what the keys receive
        ask_rest(many, many[:, :, :140]),
    ]


def ask_rows(q: Array, k: Array, want: Wanted, rules: dict[str, Any]) -> Ask:
    inputs = describe(q, k, k, rules)
    return lambda: list(native.rows(inputs, want).values())


def ask_rest(q: Array, k: Array) -> Ask:
    """Column statistics, weights, a product from the keys' side, gradients."""
    inputs = describe(q, k, k, {})
    state = state_of(native, inputs)

    def ask() -> list[Array]:
        columns = native.columns(inputs, state, Wanted(received=True, peak=True))
        slopes = native.gradients(inputs, state, Upstream(state.logsumexp, inputs.q))
        answers = [x for part in (columns, slopes) for x in part.values()]
        return [*answers, native.transposed(inputs, state, inputs.q)]

    return ask


def stress(calls: int, callers: int = 4) -> int:
    """How many of the calls gave other bits while another thread set 1, 2 and 64 threads in turn."""
    before, done = ch.get_num_threads(), threading.Event()
    ch.set_num_threads(1)
    asked = [(ask, ask()) for ask in questions()]

    def wrong(number: int) -> bool:
        ask, truth = asked[number // callers % len(asked)]
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ask(), truth, strict=True))

    def change() -> None:
        for count in cycle((1, 2, 64)):
            ch.set_num_threads(count)
            if done.wait(0.0001):
                return

    changer = threading.Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(callers) as crowd:
            return sum(crowd.map(wrong, range(calls)))
    finally:
        done.set()
        changer.join()
        ch.set_num_threads(before)


if __name__ == "__main__":
    asked_for = int(sys.argv[1])
    if wrong := stress(asked_for):
        sys.exit(f"{wrong} of {asked_for} calls were wrong")
    print(f"{asked_for} calls with the right bits at {native.level()}")
