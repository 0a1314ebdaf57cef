"""Is there memory for what was asked? Looked at before any work, so that nothing runs for minutes and then fails."""

import os
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from clearhead.errors import SizeError

SMALL = 2**26  # bytes: less is not looked at, since reading the machine's state takes longer than a short call
_ANY = 2**47  # bytes that a process can address: the limit where a system does not say what is free


def check_room(what: str, size: int, hint: str, device: str = "cpu") -> None:
    """Raise SizeError where `size` bytes are more than can be had; `hint` says what to ask instead."""
    if size <= SMALL:
        return
    free = free_bytes(device)
    if size > free:
        where = "are free" if device in ("cpu", "interpreter") else f"are free on {device}"
        raise SizeError(f"{what} would take {_written(size)}, and {_written(free)} {where}.", hint)


def array_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Of an array, in Python's own integers, which do not overflow."""
    return prod(map(int, shape)) * itemsize


def free_bytes(device: str = "cpu") -> int:
    """What this process may still take: the system's free memory and swap, within its group's and its own limits."""
    if device.startswith("cuda"):
        return _on_gpu(device)
    if device not in ("cpu", "interpreter"):  # nobody says; "meta" takes no memory at all
        return 2**63 - 1  # what PyTorch can count
    return max(0, min([_of_system(), *_of_groups(), *_of_process()]))


def _of_system() -> int:
    """Linux says what is available; where a system does not, all of its memory is the limit."""
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
    """What control groups of version 2 and 1 leave; none where they set no limit."""
    found = []
    for folder, most, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, taken = (Path(folder, name).read_text().strip() for name in (most, used))
            cached = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            found.append(int(limit) - int(taken) + int(cached.get("inactive_file", 0)))
        except (OSError, ValueError):
            continue  # no such group, or its limit is "max"
    return found


def _of_process() -> list[int]:
    """What this process's own limit of addresses (ulimit -v) leaves; nothing where it has none."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError, AttributeError):
        return []
    return [] if limit == resource.RLIM_INFINITY else [limit - taken]


def _on_gpu(device: str) -> int:
    torch = sys.modules["torch"]
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _written(size: int) -> str:
    return f"{size / 1e12:,.1f} TB" if size >= 1e12 else f"{size / 1e9:,.1f} GB"
