"""The accuracy of outputs and gradients compared with PyTorch's: the ratio of root mean square errors against float64.

    python benchmarks/errors.py

Below 1, clearhead is closer to the float64 result than PyTorch's fused kernel on the same inputs. Prints the two tables
of docs/performance.md; takes about two minutes.
"""

import os
import platform
from collections.abc import Callable
from statistics import geometric_mean

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.core import definition
from clearhead.core.call import describe

SHAPES = {  # batch, heads, queries, keys, d
    "8 heads of 512 queries and keys, d 64": (1, 8, 512, 512, 64),
    "the same, causal": (1, 8, 512, 512, 64),
    "150 queries, 400 keys, d 128": (1, 4, 150, 400, 128),
    "4 queries, 100,000 keys, d 64": (1, 4, 4, 100_000, 64),
    "one query, 2,000 keys, d 128 (640 rows)": (10, 64, 1, 2000, 128),
}
GRADIENT_SHAPES = {
    "4 heads of 130 queries and keys, d 64": (1, 4, 130, 130, 64),
    "the same, causal": (1, 4, 130, 130, 64),
    "150 queries, 400 keys, d 128": (1, 4, 150, 400, 128),
    "one query, 2,000 keys, d 64 (640 rows)": (2, 64, 1, 2000, 64),
    "one query, 2,000 keys, d 128 (640 rows)": (2, 64, 1, 2000, 128),
}
DRAWS = 5  # of a gradient, measured together: 5 times 128 rows make 640
DEVIATIONS = (1.0, 3.0, 6.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def drawn(shape: tuple[int, ...], deviation: float, seed: int) -> list[torch.Tensor]:
    """q, k, v and an upstream gradient in float32; only q, k and v have this deviation."""
    batch, heads, n, m, d = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, length, d, generator=generator) * size
        for length, size in ((n, deviation), (m, deviation), (m, deviation), (n, 1.0))
    ]


def ratio(shape: tuple[int, ...], deviation: float, dtype: torch.dtype, *, causal: bool) -> float:
    """Our root mean square error of the output divided by that of PyTorch's fused kernel."""
    q, k, v = (x.to(dtype) for x in drawn(shape, deviation, seed=0)[:3])
    inputs = describe(q, k, v, {"causal": causal})
    truth = definition.attend(inputs.problem, inputs.q, inputs.k, inputs.v).output
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    ours = ch.attention(q, k, v, causal=causal)
    local, peers = (np.square(x.double().numpy() - truth).mean() for x in (ours, theirs))
    return float(np.sqrt(local / peers))


def gradient_ratios(shape: tuple[int, ...], deviation: float, *, causal: bool) -> list[float]:
    """The same for the gradients by q, k and v in float32, several draws together."""
    errors = np.zeros((2, 3))
    for seed in range(DRAWS):
        *inputs, upstream = drawn(shape, deviation, seed)
        with sdpa_kernel(SDPBackend.MATH):
            truth = gradients([x.double() for x in inputs], upstream.double(), causal=causal)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = gradients(inputs, upstream, causal=causal)
        ours = gradients(inputs, upstream, causal=causal, attend=clearhead_attention)
        for side, result in enumerate((ours, theirs)):
            errors[side] += [float((x.double() - exact).square().sum()) for x, exact in zip(result, truth, strict=True)]
    return list(np.sqrt(errors[0] / errors[1]))


def clearhead_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """ch.attention under PyTorch's names."""
    return ch.attention(q, k, v, causal=is_causal)


def gradients(
    inputs: list[torch.Tensor],
    upstream: torch.Tensor,
    *,
    causal: bool,
    attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention,
) -> tuple[torch.Tensor, ...]:
    """The gradients by q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(attend(*leaves, is_causal=causal), leaves, upstream)


def print_gradients() -> None:
    """The table of gradients in float32, by q, k and v."""
    print("\n| deviation of the inputs | " + " | ".join(f"{one:g}" for one in DEVIATIONS) + " |")
    print("| --- " * (1 + len(DEVIATIONS)) + "|")
    for label, shape in GRADIENT_SHAPES.items():
        cells = [gradient_ratios(shape, deviation, causal="causal" in label) for deviation in DEVIATIONS]
        print(f"| {label} | " + " | ".join(", ".join(f"{one:.2f}" for one in cell) for cell in cells) + " |")


def main() -> None:
    """Print both tables, and the geometric means and worst cases of the first."""
    print(f"{platform.machine()}, torch {torch.__version__}, numpy {np.__version__}, {os.cpu_count()} cores\n")
    print("| deviation of the inputs: 1, 3, 6 | " + " | ".join(DTYPES) + " |")
    print("| --- " * (1 + len(DTYPES)) + "|")
    results: dict[str, list[float]] = {name: [] for name in DTYPES}
    for label, shape in SHAPES.items():
        cells = []
        for name, dtype in DTYPES.items():
            ratios = [ratio(shape, deviation, dtype, causal="causal" in label) for deviation in DEVIATIONS]
            results[name] += ratios
            cells.append(", ".join(f"{one:.2f}" for one in ratios))
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("| geometric mean | " + " | ".join(f"{geometric_mean(one):.2f}" for one in results.values()) + " |")
    print("| worst | " + " | ".join(f"{max(one):.2f}" for one in results.values()) + " |")
    print_gradients()


if __name__ == "__main__":
    main()
