"""The accuracy of the output compared with PyTorch's: the ratio of their root mean square errors against float64.

    python benchmarks/errors.py

Below 1, clearhead is closer to the float64 result than PyTorch's fused kernel on the same inputs. Prints the table of
docs/performance.md; takes about a minute.
"""

import os
import platform
from statistics import geometric_mean

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.core import reference
from clearhead.core.problem import describe

SHAPES = {  # batch, heads, queries, keys, d
    "8 heads of 512 queries and keys, d 64": (1, 8, 512, 512, 64),
    "the same, causal": (1, 8, 512, 512, 64),
    "150 queries, 400 keys, d 128": (1, 4, 150, 400, 128),
    "4 queries, 100,000 keys, d 64": (1, 4, 4, 100_000, 64),
    "one query, 2,000 keys, d 128 (640 rows)": (10, 64, 1, 2000, 128),
}
DEVIATIONS = (1.0, 3.0, 6.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ratio(shape: tuple[int, ...], deviation: float, dtype: torch.dtype, *, causal: bool) -> float:
    """Our root mean square error divided by that of PyTorch's fused kernel."""
    batch, heads, n, m, d = shape
    generator = torch.Generator().manual_seed(n + m)
    q, k, v = (
        (torch.randn(batch, heads, length, d, generator=generator) * deviation).to(dtype) for length in (n, m, m)
    )
    given = describe(q, k, v, {"causal": causal})
    truth = reference.attend(given.problem, given.q, given.k, given.v).output
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    ours = ch.attention(q, k, v, causal=causal)
    mine, peers = (np.square(x.double().numpy() - truth).mean() for x in (ours, theirs))
    return float(np.sqrt(mine / peers))


def main() -> None:
    """Print the table, its geometric means and its worst cases."""
    print(f"{platform.machine()}, torch {torch.__version__}, numpy {np.__version__}, {os.cpu_count()} cores\n")
    print("| deviation of the inputs: 1, 3, 6 | " + " | ".join(DTYPES) + " |")
    print("| --- " * (1 + len(DTYPES)) + "|")
    found: dict[str, list[float]] = {name: [] for name in DTYPES}
    for label, shape in SHAPES.items():
        cells = []
        for name, dtype in DTYPES.items():
            ratios = [ratio(shape, deviation, dtype, causal="causal" in label) for deviation in DEVIATIONS]
            found[name] += ratios
            cells.append(", ".join(f"{one:.2f}" for one in ratios))
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("| geometric mean | " + " | ".join(f"{geometric_mean(one):.2f}" for one in found.values()) + " |")
    print("| worst | " + " | ".join(f"{max(one):.2f}" for one in found.values()) + " |")


if __name__ == "__main__":
    main()
