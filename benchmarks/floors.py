"""Lower bounds on a GPU's time: operations, exponentials and bytes, each divided by the measured rate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.cases import Case

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Rates(NamedTuple):
    """Rates per second, measured on this device."""

    operations: float  # of a large matrix product in the case's dtype, a multiply-add being two
    exponentials: float
    bytes_read: float


class Work(NamedTuple):
    """The work per visible score: the number of products of depth d, and of exponentials."""

    products: int
    exponentials: int


WORK = {
    "output": Work(2, 1),
    "statistics": Work(2, 1),
    "+ received": Work(3, 2),  # the column pass multiplies q and k and exponentiates once more
    "+ top 8": Work(2, 1),
    "backward": Work(7, 2),  # dK and dV in one pass, dQ in another: q·k and dO·v twice
}


def floor(case: Case, answer: str, rates: Rates) -> float:
    """The least seconds that a kernel of this design needs."""
    scores = case.batch * case.heads * case.visible
    work = WORK[answer]
    queries = case.batch * case.heads * case.queries * case.d
    moved = case.bytes_read + 2 * queries * BYTES[case.dtype]
    return max(
        2 * work.products * scores * case.d / rates.operations,
        work.exponentials * scores / rates.exponentials,
        moved / rates.bytes_read,
    )


def rates(device: torch.device, dtype: torch.dtype, timed: Callable[[Callable[[], Any]], float]) -> Rates:
    """Measure all three rates; `timed` returns the seconds of a call."""
    small = device.type == "cpu"
    side = 256 if small else 8192
    a = torch.randn(side, side, device=device).to(dtype)
    x = torch.randn(1 << (14 if small else 28), device=device)
    out = torch.empty_like(x)
    seconds = timed(lambda: a @ a)
    return Rates(2 * side**3 / seconds, _exponentials(device, timed), 2 * x.nbytes / timed(lambda: out.copy_(x)))


def _exponentials(device: torch.device, timed: Callable[[Callable[[], Any]], float]) -> float:
    """Exponentials per second, from a kernel that does little else."""
    from benchmarks.rates import exponentiate

    programs, size, rounds = (1, 128, 2) if device.type == "cpu" else (132 * 32, 1024, 256)
    out = torch.zeros(programs * size, device=device)
    seconds = timed(lambda: exponentiate[(programs,)](out, rounds, SIZE=size, num_warps=4))
    return programs * size * rounds / seconds
