"""A layer that decodes with rotary positions and `KVCache`, beside PyTorch's own loop with a preallocated cache."""

import time
from statistics import median
from typing import Any

HEADS, D, BEFORE, STEPS = 8, 64, 1000, 24


def step(*, quick: bool) -> tuple[float, float]:
    """The median seconds of one token through the whole layer, and how many times as long PyTorch's loop takes."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from clearhead.nn import KVCache, MultiHeadAttention

    torch.manual_seed(0)
    layer = MultiHeadAttention(HEADS * D, HEADS, causal=True, rotary=1e4).eval()
    cache = KVCache(1, HEADS, D, D, capacity=BEFORE + STEPS)
    room = torch.zeros(2, 1, HEADS, BEFORE + STEPS, D)
    angles = torch.arange(BEFORE + STEPS)[:, None] / 1e4 ** (torch.arange(D // 2) / (D // 2))
    cos, sin = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))

    def turned(x: Any, place: slice) -> Any:
        a, b = x.chunk(2, -1)
        return x * cos[place] + torch.cat([-b, a], -1) * sin[place]

    def loop(x: Any, start: int) -> Any:
        q, k, v = (
            linear(x).unflatten(-1, (HEADS, D)).transpose(1, 2) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        stop = start + x.shape[1]
        place = slice(start, stop)
        room[0, :, :, place], room[1, :, :, place] = turned(k, place), v
        heads = scaled_dot_product_attention(
            turned(q, place), room[0, :, :, :stop], room[1, :, :, :stop], is_causal=start == 0
        )
        return layer.out_proj(heads.transpose(1, 2).flatten(2))  # type: ignore[misc]

    ours, theirs = [], []
    with torch.no_grad():
        prompt, x = torch.randn(1, BEFORE, HEADS * D), torch.randn(1, 1, HEADS * D)
        assert torch.allclose(layer(prompt, cache=cache), loop(prompt, 0), atol=1e-5)
        for _ in range(10 if quick else 60):
            cache.crop(BEFORE)
            start = time.perf_counter()
            for _ in range(STEPS):
                layer(x, cache=cache)
            between = time.perf_counter()
            for i in range(STEPS):
                loop(x, BEFORE + i)
            ours.append((between - start) / STEPS)
            theirs.append((time.perf_counter() - between) / STEPS)
    return median(ours), median(b / a for a, b in zip(ours, theirs, strict=True))
