"""Requests that cannot fit in memory are refused before any work, with a hint at what to request instead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core import room
from clearhead.core.axes import Array
from clearhead.errors import SizeError
from error_texts import let_no_engine_run

MILLION = 10**6


def wide(length: int = MILLION, *lead: int) -> Array:
    """An array of this many tokens that all share one row of memory."""
    return np.broadcast_to(np.float32(1.0), (*lead, length, 4))


def matrix(length: int = MILLION, *lead: int) -> ch.AttentionMatrix:
    return ch.AttentionMatrix(wide(length, *lead), wide(length, *lead))


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "every weight": lambda: matrix()[...],
    "an array of them": lambda: np.asarray(matrix()),
    "a tile": lambda: matrix()[::2, 3:],
    "from the keys' side": lambda: matrix().T[...],
    "top": lambda: matrix(4).top(10**12),
    "top of many": lambda: matrix(4, 64, 64).observe(top=10**10, queries=slice(-1, None)),
    "an image": lambda: matrix(4).image(MILLION, MILLION),
    "groups": lambda: matrix().groups(np.arange(MILLION), np.arange(MILLION)),
    "an output": lambda: ch.attention(wide(10**13), wide(3), wide(3)),
    "a product": lambda: ch.AttentionMatrix(wide(10**13), wide(3)) @ np.ones((3, 4), np.float32),
    "a product from the keys' side": lambda: ch.AttentionMatrix(wide(3), wide(10**13)).T @ np.ones((3, 4), np.float32),
    "entropy": lambda: ch.AttentionMatrix(wide(10**13), wide(3)).entropy(),
    "received": lambda: ch.AttentionMatrix(wide(3), wide(10**13)).received(),
    "a trace": lambda: ch.trace(wide(), wide(), wide()),
    "a layer's trace": lambda: ch.trace_layer(np.ones((MILLION, 4)), *[np.eye(4)] * 3),
    "segments": lambda: ch.attention(
        wide(3), wide(10**13), wide(10**13), query_segments=[0] * 3, kv_segments=np.broadcast_to(0, 10**13)
    ),
    "of tensors": lambda: ch.AttentionMatrix(torch.ones(4, 4), torch.ones(4, 4)).image(MILLION, MILLION),
    "with a graph": lambda: ch.AttentionMatrix(torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)).observe(
        image=(MILLION, MILLION)
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_requests_that_cannot_fit_are_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch):
    let_no_engine_run(monkeypatch)
    with pytest.raises(MemoryError) as error:
        TOO_LARGE[name]()
    assert isinstance(error.value, SizeError)
    assert error.value.hint
    assert "TB, and " in error.value.what


def test_each_error_has_its_exact_text():
    with pytest.raises(SizeError, match=r"^weights of shape \(1000000, 1000000\) would take 4\.0 TB, and \S+ GB are"):
        matrix()[...]
    with pytest.raises(SizeError, match=r"^image=\(1000000, 1000000\) of \(queries 4, keys 4\) would take 12\.0 TB"):
        matrix(4).image(MILLION, MILLION)
    with pytest.raises(SizeError, match=r"^every step of 1,000,000,000,000 weights in float64 would take 40\.0 TB"):
        ch.trace(wide(), wide(), wide())


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
