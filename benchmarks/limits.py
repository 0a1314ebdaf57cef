"""The machine: its description, and its measured rates of multiply-adds and of memory reads."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clearhead import __version__
from clearhead.errors import EngineError


class Limits(NamedTuple):
    """Rates per second, on all threads together."""

    multiply_adds: float  # float32
    bytes_read: float


def limits(threads: int) -> Limits:
    """Measure both rates, about a second each. Raises EngineError without the native engine, which measures them."""
    from clearhead.engines import native

    if not native.level():
        raise EngineError("the bench times the native engine, which is not here.", "clearhead info says why.")
    return Limits(native.peak_multiply_adds(threads), native.bytes_read(threads))


def machine(threads: int) -> dict[str, str | int]:
    """The machine and the versions that the figures belong to."""
    from clearhead.engines import native

    found: dict[str, str | int] = {"processor": _processor(), "system": platform.platform(), "threads": threads}
    found |= {"cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1}
    found |= {"python": platform.python_version(), "clearhead": __version__, "instruction set": native.level()}
    for package in ("numpy", "torch", "onnxruntime", "jax"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["numpy"] = np.__version__
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
