"""What derivatives along a direction cost: forward mode beside the output, second order beside the backward pass.

`jvp` is torch.func.jvp of the output by q, k and v, `second` the derivative of u·(gradients by q, k, v) by q, k, v and
the upstream gradient, from a backward pass that was recorded. `math` is PyTorch's scaled_dot_product_attention with its
weights in memory, the only one of its backends that has either. Times are interleaved; memory is measured in a process
of its own.
"""

import sys
from statistics import median
from typing import Any, NamedTuple

from benchmarks.memory import apart, measured
from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

SIZES, QUICK = ((512, 8), (2048, 8), (8192, 2)), ((512, 8),)  # tokens and heads


class DerivativeCost(NamedTuple):
    """One problem and one of "jvp" and "second": its seconds, and how many times as long as others it takes."""

    case: str
    what: str
    seconds: float
    times_plain: float  # over our output, or over our backward pass
    times_math: float | None  # PyTorch's time over ours; None: not timed
    peak_bytes: int  # the process's peak memory, less what it held before the call


def costs(threads: int, *, quick: bool) -> list[DerivativeCost]:
    """Interleaved times of every problem, causal and not."""
    results = []
    for n, heads in QUICK if quick else SIZES:
        for d in (64, 128):
            for causal in (False, True):
                calls = _calls(n, heads, d, threads, causal=causal)
                timings = interleaved(calls, rounds=5 if quick else 11, slice_seconds=0.1)
                for what, local in (("jvp", "output"), ("second", "backward")):
                    theirs = timings.get(f"math {what}")
                    peak = apart("benchmarks.derivatives", what, n, heads, d, threads, int(causal)).peak_bytes
                    results.append(
                        DerivativeCost(
                            f"h{heads} n {n:,} d {d}{' causal' * causal}",
                            what,
                            median(timings[what].seconds),
                            ratio(timings[what], timings[local]),
                            None if theirs is None else ratio(theirs, timings[what]),
                            peak,
                        )
                    )
    return results


def lines(result: list[DerivativeCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("case", "what", "ms", "times own", "times math", "peak MB")]
    for cost in result:
        math = "-" if cost.times_math is None else fixed(cost.times_math, 2, 6)
        shown = fixed(cost.seconds * 1e3, 2, 8), fixed(cost.times_plain, 2, 6), math
        rows.append((cost.case, cost.what, *shown, fixed(cost.peak_bytes / 1e6, 1, 8)))
    return rows


def _calls(n: int, heads: int, d: int, threads: int, *, causal: bool) -> dict[str, Call]:
    """All calls on the same inputs, by name; PyTorch's where n² numbers are not too many."""
    import clearhead as ch

    calls = _of(ch.attention, n, heads, d, threads, causal=causal)
    if n <= 2048:
        math = _of(_math, n, heads, d, threads, causal=causal)
        calls |= {f"math {name}": math[name] for name in ("jvp", "second")}
    return calls


def _math(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _of(attend: Any, n: int, heads: int, d: int, threads: int, *, causal: bool) -> dict[str, Call]:
    """The output, its derivative along a direction, the backward pass and the derivative of that."""
    import torch

    import clearhead as ch

    ch.set_num_threads(threads)
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    passed = [torch.randn(1, heads, n, d, generator=draw) for _ in range(7)]
    inputs, along, g = tuple(passed[:3]), tuple(passed[3:6]), passed[6].requires_grad_()
    leaves = [x.clone().requires_grad_() for x in inputs]

    def call(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, causal=causal)

    output = call(*leaves)
    first = torch.autograd.grad(output, leaves, g, create_graph=True)
    return {
        "output": lambda: call(*inputs),
        "jvp": lambda: torch.func.jvp(call, inputs, along),
        "backward": lambda: torch.autograd.grad(output, leaves, g, retain_graph=True),
        "second": lambda: torch.autograd.grad(first, [*leaves, g], along, retain_graph=True),
    }


if __name__ == "__main__":
    import clearhead

    what, *numbers = sys.argv[1:]
    tokens, heads, d, threads, causal = map(int, numbers)
    print(measured(_of(clearhead.attention, tokens, heads, d, threads, causal=bool(causal))[what]))
