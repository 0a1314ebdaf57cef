"""What watching a whole model costs, beside not looking at all and looking the old way: time in turn, memory apart.

A GPT-2 of 12 layers, 12 heads and width 768 with random weights reads random tokens. `watch` observes log-sum-exp,
entropy, received and the top 8 of every row and keeps queries and keys; `sdpa` looks at nothing; `eager` hands out all
weights (output_attentions=True).
"""

import json
import resource
import subprocess
import sys
from statistics import median
from typing import Any, NamedTuple

from clearhead.bench.measure import Call, interleaved, ratio

WAYS = ("watch", "sdpa", "eager")
TOKENS, LONG = 4096, 16384


class Cost(NamedTuple):
    """One way of running the model: seconds, those over the seconds of `watch` in the same round, and memory."""

    tokens: int
    way: str
    seconds: float
    ratio: float | None  # how many times the time of sdpa, in the same round; None where sdpa did not run
    peak_bytes: int  # what the process took at most, above what it held before the pass


def costs(threads: int, *, quick: bool) -> list[Cost]:
    """Time at 4,096 tokens (quick: 1,024) of all ways, interleaved; memory of each in a process of its own."""
    tokens = 1024 if quick else TOKENS
    timings = interleaved(_calls(tokens, threads), rounds=3, slice_seconds=0.0)
    found = []
    for way in WAYS:
        _, peak = _apart(way, tokens, threads)
        found.append(Cost(tokens, way, median(timings[way].seconds), ratio(timings[way], timings["sdpa"]), peak))
    if not quick:
        seconds, peak = _apart("watch", LONG, threads)
        found.append(Cost(LONG, "watch", seconds, None, peak))
    return found


def lines(found: list[Cost]) -> list[tuple[str, ...]]:
    """The rows of a table, its heading first."""
    rows: list[tuple[str, ...]] = [("tokens", "way", "seconds", "times sdpa", "peak memory, GB")]
    for cost in found:
        times = "-" if cost.ratio is None else f"{cost.ratio:.2f}"
        rows.append((f"{cost.tokens:,}", cost.way, f"{cost.seconds:.2f}", times, f"{cost.peak_bytes / 1e9:.2f}"))
    return rows


def _calls(tokens: int, threads: int) -> dict[str, Call]:
    """Every way on one model and one text."""
    import torch
    from transformers import GPT2Config, GPT2Model

    import clearhead as ch

    torch.set_num_threads(threads)
    ch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_positions=tokens, vocab_size=1000))
    model.train(mode=False)
    ids = torch.randint(1000, (1, tokens))

    def run(way: str) -> Any:
        with torch.inference_mode():
            if way == "watch":
                with ch.watch(model, entropy=True, received=True, top=8) as seen:
                    model(ids, use_cache=False)
                return seen
            if model.config._attn_implementation != way:
                model.set_attn_implementation(way)
            return model(ids, use_cache=False, output_attentions=way == "eager")

    return {way: lambda way=way: run(way) for way in WAYS}  # type: ignore[misc]


def _apart(way: str, tokens: int, threads: int) -> tuple[float, int]:
    """Seconds and peak memory of one pass in a process of its own."""
    command = [sys.executable, "-m", "clearhead.bench.watching", way, str(tokens), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return float(seconds), int(peak)


def _peak() -> int:
    """The most that this process held so far, in bytes; macOS counts bytes, Linux KiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _main(way: str, tokens: int, threads: int) -> None:
    import time

    calls = _calls(tokens, threads)
    before = _peak()
    start = time.perf_counter()
    kept = calls[way]()
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, _peak() - before]))
    del kept


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
