"""The native engine: parity at every level this machine can run, the same bits always, threads, fork."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead as ch
import native_threads
from clearhead import cli
from clearhead.core.arrays import bfloat16
from clearhead.engines import native
from clearhead.errors import RuleError, SizeError
from problems import examples

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not native.levels(), reason="the native engine is not compiled here")


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "level", [*native.levels()[:1], *(pytest.param(level, marks=pytest.mark.gate) for level in native.levels()[1:])]
)
def test_parity_with_the_reference_at_every_level(level: str) -> None:
    environment = {**os.environ, "CLEARHEAD_ISA": level}
    run = [sys.executable, str(HERE / "native_problems.py"), "0", str(examples(1).max_examples)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [level]


def test_an_unknown_level_is_refused_and_the_error_lists_the_known_ones() -> None:
    code = "import clearhead as ch, numpy as np; print(ch.plan(np.eye(2), np.eye(2)))"
    environment = {**os.environ, "CLEARHEAD_ISA": "mmx"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "engine: portable" in done.stdout
    assert "CLEARHEAD_ISA is 'mmx'" in done.stdout


DTYPES = [np.float32, np.float64, bfloat16, np.float16]
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (100, None), "softcap": 20.0},
    {"kv_lengths": [300, 2100], "sinks": [0.5, 1.0, -1.0, 0.0]},
]


def test_weights_by_index_have_the_bits_of_the_whole() -> None:
    q, k = random(2, 4, 150, 32), random(2, 2, 2400, 32, seed=1)
    make = lambda: ch.AttentionMatrix(q, k, engine="native", causal=True, query_offset=2250)  # noqa: E731
    full = make()[...]
    for row in (0, 13, 14, 71, 149):
        same(make()[1, 3, row], full[1, 3, row])
        same(make()[1, 3, row, 5:90:3], full[1, 3, row, 5:90:3])
    same(make()[:, 1, 149:3:-7, ::-2], full[:, 1, 149:3:-7, ::-2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(64, 130), *(pytest.param(*sizes, marks=pytest.mark.gate) for sizes in ((300, 2400), (1500, 700)))],
)
def test_received_has_the_same_bits_from_the_row_pass_and_the_column_pass(
    dtype: Any, rules: dict[str, Any], queries: int, keys: int
) -> None:
    q, k, v = (random(2, h, size, 32, dtype=dtype, seed=h) for h, size in ((4, queries), (2, keys), (2, keys)))
    rules = {**rules, "query_offset": keys - queries}
    if "kv_lengths" in rules:
        rules["kv_lengths"] = np.minimum(rules["kv_lengths"], keys)
    make = lambda: ch.AttentionMatrix(q, k, engine="native", **rules)  # noqa: E731
    one_pass = make().observe(v, received=True, entropy=True)
    A = make()
    A.logsumexp()
    same(one_pass.received, A.received())
    same(one_pass.received, make().received())
    same(one_pass.output, ch.attention(q, k, v, engine="native", **rules))
    before = ch.get_num_threads()
    for count in (1, 3):
        ch.set_num_threads(count)
        same(one_pass.received, make().received())
    ch.set_num_threads(before)
    truth = make()[...].astype(np.float64).sum(-2)
    np.testing.assert_allclose(one_pass.received, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({"received": True, "entropy": True, "logsumexp": True, "top": 8}, ["rows"]),
        ({"received": True, "entropy": True, "peak": True, "image": (8, 8)}, ["rows", "columns"]),
        ({"received": True}, ["columns"]),
    ],
)
def test_a_used_matrix_makes_no_more_passes_than_a_fresh_one(
    asked: dict[str, Any], passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (random(1, 2, 300, 32, seed=i) for i in range(3))
    values = None if set(asked) == {"received"} else v
    A = ch.AttentionMatrix(q, k, engine="native")
    A.logsumexp()
    taken: list[str] = []
    for name in ("rows", "columns"):
        real = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *inputs, name=name, real=real: (taken.append(name), real(*inputs))[1])
    used = A.observe(values, **asked)
    assert taken == passes
    taken.clear()
    fresh = ch.AttentionMatrix(q, k, engine="native").observe(values, **asked)
    assert len(taken) >= len(passes)
    for name in asked:
        for a, b in zip(*(np.atleast_1d(getattr(seen, name)) for seen in (used, fresh)), strict=True):
            same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_one_token_gives_the_bits_of_the_full_causal_pass(dtype: Any) -> None:
    q, k, v = (random(1, 4 if i == 0 else 2, 2100, 64, dtype=dtype, seed=i) for i in range(3))
    full = ch.attention(q, k, v, causal=True, engine="native")
    for t in (0, 1, 31, 255, 256, 1000, 2047, 2048, 2099):
        one = ch.attention(
            q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], causal=True, query_offset=t, engine="native"
        )
        same(one, full[:, :, t : t + 1])


def test_more_than_two_to_the_32_weights() -> None:
    n = 70_000  # n² is above 2³²; the window keeps the work small
    q, k, v = random(n, 4), random(n, 4, seed=1), random(n, 2, seed=2)
    matrix = ch.AttentionMatrix(q, k, window=(2, 1))
    out = np.asarray(matrix @ v)
    received = np.asarray(matrix.received())
    for i in (0, 1, 65_535, 65_536, 65_537, n - 1):
        near = slice(max(0, i - 2), min(n, i + 2))
        scores = k[near].astype(np.float64) @ q[i] / 2
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[i], weights @ v[near], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.asarray(matrix[i, near]), weights, rtol=1e-5)
    np.testing.assert_allclose(received.sum(dtype=np.float64), n, rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_large_scores_over_long_rows_are_no_less_exact_than_pytorchs(size: float) -> None:
    shape = (1, 8, 20_000, 64)
    q, k, v = random(1, 8, 16, 64) * np.float32(size), random(*shape, seed=1), random(*shape, seed=2)
    torch = pytest.importorskip("torch")
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64) / 8
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    truth = weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float64)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(x) for x in (q, k, v))).numpy()

    def error(output: Any) -> float:
        return float(np.sqrt(np.mean((output.astype(np.float64) - truth) ** 2)))

    assert error(ch.attention(q, k, v)) <= 1.25 * error(theirs)


def test_many_python_threads_at_once() -> None:
    q, k, v = (random(1, 4, 400, 32, seed=i) for i in range(3))
    truth, result = ch.attention(q, k, v, engine="native"), []
    crowd = [
        threading.Thread(target=lambda: result.extend(ch.attention(q, k, v, engine="native") for _ in range(10)))
        for _ in range(6)
    ]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert len(result) == 60
    for one in result:
        same(one, truth)


def test_the_number_of_threads_may_change_while_other_threads_compute() -> None:
    assert native_threads.stress(1000) == 0  # .ci/sanitize runs 20,000 calls under the thread sanitizer


@pytest.mark.parametrize("count", [0, -1, 1025, 2**31, 2**63, True, 2.0, "2", None])
def test_an_invalid_number_of_threads_is_refused(count: Any) -> None:
    before = ch.get_num_threads()
    with pytest.raises(RuleError, match=re.escape(f"{count!r}: expected a whole number from 1 to 1,024.")):
        ch.set_num_threads(count)
    assert ch.get_num_threads() == before


@pytest.mark.parametrize("count", ["0", "99999", "-3"])
def test_bench_refuses_an_invalid_number_of_threads(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--threads", count]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "expected a whole number from 1 to 1,024" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("keys", [2**45, 2**55])
def test_sizes_beyond_any_memory_are_refused(keys: int) -> None:
    q = np.ones((1, 8), np.float32)
    k = np.lib.stride_tricks.as_strided(q, (keys, 8), (0, 4))
    with pytest.raises(SizeError, match="larger than the machine's memory"):
        ch.attention(q, k, k, engine="native")


def test_the_number_of_threads_may_be_a_numpy_integer() -> None:
    before = ch.get_num_threads()
    try:
        ch.set_num_threads(np.int64(3))
        assert ch.get_num_threads() == 3
        assert type(ch.get_num_threads()) is int
    finally:
        ch.set_num_threads(before)


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, clearhead as ch
ch.set_num_threads(3)
q = np.random.default_rng(0).standard_normal((1, 8, 700, 32)).astype(np.float32)
truth = ch.attention(q, q, q, engine="native")
child = os.fork()
fine = (ch.attention(q, q, q, engine="native") == truth).all()
if child == 0:
    os._exit(0 if fine else 1)
sys.exit(os.waitpid(child, 0)[1] or not fine)
"""

INTERRUPT = """
import os, signal, threading, time
import numpy as np, clearhead as ch
q = np.zeros((1, 4, 60000, 64), np.float32)
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.perf_counter()
try:
    ch.attention(q, q, q, engine="native")
except KeyboardInterrupt:
    print("stopped")
    ch.attention(q[:, :, :300], q[:, :, :300], q[:, :, :300], engine="native")
    print("and goes on")
"""


# A signal handler that calls attention in the middle of a call and needs more scratch memory than that call.
HANDLER = """
import signal, threading
import numpy as np, clearhead as ch
ch.set_num_threads(1)
rng = np.random.default_rng(0)
outer, inner = (rng.standard_normal((1, 2, n, d)).astype(np.float32) for n, d in ((4000, 32), (300, 500)))
truths = []
def compute():
    truths.extend(ch.attention(x, x, x, engine="native") for x in (outer, inner))
elsewhere = threading.Thread(target=compute)  # so that this thread has no memory that is large enough for `inner`
elsewhere.start()
elsewhere.join()
handled = []
def handle(*_):
    handled.append((ch.attention(inner, inner, inner, engine="native") == truths[1]).all())
    signal.setitimer(signal.ITIMER_REAL, 0.02)  # the next one only now: handlers do not pile up on a busy machine
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.02)
fine = [(ch.attention(outer, outer, outer, engine="native") == truths[0]).all() for _ in range(4)]
signal.setitimer(signal.ITIMER_REAL, 0)
print(bool(handled), all(handled), all(fine))
"""


ENDING = """
import sys, threading, time
import numpy as np, clearhead as ch

kind, threads = sys.argv[1], int(sys.argv[2])
if kind == "tensors":
    import torch
x = np.ones((1, 8, 2000, 64), np.float32) if kind == "arrays" else torch.ones(1, 8, 2000, 64)
for _ in range(threads):
    threading.Thread(target=lambda: [ch.attention(x, x, x, engine="native") for _ in iter(int, 1)], daemon=True).start()
time.sleep(0.3)
"""
# The fork comes while another thread imports the module for its first call.
FIRST_CALL = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
import numpy as np, clearhead as ch
q = np.ones((1, 2, 8, 4), np.float32)
first = threading.Thread(target=lambda: {call})
first.start()
while "clearhead.{module}" not in sys.modules:
    pass
child = os.fork()
if child == 0:
    signal.alarm(60)
    {call}
    os._exit(0)
first.join()
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_program_ends_well_while_daemon_threads_attend(kind: str, threads: int) -> None:
    command = [sys.executable, "-c", ENDING, kind, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    end = done.returncode, done.stderr.strip()
    # PyTorch itself aborts so at times, while it allocates a tensor: docs/pytorch.md
    assert end == (0, "") or (kind == "tensors" and end == (-6, "terminate called without an active exception"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("call", "module"),
    [
        ("ch.attention(q, q, q)", "core.problem"),
        ("ch.AttentionMatrix(q, q).entropy()", "core.operands"),
        ("ch.plan(q, q, engine='portable')", "engines.portable"),
    ],
)
def test_a_process_forked_during_another_threads_first_call_computes(call: str, module: str) -> None:
    command = [sys.executable, "-c", FIRST_CALL.format(call=call, module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("code", "said"), [(FORK, ""), (INTERRUPT, "stopped\nand goes on\n"), (HANDLER, "True True True\n")]
)
def test_fork_and_interrupts_in_a_separate_process(code: str, said: str) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that reading freed memory ends the process
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
