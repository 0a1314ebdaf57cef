"""Products with a model's weights: BLAS computes them with one thread, and threads of ours share the rows or columns.

BLAS's threads wait for each other by spinning: beside other programs that took four times as long as one thread, and
the spinning ones take processors from attention's.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.engines.threads import get_num_threads

_SHARED = 2**21  # multiplications of a product that threads share
_lock = Lock()
_inside = [0]  # products that are computed at this moment
_before: list[int] = []  # the threads of each BLAS before the first of them


def product(x: Array, w: Array) -> Array:
    """x·W for x (…, tokens, d_in) and W (d_in, d_out), as one product of matrices."""
    rows = x.reshape(-1, x.shape[-1])
    made = np.empty((len(rows), w.shape[-1]), np.result_type(x, w))
    with _one_thread():
        count = get_num_threads()
        if count == 1 or rows.size * w.shape[-1] < _SHARED:
            np.matmul(rows, w, out=made)
        else:
            by_rows, size = len(rows) >= 8 * count, len(rows) if len(rows) >= 8 * count else w.shape[-1]
            parts = [slice(size * i // count, size * (i + 1) // count) for i in range(count)]

            def part(some: slice) -> None:
                if by_rows:
                    np.matmul(rows[some], w, out=made[some])
                else:
                    made[:, some] = rows @ w[:, some]

            waiting = [_threads(count - 1).submit(part, some) for some in parts[1:]]
            part(parts[0])
            for one in waiting:
                one.result()
    return made.reshape(*x.shape[:-1], -1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, BLAS computes with one thread; it has those of before when no product is computed any more."""
    blas = _blas()
    with _lock:
        if not _inside[0]:
            _before[:] = [one.num_threads for one in blas]
            for one in blas:
                one.set_num_threads(1)
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                for one, count in zip(blas, _before, strict=True):
                    one.set_num_threads(count)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that wait without spinning; a forked process makes its own."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_threads.cache_clear)
    return ThreadPoolExecutor(count, "clearhead product")


@cache
def _blas() -> list[Any]:
    """What sets the number of threads of the BLAS that NumPy computes with."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers
