"""Attention's time inside a plain model, clearhead's drop-in beside PyTorch's own: what a user of PyTorch gets.

Six blocks with linear layers around the attention run on random numbers, interleaved: one whole pass with either. The
layers' threads, and what they leave in the caches, are part of what is measured. Of a training step it is the forward
pass of attention and its backward pass, from its output's gradient to those of q, k and v.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from clearhead.digits import fixed

SIZES = ((1, 128, 768, 12), (1, 512, 768, 12), (1, 2048, 768, 12), (8, 197, 768, 12), (8, 64, 512, 8))
WAYS = ("forward", "training step", "decode")
LAYERS = 6


class Share(NamedTuple):
    """The attention of one pass: the median seconds of all layers together, and PyTorch's median divided by it."""

    way: str
    batch: int
    tokens: int
    width: int
    heads: int
    seconds: float
    ratio: float


def shares(threads: int, *, quick: bool) -> list[Share]:
    """Every way at every size; decoding adds one token to the cache of all the others."""
    import torch

    import clearhead as ch
    from clearhead.torch import scaled_dot_product_attention

    torch.set_num_threads(threads)
    ch.set_num_threads(threads)
    torch.manual_seed(0)
    attends: dict[str, Callable[..., Any]] = {
        "clearhead": scaled_dot_product_attention,
        "torch": torch.nn.functional.scaled_dot_product_attention,
    }
    results = []
    for batch, tokens, width, heads in SIZES[: 2 if quick else None]:
        blocks = [_Block(width, heads) for _ in range(LAYERS)]
        for way in WAYS:
            seconds: dict[str, list[float]] = {name: [] for name in attends}
            for _ in range(3 if quick else 9):
                for name, attend in attends.items():
                    seconds[name].append(_pass(way, blocks, torch.randn(batch, tokens, width), attend))
            ours, theirs = (median(seconds[name]) for name in attends)
            results.append(Share(way, batch, tokens, width, heads, ours, theirs / ours))
    return results


def lines(result: list[Share]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("way", "batch × tokens", "width, heads", "attention, ms", "times torch")]
    for one in result:
        size, heads = f"{one.batch} × {one.tokens:,}", f"{one.width}, {one.heads}"
        rows.append((one.way, size, heads, fixed(one.seconds * 1e3, 2, 8), fixed(one.ratio, 2, 6)))
    return rows


class _Block:
    """Pre-norm attention and a multilayer perceptron, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        from torch import nn

        self.heads, self.norms = heads, [nn.LayerNorm(width) for _ in range(2)]
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.cache: Any = None

    def __call__(self, x: Any, attend: Callable[..., Any]) -> Any:
        import torch

        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.cache is not None:
            for kept, new in zip(self.cache, (k, v), strict=True):
                kept[:, :, -1:] = new
            k, v = self.cache
        mixed: torch.Tensor = attend(q, k, v, is_causal=self.cache is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


def _pass(way: str, blocks: list[_Block], x: Any, attend: Callable[..., Any]) -> float:
    """The seconds that attention took in one pass through all blocks."""
    import torch

    trains, clock, backward = way == "training step", 0.0, []

    def timed(*inputs: Any, **rules: Any) -> Any:
        nonlocal clock
        start = time.perf_counter()
        result = attend(*inputs, **rules)
        clock += time.perf_counter() - start
        if trains:
            result.register_hook(lambda _: backward.append([time.perf_counter()] * 2))
            for one in inputs:
                one.register_hook(lambda _: backward[-1].__setitem__(1, time.perf_counter()))
        return result

    with torch.set_grad_enabled(trains):
        if way == "decode":
            for block in blocks:
                shape = len(x), block.heads, x.shape[1], x.shape[2] // block.heads
                block.cache = torch.randn(shape), torch.randn(shape)
            x = x[:, -1:]
        for block in blocks:
            x = block(x, timed)
            block.cache = None
        if trains:
            x.sum().backward()
    return clock + sum(stop - start for start, stop in backward)
