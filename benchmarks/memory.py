"""The peak memory of one call in a process of its own, less what that process held before."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


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
    """One call's seconds and how far it raised this process's peak memory, for `apart`."""
    before = _peak()
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    found = json.dumps([seconds, _peak() - before])
    del kept
    return found


def _peak() -> int:
    """This process's peak memory so far, in bytes; on Linux not by getrusage, which counts the parent's peak too."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
