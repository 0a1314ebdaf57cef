"""The cost of changing a whole model: a span cut in every layer, beside the same model unchanged, and eager attention.

A GPT-2 of 12 layers, 12 heads and width 768 with random weights reads random tokens. `unchanged` runs on clearhead's
attention; `cut` is the same inside ch.change, where no later query sees the keys of one span; `eager` is Transformers'
eager attention with a dense mask that makes the same cut. Before anything is timed, the last two must agree. Times are
interleaved; memory is measured in a process of its own for each.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpt2 import gpt2
from benchmarks.memory import apart, measured
from clearhead.bench.measure import interleaved, ratio
from clearhead.digits import fixed

WAYS = ("unchanged", "cut", "eager")
TOKENS, QUICK, FEW = 4096, 1024, 300
SPAN = slice(100, 164)


class ChangeCost(NamedTuple):
    """One way of running the model: seconds, their ratio to `unchanged` in the same round, and memory."""

    tokens: int
    way: str
    seconds: float
    ratio: float
    peak_bytes: int  # the process's peak memory, less what it held before the pass


def costs(threads: int, *, quick: bool) -> list[ChangeCost]:
    """Interleaved times of all ways at 4,096 tokens (quick: 1,024), and each one's memory in a separate process."""
    tokens = QUICK if quick else TOKENS
    run = _runner(tokens, threads)
    _check(run)
    timings = interleaved(
        {way: partial(run, way, tokens) for way in WAYS}, rounds=5 if quick else 15, slice_seconds=0.0
    )
    local = timings["unchanged"]
    return [
        ChangeCost(
            tokens,
            way,
            median(timings[way].seconds),
            ratio(timings[way], local),
            apart("benchmarks.change", way, tokens, threads).peak_bytes,
        )
        for way in WAYS
    ]


def lines(result: list[ChangeCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("tokens", "way", "seconds", "times unchanged", "peak memory, MB")]
    for cost in result:
        memory = fixed(cost.peak_bytes / 1e6, 0, 6)
        rows.append((f"{cost.tokens:,}", cost.way, fixed(cost.seconds, 2, 7), fixed(cost.ratio, 3, 7), memory))
    return rows


def _runner(tokens: int, threads: int) -> Callable[[str, int], Any]:
    """A function of a way and a number of tokens, at most these, that returns the last hidden states."""
    import torch

    import clearhead as ch
    import clearhead.hf

    model, ids = gpt2(tokens, threads)
    edit = ch.cut(queries=slice(SPAN.stop, None), keys=SPAN)

    def run(way: str, count: int) -> Any:
        implementation = "eager" if way == "eager" else "clearhead"
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        mask = _dense_mask(count) if way == "eager" else None
        block = ch.change(model, edit) if way == "cut" else nullcontext()
        with torch.inference_mode(), block:
            return model(ids[:, :count], use_cache=False, attention_mask=mask).last_hidden_state

    return run


def _dense_mask(tokens: int) -> Any:
    """What is added to the scores, (1, 1, tokens, tokens): causal, and the span cut."""
    import torch

    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen[SPAN.stop :, SPAN] = False
    return torch.zeros(tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def _check(run: Callable[[str, int], Any]) -> None:
    """Raise unless the cut model computes what eager attention with the dense mask does, and not what it did before."""
    import torch

    before, cut, eager = (run(way, FEW) for way in WAYS)
    torch.testing.assert_close(cut, eager, rtol=0, atol=1e-4)
    if torch.allclose(before, cut, rtol=0, atol=1e-3):
        raise RuntimeError("the cut changed nothing")


def _main(way: str, tokens: int, threads: int) -> None:
    run = _runner(tokens, threads)
    run(way, FEW)  # what is imported or kept from then on is no part of a pass
    print(measured(lambda: run(way, tokens)))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
