"""num_threads= of one call: it reaches the kernel in every pass, changes no bit, and leaves other calls alone."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
import seeds
from clearhead.engines import native_calls
from clearhead.errors import RuleError

normal = partial(seeds.normal, dtype=np.float32)


class Counting:
    """The compiled kernel; notes the threads that each call may use, by the calling thread."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.counts, self.lock = kernel, [], threading.Lock()

    def __getattr__(self, name: str) -> Any:
        result = getattr(self.kernel, name)
        if name not in ("output", "rows", "columns", "gradients", "others", "effects"):
            return result

        def call(threads: int, *rest: Any) -> Any:
            with self.lock:
                self.counts.append((threading.get_ident(), "rows" if name == "output" else name, threads))
            return result(threads, *rest)

        return call

    def taken(self) -> set[tuple[str, int]]:
        result = {(name, threads) for _, name, threads in self.counts}
        self.counts.clear()
        return result


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    kernel = Counting(native_calls.kernel)
    monkeypatch.setattr(native_calls, "kernel", kernel)
    return kernel


def test_it_reaches_the_kernel_in_every_pass(counting: Counting):
    q, k, v = (torch.from_numpy(normal(2, 3, 50, 8)) for _ in range(3))
    before = ch.get_num_threads()
    ours = before + 3
    ch.attention(q, k, v, num_threads=ours, mask=np.ones((50, 50), bool))
    ch.attention(q, k.bfloat16().float(), v, num_threads=ours)
    A = ch.AttentionMatrix(q, k, num_threads=ours)
    for B in (A, A.part(1, 2), copy.deepcopy(A), pickle.loads(pickle.dumps(A)), pickle.loads(pickle.dumps(A.part(0)))):
        B[..., 3, :5], B.received(), B.T[...], B.entropy(), B.image(3, 3)
        B.T @ torch.ones(50), B @ torch.ones(50), B.observe(queries=slice(3, 9), peak=True)
    ch.AttentionMatrix(q, k, num_threads=ours, logsumexp=A.logsumexp())[0, 0, :]
    ch.rollout([A, A], query=3)
    assert counting.taken() == {("rows", ours), ("columns", ours)}
    ch.AttentionMatrix(q, k).received()
    assert {threads for _, threads in counting.taken()} == {before}


def test_it_reaches_the_backward_pass(counting: Counting):
    q, k, v = (torch.from_numpy(normal(2, 3, 50, 8)).requires_grad_() for _ in range(3))
    ours = ch.get_num_threads() + 3
    (
        ch.attention(q, k, v, num_threads=ours).sum() + (ch.AttentionMatrix(q, k, num_threads=ours).T @ v).sum()
    ).backward()
    with torch.no_grad():
        A = ch.AttentionMatrix(q, k, num_threads=ours)
    (A @ v).sum().backward()
    assert counting.taken() == {("rows", ours), ("columns", ours), ("gradients", ours)}
    loss = torch.func.grad(lambda q: ch.attention(q, k.detach(), v.detach(), num_threads=ours).sum())
    loss(q.detach())
    assert counting.taken() == {("rows", ours), ("gradients", ours)}


def test_calls_at_the_same_time_have_their_own(counting: Counting):
    q = normal(2, 4, 150, 16)
    truth = ch.attention(q, q, q, engine="native", num_threads=1)
    counting.taken()
    before, ready = ch.get_num_threads(), threading.Barrier(8)

    def call(count: int | None) -> tuple[int, set[int], bool]:
        ready.wait()
        fine = all(np.array_equal(ch.attention(q, q, q, engine="native", num_threads=count), truth) for _ in range(20))
        here = threading.get_ident()
        with counting.lock:
            return count or before, {threads for thread, _, threads in counting.counts if thread == here}, fine

    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(call, (1, 2, 3, None, 5, 64, None, 8)))
    assert all(fine for *_, fine in result)
    assert [counts for _, counts, _ in result] == [{count} for count, *_ in result]
    assert ch.get_num_threads() == before


Q = np.ones((3, 4))
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "set_num_threads": ch.set_num_threads,
    "attention": lambda n: ch.attention(Q, Q, Q, num_threads=n),
    "attention by rules": lambda n: ch.attention(Q, Q, Q, num_threads=n, mask=Q[:, :3] > 0),
    "attention of a graph": lambda n: ch.attention(*[torch.ones(3, 4, requires_grad=True)] * 3, num_threads=n),
    "another engine": lambda n: ch.attention(Q, Q, Q, num_threads=n, engine="portable"),
    "plan": lambda n: ch.plan(Q, Q, Q, num_threads=n),
    "AttentionMatrix": lambda n: ch.AttentionMatrix(Q, Q, num_threads=n),
}


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = ch.get_num_threads()
    yield
    ch.set_num_threads(before)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("count", [0, -1, 1025, 2**31, 2**63, True, 2.0, "2", None])
def test_a_wrong_number_is_refused(entry: str, count: Any):
    name, hint = "num_threads", "num_threads=2"
    if entry == "set_num_threads":
        name, hint = "the number of threads", "set_num_threads(2)"
    elif count is None:  # the number that is set
        return
    before = ch.get_num_threads()
    with pytest.raises(RuleError) as error:
        ENTRIES[entry](count)
    assert str(error.value) == f"{name} is {count!r}: expected a whole number from 1 to 1,024.\n\nhint: {hint}"
    assert ch.get_num_threads() == before
    ENTRIES[entry](np.int64(2))
    assert type(ch.get_num_threads()) is int
