"""What looking at causes costs: everything that is observed of cuts, beside one backward pass of the same problem.

`cuts` is E.observe of sums by key and by query, top 8, the strongest 20 edges and an image of 256 × 256, its pass for
the others of every row included, the log-sum-exp known. `backward` is our own derivative by q, k and v. `stored` is
PyTorch with the weights and the effects in memory, by the plain formula. Times are interleaved; memory is measured in a
process of its own.
"""

import sys
from statistics import median
from typing import Any, NamedTuple

from benchmarks.memory import apart, measured
from clearhead.bench.measure import Call, interleaved, ratio
from clearhead.digits import fixed

ASKED: dict[str, Any] = {"by_key": True, "by_query": True, "top": 8, "strongest": 20, "image": (256, 256)}
SIZES, QUICK, LONG = ((1024, 8), (4096, 8), (16_384, 1)), ((1024, 8),), (65_536, 1)  # tokens and heads
D = 64


class CauseCost(NamedTuple):
    """One problem: seconds of `cuts`, and how many times as long the others take; None: not timed."""

    case: str
    engine: str
    seconds: float
    times_backward: float | None  # our time over the backward pass
    times_stored: float | None  # PyTorch's time over ours
    peak_bytes: int  # the process's peak memory, less what it held before the call


def costs(threads: int, *, quick: bool) -> list[CauseCost]:
    """Interleaved times of every problem, causal and not; the longest is timed once, alone, for its memory."""
    results = []
    for n, heads in QUICK if quick else SIZES:
        for causal in (False, True):
            calls = _calls(n, heads, threads, causal=causal)
            timings = interleaved(calls, rounds=5 if quick else 11, slice_seconds=0.1)
            local, stored = timings["cuts"], timings.get("stored")
            results.append(
                CauseCost(
                    _case(n, heads, causal=causal),
                    _engine(n),
                    median(local.seconds),
                    ratio(local, timings["backward"]) if "backward" in timings else None,
                    None if stored is None else ratio(stored, local),
                    apart("benchmarks.causes", n, heads, threads, int(causal)).peak_bytes,
                )
            )
    if not quick and _engine(LONG[0]) != "portable":
        alone = apart("benchmarks.causes", *LONG, threads, 1)
        case = _case(*LONG, causal=True)
        results.append(CauseCost(case, _engine(LONG[0]), alone.seconds, None, None, alone.peak_bytes))
    return results


def lines(result: list[CauseCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("case", "engine", "ms", "of backward", "times stored", "peak MB")]
    for cost in result:
        shown = ["-" if x is None else fixed(x, 2, 6) for x in (cost.times_backward, cost.times_stored)]
        rows.append(
            (cost.case, cost.engine, fixed(cost.seconds * 1e3, 2, 8), *shown, fixed(cost.peak_bytes / 1e6, 1, 8))
        )
    return rows


def _case(n: int, heads: int, *, causal: bool) -> str:
    return f"h{heads} n {n:,} d {D}{' causal' * causal}"


def _engine(n: int) -> str:
    """The engine that answers for effects here."""
    import numpy as np

    import clearhead as ch
    from clearhead import engines

    factors = ch.AttentionMatrix(*np.broadcast_to(np.float32(0), (2, n, D))).factors
    chosen: Any = engines.with_effects(factors.engine, factors.problem)
    return next(name for name in engines.NAMES if engines.get(name) is chosen)


def _inputs(n: int, heads: int, threads: int) -> list[Any]:
    """q, k, v and g, (1, heads, n, d)."""
    import numpy as np

    import clearhead as ch

    ch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, n, D), np.float32) for _ in range(4)]


def _cuts(n: int, heads: int, threads: int, *, causal: bool) -> Call:
    import clearhead as ch

    q, k, v, g = _inputs(n, heads, threads)
    matrix = ch.AttentionMatrix(q, k, causal=causal)
    matrix.logsumexp()
    return lambda: matrix.cuts(v, g).observe(**ASKED)


def _calls(n: int, heads: int, threads: int, *, causal: bool) -> dict[str, Call]:
    """All calls on the same q, k, v and g, by name; those that need PyTorch where it is installed."""
    import clearhead as ch

    calls = {"cuts": _cuts(n, heads, threads, causal=causal)}
    try:
        import torch
    except ImportError:
        return calls
    torch.set_num_threads(threads)
    q, k, v, g = map(torch.from_numpy, _inputs(n, heads, threads))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = ch.attention(leaves[0], leaves[1], leaves[2], causal=causal)
    calls["backward"] = lambda: torch.autograd.grad(output, leaves, g, retain_graph=True)
    calls["stored"] = lambda: _stored(torch, q, k, v, g, causal=causal)
    return calls


def _stored(torch: Any, q: Any, k: Any, v: Any, g: Any, *, causal: bool) -> list[Any]:
    """The same answers from weights in memory."""
    pool = torch.nn.functional
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        logits.masked_fill_(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(-1)
    along = g @ v.mT
    whole = (weights * along).sum(-1, keepdim=True)
    effects = weights / (1 - weights) * (whole - along)
    size = effects.abs()
    high, low = (pool.adaptive_max_pool2d(x, ASKED["image"]) for x in (effects, -effects))
    top = size.topk(ASKED["top"], dim=-1).indices
    strongest = size.flatten().topk(ASKED["strongest"]).indices
    return [
        effects.sum(-2),
        effects.sum(-1),
        effects.gather(-1, top),
        effects.flatten()[strongest],
        pool.adaptive_avg_pool2d(effects, ASKED["image"]),
        torch.where(high >= low, high, -low),
    ]


if __name__ == "__main__":
    tokens, heads, threads, causal = map(int, sys.argv[1:])
    print(measured(_cuts(tokens, heads, threads, causal=bool(causal))))
