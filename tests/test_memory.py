"""Promise 3: memory O(queries + keys) beyond inputs and outputs, whatever is observed; measured in a fresh process."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import engines
from clearhead.core import room
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.errors import SizeError
from error_texts import let_no_engine_run
from problems import of_tiers
from programs import python

MEASURE = """
import sys, tracemalloc
import numpy as np, clearhead as ch
import clearhead.engines.portable

def peak(n):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 16), dtype=np.float32) for _ in range(3))
    g, labels = np.ones(n, np.float32), np.arange(n) * 10 // n
    names = {"ch": ch, "q": q, "k": k, "v": v, "g": g, "np": np, "labels": labels, "n": n}
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    answer = eval(sys.argv[1], names | {"A": lambda **rules: ch.AttentionMatrix(q, k, **rules)})
    return tracemalloc.get_traced_memory()[1] - before

warm = ch.AttentionMatrix(*np.ones((2, 9, 4))).observe(np.ones((9, 4)), top=2, received=True)
tracemalloc.start()
print(*map(peak, map(int, sys.argv[2:])))
"""
HIGH_WATER = """
import sys, numpy as np, clearhead as ch
from benchmarks.memory import peak

n, rng = int(sys.argv[1]), np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, 64), dtype=np.float32) for _ in range(3))
asked = dict(logsumexp=True, entropy=True, received=True, top=8, image=(256, 256))
ch.AttentionMatrix(q[:9], k[:9]).observe(v[:9], **asked)
before = peak()
seen = ch.AttentionMatrix(q, k).observe(v, **asked)
print(peak() - before)
"""
ALONG = """
import sys, torch, clearhead as ch
from benchmarks.memory import peak

heads, n = int(sys.argv[1]), int(sys.argv[2])

def attend(*given):
    return ch.attention(*given, causal=True)

def peaks(n):
    q, k, v, weights, *along = (torch.randn(1, heads, n, 64) for _ in range(7))
    before = peak()
    for call in (
        lambda: torch.func.jvp(attend, (q, k, v), tuple(along)),
        lambda: torch.autograd.functional.vhp(lambda *x: (attend(*x) * weights).sum(), (q, k, v), tuple(along)),
    ):
        call()
        yield peak() - before

list(peaks(64))
print(*peaks(n))
"""
FORMS = [
    "ch.attention(q, k, v)",
    "ch.attention(q, k, v, causal=True)",
    "A() @ v",
    "A().T @ g",
    "A().logsumexp()",
    "A().max_logit()",
    "A().entropy()",
    "A().distance()",
    "A().received()",
    "A().peak()",
    "A().top(8)",
    "A().image(64, 64)",
    "A().groups(labels, labels)",
    "A(window=(100, 100), sinks=[0.5]).observe(v, entropy=True)",
    "A(bias=np.zeros(n, np.float32)).received()",
    "A(mask=np.ones((n, 1), bool)).received()",
    "A(bias=np.zeros((1, n), np.float32))[n // 2]",
    "A()[:, 5]",
]
QUICK = FORMS[1], FORMS[8], FORMS[13]


def peaks_of(form: str, *sizes: int) -> list[int]:
    """Bytes at the highest point, beyond the inputs, for each number of tokens."""
    return list(map(int, python(MEASURE, form, *sizes).split()))


@pytest.mark.parametrize("form", of_tiers(QUICK, [form for form in FORMS if form not in QUICK], every=2))
def test_twice_the_length_takes_at_most_twice_the_memory(form: str):
    _, short, long = peaks_of(form, 64, 2048, 4096)  # the first imports what it needs
    assert long <= 2 * short, f"{short} bytes, then {long}"


@pytest.mark.parametrize(
    ("engine", "n"),
    [pytest.param("native", 65_536, marks=pytest.mark.long), pytest.param("portable", 6144, marks=pytest.mark.gate)],
)
def test_sixty_five_thousand_tokens_fit_in_300_megabytes(engine: str, n: int):
    """Measured by the process's peak memory, which includes memory allocated in C++; fewer tokens in less of it."""
    if engines.get(engine).reasons_not(describe(*np.zeros((3, 2, 2)), {}).problem):
        pytest.skip(f"the {engine} engine is not here")
    assert int(python(HIGH_WATER, n, CLEARHEAD_ENGINE=engine)) < 300e6 * n / 65_536


@pytest.mark.parametrize(
    ("heads", "n", "most"),
    [pytest.param(4, 2048, 74e6, marks=pytest.mark.gate), pytest.param(8, 16_384, 400e6, marks=pytest.mark.long)],
)
def test_derivatives_along_a_direction_store_no_weights(heads: int, n: int, most: float):
    """Every derivative by q, k and v, d 64; one matrix of weights has 67 MB and 8.6 GB, a dense derivative several."""
    assert max(int(peak) for peak in python(ALONG, heads, n).split()) < most


@pytest.mark.gate
@pytest.mark.parametrize("tile", ["[1, ::2, 0, 3]", "[1, ::2, 0, :, 3]"])
def test_a_broadcast_bias_is_never_expanded_in_memory(tile: str):
    """Nine batches share one bias of 17 MB, and so do a row and a column of three of them."""
    inputs = "(np.zeros((3, 3, 1, 2048, 4), np.float32), np.zeros((2048, 2048), np.float32))"
    row = f"(lambda q, bias: ch.AttentionMatrix(q, q, bias=bias){tile})(*{inputs})"
    assert peaks_of(row, 9)[0] < peaks_of(inputs, 9)[0] + 5e6


MILLION = 10**6


def wide(length: int = MILLION, *lead: int) -> Array:
    """An array of this many tokens that all share one row of memory."""
    return np.broadcast_to(np.float32(1.0), (*lead, length, 4))


def matrix(length: int = MILLION, *lead: int) -> ch.AttentionMatrix:
    return ch.AttentionMatrix(wide(length, *lead), wide(length, *lead))


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "every weight": lambda: matrix()[...],
    "a tile": lambda: matrix()[::2, 3:],
    "top": lambda: matrix(4).top(10**12),
    "an image": lambda: matrix(4).image(MILLION, MILLION),
    "groups": lambda: matrix().groups(np.arange(MILLION), np.arange(MILLION)),
    "an output": lambda: ch.attention(wide(10**13), wide(3), wide(3)),
    "received": lambda: ch.AttentionMatrix(wide(3), wide(10**13)).received(),
    "a trace": lambda: ch.trace(wide(), wide(), wide()),
    "segments": lambda: ch.attention(
        wide(3), wide(10**13), wide(10**13), query_segments=[0] * 3, kv_segments=np.broadcast_to(0, 10**13)
    ),
    "with a graph": lambda: ch.AttentionMatrix(torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)).observe(
        image=(MILLION, MILLION)
    ),
}


TEXTS = {
    "every weight": r"weights of shape \(1000000, 1000000\) would take 4\.0 TB, and \S+ GB are",
    "an image": r"image of shape \(1, 1, 1000000, 1000000\) would take 12\.0 TB, and ",
    "a trace": r"every step of 1,000,000,000,000 weights in float64 would take 40\.0 TB, and ",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_requests_that_cannot_fit_are_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch):
    let_no_engine_run(monkeypatch)
    with pytest.raises(MemoryError) as error:
        TOO_LARGE[name]()
    assert isinstance(error.value, SizeError)
    assert error.value.hint
    assert re.match(TEXTS.get(name, ".*TB, and "), error.value.what)


def test_requests_that_fit_are_computed(monkeypatch: pytest.MonkeyPatch):
    """The limit is the free memory; small requests are never refused."""
    monkeypatch.setattr(room, "SMALL", 1000)
    monkeypatch.setattr(room, "free_bytes", lambda device: 4096)
    some = matrix(64)
    assert some[:32, :32].shape == (32, 32)
    with pytest.raises(SizeError, match=r"^weights of shape \(32, 33\)"):
        some[:32, :33]
    monkeypatch.setattr(room, "free_bytes", lambda device: 0)
    assert some[:15, :15].shape == (15, 15)


@pytest.mark.parametrize("limit", ["max", "1000000000"])
def test_the_limit_of_a_control_group_counts(limit: str, monkeypatch: pytest.MonkeyPatch):
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8000000 kB\nSwapFree: 1000000 kB\n",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": "400000000",
        "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 100000000\n",
    }

    def read(path: Any) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(room.Path, "read_text", read)
    assert room.free_bytes() == (9_000_000 * 1024 if limit == "max" else 700_000_000)


def test_a_system_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch):
    def read(path: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(room.Path, "read_text", read)
    assert 2**28 < room.free_bytes() < 2**47
    monkeypatch.delattr(room.os, "sysconf")
    assert room.free_bytes() == 2**47
