"""The cost of watching a whole model, compared with no statistics and with output_attentions=True.

A GPT-2 of 12 layers, 12 heads and width 768 with random weights reads random tokens. `watch` observes log-sum-exp,
entropy and received and keeps queries and keys, `watch top 8` lists each row's top keys as well; `sdpa` computes no
statistics; `eager` returns all weights (output_attentions=True). Times are interleaved; memory is measured in a process
of its own for each.
"""

import sys
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpt2 import gpt2
from benchmarks.memory import apart, measured
from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

WAYS = ("watch", "watch top 8", "sdpa", "eager")
TOKENS, LONG = 4096, 16384


class Cost(NamedTuple):
    """One way of running the model: seconds, their ratio to `sdpa` in the same round, and memory."""

    tokens: int
    way: str
    seconds: float
    ratio: float | None  # the median over rounds; None after a single run
    peak_bytes: int  # the process's peak memory, less what it held before the pass


def costs(threads: int, *, quick: bool) -> list[Cost]:
    """Interleaved times of all ways at 4,096 tokens (quick: 1,024), and each one's memory in a separate process."""
    tokens = 1024 if quick else TOKENS
    timings = interleaved(_calls(tokens, threads), rounds=5, slice_seconds=0.0)
    results = []
    for way in WAYS:
        peak = apart("benchmarks.watching", way, tokens, threads).peak_bytes
        results.append(Cost(tokens, way, median(timings[way].seconds), ratio(timings[way], timings["sdpa"]), peak))
    for way in () if quick else WAYS:
        if way != "eager":
            single = apart("benchmarks.watching", way, LONG, threads)
            results.append(Cost(LONG, way, single.seconds, None, single.peak_bytes))
    return results


def lines(result: list[Cost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("tokens", "way", "seconds", "times sdpa", "peak memory, GB")]
    for cost in result:
        times = "-" if cost.ratio is None else fixed(cost.ratio, 2, 6)
        memory = fixed(cost.peak_bytes / 1e9, 2, 6)
        rows.append((f"{cost.tokens:,}", cost.way, fixed(cost.seconds, 2, 7), times, memory))
    return rows


def _calls(tokens: int, threads: int) -> dict[str, Call]:
    """All ways of running one model on one text, by name."""
    import torch

    import clearhead as ch

    model, ids = gpt2(tokens, threads)

    def run(way: str) -> Any:
        with torch.inference_mode():
            if way.startswith("watch"):
                with ch.watch(model, entropy=True, received=True, top=8 if "top" in way else None) as seen:
                    model(ids, use_cache=False)
                return seen
            if model.config._attn_implementation != way:
                model.set_attn_implementation(way)
            return model(ids, use_cache=False, output_attentions=way == "eager")

    return {way: lambda way=way: run(way) for way in WAYS}  # type: ignore[misc]


if __name__ == "__main__":
    print(measured(_calls(int(sys.argv[2]), int(sys.argv[3]))[sys.argv[1]]))
