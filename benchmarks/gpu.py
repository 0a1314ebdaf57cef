"""The benchmarks on a GPU: clearhead, PyTorch's backends, FlexAttention and stored weights, with lower bounds.

First every rule is checked against the reference on small problems, so that no wrong result is timed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch
from benchmarks.cases import Case
from benchmarks.floors import Rates, floor, rates
from clearhead.core.files import make_folder, write_whole
from clearhead.errors import EngineError

Call = Callable[[], Any]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOKENS = 200  # length of the check's problems
ASKED: dict[str, dict[str, Any]] = {
    "statistics": {"logsumexp": True, "max_logit": True, "entropy": True},
    "+ received": {"logsumexp": True, "max_logit": True, "entropy": True, "received": True},
    "+ top 8": {"logsumexp": True, "max_logit": True, "entropy": True, "top": 8},
}
RULES: dict[str, dict[str, Any]] = {
    "content": {},  # segments, mask and bias, which are created for each length
    "causal": {"causal": True},
    "window": {"window": (40, 9), "softcap": 5.0},
    "lengths": {"kv_lengths": np.array([30, 40]), "query_lengths": np.array([40, 9]), "causal": True},
    "sinks": {"sinks": np.ones(4), "alibi_slopes": np.ones(4) / 9},
}


class Line(NamedTuple):
    """One contestant in one case."""

    case: str
    contestant: str
    seconds: float
    ratio: float  # to PyTorch's best backend, which computes the output alone
    share: float | None  # the lower bound's share of the time, for ours
    peak_bytes: int  # beyond the inputs


def gpu_cases(*, quick: bool) -> list[Case]:
    """bfloat16 forward passes at d 64 and 128, full and causal, also grouped-query; and decoding."""
    lengths = (2048, 16384) if quick else (2048, 4096, 8192, 16384, 32768, 65536, 131072)
    every = product(lengths, (64, 128), (False, True), (32, 8))
    results = [
        Case("forward", "observe", max(1, 16384 // n), 32, kv_heads, n, n, d, "bfloat16", causal=causal)
        for n, d, causal, kv_heads in every
    ]
    return results + [Case("decode", "decode", batch, 32, 8, 1, 131072, 128, "bfloat16") for batch in (1, 8)]


def bench(*, quick: bool, save: str | None, device: str = "cuda") -> None:
    """Check, measure and print the table on standard output."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("there is no GPU: torch.cuda.is_available() is False.", "python -m benchmarks times the CPU.")
    folder = None if save is None else make_folder(save)
    place = torch.device(device)
    worst = check(place)
    print(f"checked against the reference, largest error of each rule: {worst}")
    limits = rates(place, torch.bfloat16, lambda call: seconds_of(call, place))
    lines = []
    for case in gpu_cases(quick=quick):
        for line in measure(case, place, limits):
            print(written(line), flush=True)
            lines.append(line)
    facts = {**machine(place), **limits._asdict()}
    print(json.dumps(facts))
    if folder is not None:
        _save(folder, lines, facts)


def machine(device: torch.device) -> dict[str, str]:
    """The machine and versions that the figures belong to."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "clearhead": ch.__version__}


def check(device: torch.device) -> dict[str, float]:
    """The largest error of outputs, statistics and gradients under each rule. Raises EngineError above 0.05."""
    worst = {}
    for name, rules in RULES.items():
        results, truth = (_answers(rules, place, dtype) for place, dtype in ((device, torch.bfloat16), (None, None)))
        pairs = zip(results, truth, strict=True)
        worst[name] = max(float((a - b).abs().nan_to_num(0.0).max() / b[b.isfinite()].abs().max()) for a, b in pairs)
        if not worst[name] < 0.05:
            raise EngineError(f"under `{name}` the Triton engine is off by {worst[name]:.2g} on {machine(device)}.")
    return worst


def _answers(rules: dict[str, Any], device: torch.device | None, dtype: torch.dtype | None) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, heads, TOKENS, 48, generator=rng).bfloat16() for heads in (4, 2, 2)]
    leaves = [x.to(device, dtype) if dtype else x.double() for x in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    labels, places = np.arange(TOKENS) // 60, np.arange(TOKENS)
    if not rules:
        rules = {
            "query_segments": labels,
            "kv_segments": labels,
            "mask": places % 3 > 0,
            "bias": np.float32(places % 7),
        }
    matrix = ch.AttentionMatrix(leaves[0], leaves[1], engine="triton" if dtype else "portable", **rules)
    seen = matrix.observe(leaves[2], logsumexp=True, entropy=True, received=True, peak=True, image=(20, 30), top=4)
    assert seen.top is not None
    (seen.output.float().square().sum() + seen.received.float().square().sum()).backward()
    answers = [seen.output, seen.logsumexp, seen.entropy, seen.received, seen.peak, seen.image, seen.top.weights]
    return [x.detach().double().cpu() for x in (*answers, *(leaf.grad for leaf in leaves)) if x is not None]


def measure(case: Case, device: torch.device, limit: Rates) -> Iterator[Line]:
    """Time every contestant on one case by turns, PyTorch's best backend first."""
    q, k, v = (
        torch.randn(case.batch, heads, length, case.d, device=device).to(getattr(torch, case.dtype))
        for heads, length in ((case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    )
    calls = {name: call for name, call in _theirs(case, q, k, v) if works(call)}
    timings = {name: (seconds_of(call, device), peak_of(call, device)) for name, call in calls.items()}
    best = min((timings[name][0] for name in BACKENDS if name in timings), default=float("nan"))
    for name, call in _ours(case, q, k, v):
        timings[name] = seconds_of(call, device), peak_of(call, device)
    for name, (seconds, peak) in timings.items():
        asked = name if name in ASKED else "output" if name == "A @ v" else None
        share = None if asked is None else floor(case, asked, limit) / seconds
        yield Line(case.name, name, seconds, seconds / best, share, peak)


def _theirs(case: Case, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    grouped = case.heads != case.kv_heads

    def sdpa(backend: Any) -> Any:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

    for name, backend in BACKENDS.items():
        yield name, lambda backend=backend: sdpa(backend)  # type: ignore[misc]
    if q.device.type == "cuda":
        yield "flex", _flex(case, q, k, v)
    if case.batch * case.heads * case.queries * case.keys * 8 < 60e9:  # memory for scores and weights, with a margin
        yield "materialised", lambda: _materialised(case, q, k, v)


def _flex(case: Case, q: Any, k: Any, v: Any) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def behind(b: Any, h: Any, i: Any, j: Any) -> Any:
        del b, h
        return j <= i

    blocks = create_block_mask(behind, None, None, case.queries, case.keys, q.device) if case.causal else None
    compiled: Any = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


def _materialised(case: Case, q: Any, k: Any, v: Any) -> Any:
    """The usual way to get statistics: store all weights, then reduce them."""
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * case.d**-0.5
    if case.causal:
        scores.masked_fill_(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf)
    weights = torch.softmax(scores, -1)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    return weights.to(q.dtype) @ v, scores.logsumexp(-1), scores.amax(-1), entropy, weights.sum(-2)


def _ours(case: Case, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    rules: dict[str, Any] = {"causal": True} if case.causal else {}

    def matrix() -> ch.AttentionMatrix:
        return ch.AttentionMatrix(q, k, engine="triton", **rules)

    yield "A @ v", lambda: matrix() @ v
    for name, asked in ASKED.items():
        yield name, lambda asked=asked: matrix().observe(v, **asked)  # type: ignore[misc]
    if case.kind != "decode":
        labels = np.arange(case.queries) * 4 // case.queries
        more = {**rules, "window": (case.queries // 2, 0), "query_segments": labels, "kv_segments": labels}
        inputs = {**more, "sinks": np.ones(case.heads)}
        yield "sinks, window, segments", lambda: ch.attention(q, k, v, engine="triton", **inputs)


def works(call: Call) -> bool:
    """Whether the call runs; a backend raises for a case that it does not support."""
    with suppress(RuntimeError, torch.OutOfMemoryError):
        call()
        return True
    return False


def seconds_of(call: Call, device: torch.device) -> float:
    """The median seconds of several runs by the device's clock, after two warm-up runs."""
    import time

    times = []
    for turn in range(9):
        if device.type == "cuda":
            clock: Any = torch.cuda.Event
            start, end = clock(enable_timing=True), clock(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
            if turn:
                break
    return median(times[2:] or times[1:])


def peak_of(call: Call, device: torch.device) -> int:
    """The peak memory of a run in bytes, beyond what was allocated before."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    del kept
    return int(torch.cuda.max_memory_allocated(device) - before)


def written(line: Line) -> str:
    """One line of the table."""
    share = "-" if line.share is None else f"{line.share:.0%}"
    return (
        f"{line.case:<44} {line.contestant:<24} {line.seconds * 1e3:10.3f} ms {line.ratio:7.2f} × best "
        f"{share:>5} of the floor {line.peak_bytes / 1e6:10.1f} MB"
    )


def _save(folder: Path, lines: list[Line], facts: dict[str, Any]) -> None:
    data = {"machine": facts, "lines": [line._asdict() for line in lines]}
    write_whole(folder / "gpu.json", (json.dumps(data, indent=1) + "\n").encode("utf-8"))
    write_whole(folder / "gpu.txt", ("\n".join(map(written, lines)) + "\n").encode("utf-8"))
