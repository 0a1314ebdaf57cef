"""A kernel that only computes exponentials, to measure the device's rate."""

import triton
import triton.language as tl


@triton.jit
def exponentiate(out, rounds, SIZE: tl.constexpr):
    """Each program computes `rounds` times SIZE exponentials, each depending on the one before."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(out + place) - 0.5
    for _ in range(rounds):
        x = tl.exp2(x) - 1.5
    tl.store(out + place, x)
