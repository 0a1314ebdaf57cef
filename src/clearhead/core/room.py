"""Checks that there is enough memory before any work, so that no call runs for minutes and then fails."""

import os
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from clearhead.errors import FileError, SizeError

SMALL = 2**26  # bytes: less is not checked, since reading the system's free memory takes longer than a short call
OF_FILES = ("GB", "MB")  # units in which `written` says how large a file or what it holds is
_UNITS = {"TB": (1e12, 1e12), "GB": (1e9, 1e8), "MB": (1e6, 0)}  # bytes in one, and from how many on it is used
_ANY = 2**47  # bytes that a process can address: the limit where a system does not say what is free


def check_room(what: str, size: int, hint: str, device: str = "cpu") -> None:
    """Raise SizeError where `size` bytes are more than are free; `hint` says what to ask for instead."""
    if size > SMALL and size > (free := free_bytes(device)):
        where = "" if device in ("cpu", "interpreter") else f" on {device}"
        raise SizeError(f"{what} would take {written(size)}, and {written(free)} are free{where}.", hint)


def check_room_for_file(path: object, size: int, what: str) -> None:
    """Raise FileError if `what` (a part of the file) would take more than the free memory."""
    free = free_bytes()
    if size > free:
        raise FileError(
            f"{path}: {what} would take {written(size, OF_FILES)} of memory, and {written(free, OF_FILES)} are free."
        )


def written(size: int, units: Sequence[str] = ("TB", "GB")) -> str:
    """A number of bytes as text, such as 1.5 GB, in the first unit that is not too large for it, else in the last."""
    unit = next((unit for unit in units if size >= _UNITS[unit][1]), units[-1])
    return f"{size / _UNITS[unit][0]:,.1f} {unit}"


def array_bytes(shape: Sequence[int], itemsize: int) -> int:
    """An array's size in bytes, computed with Python's integers, which do not overflow."""
    return prod(map(int, shape)) * itemsize


def free_bytes(device: str = "cpu") -> int:
    """How many bytes this process may still allocate: free memory and swap, within the limits set for it."""
    if device.startswith("cuda"):
        cuda = sys.modules["torch"].cuda
        return int(cuda.mem_get_info(device)[0] + cuda.memory_reserved(device) - cuda.memory_allocated(device))
    if device not in ("cpu", "interpreter"):  # unknown; "meta" takes no memory at all
        return 2**63 - 1  # the most that PyTorch can count
    return max(0, min([_of_system(), *_of_groups(), *_of_process()]))


def _of_system() -> int:
    """Linux reports the available memory; on other systems all memory is the limit."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _ANY


def _of_groups() -> list[int]:
    """The bytes left of the control group's memory limit, as a list; [] if it has none."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, taken = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return []
    return [limit - taken + int(cached.get("inactive_file", 0))]


def _of_process() -> list[int]:
    """The bytes left of this process's limit of addresses (ulimit -v), as a list; [] if it has none."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError, AttributeError):
        return []
    return [] if limit == resource.RLIM_INFINITY else [limit - taken]
