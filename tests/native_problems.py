"""The parity tests, gradients and ragged batches of the kernel, at the level CLEARHEAD_ISA names.

`python native_problems.py COUNT` draws so many problems for each. It needs no PyTorch, so that sanitizers can run it.
"""

import sys
from typing import Any

import numpy as np
from hypothesis import given, settings

import conftest
import seeds
import test_parity
import test_products
from clearhead import engines
from clearhead.core.arrays import FLOATS, statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.statistics import Wanted
from clearhead.engines import native, portable
from clearhead.engines.base import Upstream, kinds
from problems import LAYOUTS, Case, cases

CLOSE = dict(zip(FLOATS, (1e-9, 2e-3, 0.1, 0.1), strict=True))  # of the largest gradient


def gradients(case: Case) -> None:
    """The kernel's gradients are the portable engine's."""
    p, rng, inputs = case.problem, case.rng, case.given
    usual, sizes = statistics_dtype(p.dtype), (p.batch, p.heads, p.queries)
    number = lambda *shape, dtype=usual: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    maybe = lambda x: x if rng.random() < 0.7 else None  # noqa: E731
    output = LAYOUTS[sorted(LAYOUTS)[rng.integers(len(LAYOUTS))]](number(*sizes, inputs.d_v, dtype=p.dtype))
    upstream = Upstream(
        number(*sizes), output, maybe(number(*sizes[:2], p.keys)), maybe(number(*sizes)), maybe(number(*sizes)),
        bias=maybe(tuple(size if rng.random() < 0.6 else 1 for size in (*sizes, p.keys))),
    )  # fmt: skip
    state = engines.state_of(portable, inputs)  # type: ignore[arg-type]
    result, truth = (engine.gradients(inputs, state, upstream) for engine in (native, portable))
    for name, x in truth.items():
        allowed = CLOSE[p.dtype] * (1 + np.abs(x.astype(np.float64)).max(initial=0))
        np.testing.assert_allclose(*(y.astype(np.float64) for y in (result[name], x)), 0, allowed, err_msg=name)


def ragged(rng: np.random.Generator) -> None:
    """Each request of a ragged batch over pages has the bits of the row and the column pass alone."""
    dtype = FLOATS[rng.integers(4)]
    page, kv_heads, group = 16 * int(rng.integers(1, 5)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
    d_k, d_v = (int(rng.choice([1, 8, 16, 31, 32, 64])) for _ in range(2))
    queries, keys = rng.choice([0, 1, 1, 5, 16, 17, 70, 300, 2300], (2, 4), p=[0.12] * 8 + [0.04])
    queries[0] = max(queries[0], 1)  # the rules are described by a query that there is
    needed = -(-keys // page)
    table = np.full((4, needed.max() + 1), 1 << 30, np.int32)
    table[np.arange(table.shape[1]) < needed[:, None]] = rng.permutation(needed.sum())
    make = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    q, k, v = make(queries.sum(), kv_heads * group, d_k), *(make(needed.sum(), page, kv_heads, d) for d in (d_k, d_v))
    rules: Any = {"causal": bool(rng.random() < 0.7), "sinks": rng.standard_normal(q.shape[1])}
    want = Wanted(output=True, logsumexp=True, entropy=True, received=True, top=3, diagonal=True)
    problem = describe(q[:1].swapaxes(0, 1), k[:1, 0].swapaxes(0, 1), None, rules).problem
    starts, ends = np.array([0, *queries.cumsum()]), keys.cumsum()
    results: dict[str, Array] = {
        name: np.empty((ends[-1] if name == "received" else len(q), q.shape[1], *shape[3:]), kind)
        for name, (shape, kind) in kinds(problem, want, want.names(), native.STATISTICS, d_v).items()
    }
    native.ragged(problem, q, k, v, (starts, None, keys, table), results)
    for row, (n, m) in enumerate(zip(queries, keys, strict=True)):
        near = [x[table[row, : needed[row]]].reshape(-1, *x.shape[2:])[:m].swapaxes(0, 1) for x in (k, v)]
        part = q[starts[row] : starts[row + 1]].swapaxes(0, 1)
        one = describe(part, *near, rules | {"query_offset": int(m - n)})
        answers = engines.answer(native, one, want)  # type: ignore[arg-type]
        for name, x in results.items():
            places = slice(ends[row] - m, ends[row]) if name == "received" else slice(*starts[row : row + 2])
            np.testing.assert_array_equal(x[places], answers[name][0].swapaxes(0, 1), f"request {row}, {name}")


if __name__ == "__main__":
    if native.missing():
        sys.exit(native.missing())
    count = int(sys.argv[1])
    settings.register_profile("here", max_examples=count, deadline=None, suppress_health_check=conftest.QUIET)
    settings.load_profile("here")
    print("seed", seeds.start(), file=sys.stderr)
    for test in (
        test_parity.test_output_and_row_statistics,
        test_parity.test_column_statistics,
        test_parity.test_indexing_works_as_on_a_numpy_array,
        test_parity.test_products_from_the_keys_side,
    ):
        test("compiled")
    test_products.test_products_are_those_of_the_unpacked_numbers()
    given(case=cases(most=20_000))(gradients)()
    for _ in range(count):
        ragged(seeds.fresh())
    print(native.level())
