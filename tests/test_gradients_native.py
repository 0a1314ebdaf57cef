"""The native engine's gradients: of other heads and dtypes of v, of many weights, and when they are interrupted."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from clearhead.core.axes import Array
from clearhead.core.problem import describe
from clearhead.core.statistics import Wanted
from clearhead.engines import native
from clearhead.engines.base import Upstream
from problems import Case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def some_loss(rules: dict[str, Any], dtype: Any, queries: int = 500, keys: int = 700) -> tuple[Case, Upstream, Array]:
    q, k, v = (random(2, h, size, 40, dtype=dtype, seed=h) for h, size in ((4, queries), (2, keys), (2, keys)))
    case = Case(q, k, v, {**rules, "query_offset": keys - queries}, 0)
    lse = native.rows(case.problem, q, k, None, Wanted(logsumexp=True))["logsumexp"]
    rows, entropy = random(2, 4, queries, seed=3), random(2, 4, queries, seed=4)
    return case, Upstream(rows, random(*q.shape, dtype=dtype, seed=5), random(2, 4, keys, seed=6), entropy), lse


def test_keys_and_values_may_have_different_numbers_of_heads() -> None:
    case, said, lse = some_loss({"causal": True}, np.float32)
    v = random(2, 4, 700, 40, seed=9)
    result = native.gradients(case.problem, case.q, case.k, v, lse, said)
    full = describe(case.q, case.k.repeat(2, axis=1), v, case.rules)
    truth = native.gradients(full.problem, case.q, full.k, v, lse, said)
    for name in ("q", "v"):
        np.testing.assert_array_equal(result[name], truth[name])
    np.testing.assert_allclose(result["k"], truth["k"].reshape(2, 2, 2, 700, 40).sum(2), rtol=1e-4, atol=1e-5)


def test_values_of_another_dtype() -> None:
    case, said, lse = some_loss({"causal": True}, np.float32)
    result = native.gradients(case.problem, case.q, case.k, case.v.astype(np.float64), lse, said)
    truth = native.gradients(case.problem, case.q, case.k, case.v, lse, said)
    for name in truth:
        assert result[name].dtype == np.float32
        np.testing.assert_allclose(result[name], truth[name], rtol=1e-4, atol=1e-4)


def test_more_than_two_to_the_32_weights() -> None:
    n = 70_000
    q, k = random(1, 1, n, 4), random(1, 1, n, 4, seed=1)
    problem = describe(q, k, None, {"window": (0, 0)}).problem  # each query sees one key, with a weight of 1
    lse, rows = (q * k).sum(-1) / 2, random(1, 1, n, seed=2)
    result = native.gradients(problem, q, k, None, lse, Upstream(rows, bias=(1, 1, 1, n)))
    np.testing.assert_allclose(result["q"], rows[..., None] * k / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["k"], rows[..., None] * q / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["bias"][:, :, 0], rows, rtol=1e-5)


INTERRUPT = """
import os, signal, threading
import numpy as np, clearhead as ch
from clearhead.engines import native
from clearhead.engines.base import Upstream
from clearhead.core.statistics import Wanted
from clearhead.core.problem import describe
q, rows = np.zeros((1, 4, 60000, 64), np.float32), np.zeros((1, 4, 60000), np.float32)
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    native.gradients(describe(q, q, q, {}).problem, q, q, q, rows, Upstream(rows, q))
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_stops_the_backward_pass() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "stopped\n", done.stderr
