"""What a program prints in a process of its own, and the memory that a call takes in this one."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any


def python(code: str, *inputs: object, **environment: str) -> str:
    """What the program prints; it must end well, and before pytest's own limit of 300 s ends everything."""
    command, env = [sys.executable, "-c", code, *map(str, inputs)], os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes at the highest point, of what NumPy and Python allocate."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
