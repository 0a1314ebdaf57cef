"""What watching a whole model costs, beside not looking at all and looking the old way: time in turn, memory apart.

A GPT-2 of 12 layers, 12 heads and width 768 with random weights reads random tokens. `watch` observes log-sum-exp,
entropy and received and keeps queries and keys, `watch top 8` lists each row's strongest keys as well; `sdpa` looks at
nothing; `eager` hands out all weights (output_attentions=True).
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

WAYS = ("watch", "watch top 8", "sdpa", "eager")
TOKENS, LONG = 4096, 16384
FUSED = "gelu_pytorch_tanh"  # one call; GPT-2's usual one is seven, each with its own array


class Cost(NamedTuple):
    """One way of running the model: seconds, those over the seconds of `sdpa` in the same round, and memory."""

    tokens: int
    way: str
    seconds: float
    ratio: float | None  # the median over rounds; None where there was one run only
    peak_bytes: int  # what the process took at most, above what it held before the pass


def costs(threads: int, *, quick: bool) -> list[Cost]:
    """Time at 4,096 tokens (quick: 1,024) of all ways, interleaved; memory of each in a process of its own."""
    tokens = 1024 if quick else TOKENS
    timings = interleaved(_calls(tokens, threads), rounds=5, slice_seconds=0.0)
    found = []
    for way in WAYS:
        _, _, peak = _apart(way, tokens, threads)
        found.append(Cost(tokens, way, median(timings[way].seconds), ratio(timings[way], timings["sdpa"]), peak))
    if not quick:
        found += [Cost(LONG, way, *_apart(way, LONG, threads)) for way in WAYS if way != "eager"]
    return found


def lines(found: list[Cost]) -> list[tuple[str, ...]]:
    """The rows of a table, its heading first."""
    rows: list[tuple[str, ...]] = [("tokens", "way", "seconds", "times sdpa", "peak memory, GB")]
    for cost in found:
        times = "-" if cost.ratio is None else fixed(cost.ratio, 2, 6)
        memory = fixed(cost.peak_bytes / 1e9, 2, 6)
        rows.append((f"{cost.tokens:,}", cost.way, fixed(cost.seconds, 2, 7), times, memory))
    return rows


def _calls(tokens: int, threads: int) -> dict[str, Call]:
    """Every way on one model and one text."""
    import torch
    from transformers import GPT2Config, GPT2Model

    import clearhead as ch

    torch.set_num_threads(threads)
    ch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2Model(
        GPT2Config(n_positions=tokens, vocab_size=1000, bos_token_id=0, eos_token_id=0, activation_function=FUSED)
    )
    model.train(mode=False)
    ids = torch.randint(1000, (1, tokens))

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


def _apart(way: str, tokens: int, threads: int) -> tuple[float, None, int]:
    """Seconds and peak memory of one pass in a process of its own; no ratio, for want of rounds."""
    command = [sys.executable, "-m", "clearhead.bench.watching", way, str(tokens), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return float(seconds), None, int(peak)


def _peak() -> int:
    """The most that this process held so far, in bytes; getrusage would count what its parent held before it, too."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
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
