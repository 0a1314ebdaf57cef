"""A kernel that does nothing but exponentials, to measure how many the device can do."""

import triton
import triton.language as tl


@triton.jit
def exponentiate(out, rounds, SIZE: tl.constexpr):
    """Each program: `rounds` times SIZE exponentials, each needing the one before."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(out + place) - 0.5
    for _ in range(rounds):
        x = tl.exp2(x) - 1.5
    tl.store(out + place, x)
