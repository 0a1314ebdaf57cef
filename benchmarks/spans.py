"""What the rule `spans` costs: the same call with labels, beside the one without, and beside PyTorch with a dense mask.

`labels` adds a table of 64 × 64 numbers, its labels in runs (as words, turns or documents have them) or mixed; `cut`
forbids half of the keys, as one span. Times are interleaved.
"""

from statistics import median
from typing import Any, NamedTuple

from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

LABELS = 64


class SpanCost(NamedTuple):
    """One call with spans: its seconds, and how many times as long it takes as the call without, and PyTorch's."""

    case: str
    way: str
    seconds: float
    times_without: float
    times_torch: float | None  # PyTorch's fused kernel with the same rule as a dense mask: its time over ours


def costs(threads: int, *, quick: bool) -> list[SpanCost]:
    """Interleaved times of every case and way."""
    results = []
    for n, d, causal in (
        [(2048, 64, False)] if quick else [(n, d, c) for n in (1024, 4096) for d in (64, 128) for c in (False, True)]
    ):
        calls = _calls(n, d, threads, causal=causal)
        timings = interleaved(calls, rounds=5 if quick else 11, slice_seconds=0.1)
        for way in calls:
            if way == "without" or way.startswith("torch"):
                continue
            theirs = timings.get(f"torch {way}")
            results.append(
                SpanCost(
                    f"n {n:,} d {d}{' causal' * causal}",
                    way,
                    median(timings[way].seconds),
                    ratio(timings[way], timings["without"]),
                    None if theirs is None else ratio(theirs, timings[way]),
                )
            )
    return results


def lines(result: list[SpanCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("case", "spans", "ms", "times without", "times torch")]
    for cost in result:
        torch = "-" if cost.times_torch is None else fixed(cost.times_torch, 2, 6)
        rows.append((cost.case, cost.way, fixed(cost.seconds * 1e3, 2, 8), fixed(cost.times_without, 2, 6), torch))
    return rows


def _calls(n: int, d: int, threads: int, *, causal: bool) -> dict[str, Call]:
    """All calls on the same q, k and v, (1, 8, n, d), by name; PyTorch's where it is installed."""
    import numpy as np

    import clearhead as ch

    ch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, n, d), np.float32) for _ in range(3))
    table = rng.standard_normal((LABELS, LABELS)).astype(np.float32)
    runs = np.arange(n) * LABELS // n
    half = np.repeat([0, 1], [n // 2, n - n // 2])
    spans: dict[str, Any] = {
        "labels in runs": (runs, runs, table),
        "labels mixed": (*(rng.integers(LABELS, size=n) for _ in range(2)), table),
        "half cut": (np.zeros(n, int), half, np.array([[0, -np.inf]])),
    }
    calls: dict[str, Call] = {"without": lambda: ch.attention(q, k, v, causal=causal)}
    for name, rule in spans.items():
        calls[name] = lambda rule=rule: ch.attention(q, k, v, causal=causal, spans=rule)  # type: ignore[misc]
    try:
        import torch
    except ImportError:
        return calls
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    fused: Any = torch.nn.functional.scaled_dot_product_attention
    for name, (rows, cols, numbers) in spans.items():
        mask = torch.from_numpy(np.asarray(numbers, np.float32)[rows[:, None], cols])
        if causal:
            mask = mask.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        calls[f"torch {name}"] = lambda mask=mask: fused(tensors[0], tensors[1], tensors[2], attn_mask=mask)  # type: ignore[misc]
    return calls
