"""The problems of `assert_attention`: kind, sizes, rules and numbers, all drawn from one seed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.rules import RULES, Rules
from clearhead.core.visibility import dense

KINDS: dict[str, str] = {  # what a kind of problem is about
    "usual": "normal numbers",
    "large scores": "scores in the hundreds and thousands, so that exp overflows where the maximum is not subtracted",
    "scores far below zero": "all scores near -300, so that every power is 0 where the maximum is not subtracted",
    "growing scores": "later keys have larger scores, so that a running maximum has to be raised often",
    "equal scores": "all scores are 0, so that the output is the mean of the visible values",
    "many keys": "one to two thousand keys, many blocks of a kernel",
    "one query": "a single query, as in decoding",
    "strides": "arrays that lie in memory with their heads and tokens swapped",
    "empty rows": "some queries see no key: their output is 0",
    "NaN behind the mask": "NaN and infinity in keys, values and queries that the rules hide from everybody",
}
LENGTHS = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129)
WIDTHS = (16, 64, (40, 24))
_LONG = (1000, 1024, 1025, 2047)
_HIDING = ("mask", "kv_lengths", "query_lengths", "query_segments")
_NEEDED = {"empty rows": (*_HIDING, "bias"), "NaN behind the mask": _HIDING}  # kinds, and rules of which they need one
_MOST = 300_000  # weights of one problem


class Sizes(NamedTuple):
    """The sizes of one problem."""

    batch: int
    kv_heads: int
    group: int  # query heads for each key head
    queries: int
    keys: int
    d_k: int
    d_v: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Draws:
    """What a caller of `assert_attention` asks for."""

    rules: Mapping[str, Any]  # of every problem; True: drawn for each
    optional: tuple[str, ...]  # rules of some problems
    kinds: tuple[str, ...]
    dtypes: tuple[np.dtype[Any], ...]
    lengths: tuple[int, ...] | None
    widths: tuple[tuple[int, int], ...]
    grouped: bool


@dataclass(frozen=True)
class Plan:
    """One problem before its numbers: everything that may be made smaller."""

    seed: int
    kind: str
    dtype: np.dtype[Any]
    sizes: Sizes
    names: frozenset[str]  # of its rules


RuleDraw = Callable[[np.random.Generator, Plan], dict[str, Any]]


class Drawn(NamedTuple):
    """One problem: q (batch, heads, queries, d_k), k and v (batch, kv_heads, keys, …), and its rules.

    `empty` (batch, heads, queries, 1) are the rows that see nothing.
    """

    q: Array
    k: Array
    v: Array
    rules: dict[str, Any]
    empty: Array


def possible_kinds(draws: Draws) -> tuple[str, ...]:
    """The kinds that these rules and sizes can have."""
    names = {*draws.rules, *draws.optional}
    lacking = {kind for kind, needed in _NEEDED.items() if names.isdisjoint(needed)}
    if (_square(draws, set(draws.rules))) or (draws.lengths is not None and 1 not in draws.lengths):
        lacking.add("one query")
    return tuple(kind for kind in draws.kinds if kind not in lacking)


def planned(draws: Draws, seed: int) -> Plan:
    """The plan of a seed; consecutive seeds have different kinds."""
    kinds, rng = possible_kinds(draws), np.random.default_rng([seed, 0])
    kind = kinds[seed % len(kinds)]
    names = {*draws.rules, *(name for name in draws.optional if rng.random() < 0.5)}
    needed = _NEEDED.get(kind, ())
    if needed and not names & set(needed):
        names.add(str(rng.choice([name for name in needed if name in draws.optional])))
    if kind == "one query" and _square(draws, names):
        names -= {"causal", "window"} - draws.rules.keys()
    dtype = draws.dtypes[int(rng.integers(len(draws.dtypes)))]
    return Plan(seed, kind, dtype, _sizes(draws, kind, names, rng), frozenset(names))


def _square(draws: Draws, names: set[str]) -> bool:
    """Do positions count, and is no query_offset given? Then queries and keys must be as many."""
    positional = any(name in names and draws.rules.get(name) is not False for name in ("causal", "window"))
    return positional and "query_offset" not in draws.rules and "query_offset" not in names


def _sizes(draws: Draws, kind: str, names: set[str], rng: np.random.Generator) -> Sizes:
    lengths = draws.lengths or LENGTHS
    n, m = (int(x) for x in rng.choice(lengths, 2))
    d_k, d_v = draws.widths[int(rng.integers(len(draws.widths)))]
    if kind == "many keys":
        m = max(draws.lengths) if draws.lengths else int(rng.choice(_LONG))
        n = min(n, 33) if draws.lengths is None else n
    if kind == "one query":
        n = 1
    if _square(draws, names) or (kind not in ("many keys", "one query") and rng.random() < 0.4):
        n = m = m if kind == "many keys" else n
    batch, kv_heads = (int(x) for x in rng.integers(1, 4, 2))
    group = int(rng.choice([1, 2, 4])) if draws.grouped else 1
    while batch * kv_heads * group * n * m > _MOST and batch * kv_heads * group > 1:
        batch, kv_heads, group = max(1, batch // 2), max(1, kv_heads // 2), max(1, group // 2)
    return Sizes(batch, kv_heads, group, n, m, d_k, d_v)


def smaller(draws: Draws, plan: Plan) -> Iterator[Plan]:
    """Plans of the same kind with something left out, the boldest first."""
    sizes = plan.sizes
    for name in sorted(plan.names - draws.rules.keys()):
        yield replace(plan, names=plan.names - {name})
    for field, most in (("batch", sizes.batch), ("group", sizes.group), ("kv_heads", sizes.kv_heads)):
        for size in {1, most // 2, most - 1}:
            if 0 < size < most:
                yield replace(plan, sizes=sizes._replace(**{field: size}))
    allowed = draws.lengths or tuple(range(1, max(sizes.queries, sizes.keys)))
    square = _square(draws, set(plan.names))
    for fields in (("queries", "keys"),) if square else (("queries", "keys"), ("queries",), ("keys",)):
        for cut in (8, 4, 2, 1):
            changes = {}
            for field in fields:  # the largest allowed one of size/cut at most; for a cut of 1 the next smaller one
                size = getattr(sizes, field)
                fits = (length for length in allowed if length <= (size - 1 if cut == 1 else size // cut))
                changes[field] = max(fits, default=size)
            if any(changes[field] != getattr(sizes, field) for field in fields):
                yield replace(plan, sizes=sizes._replace(**changes))
    for d_k, d_v in draws.widths:
        if d_k + d_v < sizes.d_k + sizes.d_v:
            yield replace(plan, sizes=sizes._replace(d_k=d_k, d_v=d_v))


def drawn(draws: Draws, plan: Plan) -> Drawn:
    """The numbers of a plan, the same each time."""
    rng, s = np.random.default_rng([plan.seed, 1]), plan.sizes
    rules = _rules(draws, plan, rng)
    shapes = (
        (s.batch, s.heads, s.queries, s.d_k),
        (s.batch, s.kv_heads, s.keys, s.d_k),
        (s.batch, s.kv_heads, s.keys, s.d_v),
    )
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    scale = max(float(np.abs(rules.get("scale", s.d_k**-0.5)).max()), 1e-3)
    if plan.kind == "large scores":
        q = q * float(rng.choice([30, 100, 250])) / (scale * s.d_k**0.5)
    elif plan.kind == "scores far below zero":
        q[..., 0], k[..., 0] = -50 / scale, 6
    elif plan.kind == "growing scores":
        k = k * np.linspace(0.1, 4, s.keys)[:, None]
    elif plan.kind == "equal scores":
        q = 0 * q
    q, k, v = (x.astype(plan.dtype) for x in (q, k, v))
    seen = dense(describe(q, k, v, cast("Rules", rules)).problem)
    if plan.kind == "NaN behind the mask":
        poison = rng.choice([np.nan, np.inf, -np.inf])
        hidden_k = ~np.asarray(seen.any(axis=(1, 2), keepdims=True)).swapaxes(2, 3)
        k, v = (np.where(hidden_k, poison, x.astype(np.float64)).astype(plan.dtype) for x in (k, v))
        if "query_lengths" in rules:
            hidden_q = ~np.asarray(seen.any(axis=(1, 3), keepdims=True))
            q = np.where(hidden_q, poison, q.astype(np.float64)).astype(plan.dtype)
    return Drawn(q, k, v, rules, ~np.asarray(seen.any(axis=-1, keepdims=True)))


def _rules(draws: Draws, plan: Plan, rng: np.random.Generator) -> dict[str, Any]:
    """The values of the plan's rules."""
    results: dict[str, Any] = {}
    for name in (name for name in RULES if name in plan.names):
        value = draws.rules.get(name, True)
        if value is True:
            results |= RULE_DRAWS[name](rng, plan)
        elif value is not False and value is not None:
            results[name] = value(plan.sizes.queries, plan.sizes.keys) if callable(value) else value
    if results.get("causal") is None and "window" not in results:
        results.pop("query_offset", None)  # no rule reads it
    return results


def _mask(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    s = plan.sizes
    mask = rng.random((s.batch, s.heads, s.queries, s.keys)) < rng.choice([0.3, 0.7, 0.95])
    if plan.kind == "empty rows":
        mask[:, :, (rng.random(s.queries) < 0.3) | (np.arange(s.queries) == rng.integers(s.queries))] = False
    if plan.kind == "NaN behind the mask":
        mask[..., (rng.random(s.keys) < 0.3) | (np.arange(s.keys) == rng.integers(s.keys))] = False
    return {"mask": mask}


def _bias(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    s = plan.sizes
    bias = 2 * rng.standard_normal((s.batch, s.heads, s.queries, s.keys))
    if plan.kind == "empty rows":
        bias[:, :, rng.integers(s.queries)] = -np.inf
    return {"bias": bias.astype(plan.dtype)}


def _lengths(name: str, size: str) -> RuleDraw:
    def draw(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
        most = getattr(plan.sizes, size)
        shorter = plan.kind in ("NaN behind the mask", "empty rows") and most > 1
        lengths = rng.integers(1, most + (not shorter), plan.sizes.batch)
        if plan.kind == "empty rows":
            lengths[0] = 0
        return {name: lengths}

    return draw


def _segments(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    s, count = plan.sizes, int(rng.integers(1, 5))
    sides = [np.sort(rng.integers(0, count, (s.batch, size))) for size in (s.queries, s.keys)]
    if plan.kind == "empty rows":
        sides[0][:, -1] = count
    if plan.kind == "NaN behind the mask":
        sides[1][:, -1] = count + 1
    return {"query_segments": sides[0], "kv_segments": sides[1]}


def _spans(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    s = plan.sizes
    table = rng.standard_normal((s.heads, 3, 4)).astype(np.float32)
    return {"spans": (rng.integers(-1, 3, (s.batch, s.queries)), rng.integers(-1, 4, (s.batch, s.keys)), table)}


def _window(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    left, right = (int(x) for x in rng.choice([0, 1, 2, 5, 16, 31, 64], 2))
    return {"window": (left, None if "causal" in plan.names else right)}


def _offset(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    ahead = max(0, plan.sizes.keys - plan.sizes.queries)
    return {"query_offset": int(rng.choice([0, ahead, int(rng.integers(0, ahead + 1))]))}


def _one(name: str, draw: Callable[[np.random.Generator], Any]) -> RuleDraw:
    return lambda rng, _: {name: draw(rng)}


RULE_DRAWS: dict[str, RuleDraw] = {
    "scale": _one("scale", lambda rng: float(rng.uniform(0.05, 1))),
    "softcap": _one("softcap", lambda rng: float(rng.choice([2.0, 20.0, 50.0]))),
    "bias": _bias,
    "alibi_slopes": lambda _, plan: {"alibi_slopes": (2.0 ** -np.arange(1, plan.sizes.heads + 1)).astype(np.float32)},
    "spans": _spans,
    "causal": _one("causal", lambda _: True),
    "window": _window,
    "mask": _mask,
    "kv_lengths": _lengths("kv_lengths", "keys"),
    "query_lengths": _lengths("query_lengths", "queries"),
    "query_segments": _segments,
    "kv_segments": lambda *_: {},  # drawn with the queries'
    "sinks": lambda rng, plan: {"sinks": rng.standard_normal(plan.sizes.heads).astype(np.float32)},
    "query_offset": _offset,
}
