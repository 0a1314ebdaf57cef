"""Merges two partial answers into one, over disjoint keys or over disjoint queries.

Answers over disjoint keys merge by their log-sum-exp, as in online softmax (Milakov & Gimelshein 2018): with
L = ln(exp(L_a) + exp(L_b)), a weighted sum becomes exp(L_a - L)·sum_a + exp(L_b - L)·sum_b, by the rows' states
(state.py). Answers over disjoint queries, whose states are final, are concatenated, added or reduced to the larger.
`STATISTICS` says which of these applies to each statistic.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from clearhead.core import state as states
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS
from clearhead.errors import RuleError, ShapeError

Results = Mapping[str, Any]  # answers by name; what is missing or None was not asked for
Parts = Sequence[tuple[Sequence[Array], Array]]  # the arrays of each part's answer, and exp(L_part - L), (…, queries)


def over_queries(a: Results, b: Results) -> dict[str, Any]:
    """Merge two answers over disjoint queries and the same keys; b's queries follow a's.

    Raises RuleError where only one part has some statistic, ShapeError where more than the number of queries (for
    groups, of query groups) differs.
    """
    _check_alike(a, b)
    result = {}
    for name in _asked(a):
        axis, merge = STATISTICS[name].queries_axis, _OVER_QUERIES[STATISTICS[name].over_queries]
        if name != "groups":
            _check_shapes(name, a[name], b[name], axis, "queries")
        (first, back), (second, _) = _read(name, a[name]), _read(name, b[name])
        result[name] = back(merge(one, other, axis) for one, other in zip(first, second, strict=True))
    return result


def over_keys(a: Results, b: Results, keys: int) -> dict[str, Any]:
    """Merge two answers over disjoint keys and the same queries; a has `keys` keys, and b's keys follow them.

    Raises RuleError where a part has no log-sum-exp, where it has a statistic per key, or where only one part has some
    statistic; ShapeError where their queries differ.
    """
    for part in (a, b):
        check_weighable(part)
    shapes = [part["logsumexp"].largest.shape for part in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"the parts have log-sum-exp {shapes[0]} and {shapes[1]}: they must be the same queries.")
    _check_alike(a, b)
    for name in _asked(a):
        _check_shapes(name, a[name], b[name], -1 if STATISTICS[name].over_keys == "strongest" else None, "keys")
    return weighed(a, b, keys)


def check_weighable(part: Results) -> None:
    """Raise RuleError unless this answer can be merged over keys: it has its log-sum-exp and no statistic per key."""
    if part["logsumexp"] is None:
        raise RuleError("a part has no logsumexp: parts over keys are weighed by it.", "observe(logsumexp=True)")
    column = next((name for name in _asked(part) if STATISTICS[name].over_keys is None), None)
    if column:
        raise RuleError(
            f"{column} over some keys only cannot be merged: a column statistic needs the final log-sum-exp.",
            "observe it from the whole matrix, or over disjoint queries and merge_queries.",
        )


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def weighed(a: Results, b: Results, keys: int) -> dict[str, Any]:
    """`over_keys` without its checks; b may hold a state and nothing else, which is how a sink is merged in."""
    each = [State(*(x.astype(np.float64) for x in _read("logsumexp", part["logsumexp"])[0])) for part in (a, b)]
    whole = states.merged(np, *each)
    shares = [states.share(np, state, whole) for state in each]  # 0 where a part sees nothing
    result = {}
    for name in _asked(a):
        first, back = _read(name, a[name])
        parts = [(first, shares[0])]
        if b.get(name) is not None:
            parts.append((_read(name, b[name])[0], shares[1]))
        merge = _OVER_KEYS.get(STATISTICS[name].over_keys)
        made = whole if merge is None else merge(parts, keys)
        result[name] = back(x.astype(like.dtype, copy=False) for x, like in zip(made, first, strict=True))
    return result


def _read(name: str, x: Any) -> tuple[list[Array], Callable[[Iterable[Array]], Any]]:
    """An answer's arrays in the CPU's memory, and a function that makes an answer of its kind of others."""
    several = isinstance(x, tuple)
    arrays, restores = zip(*(as_host_array(one, name) for one in (x if several else (x,))), strict=True)

    def back(made: Iterable[Array]) -> Any:
        restored = [restore(array) for restore, array in zip(restores, made, strict=True)]
        return type(x)(*restored) if several else restored[0]

    return list(arrays), back


def _strongest(parts: Parts, keys: int) -> list[Array]:
    weights = np.concatenate([x * share[..., None] for (x, _), share in parts], axis=-1)
    each = [np.where(at < 0, -1, at + place * keys) for place, ((_, at), _) in enumerate(parts)]
    places, count = np.concatenate(each, axis=-1), min(x.shape[-1] for x in each)
    order = np.argsort(np.where(places < 0, 1.0, -weights), axis=-1, kind="stable")[..., :count]
    return [np.take_along_axis(x, order, axis=-1) for x in (weights, places)]


def _weigh(parts: Parts, _: int) -> list[Array]:
    return [reduce(np.add, (
        x.astype(np.float64) * share.reshape(share.shape + (1,) * (x.ndim - share.ndim)) for (x,), share in parts
    ))]  # fmt: skip


def _entropy(parts: Parts, _: int) -> list[Array]:
    """H = Σ_part share·(H_part + L - L_part)."""
    return [reduce(np.add, (share * (x - np.log(np.where(share > 0, share, 1.0))) for (x,), share in parts))]


def _asked(part: Results) -> list[str]:
    return [name for name in STATISTICS if part.get(name) is not None]


def _check_alike(a: Results, b: Results) -> None:
    """Raise RuleError unless both parts have the same statistics: what only one of them has could not be merged."""
    for name in STATISTICS:
        if (a[name] is None) != (b[name] is None):
            has, lacks = ("first", "second") if b[name] is None else ("second", "first")
            raise RuleError(
                f"the {has} part has {name}, the {lacks} has not: it cannot be joined.",
                f"observe both parts with {'v' if name == 'output' else name}, or neither.",
            )


def _check_shapes(name: str, one: Any, other: Any, free: int | None, over: str) -> None:
    """Raise ShapeError unless the shapes are equal; the axis `free`, counted from the end, may differ."""
    for pair in zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]:
        left, right = (tuple(x.shape) for x in pair)
        rest = [[size for axis, size in enumerate(s) if free is None or axis != len(s) + free] for s in (left, right)]
        if rest[0] != rest[1] or len(left) != len(right):
            raise ShapeError(f"the parts have {name} {left} and {right}: only the {over} may differ between them.")


def _add(one: Array, other: Array, axis: int | None) -> Array:
    """Add two arrays; tables (…, query groups, key groups) may differ in their number of query groups."""
    if axis is None:
        return one + other
    if one.shape[-1] != other.shape[-1]:
        raise ShapeError(f"one part has {one.shape[-1]} key groups, the other {other.shape[-1]}: they share all keys.")
    _check_shapes("groups", one, other, axis, "query groups")
    total = np.zeros((*one.shape[:-2], max(one.shape[-2], other.shape[-2]), one.shape[-1]), one.dtype)
    for part in (one, other):
        total[..., : part.shape[-2], :] += part
    return total


_OVER_KEYS: dict[str | None, Callable[[Parts, int], Sequence[Array]]] = {  # and logsumexp, which is the merged state
    "weighed": _weigh,
    "larger": lambda parts, _: [reduce(np.maximum, (x for (x,), _ in parts))],
    "entropy": _entropy,
    "strongest": _strongest,
}
_OVER_QUERIES: dict[str, Callable[[Array, Array, int | None], Array]] = {
    "after": lambda one, other, axis: np.concatenate([one, other], axis=axis),
    "added": _add,
    "larger": lambda one, other, _: np.maximum(one, other),
}


def sink_weights(xp: Any, sinks: Any, state: State) -> Any:
    """exp((sink - m_i) - l_i), (batch, heads, queries); 0 for a row without visible keys."""
    empty = xp.isneginf(state.largest)
    above = sinks[:, None] - xp.where(empty, 0.0, state.largest)
    return xp.exp(xp.where(empty, -np.inf, above - state.log_sum))
