"""Random problems against the reference, at the level CLEARHEAD_ISA names: `python native_problems.py seed count`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import statistics_dtype
from clearhead.core.call import describe
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import native, portable
from clearhead.engines.base import Upstream, room_for_ragged

DTYPES = {
    np.dtype(np.float64): (1e-11, 1e-11),
    np.dtype(np.float32): (3e-5, 3e-5),
    np.dtype(ml_dtypes.bfloat16): (2e-2, 3e-3),
    np.dtype(np.float16): (2e-3, 1e-4),
}


def random_problem(rng: np.random.Generator) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Arrays and rules; sizes are odd on purpose."""
    dtype = list(DTYPES)[rng.integers(4)]
    batch, kv_heads, group = (int(rng.integers(1, 3)) for _ in range(3))
    heads = kv_heads * group
    n, m = (int(rng.choice([1, 2, 5, 13, 14, 15, 33, 64, 130, 300])) for _ in range(2))
    if rng.random() < 0.15:
        m = int(rng.choice([513, 2047, 2048, 2300, 4500]))
    d_k, d_v = (int(rng.choice([1, 3, 8, 16, 31, 32, 64, 80])) for _ in range(2))
    make = lambda *shape: strided(rng, rng.standard_normal(shape).astype(dtype))  # noqa: E731
    q, k, v = make(batch, heads, n, d_k), make(batch, kv_heads, m, d_k), make(batch, kv_heads, m, d_v)
    rules: dict[str, Any] = {"query_offset": int(rng.integers(-3, max(1, m - n) + 3))}
    if rng.random() < 0.3:
        rules["query_offset"] = rng.integers(-4, 5 + abs(m - n), batch)
    if rng.random() < 0.2:
        rules["scale"] = float(rng.choice([0.0, -0.3, 2.0]))
    if rng.random() < 0.2:
        rules["softcap"] = float(rng.choice([0.5, 30.0]))
    if rng.random() < 0.25:
        bias = rng.standard_normal((*([1, batch][rng.integers(2)],), heads, n, m)).astype(list(DTYPES)[rng.integers(4)])
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        rules["bias"] = bias
    if rng.random() < 0.2:
        rules["alibi_slopes"] = rng.random(heads) * 0.1
    if rng.random() < 0.4:
        rules["causal"] = True
    if rng.random() < 0.3:
        rules["window"] = (int(rng.integers(0, 40)), None if rng.random() < 0.5 else int(rng.integers(0, 40)))
    if rng.random() < 0.25:
        shape = [(batch, heads, n, m), (m,), (batch, 1, 1, m), (n, 1), (heads, n, m)][rng.integers(5)]
        rules["mask"] = rng.random(shape) < 0.7
    if rng.random() < 0.2:
        rules["kv_lengths"] = rng.integers(0, m + 1, batch)
    if rng.random() < 0.2:
        rules["query_lengths"] = rng.integers(0, n + 1, batch)
    if rng.random() < 0.2:
        rules["query_segments"], rules["kv_segments"] = (np.sort(rng.integers(0, 3, (batch, size))) for size in (n, m))
    if rng.random() < 0.2:
        rules["sinks"] = rng.standard_normal(heads)
    return q, k, v, rules


def strided(rng: np.random.Generator, x: Any) -> Any:
    """The same numbers, now and then in other strides."""
    kind = rng.integers(4)
    if kind == 0:
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if kind == 1:
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if kind == 2:
        return x[..., ::-1].copy()[..., ::-1]
    return x


def wanted(rng: np.random.Generator, n: int, m: int, batch: int) -> Wanted:
    labels = rng.integers(-1, 3, (batch, n)), rng.integers(-1, 4, (batch, m))
    groups = (*labels, (int(labels[0].max(initial=-1)) + 1, int(labels[1].max(initial=-1)) + 1))
    return Wanted(
        output=True, logsumexp=True, max_logit=True, entropy=True, distance=True, top=int(rng.choice([1, 3, 8])),
        received=True, peak=True, image=(int(rng.integers(1, 9)), int(rng.integers(1, 9))), groups=groups,
    )  # fmt: skip


def compare(seed: int) -> None:
    """The row pass against the definition in float64; every other pass against the portable engine's."""
    rng = np.random.default_rng(seed)
    q, k, v, rules = random_problem(rng)
    described = describe(q, k, v, rules)
    inputs, p, q, k, v = described, described.problem, described.q, described.k, described.v
    assert native.reasons_not(p) == []
    want = wanted(rng, p.queries, p.keys, p.batch)
    book = definition.attend(p, q, k, v)
    rtol, atol = DTYPES[p.dtype]
    stat = (2e-4, 2e-4) if p.dtype.itemsize == 2 else (rtol, atol)

    def same(name: str, result: Any, truth: Any, tolerance: tuple[float, float]) -> None:
        message = f"seed {seed}, {name}, {p.dtype}, {rules.keys()}, {p.shape}"
        result, truth = np.asarray(result, np.float64), np.asarray(truth, np.float64)
        np.testing.assert_allclose(result, truth, tolerance[0], tolerance[1], err_msg=message)

    rows = native.rows(inputs, want)
    same("output", rows["output"], book.output, (rtol, atol + rtol))
    same("top", rows["top_weights"], definition.top(book, want.top or 0)[0], stat)
    for name, x in definition.per_query(book).items():
        if name in rows:
            same(name, rows[name], x, (stat[0] * 4, stat[1] * (p.keys if name == "distance" else 4)))
    state = State(rows["largest"], rows["log_sum"])
    same("weights", native.weights(inputs, state), book.weights, stat)
    stats = statistics_dtype(p.dtype)
    number = lambda *shape: rng.standard_normal(shape).astype(stats)  # noqa: E731
    maybe = lambda x: x if rng.random() < 0.7 else None  # noqa: E731
    like = lambda x: strided(rng, rng.standard_normal(x.shape).astype(x.dtype))  # noqa: E731
    per_query, output = (p.batch, p.heads, p.queries), np.empty((p.batch, p.heads, p.queries, v.shape[-1]), p.dtype)
    g = number(p.batch, 1 if rng.random() < 0.5 else p.heads, p.queries, int(rng.integers(1, 40)))
    bias = tuple(size if rng.random() < 0.6 else 1 for size in book.weights.shape)
    upstream = Upstream(
        number(*per_query), like(output), maybe(number(p.batch, p.heads, p.keys)),
        *(maybe(number(*per_query)) for _ in range(2)), bias=maybe(bias),
    )  # fmt: skip
    passes: dict[str, Callable[[Any], Any]] = {
        "columns": lambda engine: engine.columns(inputs, state, want),
        "transposed": lambda engine: {"": engine.transposed(inputs, state, g)},
        "gradient": lambda engine: engine.gradients(inputs, state, upstream),
    }
    close = 1e-9 if p.dtype == np.float64 else 2e-3 if p.dtype == np.float32 else 0.1
    for title, ask in passes.items():
        right, result = ask(portable), ask(native)
        for name, x in right.items():
            finite = np.where(np.isneginf(x.astype(np.float64)), 0, x.astype(np.float64))
            allowed = 10 * stat[1] if title in ("columns", "transposed") else close
            same(f"{title} {name}", result[name], x, (0.0, allowed * (1 + np.abs(finite).max(initial=0))))


def compare_ragged(seed: int) -> None:
    """A ragged batch over pages: each request's bits are those of the row and the column pass alone."""
    rng = np.random.default_rng(seed)
    dtype = list(DTYPES)[rng.integers(4)]
    page, kv_heads, group = 16 * int(rng.integers(1, 5)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
    d_k, d_v = (int(rng.choice([1, 8, 16, 31, 32, 64])) for _ in range(2))
    queries, keys = (rng.choice([0, 1, 1, 5, 16, 17, 70, 300], int(rng.integers(1, 5))) for _ in range(2))
    keys = np.resize(keys, queries.shape)
    if rng.random() < 0.2:
        keys[0] = 2300
    needed = -(-keys // page)
    table = np.full((len(keys), needed.max() + 1), 1 << 30, np.int32)
    blocks = rng.permutation(needed.sum()).astype(np.int32)
    for row, (first, count) in enumerate(zip(needed.cumsum() - needed, needed, strict=True)):
        table[row, :count] = blocks[first : first + count]
    make = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    q = make(queries.sum(), kv_heads * group, d_k)
    k, v = (strided(rng, make(needed.sum(), page, kv_heads, d)) for d in (d_k, d_v))
    rules: Any = {"causal": bool(rng.random() < 0.7), "sinks": rng.standard_normal(q.shape[1])}
    want = Wanted(output=True, logsumexp=True, entropy=True, received=True, top=3, diagonal=True)
    problem = describe(np.zeros((q.shape[1], 1, d_k), dtype), np.zeros((kv_heads, 1, d_k), dtype), None, rules).problem
    starts = np.array([0, *queries.cumsum()])
    whole = replace(problem, rows=range(len(q)), cols=range(int(keys.sum())))
    results = room_for_ragged(whole, d_v, want, native.STATISTICS)
    native.ragged(problem, q, k, v, (starts, None, keys, table), results)
    for row, (n, m) in enumerate(zip(queries, keys, strict=True)):
        near = [x[table[row, : needed[row]]].reshape(-1, *x.shape[2:])[:m].swapaxes(0, 1) for x in (k, v)]
        part = q[starts[row] : starts[row + 1]].swapaxes(0, 1)
        one = describe(part, *near, rules | {"query_offset": int(m - n)})
        answers = engines.answer(native, one, want)  # type: ignore[arg-type]
        last = keys.cumsum()[row]
        for name, x in results.items():
            places = slice(last - m, last) if name == "received" else slice(*starts[row : row + 2])
            message = f"seed {seed}, request {row}, {name}"
            np.testing.assert_array_equal(x[places], answers[name][0].swapaxes(0, 1), message)


if __name__ == "__main__":
    first, count = (int(x) for x in sys.argv[1:3])
    for seed in range(first, first + count):
        compare(seed)
        compare_ragged(seed)
    print(native.level())
