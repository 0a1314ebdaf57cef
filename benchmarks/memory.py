"""The peak memory of one call in a process of its own, less what that process held before."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")


class Single(NamedTuple):
    """One call in a process of its own."""

    seconds: float
    peak_bytes: int


def apart(module: str, *words: object) -> Single:
    """Run `python -m module words…`, whose main program prints what `measured` returns."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return Single(float(seconds), int(peak))


def measured(call: Callable[[], object]) -> str:
    """One call's seconds, and its peak memory less what this process held before it, for `apart`."""
    before = _held()
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    result = json.dumps([seconds, peak() - before])
    del kept
    return result


def _held() -> int:
    """The memory that this process holds, from which its peak counts anew; on macOS its peak so far."""
    if not _STATUS.exists():
        return peak()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now: see Linux's proc(5)
    return _of_status("VmRSS")


def peak() -> int:
    """This process's peak memory, in bytes; on Linux not by getrusage, which counts the parent's peak too."""
    if _STATUS.exists():
        return _of_status("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _of_status(name: str) -> int:
    return int(_STATUS.read_text().split(f"{name}:")[1].split()[0]) * 1024
