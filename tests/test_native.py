"""The native engine: parity at every level this machine can run, the same bits always, threads, fork."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead as ch
import native_threads
import seeds
from clearhead.core.arrays import bfloat16
from clearhead.core.call import describe
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import native, state_of
from clearhead.engines.base import Upstream
from clearhead.errors import SizeError
from problems import examples, of_tiers
from programs import python

HERE = Path(__file__).parent
normal = partial(seeds.normal, dtype=np.float32)

pytestmark = pytest.mark.skipif(not native.levels(), reason="the native engine is not compiled here")


def same(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("level", of_tiers((), native.levels()[::-1]))
def test_parity_with_the_reference_at_every_level(level: str) -> None:
    environment = {**os.environ, "CLEARHEAD_ISA": level}
    run = [sys.executable, str(HERE / "native_problems.py"), str(examples(1).max_examples)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [level]


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    code = "import clearhead as ch, numpy as np; print(ch.plan(np.eye(2), np.eye(2)))"
    said = python(code, CLEARHEAD_ISA="mmx")
    assert "engine: portable" in said
    assert "CLEARHEAD_ISA is 'mmx'" in said


DTYPES = [np.float32, np.float64, bfloat16, np.float16]
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (100, None), "softcap": 20.0},
    {"kv_lengths": [300, 2100], "sinks": [0.5, 1.0, -1.0, 0.0]},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(64, 130), *(pytest.param(*sizes, marks=pytest.mark.gate) for sizes in ((300, 2400), (1500, 700)))],
)
def test_received_agrees_in_both_passes(dtype: Any, rules: dict[str, Any], queries: int, keys: int) -> None:
    q, k, v = (normal(2, h, size, 32, dtype=dtype) for h, size in ((4, queries), (2, keys), (2, keys)))
    rules = {**rules, "query_offset": keys - queries}
    if "kv_lengths" in rules:
        rules["kv_lengths"] = np.minimum(rules["kv_lengths"], keys)
    make = lambda: ch.AttentionMatrix(q, k, engine="native", **rules)  # noqa: E731
    one_pass = make().observe(v, received=True, entropy=True)
    A = make()
    A.logsumexp()
    same(make().received(), A.received())
    same(one_pass.output, ch.attention(q, k, v, engine="native", **rules))
    truth = make()[...].astype(np.float64).sum(-2)
    for sums in (one_pass.received, A.received()):
        np.testing.assert_allclose(sums, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("large", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("place", ["q", "k"])
def test_received_beside_an_output_is_that_alone(place: str, large: float) -> None:
    arrays = {name: normal(1, 2, 300, 16) for name in "qkv"}
    arrays[place][0, 1, 150, 3] = large
    q, k, v = arrays.values()
    make = lambda: ch.AttentionMatrix(q, k, causal=True, engine="native")  # noqa: E731
    alone = make().received()
    np.testing.assert_allclose(make().observe(v, received=True).received, alone, rtol=2e-5, atol=1e-6)
    assert np.isnan(alone).any() == (not np.isfinite(large))
    assert np.isfinite(alone[0, 1, 151:]).all() or place == "k"


@pytest.mark.parametrize("window", [None, (101, None)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_one_token_gives_the_bits_of_the_full_pass(dtype: Any, window: Any) -> None:
    q, k, v = (normal(1, 4 if i == 0 else 2, 2100, 64, dtype=dtype) for i in range(3))

    def attended(start: int, stop: int) -> Any:  # in float32, since rounding hides a different order of sums
        rules: dict[str, Any] = {"causal": True, "window": window, "query_offset": start}
        inputs = describe(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], rules)
        return native.rows(inputs, Wanted(output=True, keep_float32=True))["output"]

    full = attended(0, 2100)
    for t in (0, 1, 31, 255, 256, 1000, 2047, 2048, 2099):
        same(attended(t, t + 1), full[:, :, t : t + 1])


def test_more_than_two_to_the_32_weights() -> None:
    n = 70_000  # n² is above 2³²; the window keeps the work small
    q, k, v = normal(n, 4), normal(n, 4), normal(n, 2)
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


def test_gradients_of_more_than_two_to_the_32_weights() -> None:
    n = 70_000
    q, k = normal(1, 1, n, 4), normal(1, 1, n, 4)
    inputs = describe(q, k, None, {"window": (0, 0)})  # each query sees one key, with a weight of 1
    logits, rows = (q * k).sum(-1) / 2, normal(1, 1, n)
    result = native.gradients(inputs, State(logits, 0 * logits), Upstream(rows, bias=(1, 1, 1, n)))
    np.testing.assert_allclose(result["q"], rows[..., None] * k / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["k"], rows[..., None] * q / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["bias"][:, :, 0], rows, rtol=1e-5)


def test_gradients_by_values_with_more_heads_than_keys() -> None:
    q, k, g, many = (normal(2, heads, n, 40) for heads, n in ((4, 500), (2, 700), (4, 500), (4, 700)))
    rules = {"causal": True, "query_offset": 200}
    grouped, full = (describe(q, x, None, rules) for x in (k, k.repeat(2, axis=1)))
    state = state_of(native, grouped)
    upstream = Upstream(normal(2, 4, 500), g, normal(2, 4, 700), normal(2, 4, 500))
    result, truth = (native.gradients(x.with_values(many), state, upstream) for x in (grouped, full))
    for name in ("q", "v"):
        same(result[name], truth[name])
    np.testing.assert_allclose(result["k"], truth["k"].reshape(2, 2, 2, 700, 40).sum(2), rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_may_change_during_calls() -> None:
    assert native_threads.stress(1000) == 0  # .ci/sanitize runs 20,000 calls under the thread sanitizer


@pytest.mark.parametrize("keys", [2**45, 2**55])
def test_sizes_beyond_any_memory_are_refused(keys: int) -> None:
    q = np.ones((1, 8), np.float32)
    k = np.lib.stride_tricks.as_strided(q, (keys, 8), (0, 4))
    with pytest.raises(SizeError, match="would not fit in the machine's memory"):
        ch.attention(q, k, k, engine="native")


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

# OpenMP's threads do not live in the new process, and a call that waited for them would never return.
FORK_BESIDE_PYTORCH = """
import os, torch, clearhead as ch

torch.set_num_threads(2), ch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 4, 150, 32)
(q @ k.mT).softmax(-1)  # wakes PyTorch's threads
expected = ch.attention(q, k, v)
child = os.fork()
if child == 0:
    os._exit(0 if (ch.attention(q, k, v).numpy() == expected.numpy()).all() else 1)  # PyTorch's own threads hang here
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

INTERRUPT = """
import os, signal, threading
import numpy as np, clearhead as ch
from clearhead.core.call import describe
from clearhead.core.state import State
from clearhead.engines import native
from clearhead.engines.base import Upstream
q, rows = np.zeros((1, 4, 60000, 64), np.float32), np.zeros((1, 4, 60000), np.float32)
for call in (
    lambda: ch.attention(q, q, q, engine="native"),
    lambda: native.gradients(describe(q, q, q, {}), State(rows, rows), Upstream(rows, q)),
):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        call()
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


@pytest.mark.parametrize(
    ("kind", "threads"),
    [("arrays", 1), ("arrays", 4), ("tensors", 4), pytest.param("tensors", 1, marks=pytest.mark.long)],
)
def test_a_program_ends_well_while_daemon_threads_attend(kind: str, threads: int) -> None:
    command = [sys.executable, "-c", ENDING, kind, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    end = done.returncode, done.stderr.strip()
    # PyTorch itself aborts so at times, while it allocates a tensor: docs/pytorch.md
    assert end == (0, "") or (kind == "tensors" and end == (-6, "terminate called without an active exception"))


FIRST_CALLS = [
    ("ch.attention(q, q, q)", "core.problem"),
    ("ch.AttentionMatrix(q, q).entropy()", "ops.matrix"),
    ("ch.plan(q, q, engine='portable')", "engines.portable"),
]
PROGRAMS = [  # and what they print
    (FORK, ""),
    pytest.param(FORK_BESIDE_PYTORCH, "", marks=pytest.mark.gate),
    *((FIRST_CALL.format(call=call, module=module), "") for call, module in FIRST_CALLS),
    (INTERRUPT, "stopped\nstopped\nand goes on\n"),
    (HANDLER, "True True True\n"),
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("code", "said"), PROGRAMS)
def test_fork_and_interrupts_in_a_separate_process(code: str, said: str) -> None:
    assert python(code, MALLOC_MMAP_THRESHOLD_="65536") == said  # so that reading freed memory ends the process
