"""Merges two partial answers into one, over disjoint keys or over disjoint queries.

Answers over disjoint keys merge by their log-sum-exp, as in online softmax (Milakov & Gimelshein 2018): with
L = ln(exp(L_a) + exp(L_b)), a weighted sum becomes exp(L_a - L)·sum_a + exp(L_b - L)·sum_b, by the rows' states
(state.py). Answers over disjoint queries, whose states are final, are concatenated, added or reduced to the larger.
`STATISTICS` says which of these applies to each statistic.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import state as states
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Top
from clearhead.errors import RuleError, ShapeError

Results = Mapping[str, Any]  # answers by name; what is missing or None was not asked for


def over_queries(a: Results, b: Results) -> dict[str, Any]:
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
        joined[name] = _on_host(_OVER_QUERIES[STATISTICS[name].over_queries], name, one, other, axis)
    return joined


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


class Shares(NamedTuple):
    """How much each of two parts counts in the merged whole; arrays are (…, queries) in float64."""

    state: State  # of the whole
    parts: tuple[State, State]  # of each part
    shares: tuple[Array, Array]  # exp(L_part - L); 0 where a part sees nothing
    keys: int  # how many keys the first part has


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def weighed(a: Results, b: Results, keys: int) -> dict[str, Any]:
    """`over_keys` without its checks; b may hold a state and nothing else, which is how a sink is merged in."""
    first, second = (
        State(*(as_host_array(x, "logsumexp")[0].astype(np.float64) for x in part["logsumexp"])) for part in (a, b)
    )
    whole = states.merged(np, first, second)
    how = Shares(whole, (first, second), (states.share(np, first, whole), states.share(np, second, whole)), keys)
    rules = {name: STATISTICS[name].over_keys or "" for name in _asked(a)}
    whole_rows: dict[str, Callable[[Any, Any, Shares], Any]] = {"strongest": _strongest, "logsumexp": _whole_state}
    return {
        name: whole_rows[rule](a[name], b.get(name), how)
        if rule in whole_rows
        else _on_host(_OVER_KEYS[rule], name, a[name], b.get(name), how)
        for name, rule in rules.items()
    }


def entropy_of_part(share: Any, entropy: Any, rise: Any) -> Any:
    """A part's term in the merged entropy H = Σ_part share·(H_part + L - L_part); `rise` is L - L_part."""
    return share * (entropy + rise)


def _on_host(merge: Callable[[Array, Any, Any], Array], name: str, one: Any, other: Any, how: Any) -> Any:
    """What `merge` makes of two answers in the CPU's memory, as the kind of array that the first is; pairs apart."""
    if isinstance(one, tuple):
        return type(one)(*(_on_host(merge, name, x, y, how) for x, y in zip(one, other, strict=True)))
    array, restore = as_host_array(one, name)
    return restore(merge(array, None if other is None else as_host_array(other, name)[0], how))


def _weigh(one: Array, other: Array | None, how: Shares) -> Array:
    rows = how.state.largest.shape
    shape = rows + (1,) * (one.ndim - len(rows))
    total = one.astype(np.float64) * how.shares[0].reshape(shape)
    if other is not None:
        total = total + other.astype(np.float64) * how.shares[1].reshape(shape)
    return total.astype(one.dtype)


def _merge_entropy(one: Array, other: Array | None, how: Shares) -> Array:
    total = np.zeros(how.state.largest.shape)
    for part, share in zip((one, other), how.shares, strict=True):
        if part is not None:
            total = total + entropy_of_part(share, part, -np.log(np.where(share > 0, share, 1.0)))
    return total.astype(one.dtype)


def _whole_state(one: State, _: Any, how: Shares) -> State:
    arrays = zip(one, how.state, strict=True)
    return State(*(_on_host(lambda x, y, _: y.astype(x.dtype), "logsumexp", x, y, how) for x, y in arrays))


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
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    for x, y in pairs:
        left, right = (as_host_array(part, name)[0].shape for part in (x, y))
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


_OVER_KEYS: dict[str, Callable[[Array, Any, Shares], Array]] = {  # and "strongest" and "logsumexp"
    "weighed": _weigh,
    "larger": lambda one, other, _: one if other is None else np.maximum(one, other),
    "entropy": _merge_entropy,
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
