"""Merges what was observed over disjoint keys, as online softmax does (Milakov & Gimelshein 2018, section 3.1).

With L = ln(exp(L_a) + exp(L_b)), a weighted sum becomes exp(L_a - L)·sum_a + exp(L_b - L)·sum_b, by the rows' states
(state.py). `STATISTICS` says how each statistic merges.
"""

from collections.abc import Callable, Mapping, Sequence
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


def check_parts(*parts: Results) -> None:
    """Raise RuleError or ShapeError unless these answers over some keys each can be weighed by their log-sum-exp."""
    for part in parts:
        if part["logsumexp"] is None:
            raise RuleError("a part has no logsumexp: parts over keys are weighed by it.", "observe(logsumexp=True)")
        column = next((x for x in STATISTICS if part[x] is not None and STATISTICS[x].over_keys is None), None)
        if column:
            raise RuleError(
                f"{column} over some keys only cannot be merged: a column statistic needs the final log-sum-exp.",
                "observe it from the whole matrix, or over disjoint queries and merge_queries.",
            )
    shapes = [tuple(part["logsumexp"].largest.shape) for part in parts]
    if len({*shapes}) > 1:
        raise ShapeError(f"the parts have log-sum-exp {shapes[0]} and {shapes[1]}: they must be the same queries.")


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def over_keys(a: Results, b: Results, keys: int) -> dict[str, Any]:
    """Merge two answers over disjoint keys and the same queries; a has `keys` keys, and b's keys follow them.

    O(queries·d_v) time and memory.
    """
    each = [State(*(x.astype(np.float64) for x in _host(part["logsumexp"]))) for part in (a, b)]
    whole = states.merged(np, *each)
    shares = [states.share(np, state, whole) for state in each]  # 0 where a part sees nothing
    result = {}
    for name, value in a.items():
        if value is None:
            continue
        first = _host(value)
        parts = [(first, shares[0]), (_host(b[name]), shares[1])]
        merge = _OVER_KEYS.get(STATISTICS[name].over_keys)
        made = whole if merge is None else merge(parts, keys)
        exact = [x.astype(like.dtype, copy=False) for x, like in zip(made, first, strict=True)]
        several = isinstance(value, tuple)
        restored = [as_host_array(x, name)[1](y) for x, y in zip(value if several else [value], exact, strict=True)]
        result[name] = type(value)(*restored) if several else restored[0]
    return result


def _host(value: Any) -> list[Array]:
    """An answer's arrays in the CPU's memory."""
    return [as_host_array(x, "part")[0] for x in (value if isinstance(value, tuple) else (value,))]


def _strongest(parts: Parts, keys: int) -> list[Array]:
    weights = np.concatenate([x * share[..., None] for (x, _), share in parts], axis=-1)
    each = [np.where(at < 0, -1, at + place * keys) for place, ((_, at), _) in enumerate(parts)]
    places, count = np.concatenate(each, axis=-1), min(x.shape[-1] for x in each)
    order = np.argsort(np.where(places < 0, 1.0, -weights), axis=-1, kind="stable")[..., :count]
    return [np.take_along_axis(x, order, axis=-1) for x in (weights, places)]


def _weigh(parts: Parts, _: int) -> list[Array]:
    each = (x.astype(np.float64) * share.reshape(share.shape + (1,) * (x.ndim - share.ndim)) for (x,), share in parts)
    return [reduce(np.add, each)]


def _entropy(parts: Parts, _: int) -> list[Array]:
    """H = Σ_part share·(H_part + L - L_part)."""
    return [reduce(np.add, (share * (x - np.log(np.where(share > 0, share, 1.0))) for (x,), share in parts))]


_OVER_KEYS: dict[str | None, Callable[[Parts, int], Sequence[Array]]] = {  # and logsumexp, which is the merged state
    "weighed": _weigh,
    "larger": lambda parts, _: [reduce(np.maximum, (x for (x,), _ in parts))],
    "entropy": _entropy,
    "strongest": _strongest,
}
