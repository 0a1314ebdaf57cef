"""The GPU kernels skip fully masked blocks: the tests count what the kernels compute.

The interpreter's builder counts what kernels multiply and exponentiate; visibility.py says in which tiles of 32 × 32,
the interpreter's size, some query sees some key.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder

from clearhead.core import visibility
from clearhead.core.axes import Array
from clearhead.core.statistics import Wanted
from clearhead.engines import triton
from clearhead.engines.base import Upstream
from problems import Case, of_tiers
from seeds import fresh

N, M, TILE = 70, 140, 32
RNG = np.random.default_rng(0)
TILES = np.kron(RNG.random((2, 3, 5)) < 0.4, np.ones((32, 32), bool))[:, :N, :M]  # whole blocks, others for each head
SCATTERED = TILES & (RNG.random(TILES.shape) < 0.2)
DOCUMENTS = {"query_segments": np.arange(N) // 30, "kv_segments": np.arange(M) // 41}
FORBIDDEN = np.where(RNG.random((2, 4, 6)) < 0.6, -np.inf, RNG.standard_normal((2, 4, 6)))  # others for each head
RULES: dict[str, dict[str, Any]] = {
    "whole blocks": {"mask": TILES},
    "scattered": {"mask": SCATTERED, "causal": True, "query_offset": 50},
    "bias": {"bias": np.where(SCATTERED, RNG.standard_normal(SCATTERED.shape), -np.inf)},
    "packed": DOCUMENTS,
    "in turns": {"query_segments": np.arange(N) // 8 % 7 * 2**40, "kv_segments": np.arange(M) // 64 * 2**40},
    "nothing": {"query_segments": np.zeros(N, int), "kv_segments": np.ones(M, int)},
    "spans": {"spans": (np.arange(N) // 20, np.arange(M) // 24, FORBIDDEN), "scale": np.array([0.3, -0.2])},
    "no label": {"spans": (np.arange(N) // 50 - 1, np.arange(M) // 50, np.full((1, 3), -np.inf))},
    "packed and causal": {**DOCUMENTS, "causal": True, "query_offset": 40, "alibi_slopes": np.ones(2)},
}


every_rule = pytest.mark.parametrize("rules", of_tiers((), RULES, every=6))


def drawn(rules: str) -> Case:
    q, k, v = (np.random.default_rng(n).standard_normal((1, 2, n, 8)) for n in (N, M, M + 1))
    v = v[:, :, :M]
    return Case(q, k, v, RULES[rules], 0)


PASSES = "rows", "columns", "weights", "transposed", "gradients"


def passes(case: Case) -> dict[str, tuple[Callable[[], dict[str, Array]], int, int]]:
    """Each pass, with the number of products and exponentials that it computes for a block."""
    inputs = case.given
    state, g = case.book.state, case.rng.standard_normal(inputs.q.shape)
    said = Upstream(np.full_like(state.largest, 0.5), g, entropy=np.full_like(state.largest, 0.3))
    every_row = Wanted(output=True, logsumexp=True, max_logit=True, entropy=True, distance=True, top=3)
    return {
        "rows": (lambda: triton.rows(inputs, every_row), 2, 1),
        "columns": (lambda: triton.columns(inputs, state, Wanted(received=True, peak=True)), 1, 1),
        "weights": (lambda: {"weights": triton.weights(inputs, state)}, 1, 1),
        "transposed": (lambda: {"product": triton.transposed(inputs, state, g)}, 2, 1),
        "gradients": (lambda: triton.gradients(inputs, state, said), 7, 2),
    }


def blocks(case: Case) -> int:
    """How many tiles have a query that sees a key."""
    seen = visibility.dense(case.problem).reshape(-1, *case.problem.shape[-2:])
    starts = [np.arange(0, size, TILE) for size in seen.shape[1:]]
    counted = np.add.reduceat(np.add.reduceat(seen.astype(int), starts[0], axis=1), starts[1], axis=2)
    return int((counted > 0).sum())


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the products and exponentials of tiles, and the tiles visited."""
    counts: Counter[str] = Counter()
    dot, exp2 = InterpreterBuilder.create_dot, InterpreterBuilder.create_exp2

    def counted_dot(self: Any, *args: Any) -> Any:
        counts["products"] += 1
        return dot(self, *args)

    def counted_exp2(self: Any, x: Any) -> Any:
        counts["exponentials"] += x.data.ndim == 2
        return exp2(self, x)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_exp2", counted_exp2)
    return counts


@every_rule
@pytest.mark.gate
def test_fully_masked_blocks_are_not_computed(rules: str, done: Counter[str]):
    case = drawn(rules)
    count = blocks(case)
    assert count < 2 * 3 * 5  # otherwise there is no block to skip
    result = passes(case)
    for name in fresh().choice(PASSES, 3, replace=False):
        run, products, exponentials = result[name]
        done.clear()
        run()
        assert (done["products"], done["exponentials"]) == (products * count, exponentials * count), name
