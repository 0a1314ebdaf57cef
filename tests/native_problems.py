"""Random problems against the reference, at the level CLEARHEAD_ISA names: `python native_problems.py seed count`."""

import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from clearhead.core import reference
from clearhead.core.arrays import statistics_dtype
from clearhead.core.directions import Directions
from clearhead.core.problem import describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines import native, portable
from clearhead.engines.base import Kept, Upstream

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
    groups = Groups(*labels, (int(labels[0].max(initial=-1)) + 1, int(labels[1].max(initial=-1)) + 1))
    return Wanted(
        output=True, logsumexp=True, max_logit=True, entropy=True, distance=True, top=int(rng.choice([1, 3, 8])),
        received=True, peak=True, image=(int(rng.integers(1, 9)), int(rng.integers(1, 9))), groups=groups,
    )  # fmt: skip


def compare(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v, rules = random_problem(rng)
    given = describe(q, k, v, rules)
    p = given.problem
    assert native.reasons_not(p) == []
    want = wanted(rng, p.queries, p.keys, p.batch)
    book = reference.attend(p, given.q, given.k, given.v)
    rtol, atol = DTYPES[p.dtype]
    stat = (2e-4, 2e-4) if p.dtype.itemsize == 2 else (rtol, atol)
    assert book.output is not None

    def same(name: str, found: Any, truth: Any, tolerance: tuple[float, float]) -> None:
        message = f"seed {seed}, {name}, {p.dtype}, {rules.keys()}, {p.shape}"
        found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
        np.testing.assert_allclose(found, truth, tolerance[0], tolerance[1], err_msg=message)

    rows = native.rows(p, given.q, given.k, given.v, want)
    same("output", rows["output"], book.output, (rtol, atol + rtol))
    same("logsumexp", rows["logsumexp"], book.logsumexp, stat)
    same("max_logit", rows["max_logit"], reference.max_logit(book), stat)
    same("entropy", rows["entropy"], reference.entropy(book), (stat[0] * 4, stat[1] * 4))
    same("distance", rows["distance"], reference.distance(p, book), (stat[0], stat[1] * p.keys))
    same("top", rows["top_weights"], reference.top(book, want.top or 0)[0], stat)
    columns = native.columns(p, given.q, given.k, rows["logsumexp"], want)
    same("received", columns["received"], reference.received(book), (stat[0], stat[1] * 10))
    same("peak", columns["peak"], reference.peak(book), stat)
    assert want.image is not None
    assert want.groups is not None
    same("image", columns["image"], reference.image(book, *want.image), stat)
    same(
        "groups",
        columns["groups"],
        reference.groups(book, want.groups.queries, want.groups.keys),
        (stat[0], stat[1] * p.queries),
    )
    same("weights", native.weights(p, given.q, given.k, rows["logsumexp"]), book.weights, stat)
    g = rng.standard_normal(
        (p.batch, 1 if rng.random() < 0.5 else p.heads, p.queries, int(rng.integers(1, 40)))
    ).astype(np.float32)
    truth = book.weights.swapaxes(-1, -2) @ g.astype(np.float64)
    found = native.transposed(p, given.q, given.k, rows["logsumexp"], g)
    same("transposed", found, truth, (stat[0], stat[1] * p.queries + 1e-7))
    compare_gradients(rng, given, book, rows["logsumexp"], same)
    compare_tangents(rng, given, want, same)


def compare_gradients(rng: np.random.Generator, given: Any, book: reference.Textbook, lse: Any, same: Any) -> None:
    p, stats = given.problem, statistics_dtype(given.problem.dtype)
    number = lambda *shape: rng.standard_normal(shape).astype(stats)  # noqa: E731
    told = Upstream(
        number(p.batch, p.heads, p.queries),
        strided(rng, rng.standard_normal((p.batch, p.heads, p.queries, given.v.shape[-1])).astype(p.dtype)),
        number(p.batch, p.heads, p.keys) if rng.random() < 0.5 else None,
        number(p.batch, p.heads, p.queries) if rng.random() < 0.5 else None,
        number(p.batch, p.heads, p.queries) if rng.random() < 0.5 else None,
        tuple(size if rng.random() < 0.6 else 1 for size in book.weights.shape) if rng.random() < 0.5 else None,  # type: ignore[arg-type]
    )
    wide = lambda x: x.astype(np.float64)  # noqa: E731
    a, group = book.weights, p.heads // p.kv_heads
    k, v = (np.repeat(wide(x), group, axis=1) for x in (given.k, given.v))
    slope = wide(told.output) @ v.swapaxes(-1, -2) + told.rows[..., None]
    if told.keys is not None:
        slope = slope + told.keys[..., None, :]
    if told.entropy is not None:
        slope = slope - told.entropy[..., None] * np.log(np.where(a > 0, a, 1))
    if told.distance is not None:
        slope = slope + told.distance[..., None] * reference.all_distances(p)
    slope = a * slope
    scale = p.scale[:, None, None]
    bent = slope * (1 - (book.capped / p.softcap) ** 2 if p.softcap else 1)
    fold = lambda x: x.reshape(p.batch, p.kv_heads, group, *x.shape[2:]).sum(2)  # noqa: E731
    truth = {
        "q": scale * (bent @ k),
        "k": fold(scale * bent.swapaxes(-1, -2) @ wide(given.q)),
        "v": fold(a.swapaxes(-1, -2) @ wide(told.output)),
    }
    if told.bias is not None:
        truth["bias"] = slope.sum(axis=tuple(i for i in range(4) if told.bias[i] == 1), keepdims=True)
    found = native.gradients(p, given.q, given.k, given.v, lse, told)
    rtol, atol = DTYPES[p.dtype]
    for name, x in found.items():
        most = np.abs(truth[name]).max(initial=0)
        same(f"gradient {name}", x, truth[name], (rtol, 30 * atol + (3 * atol + rtol) * most))


def compare_tangents(rng: np.random.Generator, given: Any, want: Wanted, same: Any) -> None:
    """Every derivative along a direction, against the portable engine's on the same arrays."""
    p, stats = given.problem, statistics_dtype(given.problem.dtype)
    number = lambda *shape: rng.standard_normal(shape).astype(stats)  # noqa: E731
    maybe = lambda x: x if rng.random() < 0.7 else None  # noqa: E731
    like = lambda x: strided(rng, rng.standard_normal(x.shape).astype(x.dtype))  # noqa: E731
    per_query = p.batch, p.heads, p.queries
    q, k, v = given.q, given.k, given.v
    along = Directions(
        q=maybe(like(q)),
        k=maybe(like(k)),
        v=maybe(like(v)),
        bias=None if p.bias is None else maybe(like(p.bias)),
        sinks=None if p.sinks is None else maybe(rng.standard_normal(p.heads)),
    )
    rows = replace(want, max_logit=False, top=None, own=True)
    columns = replace(want, peak=False)
    truth, found = (engine.tangents(p, q, k, v, along, rows) for engine in (portable, native))
    kept = Kept(truth["logsumexp"], truth["logsumexp_tangent"])
    output = (*per_query, v.shape[-1])
    by, changing = (
        Upstream(
            number(*per_query), like(np.empty(output, p.dtype)), None, *(maybe(number(*per_query)) for _ in range(3)),
            None if p.bias is None else (*per_query, p.keys),
        )
        for _ in range(2)
    )  # fmt: skip
    for title, ask in (
        ("along", lambda engine: truth if engine is portable else found),
        ("known", lambda engine: engine.tangents(p, q, k, v, along, rows, kept.logsumexp, truth["output"])),
        ("columns along", lambda engine: engine.column_tangents(p, q, k, along, kept, columns)),
        ("gradient along", lambda engine: engine.gradient_tangents(p, q, k, v, along, kept, by, changing)),
    ):
        right, mine = ask(portable), ask(native)
        for name, x in right.items():
            finite = np.where(np.isneginf(x.astype(np.float64)), 0, x.astype(np.float64))
            atol = (1e-9 if p.dtype == np.float64 else 2e-3 if p.dtype == np.float32 else 0.1) * (
                1 + np.abs(finite).max(initial=0)
            )
            same(f"{title} {name}", mine[name], x, (0.0, atol))


if __name__ == "__main__":
    first, count = (int(x) for x in sys.argv[1:3])
    for seed in range(first, first + count):
        compare(seed)
    print(native.level())
