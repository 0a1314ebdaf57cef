"""The machine: its description, and the rates that bound attention on it, measured by turns with every case.

Prefill is bounded by the rate of matrix products, in the case's dtype or, as numbers can be widened, in float32: that
of the fastest library here, on large squares. Decoding is bounded by the rate at which keys and values are read. So the
share of a limit can be compared between processors, which a speed relative to another program cannot.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import Case
from clearhead import __version__
from clearhead.bench.self_check import Call
from clearhead.errors import EngineError

SIDE = 2048  # of the squares that are multiplied
_MOST = 2.0  # seconds: a product that would take longer is not measured
READ = 1 << 26  # float32 numbers: 256 MiB, more than any cache
READS = "reads"
_GENERATIONS = {  # by vendor, family and model, 0 for any: a virtual machine's model name often leaves it out
    ("AuthenticAMD", 25, 17): "Zen 4",
    ("AuthenticAMD", 26, 0): "Zen 5",
    ("GenuineIntel", 6, 143): "Sapphire Rapids",
    ("GenuineIntel", 6, 207): "Emerald Rapids",
}


class Limit(NamedTuple):
    """Work that the machine does at its best rate.

    by     whose code does it
    call   does `work` multiply-adds, or reads so many bytes
    rate   per second, at its best before the cases ran
    """

    by: str
    call: Call
    work: float
    rate: float


def limits(threads: int) -> dict[str, Limit]:
    """Measure all limits, which takes a few seconds. Raises EngineError without the native engine, which is timed.

    They are, by name: a product in each dtype that a library multiplies, and reads.
    """
    from clearhead.engines import native

    if not native.level():
        raise EngineError("the bench times the native engine, which is not here.", "clearhead info says why.")
    results = {READS: _reads(threads)}
    for dtype in ("float32", "bfloat16", "float16"):
        products = [_measured(by, call, float(SIDE) ** 3) for by, call in _products(dtype, threads)]
        if products:
            results[f"{dtype} product"] = max(products, key=lambda limit: limit.rate)
    return results


def limit_of(case: Case, known: Mapping[str, Limit]) -> str:
    """The name of the limit of a case: reads for decoding, else the faster of the products in its dtype and float32."""
    if case.kind == "decode":
        return READS
    names = [name for name in ("float32 product", f"{case.dtype} product") if name in known]
    return max(names, key=lambda name: known[name].rate)


def _reads(threads: int) -> Limit:
    """The limit of reads: each thread reduces its part, which NumPy does without the interpreter."""
    parts, pool = np.array_split(np.ones(READ // 2, np.int64), threads), ThreadPoolExecutor(threads)
    return _measured("numpy", lambda: list(pool.map(np.bitwise_or.reduce, parts)), 4.0 * READ)


def _products(dtype: str, threads: int) -> Iterator[tuple[str, Call]]:
    """(library, call) for each library that multiplies squares of this dtype on so many threads."""
    if find_spec("torch"):
        import torch

        kind = getattr(torch, dtype)
        small = torch.ones(SIDE // 8, SIDE // 8, dtype=kind)
        if 512 / _measured("torch", lambda: torch.mm(small, small), 1.0).rate > _MOST:
            return  # without instructions for it a product goes number by number: that is no limit
        a, b, to = (torch.ones(SIDE, SIDE, dtype=kind) / SIDE for _ in range(3))

        def call() -> object:
            torch.set_num_threads(threads)
            with torch.no_grad():
                return torch.mm(a, b, out=to)

        yield "torch", call
    # NumPy's own library takes a thread for each core
    if dtype == "float32" and (threads == _cores() or not find_spec("torch")):
        left, right, into = (np.full((SIDE, SIDE), 1 / SIDE, np.float32) for _ in range(3))
        yield "numpy", lambda: np.matmul(left, right, out=into)


def _measured(by: str, call: Call, work: float) -> Limit:
    """The limit with the best rate of seven calls after a first."""
    call()
    times = []
    for _ in range(7):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return Limit(by, call, work, work / min(times))


def machine(threads: int) -> dict[str, str | int]:
    """The machine and the versions that the figures belong to."""
    from clearhead.engines import native

    results: dict[str, str | int] = {"processor": _processor(), "system": platform.platform(), "threads": threads}
    results |= {"cores": _cores(), "python": platform.python_version(), "clearhead": __version__}
    results["instruction set"] = native.level()
    for package in ("numpy", "torch", "onnxruntime"):
        try:
            results[package] = version(package)
        except PackageNotFoundError:
            continue
    results["numpy"] = np.__version__
    return results


def origin(module: str) -> dict[str, str]:
    """When, from which commit and by which command of a module figures are measured."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        said = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    except OSError:
        said = ""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return {"date": date.today().isoformat(), "commit": said.strip(), "command": command}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        first = info.read_text().split("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        shown = {name.strip(): value.strip() for name, _, value in lines}
        if "model name" in shown:
            return processor_of(shown)
    return platform.processor() or platform.machine()


def processor_of(shown: Mapping[str, Any]) -> str:
    """The processor's name, and its generation or else its numbers, from Linux's /proc/cpuinfo.

    >>> processor_of({"model name": "AMD EPYC", "vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"})
    'AMD EPYC (Zen 5)'
    """
    try:
        vendor, family, model = shown["vendor_id"], int(shown["cpu family"]), int(shown["model"])
    except (KeyError, ValueError):  # not of this kind: on ARM it has other lines
        return str(shown["model name"])
    known = _GENERATIONS.get((vendor, family, model)) or _GENERATIONS.get((vendor, family, 0))
    return f"{shown['model name']} ({known or f'family {family} model {model}'})"
