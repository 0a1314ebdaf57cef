"""Runs a few cases on every engine of this machine, checks them against the reference, then times them in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from clearhead import __version__, engines
from clearhead.core import definition
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.digits import fixed, significant
from clearhead.engines import native
from clearhead.engines.threads import get_num_threads
from clearhead.errors import EngineError
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix
from clearhead.tables import aligned

Call = Callable[[], object]
SLOW_ROUNDS = 1
CHECKED = 16  # how many of the last queries are compared with the reference
SLACK = {"float32": 1e-4, "bfloat16": 3e-2}  # largest error allowed, relative to the largest output
OBSERVED: dict[str, Any] = {"logsumexp": True, "entropy": True, "received": True}


class Case(NamedTuple):
    """One problem with d_k = d_v = 64."""

    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dtype: str = "float32"
    causal: bool = False
    observed: bool = False


CASES = (
    Case("8 heads, 1,024 tokens", 8, 8, 1024, 1024),
    Case("8 heads, 1,024 tokens, causal", 8, 8, 1024, 1024, causal=True),
    Case("  with statistics", 8, 8, 1024, 1024, causal=True, observed=True),
    Case("  bfloat16", 8, 8, 1024, 1024, "bfloat16", causal=True),
    Case("32 heads, 1 query, 8,192 keys", 32, 8, 1, 8192),
)


def self_check(cases: tuple[Case, ...] = CASES) -> None:
    """Print the machine and a table. Raises EngineError if an engine's output is wrong, before timing it."""
    versions = [f"{name} {version(name)}" for name in ("numpy", "torch") if find_spec(name)]
    level = f"native engine for {native.level()}" if native.level() else "no native engine"
    print("; ".join((f"clearhead {__version__}", level, f"threads {get_num_threads()}", *versions)))
    widths = 31, 8, -8, 0
    print(aligned(widths, ("case", "engine", "ms", " times as fast as"), " "))
    for case in cases:
        engine, seconds, ratios = measured(case)
        others = ", ".join(f"{name} {fixed(value, 2, 5)}" for name, value in ratios.items())
        cells = case.name, engine, fixed(seconds * 1e3, 3, 8), f" {others or '-'}"
        print(aligned(widths, cells, " "), flush=True)


def measured(case: Case) -> tuple[str, float, dict[str, float]]:
    """Check and time one case; return the chosen engine, its seconds, and how many times as fast as others it is.

    The others include PyTorch if it is installed. Raises as `self_check`.
    """
    rng = np.random.default_rng(0)
    sizes = ((case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    q, k, v = (rng.standard_normal((1, *size, 64), dtype=np.float32).astype(case.dtype) for size in sizes)
    arrays = q, k, v
    rules: Any = {"causal": True} if case.causal else {}
    problem = describe(*arrays, rules).problem
    plan = engines.choose(problem)
    names = [plan.engine, *(name for name in ("native", "portable") if name not in (plan.engine, *plan.reasons))]
    calls = {name: _ours(case, arrays, rules, name) for name in names}
    truth = _truth(arrays, rules)
    for name, call in calls.items():
        error = _error(call(), truth)
        if not error <= SLACK[case.dtype]:
            off = significant(error, 2)
            raise EngineError(f"the {name} engine is off by {off} in `{case.name.strip()}`.", "clearhead info")
    theirs = None if case.observed or not find_spec("torch") else _theirs(case, arrays)  # PyTorch has no statistics
    if theirs is not None and _error(theirs(), truth) <= SLACK[case.dtype]:
        calls["torch"] = theirs
    timings = interleaved(calls, rounds=5, slice_seconds=0.05)
    local = timings.pop(plan.engine)
    return plan.engine, median(local), {name: ratio(timing, local) for name, timing in timings.items()}


def _ours(case: Case, arrays: tuple[Array, Array, Array], rules: Any, engine: str) -> Call:
    q, k, v = arrays
    if case.observed:
        return lambda: AttentionMatrix(q, k, engine=engine, **rules).observe(v, **OBSERVED).output
    return lambda: attention(q, k, v, engine=engine, **rules)


def _theirs(case: Case, arrays: tuple[Array, Array, Array]) -> Call:
    """PyTorch's own attention on the same inputs, with as many threads."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(get_num_threads())
    q, k, v = (torch.from_numpy(x.astype(np.float32)).to(getattr(torch, case.dtype)) for x in arrays)

    def call() -> object:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)

    return call


def _truth(arrays: tuple[Array, Array, Array], rules: Any) -> Array:
    """The float64 reference's output for the last queries."""
    inputs = describe(*arrays, rules)
    last = range(max(0, inputs.problem.queries - CHECKED), inputs.problem.queries)
    output = definition.attend(
        inputs.problem.take(queries=last), inputs.q[:, :, last.start :], inputs.k, inputs.v
    ).output
    assert output is not None
    return output


def _error(output: Any, truth: Array) -> float:
    """The largest difference from `truth`, relative to the largest element of `truth`."""
    result = as_host_array(output, "output")[0][:, :, -truth.shape[2] :].astype(np.float64)
    return float(np.abs(result - truth).max() / np.abs(truth).max())


# ── interleaved timing: all engines take turns in every round, in one process ──
#
# A library's threads may keep spinning for tens of milliseconds after its last call, on cores that the next engine
# needs. So each engine waits until the process is idle, and warms up, before it is timed.


def interleaved(calls: Mapping[str, Call], *, rounds: int, slice_seconds: float) -> dict[str, list[float]]:
    """Time each call in every round, in rotating order, each for about `slice_seconds`; the first call is ours.

    Returns the seconds per call in each round, by name.

    If our call takes longer than a slice, half the rounds are run. A call that takes more than a second, and more than
    four times as long as ours, is timed in the first round only.
    """
    once = {name: _once(call) for name, call in calls.items()}
    local = next(iter(once.values()))
    slow = {name for name in calls if once[name] > max(1.0, 4 * local)}
    rounds = rounds if local < slice_seconds else (rounds + 1) // 2
    results: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name in slow and turn >= SLOW_ROUNDS:
                continue
            _wait_for_quiet()
            if once[name] < 2 * slice_seconds:
                calls[name]()
            repeats = max(1, min(10_000, round(slice_seconds / max(once[name], 1e-7))))
            results[name].append(_timed(calls[name], repeats))
    return results


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast ours is: the median of their time divided by ours, over the rounds that have both."""
    return median(a / b for a, b in zip(theirs, ours, strict=False))


def _once(call: Call) -> float:
    """Roughly the seconds of one call after warm-up of caches, compilers and thread pools."""
    first = _timed(call, 1)
    return min(first, _timed(call, 1)) if first < 10.0 else first


def _wait_for_quiet() -> None:
    """Wait until this process's threads sleep, that is, use less than a tenth of it as processor time; 1 s at most."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.001:
            return


def _timed(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
