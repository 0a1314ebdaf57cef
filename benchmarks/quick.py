"""How many times as fast as PyTorch's F.scaled_dot_product_attention: interleaved in one process, median of ratios.

python benchmarks/quick.py [words that must occur in a case's name …]
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import clearhead as ch

Pair = tuple[str, Callable[[], Any], Callable[[], Any], float]  # name, ours, theirs, multiply-adds · 2


def median_ratio(ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """Median of theirs/ours over interleaved runs, and the median times."""
    ours(), theirs(), ours(), theirs()
    times: list[tuple[float, float]] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 2000):
        a = time.perf_counter()
        ours()
        b = time.perf_counter()
        theirs()
        times.append((b - a, time.perf_counter() - b))
    pairs = np.array(times)
    return float(np.median(pairs[:, 1] / pairs[:, 0])), *map(float, np.median(pairs, axis=0))


def arrays(batch: int, heads: int, kv: int, n: int, m: int, d: int, dtype: Any) -> list[Any]:
    make = lambda h, size: torch.randn(batch, h, size, d).to(dtype)  # noqa: E731
    return [make(heads, n), make(kv, m), make(kv, m)]


def forward(name: str, shape: tuple[int, ...], dtype: Any = torch.float32, **rules: Any) -> Pair:
    q, k, v = arrays(*shape, dtype)
    batch, heads, kv, n, m, d = shape
    causal = rules.get("causal", False)
    theirs = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv)  # noqa: E731
    return (
        name,
        lambda: ch.attention(q, k, v, engine="native", **rules),
        theirs,
        4.0 * batch * heads * n * m * d / (1 + causal),
    )


def windowed(n: int) -> Pair:
    q, k, v = arrays(1, 8, 8, n, n, 64, torch.float32)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    mask = (j <= i) & (j > i - 256)
    theirs = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    return (
        f"window 256 of {n}",
        lambda: ch.attention(q, k, v, causal=True, window=(255, None), engine="native"),
        theirs,
        4.0 * 8 * n * 256 * 64,
    )


def looked_at(n: int, everything: bool) -> Pair:
    q, k, v = arrays(1, 8, 8, n, n, 64, torch.float32)
    asked = {"logsumexp": True, "entropy": True, "received": True}
    if everything:
        asked |= {"max_logit": True, "top": 8}
    ours = lambda: ch.AttentionMatrix(q, k, engine="native").observe(v, **asked)  # noqa: E731
    name = f"observe {'all' if everything else 'lse+entropy+received'} {n} / output alone"
    return name, ours, lambda: F.scaled_dot_product_attention(q, k, v), 4.0 * 8 * n * n * 64


def cases() -> Iterator[Callable[[], Pair]]:
    for d in (64, 128):
        for n in (512, 1024, 2048, 4096, 8192):
            yield lambda n=n, d=d: forward(f"full f32 {n} d{d}", (1, 8, 8, n, n, d))
    for d in (64, 128):
        for n in (256, 512, 1024, 2048, 4096, 8192):
            yield lambda n=n, d=d: forward(f"causal f32 {n} d{d}", (1, 8, 8, n, n, d), causal=True)
    yield lambda: forward("short 16x12x128", (16, 12, 12, 128, 128, 64))
    yield lambda: forward("short 64x8x32", (64, 8, 8, 32, 32, 64))
    for n in (2048, 4096, 8192):
        yield lambda n=n: windowed(n)
    for d in (64, 128):
        yield lambda d=d: forward(f"full bf16 2048 d{d}", (1, 8, 8, 2048, 2048, d), torch.bfloat16)
        yield lambda d=d: forward(f"causal bf16 2048 d{d}", (1, 8, 8, 2048, 2048, d), torch.bfloat16, causal=True)
        yield lambda d=d: forward(f"full f16 2048 d{d}", (1, 8, 8, 2048, 2048, d), torch.float16)
    for m in (8192, 32768):
        yield lambda m=m: forward(f"decode f32 32/32 {m}", (1, 32, 32, 1, m, 128))
        yield lambda m=m: forward(f"decode f32 32/8 {m}", (1, 32, 8, 1, m, 128))
        yield lambda m=m: forward(f"decode bf16 32/8 {m}", (1, 32, 8, 1, m, 128), torch.bfloat16)
    yield lambda: forward("decode f32 1/1 32768", (1, 1, 1, 1, 32768, 128))
    yield lambda: forward("tiny 4x512", (1, 1, 1, 4, 4, 512))
    for n in (2048, 4096):
        yield lambda n=n: looked_at(n, False)
        yield lambda n=n: looked_at(n, True)


def main() -> None:
    torch.set_num_threads(ch.get_num_threads())
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for case in cases():
            name, ours, theirs, flops = case()
            if not all(word in name for word in sys.argv[1:]):
                continue
            ratio, mine, other = median_ratio(ours, theirs, 1.0)
            found.setdefault(" ".join(name.split()[:2]), []).append(ratio)
            print(
                f"{name:44} {ratio:6.2f}   ours {mine * 1e3:9.3f} ms {flops / mine * 1e-9:6.0f} GF/s"
                f"   torch {other * 1e3:9.3f} ms",
                flush=True,
            )
    for name, ratios in found.items():
        print(f"{name:30} geometric mean {np.exp(np.mean(np.log(ratios))):.2f}, worst {min(ratios):.2f}")


if __name__ == "__main__":
    main()
