"""Merges two partial answers into one, over disjoint keys or over disjoint queries.

Answers over disjoint keys merge by their log-sum-exp, as in online softmax (Milakov & Gimelshein 2018): with
L = ln(exp(L_a) + exp(L_b)), a weighted sum becomes exp(L_a - L)·sum_a + exp(L_b - L)·sum_b. Answers over disjoint
queries, whose log-sum-exp is final, are concatenated, added or reduced to the larger. `STATISTICS` says which of these
applies to each statistic.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS, Top
from clearhead.errors import RuleError, ShapeError

Found = Mapping[str, Any]  # answers by name; what is missing or None was not asked for


def over_queries(a: Found, b: Found) -> dict[str, Any]:
    """Merge two answers over disjoint queries and the same keys; b's queries follow a's.

    Raises RuleError where only one part has some statistic, ShapeError where more than the number of queries (for
    groups, of query groups) differs.
    """
    _check_alike(a, b)
    joined: dict[str, Any] = dict.fromkeys(STATISTICS)
    for name in _asked(a):
        one, other, axis = a[name], b[name], STATISTICS[name].queries_axis
        if name != "groups":
            _check_shapes(name, one, other, axis, "queries")
        joined[name] = _OVER_QUERIES[STATISTICS[name].over_queries](one, other, axis)
    return joined


def over_keys(a: Found, b: Found, keys: int) -> dict[str, Any]:
    """Merge two answers over disjoint keys and the same queries; a has `keys` keys, and b's keys follow them.

    Raises RuleError where a part has no log-sum-exp, where it has a statistic per key, or where only one part has some
    statistic; ShapeError where their queries differ.
    """
    for part in (a, b):
        check_weighable(part)
    shapes = [as_host_array(part["logsumexp"], "logsumexp")[0].shape for part in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"the parts have log-sum-exp {shapes[0]} and {shapes[1]}: they must be the same queries.")
    _check_alike(a, b)
    for name in _asked(a):
        _check_shapes(name, a[name], b[name], -1 if STATISTICS[name].over_keys == "strongest" else None, "keys")
    return weighed(a, b, keys)


def check_weighable(part: Found) -> None:
    """Raise RuleError unless this answer can be merged over keys: it has its log-sum-exp and no statistic per key."""
    if part["logsumexp"] is None:
        raise RuleError("a part has no logsumexp: parts over keys are weighed by it.", "observe(logsumexp=True)")
    column = next((name for name in _asked(part) if STATISTICS[name].over_keys is None), None)
    if column:
        raise RuleError(
            f"{column} over some keys only cannot be merged: a column statistic needs the final log-sum-exp.",
            "observe it from the whole matrix, or over disjoint queries and merge_queries.",
        )


class Shares(NamedTuple):
    """How much each of two parts counts in the merged whole; arrays are (…, queries) in float64."""

    logsumexp: Array  # L of the whole
    parts: tuple[Array, Array]  # L of each part
    shares: tuple[Array, Array]  # exp(L_part - L); 0 where a part sees nothing
    keys: int  # how many keys the first part has


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def weighed(a: Found, b: Found, keys: int) -> dict[str, Any]:
    """`over_keys` without its checks; b may hold a log-sum-exp and nothing else, which is how a sink is merged in."""
    first, second = (as_host_array(part["logsumexp"], "logsumexp")[0].astype(np.float64) for part in (a, b))
    whole = np.logaddexp(first, second)
    share, other = (np.where(np.isneginf(part), 0.0, np.exp(part - whole)) for part in (first, second))
    how = Shares(whole, (first, second), (share, other), keys)
    return {name: _OVER_KEYS[STATISTICS[name].over_keys or ""](a[name], b.get(name), how) for name in _asked(a)}


def entropy_of_part(share: Any, entropy: Any, rise: Any) -> Any:
    """A part's term in the merged entropy H = Σ_part share·(H_part + L - L_part); `rise` is L - L_part."""
    return share * (entropy + rise)


def _whole_logsumexp(one: Any, other: Any, how: Shares) -> Any:
    del other
    array, restore = as_host_array(one, "logsumexp")
    return restore(how.logsumexp.astype(array.dtype))


def _weigh(one: Any, other: Any, how: Shares) -> Any:
    left, back = as_host_array(one, "part")
    shape = how.logsumexp.shape + (1,) * (left.ndim - how.logsumexp.ndim)
    total = left.astype(np.float64) * how.shares[0].reshape(shape)
    if other is not None:
        total = total + as_host_array(other, "part")[0].astype(np.float64) * how.shares[1].reshape(shape)
    return back(total.astype(left.dtype))


def _larger(one: Any, other: Any, how: object) -> Any:
    del how
    return one if other is None else _combine(one, other, np.maximum)


def _merge_entropy(one: Any, other: Any, how: Shares) -> Any:
    first, restore = as_host_array(one, "entropy")
    total = np.zeros(how.logsumexp.shape)
    for part, logsumexp, share in zip((one, other), how.parts, how.shares, strict=True):
        if part is not None:
            rise = np.where(share > 0, how.logsumexp - np.where(share > 0, logsumexp, 0.0), 0.0)
            total = total + entropy_of_part(share, as_host_array(part, "entropy")[0], rise)
    return restore(total.astype(first.dtype))


def _strongest(one: Top, other: Top | None, how: Shares) -> Top:
    (weights, back), (indices, back_indices) = (as_host_array(x, "top") for x in one)
    result, places, count = weights * how.shares[0][..., None], indices, weights.shape[-1]
    if other is not None:
        more, more_places = (as_host_array(x, "top")[0] for x in other)
        count = min(count, more.shape[-1])
        result = np.concatenate([result, more * how.shares[1][..., None]], axis=-1)
        places = np.concatenate([places, np.where(more_places < 0, -1, more_places + how.keys)], axis=-1)
    order = np.argsort(np.where(places < 0, 1.0, -result), axis=-1, kind="stable")[..., :count]
    return Top(
        back(np.take_along_axis(result, order, axis=-1).astype(weights.dtype)),
        back_indices(np.take_along_axis(places, order, axis=-1)),
    )


def _asked(part: Found) -> list[str]:
    return [name for name in STATISTICS if part.get(name) is not None]


def _check_alike(a: Found, b: Found) -> None:
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
    pairs = zip(one, other, strict=True) if isinstance(one, Top) else [(one, other)]
    for x, y in pairs:
        left, right = (as_host_array(part, name)[0].shape for part in (x, y))
        rest = [[size for axis, size in enumerate(s) if free is None or axis != len(s) + free] for s in (left, right)]
        if rest[0] != rest[1] or len(left) != len(right):
            raise ShapeError(f"the parts have {name} {left} and {right}: only the {over} may differ between them.")


def _combine(a: Any, b: Any, how: np.ufunc) -> Any:
    left, restore = as_host_array(a, "part")
    return restore(how(left, as_host_array(b, "part")[0]))


def _stack(a: Any, b: Any, axis: int | None) -> Any:
    if isinstance(a, Top):
        return Top(*(_stack(x, y, axis) for x, y in zip(a, b, strict=True)))
    left, restore = as_host_array(a, "part")
    return restore(np.concatenate([left, as_host_array(b, "part")[0]], axis=axis))


def _add(a: Any, b: Any, axis: int | None) -> Any:
    """Add two arrays; tables (…, query groups, key groups) may differ in their number of query groups."""
    if axis is None:
        return _combine(a, b, np.add)
    (left, restore), (right, _) = as_host_array(a, "groups"), as_host_array(b, "groups")
    if left.shape[-1] != right.shape[-1]:
        raise ShapeError(f"one part has {left.shape[-1]} key groups, the other {right.shape[-1]}: they share all keys.")
    _check_shapes("groups", a, b, axis, "query groups")
    total = np.zeros((*left.shape[:-2], max(left.shape[-2], right.shape[-2]), left.shape[-1]), left.dtype)
    for part in (left, right):
        total[..., : part.shape[-2], :] += part
    return restore(total)


_OVER_KEYS: dict[str, Callable[[Any, Any, Shares], Any]] = {
    "logsumexp": _whole_logsumexp,
    "weighed": _weigh,
    "larger": _larger,
    "entropy": _merge_entropy,
    "strongest": _strongest,
}
_OVER_QUERIES: dict[str, Callable[[Any, Any, int | None], Any]] = {"after": _stack, "added": _add, "larger": _larger}


def sink_weights(xp: Any, sinks: Any, logsumexp: Any) -> Any:
    """exp(sink - L_i), (batch, heads, queries); 0 for a row without visible keys."""
    empty = xp.isneginf(logsumexp)
    return xp.exp(xp.where(empty, -np.inf, sinks[:, None] - xp.where(empty, 0.0, logsumexp)))
