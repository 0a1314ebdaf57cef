"""How two answers become one: over keys by their log-sum-exp, over queries by standing one after the other or adding.

Answers over disjoint keys merge by the log-sum-exp algebra of online softmax (Milakov & Gimelshein 2018); answers over
disjoint queries, whose log-sum-exp is final, are joined or added. `STATISTICS` says which axes each answer has.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from clearhead.arrays import read
from clearhead.axes import Array, brief
from clearhead.errors import RuleError, ShapeError

COLUMN_STATISTICS = ("received", "peak", "image", "groups")
Found = Mapping[str, Any]  # answers by name; what is missing or None was not asked for


class Statistic(NamedTuple):
    """Where an answer's axes are, counted from the end, and what two answers over queries do."""

    heads: int
    queries: int | None  # the axis that may differ between two parts over queries
    combine: np.ufunc | None = None  # how equal shapes join; None: one after the other along `queries`


STATISTICS: dict[str, Statistic] = {
    "output": Statistic(-3, -2),
    "logsumexp": Statistic(-2, -1),
    "max_logit": Statistic(-2, -1),
    "entropy": Statistic(-2, -1),
    "received": Statistic(-2, None, np.add),
    "peak": Statistic(-2, None, np.maximum),
    "top": Statistic(-3, -2),
    "distance": Statistic(-2, -1),
    "image": Statistic(-3, -2),
    "groups": Statistic(-3, -2),
}


class Top(NamedTuple):
    """Each query's strongest weights and the keys they fall on, strongest first; 0 and -1 where fewer are visible."""

    weights: Any
    indices: Any

    def __repr__(self) -> str:
        return brief("Top", self._asdict())


def over_queries(a: Found, b: Found) -> dict[str, Any]:
    """Two answers over disjoint queries and the same keys as one. Raises RuleError or ShapeError for unlike parts."""
    _check_alike(a, b)
    joined: dict[str, Any] = dict.fromkeys(STATISTICS)
    for name in _asked(a):
        one, other, (_, axis, combine) = a[name], b[name], STATISTICS[name]
        if name == "groups":
            joined[name] = _add_groups(one, other)
            continue
        _check_shapes(name, one, other, axis, "queries")
        if combine is not None:
            joined[name] = _combine(one, other, combine)
        elif name == "top":
            joined[name] = Top(*(_stack(x, y, -2) for x, y in zip(one, other, strict=True)))
        else:
            joined[name] = _stack(one, other, axis)
    return joined


def over_keys(a: Found, b: Found, keys: int) -> dict[str, Any]:
    """Two answers over disjoint keys and the same queries as one; a's keys are `keys` many, and b's follow them."""
    for part in (a, b):
        check_weighable(part)
    shapes = [read(part["logsumexp"], "logsumexp")[0].shape for part in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"the parts have log-sum-exp {shapes[0]} and {shapes[1]}: they must be the same queries.")
    _check_alike(a, b)
    for name in _asked(a):
        _check_shapes(name, a[name], b[name], -1 if name == "top" else None, "keys")
    return weighed(a, b, keys)


def check_weighable(part: Found) -> None:
    """Can this answer be weighed against another by its log-sum-exp?"""
    if part["logsumexp"] is None:
        raise RuleError("a part has no logsumexp: parts over keys are weighed by it.", "observe(logsumexp=True)")
    column = next((name for name in COLUMN_STATISTICS if part[name] is not None), None)
    if column:
        raise RuleError(
            f"{column} over some keys only cannot be merged: a column statistic needs the final log-sum-exp.",
            "observe it from the whole matrix, or over disjoint queries and merge_queries.",
        )


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def weighed(a: Found, b: Found, keys: int) -> dict[str, Any]:
    """The (log-sum-exp, weighted sums) algebra; b may be a log-sum-exp alone, with nothing behind it, as a sink is."""
    lse_a, restore = read(a["logsumexp"], "logsumexp")
    lse_b = read(b["logsumexp"], "logsumexp")[0]
    work_a, work_b = lse_a.astype(np.float64), lse_b.astype(np.float64)
    lse = np.logaddexp(work_a, work_b)
    share_a, share_b = (np.where(np.isneginf(part), 0.0, np.exp(part - lse)) for part in (work_a, work_b))

    def weigh(name: str) -> Any:
        x, y = a[name], b.get(name)
        if x is None:
            return None
        left, back = read(x, name)
        tail = (1,) * (left.ndim - lse.ndim)
        total = left.astype(np.float64) * share_a.reshape(lse.shape + tail)
        if y is not None:
            total = total + read(y, name)[0].astype(np.float64) * share_b.reshape(lse.shape + tail)
        return back(total.astype(left.dtype))

    most = a["max_logit"]
    if most is not None and b.get("max_logit") is not None:
        most = _combine(most, b["max_logit"], np.maximum)
    return {
        "output": weigh("output"),
        "logsumexp": restore(lse.astype(lse_a.dtype)),
        "max_logit": most,
        "entropy": _merge_entropy(a, b, lse, share_a, share_b),
        "distance": weigh("distance"),
        "top": _merge_top(a, b, keys, share_a, share_b),
    }


def _merge_entropy(a: Found, b: Found, lse: Array, share_a: Array, share_b: Array) -> Any:
    """H = Σ_part share·(H_part + L - L_part)."""
    if a["entropy"] is None:
        return None
    first, restore = read(a["entropy"], "entropy")
    total = np.zeros(lse.shape)
    for part, share in ((a, share_a), (b, share_b)):
        if part.get("entropy") is not None:
            own = read(part["logsumexp"], "logsumexp")[0].astype(np.float64)
            rise = np.where(share > 0, lse - np.where(share > 0, own, 0.0), 0.0)
            total = total + share * (read(part["entropy"], "entropy")[0] + np.where(share > 0, rise, 0.0))
    return restore(total.astype(first.dtype))


def _merge_top(a: Found, b: Found, keys: int, share_a: Array, share_b: Array) -> Top | None:
    if a["top"] is None:
        return None
    (weights, back), (indices, back_indices) = (read(x, "top") for x in a["top"])
    found, places, count = weights * share_a[..., None], indices, weights.shape[-1]
    if b.get("top") is not None:
        more, at = (read(x, "top")[0] for x in b["top"])
        count = min(count, more.shape[-1])
        found = np.concatenate([found, more * share_b[..., None]], axis=-1)
        places = np.concatenate([places, np.where(at < 0, -1, at + keys)], axis=-1)
    order = np.argsort(np.where(places < 0, 1.0, -found), axis=-1, kind="stable")[..., :count]
    return Top(
        back(np.take_along_axis(found, order, axis=-1).astype(weights.dtype)),
        back_indices(np.take_along_axis(places, order, axis=-1)),
    )


def _asked(part: Found) -> list[str]:
    return [name for name in STATISTICS if part[name] is not None]


def _check_alike(a: Found, b: Found) -> None:
    """Both parts must have been asked for the same: what only one of them has would be lost."""
    for name in STATISTICS:
        if (a[name] is None) != (b[name] is None):
            has, lacks = ("first", "second") if b[name] is None else ("second", "first")
            raise RuleError(
                f"the {has} part has {name}, the {lacks} has not: it cannot be joined.",
                f"observe both parts with {'v' if name == 'output' else name}, or neither.",
            )


def _check_shapes(name: str, one: Any, other: Any, free: int | None, over: str) -> None:
    """Equal shapes, but for the axis that may differ."""
    pairs = zip(one, other, strict=True) if name == "top" else [(one, other)]
    for x, y in pairs:
        left, right = (read(part, name)[0].shape for part in (x, y))
        rest = [[size for axis, size in enumerate(s) if free is None or axis != len(s) + free] for s in (left, right)]
        if rest[0] != rest[1] or len(left) != len(right):
            raise ShapeError(f"the parts have {name} {left} and {right}: only the {over} may differ between them.")


def _combine(a: Any, b: Any, how: np.ufunc) -> Any:
    left, restore = read(a, "part")
    return restore(how(left, read(b, "part")[0]))


def _stack(a: Any, b: Any, axis: int | None) -> Any:
    left, restore = read(a, "part")
    return restore(np.concatenate([left, read(b, "part")[0]], axis=axis))


def _add_groups(a: Any, b: Any) -> Any:
    """The sum of two tables (…, query groups, key groups); a query group that one part has not got adds nothing."""
    (left, restore), (right, _) = read(a, "groups"), read(b, "groups")
    if left.shape[-1] != right.shape[-1]:
        raise ShapeError(f"one part has {left.shape[-1]} key groups, the other {right.shape[-1]}: they share all keys.")
    _check_shapes("groups", a, b, -2, "query groups")
    total = np.zeros((*left.shape[:-2], max(left.shape[-2], right.shape[-2]), left.shape[-1]), left.dtype)
    for part in (left, right):
        total[..., : part.shape[-2], :] += part
    return restore(total)
