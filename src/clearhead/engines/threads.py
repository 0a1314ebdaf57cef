"""The number of threads of the native engine: the user's, else as many as the processors that this process may use."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from clearhead.core.rule_values import MOST_THREADS, whole_number

_chosen: int | None = None


def set_num_threads(count: int) -> None:
    """Use `count` threads from now on, the calling one included; no bit of a result depends on it.

    A call reads the number when it starts, so setting it while other threads compute changes only their next calls.
    Raises RuleError unless count is a whole number from 1 to 1,024.

    >>> import clearhead as ch
    >>> ch.set_num_threads(ch.get_num_threads())
    """
    global _chosen
    _chosen = whole_number("the number of threads", count, 1, MOST_THREADS, "set_num_threads(2)")


def get_num_threads() -> int:
    """Return how many threads the native engine uses: the number given to `set_num_threads`, else a default.

    The default is the smallest of OMP_NUM_THREADS, the processors that this process may run on, the processors that its
    control group grants it, and 1,024; it is read once.

    >>> import clearhead as ch
    >>> ch.get_num_threads() >= 1
    True
    """
    global _chosen
    if _chosen is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        limits = [affinity, *([int(asked)] if asked.isdigit() and int(asked) > 0 else []), *_cgroup()]
        _chosen = max(1, min(*limits, MOST_THREADS))
    return _chosen


def openmp_of_torch() -> tuple[int, int] | None:
    """The addresses of GOMP_parallel and omp_get_max_threads in the OpenMP library that PyTorch computes with.

    GNU's, LLVM's and Intel's libraries have both. None where PyTorch has no such library, or not on Linux.
    """
    torch: Any = sys.modules["torch"]
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not torch.backends.openmp.is_available() or not library.exists():
        return None
    loaded = ctypes.CDLL(str(library))  # in which a name is looked up among all the libraries that it needs
    try:
        results = [
            ctypes.cast(loaded[name], ctypes.c_void_p).value for name in ("GOMP_parallel", "omp_get_max_threads")
        ]
    except AttributeError:
        return None
    return (results[0], results[1]) if results[0] and results[1] else None


def _cgroup() -> list[int]:
    """The processors that this process's control group grants, rounded up; empty where it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return [] if quota == "max" else [max(1, -(-int(quota) // int(period)))]
    except (OSError, ValueError):
        return []
