"""The cost of a training step while causes are watched, compared with the same step of the model as it is.

A GPT-2 of 12 layers, 12 heads and width 768 with random weights, dropout off, predicts random tokens. A step is the
forward pass and loss.backward(), the gradients dropped before it. `sdpa` is the model as it is; `clearhead` runs on our
attention; `causes` runs inside ch.watch(model, causes=True), which observes log-sum-exp and keeps queries, keys, values
and the derivative by every head's output. Times are interleaved; memory is measured in a process of its own for each.
"""

import sys
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpt2 import gpt2
from benchmarks.memory import apart, measured
from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

WAYS = ("sdpa", "clearhead", "causes")
TOKENS, QUICK = (256, 1024), (128,)


class StepCost(NamedTuple):
    """One way of running a step: seconds, their ratios to other ways in the same round, and memory."""

    tokens: int
    way: str
    seconds: float
    ratio: float  # to sdpa
    to_clearhead: float
    peak_bytes: int  # the process's peak memory, less what it held before the step


def costs(threads: int, *, quick: bool) -> list[StepCost]:
    """Interleaved times of all ways, and each one's memory in a separate process."""
    results = []
    for tokens in QUICK if quick else TOKENS:
        timings = interleaved(_calls(tokens, threads), rounds=6 if quick else 22, slice_seconds=0.0)
        for way in WAYS:
            local = timings[way]
            of_sdpa, of_clearhead = (ratio(local, timings[other]) for other in ("sdpa", "clearhead"))
            peak = apart("benchmarks.steps", way, tokens, threads).peak_bytes
            results.append(StepCost(tokens, way, median(local.seconds), of_sdpa, of_clearhead, peak))
    return results


def lines(result: list[StepCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("tokens", "step", "seconds", "times sdpa", "times clearhead", "peak memory, GB")]
    for cost in result:
        shown = (fixed(cost.ratio, 3, 6), fixed(cost.to_clearhead, 3, 6), fixed(cost.peak_bytes / 1e9, 2, 6))
        rows.append((f"{cost.tokens:,}", cost.way, fixed(cost.seconds, 2, 7), *shown))
    return rows


def _calls(tokens: int, threads: int) -> dict[str, Call]:
    """All ways of running a step of one model on one text, by name; each returns the loss."""
    import torch

    import clearhead as ch
    import clearhead.hf

    model, ids = gpt2(tokens, threads)
    vocabulary = model.wte.weight

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        hidden = model(ids, use_cache=False).last_hidden_state[0, :-1]
        loss: Any = torch.nn.functional.cross_entropy(hidden @ vocabulary.T, ids[0, 1:])
        loss.backward()
        return loss.detach()

    def run(way: str) -> Any:
        implementation = "clearhead" if way == "clearhead" else "sdpa"
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        if way != "causes":
            return step()
        with ch.watch(model, causes=True) as seen:
            loss = step()
        if not all(seen.layer(name).g.any() for name in seen.layers):
            raise RuntimeError("a layer has no derivative")
        return loss

    return {way: lambda way=way: run(way) for way in WAYS}  # type: ignore[misc]


if __name__ == "__main__":
    print(measured(_calls(int(sys.argv[2]), int(sys.argv[3]))[sys.argv[1]]))
