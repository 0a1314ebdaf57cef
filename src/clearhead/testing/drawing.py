"""Draws the problems of `assert_attention`: kind, sizes, rules and numbers, all from one seed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.call import describe
from clearhead.core.rules import Rules, flat, joined
from clearhead.core.visibility import dense

KINDS: dict[str, str] = {  # each kind of problem, and what it tests
    "usual": "normal numbers",
    "large scores": "scores in the hundreds and thousands, so that exp overflows where the maximum is not subtracted",
    "growing scores": "later keys have larger scores, so that a running maximum has to be raised often",
    "many keys": "one to two thousand keys, many blocks of a kernel",
    "one query": "a single query, as in decoding",
    "strides": "arrays that lie in memory with their heads and tokens swapped",
    "empty rows": "some queries see no key: their output is 0",
    "NaN behind the mask": "NaN and infinity in keys and values that the rules hide from all queries",
}
SIZES = ("batch", "kv_heads", "group", "queries", "keys", "d_k", "d_v")  # those of a ProblemPlan
LENGTHS = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129)
WIDTHS = (16, 64, (40, 24))
_LONG = (1000, 1024, 1025, 2047)
_HIDING = {"mask", "kv_lengths", "query_lengths", "query_segments"}
NEEDED = {"empty rows": {*_HIDING, "bias"}, "NaN behind the mask": _HIDING}  # kinds that need one of these rules
_MOST = 300_000  # weights of one problem


class ProblemPlan(NamedTuple):
    """A problem's seed, kind, dtypes, rules and sizes, before its numbers are drawn."""

    seed: int
    kind: str
    dtype: np.dtype[Any]
    result: np.dtype[Any]  # the dtype of the output
    names: frozenset[str]  # of its rules
    fixed: Mapping[str, Any]  # rules whose values are given: a value, or a function of queries and keys
    batch: int
    kv_heads: int
    group: int  # query heads for each key head
    queries: int
    keys: int
    d_k: int
    d_v: int

    @property
    def pairs(self) -> tuple[int, ...]:
        """The axes of its weights."""
        return self.batch, self.kv_heads * self.group, self.queries, self.keys


def parts(problem: Mapping[str, Any]) -> tuple[list[Any], Rules]:
    """Split a problem into q (batch, heads, queries, d_k), k and v (batch, kv_heads, keys, …), and its rules."""
    return [problem[name] for name in "qkv"], joined({name: x for name, x in problem.items() if name not in "qkv"})


def planned(
    seed: int,
    *,
    rules: Mapping[str, Any],
    optional: Sequence[str],
    kinds: Sequence[str],
    dtypes: Sequence[tuple[np.dtype[Any], np.dtype[Any]]],
    lengths: Sequence[int] | None,
    widths: Sequence[tuple[int, int]],
    grouped: bool,
) -> ProblemPlan:
    """Draw the plan of a seed; arguments as in `assert_attention`. Consecutive seeds have different kinds."""
    kind, rng = kinds[seed % len(kinds)], np.random.default_rng([seed, 0])
    names = {*rules, *(name for name in optional if kind in NEEDED or rng.random() < 0.5)}
    names |= {"query_segments", "kv_segments"} if names & {"query_segments", "kv_segments"} else set()
    dtype, result = dtypes[int(rng.integers(len(dtypes)))]
    n, m = (int(x) for x in rng.choice(lengths or LENGTHS, 2))
    if kind == "many keys":
        m = max(lengths) if lengths else int(rng.choice(_LONG))
        n = n if lengths else min(n, 33)
    if kind == "one query":
        n = min(lengths or LENGTHS)
    if names & {"causal", "window"} and "query_offset" not in names:  # otherwise the causal corner would be ambiguous
        n = m = m if kind == "many keys" else n
    batch, kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
    if batch * kv_heads * group * n * m > _MOST:
        batch = kv_heads = 1
    sizes = (batch, kv_heads, group if grouped else 1, n, m, *rng.choice(widths).tolist())
    fixed = {name: value for name, value in rules.items() if value is not True}
    return ProblemPlan(seed, kind, dtype, result, frozenset(names), fixed, *sizes)


def drawn(plan: ProblemPlan, *, again: bool = False) -> dict[str, Any]:
    """Draw q, k, v and the rules of a plan, by name as in `flat`; `again` draws a second call with equal shapes."""
    problem, s = _numbers(plan, 1), plan
    if again:
        others = _numbers(plan, 2)
        problem = {name: _mixed(value, others[name]) for name, value in problem.items()}
    q, k, v = (problem[name] for name in "qkv")
    stated = describe(q, k, v, parts(problem)[1]).problem  # raises for wrong values of rules
    rng, scale = np.random.default_rng([s.seed, 3]), max(float(np.abs(stated.scale).max()), 1e-3)
    if s.kind == "large scores":
        q = q * float(rng.choice([30, 100, 250])) / (scale * s.d_k**0.5)
    elif s.kind == "growing scores":
        k = k * np.linspace(0.1, 4, s.keys)[:, None]
    elif s.kind == "NaN behind the mask":
        hidden = ~np.asarray(dense(stated).any(axis=(1, 2), keepdims=True))
        k, v = (np.where(hidden.swapaxes(2, 3), rng.choice([np.nan, np.inf, -np.inf]), x) for x in (k, v))
    return problem | {name: x.astype(s.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}


def _numbers(plan: ProblemPlan, draw: int) -> dict[str, Any]:
    """Normal numbers for q, k and v, and the values of the plan's rules."""
    rng, s = np.random.default_rng([plan.seed, draw]), plan
    shapes = (*s.pairs[:3], s.d_k), (s.batch, s.kv_heads, s.keys, s.d_k), (s.batch, s.kv_heads, s.keys, s.d_v)
    rules = {name: value for name, value in rule_values(rng, s).items() if name in s.names}
    rules |= {name: x(s.queries, s.keys) if callable(x) else x for name, x in s.fixed.items()}
    if not rules.keys() & {"causal", "window"}:
        rules.pop("query_offset", None)  # no rule reads it
    return {**{name: rng.standard_normal(shape) for name, shape in zip("qkv", shapes, strict=True)}, **flat(rules)}


def _mixed(first: Any, other: Any) -> Any:
    """Numbers for a second call: large arrays keep their first and last third, which a wrong cache may compare."""
    if not isinstance(first, np.ndarray):
        return first
    if first.ndim < 4:
        return other
    mixed, middle = first.copy(), slice(first.size // 3, first.size - first.size // 3)
    mixed.flat[middle] = other.flat[middle]
    return mixed


def rule_values(rng: np.random.Generator, plan: ProblemPlan) -> dict[str, Any]:
    """Draw a value for every rule, whether the problem has it or not."""
    s, heads = plan, plan.pairs[1]
    mask, bias = rng.random(s.pairs) < rng.choice([0.3, 0.7, 0.95]), 2 * rng.standard_normal(s.pairs)
    sides, row, key = (s.queries, s.keys), rng.integers(s.queries), rng.integers(s.keys)
    lengths = [rng.integers(1, size + 1, s.batch) for size in sides]
    segments = [np.sort(rng.integers(0, 4, (s.batch, size))) for size in sides]
    if plan.kind == "empty rows":
        mask[:, :, row], bias[:, :, row] = False, -np.inf
        lengths[0][0] = lengths[1][0] = 0
        segments[0][:, -1] = 4
    if plan.kind == "NaN behind the mask":
        mask[..., key] = False
        lengths = [np.minimum(x, max(1, size - 1)) for x, size in zip(lengths, sides, strict=True)]
        segments[1][:, -1] = 5
    left, right = (int(x) for x in rng.choice([0, 1, 2, 5, 16, 31, 64], 2))
    labels = rng.integers(-1, 3, (s.batch, s.queries)), rng.integers(-1, 4, (s.batch, s.keys))
    return {
        "scale": float(rng.uniform(0.05, 1)),
        "softcap": float(rng.choice([2.0, 20.0, 50.0])),
        "bias": bias.astype(plan.dtype),
        "alibi_slopes": (2.0 ** -np.arange(1, heads + 1)).astype(np.float32),
        "spans": (*labels, rng.standard_normal((heads, 3, 4)).astype(np.float32)),
        "causal": True,
        "window": (left, None if "causal" in plan.names else right),
        "mask": mask,
        "kv_lengths": lengths[1],
        "query_lengths": lengths[0],
        "query_segments": segments[0],
        "kv_segments": segments[1],
        "sinks": rng.standard_normal(heads).astype(np.float32),
        "query_offset": int(rng.choice([0, max(0, s.keys - s.queries)])),
    }
