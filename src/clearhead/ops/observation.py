"""Observation: the statistics computed by one call of `observe`, and how those over disjoint queries are merged.

Rows' states are final there, so such parts are concatenated, added or reduced to the larger; `STATISTICS` says which of
these applies to each statistic. core/merging.py merges parts over disjoint keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core import merging
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array, brief
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Matrix, Strongest, joined_arrays
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Observation:
    """What was observed, (…, heads, …), by name; None for what was not requested.

    Returned by `observe` of AttentionMatrix and of EffectMatrix, where each field has the answer of the method of its
    name, and by `varlen_attn`. Arrays are of q's kind; statistics are float32, or float64 for float64, and the output
    has q's dtype. The log-sum-exp is kept as two arrays, each row's largest logit and what is added to it (`largest`
    and `log_sum`), which have digits that their sum may not have. `queries` and `keys` are how many it covers.

    >>> import numpy as np, clearhead as ch
    >>> seen = ch.AttentionMatrix(np.eye(2), np.eye(2), causal=True).observe(received=True)
    >>> seen.received.round(2), seen.entropy
    (array([1.33, 0.67]), None)
    >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).cut_effects(np.eye(3), np.eye(3)).observe(by_key=True, top=2)
    Observation(queries 3, keys 3, by_key (3,), top Ranked(values (3, 2), indices (3, 2)))
    """

    output: Any = None
    largest: Any = None
    log_sum: Any = None
    max_logit: Any = None
    entropy: Any = None
    received: Any = None
    peak: Any = None
    by_key: Any = None
    by_query: Any = None
    top: Any = None  # a Top; of effects, a Ranked
    strongest: Strongest | None = None
    distance: Any = None
    diagonal: Any = None
    image: Any = None  # an array; of effects, a SignedImage
    groups: Any = None
    queries: int = 0
    keys: int = 0
    sinks: bool = False  # True where the log-sum-exp and the weights include a sink

    def __repr__(self) -> str:
        result = {**self.statistics(), "logsumexp": self.largest}
        return brief("Observation", {"queries": self.queries, "keys": self.keys, **result})

    @property
    def logsumexp(self) -> Any:
        """The sum of `largest` and `log_sum`."""
        return None if self.largest is None else self.largest + self.log_sum

    @property
    def state(self) -> State | None:
        """`largest` and `log_sum`."""
        return None if self.largest is None else State(self.largest, self.log_sum)

    def statistics(self) -> dict[str, Any]:
        """All statistics by name, None for those not requested; the log-sum-exp as a State."""
        return {name: self.state if name == "logsumexp" else getattr(self, name) for name in STATISTICS}

    def merge_keys(self, other: "Observation") -> "Observation":
        """Merge this result over some keys with one over the keys that follow, for the same queries.

        Exact: outputs and row statistics are weighted by exp(L_part - L). Both parts need their log-sum-exp, and must
        have been computed without sinks. Returns an Observation over all these keys. Raises DtypeError when `other` is
        no Observation; RuleError when a part has no log-sum-exp, has sinks, has a column statistic (which needs the
        final log-sum-exp), or lacks a statistic that the other has; ShapeError when the parts have different queries.
        O(queries·d_v) time and memory.
        Source: Milakov & Gimelshein 2018, section 3.1.

        >>> import numpy as np, clearhead as ch
        >>> q, k, v = np.ones((2, 4)), np.eye(6, 4), np.eye(6, 3)
        >>> part = [ch.AttentionMatrix(q, k[s]).observe(v[s], logsumexp=True) for s in (np.s_[:3], np.s_[3:])]
        >>> bool(np.allclose(part[0].merge_keys(part[1]).output, ch.attention(q, k, v)))
        True
        """
        _check_part(other)
        if self.sinks or other.sinks:
            raise RuleError("a part has sinks in its denominators already: they would count twice.")
        parts = self.statistics(), other.statistics()
        merging.check_parts(*parts)
        _check_alike(*parts)
        return observation(merging.over_keys(*parts, self.keys), queries=self.queries, keys=self.keys + other.keys)

    def merge_queries(self, other: "Observation") -> "Observation":
        """Merge this result over some queries with one over the queries that follow, for the same keys.

        Row statistics are concatenated, received and groups are added, peak takes the maximum. Images are stacked,
        which needs pixels of the same height. Returns an Observation over all these queries. Raises DtypeError when
        `other` is no Observation; RuleError when pixels differ in size, when only one part includes sinks, or for a
        statistic that only one part has; ShapeError when the parts have different keys or heads.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(4), np.eye(4))
        >>> parts = [A.observe(queries=rows, received=True) for rows in (np.s_[:1], np.s_[1:])]
        >>> parts[0].merge_queries(parts[1]).received
        array([1., 1., 1., 1.])
        """
        _check_part(other)
        if self.keys != other.keys:
            raise ShapeError(
                f"one part has {self.keys} keys, the other {other.keys}: parts over queries share all keys."
            )
        if self.sinks != other.sinks:
            raise RuleError(
                f"the {'first' if self.sinks else 'second'} part has sinks in its denominators, the other has not: "
                "they are not rows of the same matrix.",
                "observe both with the same sinks.",
            )
        if self.image is not None and other.image is not None:
            (high, wide), (high_other, wide_other) = (tuple(part.image.shape[-2:]) for part in (self, other))
            if self.queries * high_other != other.queries * high or wide != wide_other:
                raise RuleError(
                    f"the images' pixels differ: {self.queries} queries on {high} rows and {other.queries} on "
                    f"{high_other}.",
                    "choose heights so that each pixel covers equally many queries, and one width.",
                )
        parts, result = (self.statistics(), other.statistics()), {}
        _check_alike(*parts)
        for name in STATISTICS:
            one, more = (part[name] for part in parts)
            if one is not None:
                result[name] = _merged(name, one, more)
        return observation(result, queries=self.queries + other.queries, keys=self.keys, sinks=self.sinks)

    def heads(self, chosen: int | slice | Sequence[int]) -> "Observation":
        """The same result for some heads: an integer, which drops the heads axis, a slice or a list of indices.

        The heads axis is the last but one of statistics per query or key, (…, heads, queries), and the last but two of
        output, top, image and groups. Raises SelectionError when there is no such head, or no heads axis.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.ones((2, 3, 4)), np.ones((2, 3, 4))).observe(logsumexp=True, top=1)
        >>> seen.heads(1).logsumexp.shape, seen.heads([1]).top.weights.shape
        ((3,), (1, 3, 1))
        """
        result = self.statistics()
        for name, value in result.items():
            axis = -len(STATISTICS[name].axes)  # the heads lead
            if isinstance(value, tuple):
                result[name] = type(value)(*(_heads_of(name, x, axis, chosen) for x in value))
            elif value is not None:
                result[name] = _heads_of(name, value, axis, chosen)
        return observation(result, queries=self.queries, keys=self.keys, sinks=self.sinks)


def _check_part(other: Any) -> None:
    if not isinstance(other, Observation):
        raise DtypeError(f"the other part is a {type(other).__name__}: expected an Observation.", "A.observe(…)")


def _check_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise RuleError unless both parts have the same statistics: what only one of them has could not be merged."""
    for name in STATISTICS:
        if (one[name] is None) != (other[name] is None):
            has, lacks = ("first", "second") if other[name] is None else ("second", "first")
            raise RuleError(
                f"the {has} part has {name}, the {lacks} has not: it cannot be joined.",
                f"observe both parts with {'v' if name == 'output' else name}, or neither.",
            )


def observation(
    result: dict[str, Any], queries: int, keys: int, *, sinks: bool = False, of: Matrix = "weights"
) -> Observation:
    """An Observation from statistics, or an engine's arrays, by name; `sinks` says whether the problem had any."""
    state: State | None = result.pop("logsumexp", None)
    arrays = joined_arrays(result, of) | ({} if state is None else state._asdict())
    return Observation(**arrays, queries=queries, keys=keys, sinks=sinks)


def _heads_of(name: str, x: Any, axis: int, chosen: Any) -> Any:
    """Index the heads axis, after checking that it exists and has those heads."""
    if x.ndim < -axis:
        raise SelectionError(
            f"{name} has shape {tuple(x.shape)}: a matrix of two axes is one head, with no axis to choose from."
        )
    try:
        places = np.arange(x.shape[axis])[chosen if isinstance(chosen, (int, slice)) else list(chosen)].copy()
    except (IndexError, TypeError) as error:
        raise SelectionError(f"there are no such heads: {error}.") from None
    return x[(Ellipsis, places, *(slice(None),) * (-axis - 1))]


def _merged(name: str, one: Any, more: Any) -> Any:
    """A statistic of all queries, of those of one part and the others that follow; only these may differ in number."""
    if isinstance(one, tuple):
        return type(one)(*(_merged(name, *pair) for pair in zip(one, more, strict=True)))
    (first, restore), (second, _) = (as_host_array(x, name) for x in (one, more))
    axis = STATISTICS[name].queries_axis
    fixed = [[n for place, n in enumerate(x.shape) if place - x.ndim != axis] for x in (first, second)]
    if fixed[0] != fixed[1]:
        raise ShapeError(f"the parts have {name} {first.shape} and {second.shape}: only the queries may differ.")
    return restore(_OVER_QUERIES[STATISTICS[name].over_queries](first, second, axis))


def _add(one: Array, other: Array, axis: int | None) -> Array:
    """Add two arrays; tables (…, query groups, key groups) may differ in their number of query groups."""
    if axis is None:
        return one + other
    total = np.zeros((*one.shape[:-2], max(one.shape[-2], other.shape[-2]), one.shape[-1]), one.dtype)
    for part in (one, other):
        total[..., : part.shape[-2], :] += part
    return total


_OVER_QUERIES: Mapping[str, Callable[[Array, Array, int | None], Array]] = {
    "after": lambda one, other, axis: np.concatenate([one, other], axis=axis),
    "added": _add,
    "larger": lambda one, other, _: np.maximum(one, other),
}
