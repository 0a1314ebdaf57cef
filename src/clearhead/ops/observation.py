"""Observation: the statistics computed by one call of `observe`, and how partial ones are merged."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from clearhead.core import merging, room
from clearhead.core import state as states
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import as_slice, brief
from clearhead.core.rule_values import one_per_head, read_place, read_slice
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Answers, Top, joined_arrays
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Observation(Answers):
    """The requested statistics by name; None for those not requested. Returned by `AttentionMatrix.observe`.

    Arrays are of q's kind; statistics are float32, or float64 for float64, and the output has q's dtype. The
    log-sum-exp is kept as its rows' largest logits and what is added to these (`largest` and `log_sum`). Axes are those
    that `observe` lists, after the matrix's leading axes. `queries` and `keys` are how many it covers. copy.copy shares
    the arrays; copy.deepcopy, pickle, multiprocessing and torch.save copy them (torch.load needs weights_only=False),
    and raise RuleError for tensors that PyTorch computed in a graph.

    >>> import numpy as np, clearhead as ch
    >>> seen = ch.AttentionMatrix(np.eye(2), np.eye(2), causal=True).observe(received=True)
    >>> seen.received.round(2), seen.entropy
    (array([1.33, 0.67]), None)
    """

    top: Top | None = None
    queries: int = 0
    keys: int = 0
    sinks: bool = False  # True where the log-sum-exp and the weights include a sink

    def merge_keys(self, other: "Observation") -> "Observation":
        """Merge this result over some keys with one over the keys that follow, for the same queries.

        Exact: outputs and row statistics are weighted by exp(L_part - L). Both parts need their log-sum-exp, and must
        have been computed without sinks; `with_sinks` adds those at the end. Returns an Observation over all these
        keys. Raises DtypeError when `other` is no Observation; RuleError when a part has no log-sum-exp, has sinks, has
        a column statistic (which needs the final log-sum-exp), or lacks a statistic that the other has; ShapeError when
        the parts have different queries. O(queries·d_v) time and memory.
        Source: Milakov & Gimelshein 2018, section 3.1.

        >>> import numpy as np, clearhead as ch
        >>> q, k, v = np.ones((2, 4)), np.eye(6, 4), np.eye(6, 3)
        >>> part = [ch.AttentionMatrix(q, k[s]).observe(v[s], logsumexp=True) for s in (np.s_[:3], np.s_[3:])]
        >>> bool(np.allclose(part[0].merge_keys(part[1]).output, ch.attention(q, k, v)))
        True
        """
        _check_part(other)
        for part in (self, other):
            _check_without_sinks(part)
        result = merging.over_keys(self.statistics(), other.statistics(), self.keys)
        return observation(result, queries=self.queries, keys=self.keys + other.keys)

    def with_sinks(self, sinks: Any) -> "Observation":
        """The same result with one extra logit per head, (heads,), in each row's denominator.

        Raises RuleError as `merge_keys` does, and what `attention` raises for sinks. O(queries·d_v) time and memory.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.zeros((1, 2)), np.zeros((3, 2))).observe(np.ones((3, 1)), logsumexp=True)
        >>> seen.with_sinks([0.0]).output
        array([[0.75]])
        """
        _check_without_sinks(self)
        merging.check_weighable(self.statistics())
        if sinks is None:
            return self
        largest = as_host_array(self.largest, "logsumexp")[0]
        heads = largest.shape[-2] if largest.ndim > 1 else 1
        logits = one_per_head("sinks", sinks, heads, largest.ndim + 1)
        kept = states.of_sinks(logits if largest.ndim > 1 else logits[0], largest)
        result = merging.weighed(self.statistics(), {"logsumexp": kept}, self.keys)
        return observation(result, queries=self.queries, keys=self.keys, sinks=True)

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
        result = merging.over_queries(self.statistics(), other.statistics())
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
                result[name] = type(value)(*(_pick_heads(name, x, axis, chosen) for x in value))
            elif value is not None:
                result[name] = _pick_heads(name, value, axis, chosen)
        return observation(result, queries=self.queries, keys=self.keys, sinks=self.sinks)

    def __repr__(self) -> str:
        result = self.statistics() | {"top": None if self.top is None else self.top.weights}
        result["logsumexp"] = self.largest
        return brief("Observation", {"queries": self.queries, "keys": self.keys, **result})

    def __copy__(self) -> "Observation":
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deep copies. Raises RuleError for tensors that PyTorch computed in a graph."""
        arrays = {**self.statistics(), "top": self.top and self.top.weights, "logsumexp": self.log_sum}
        for name, x in arrays.items():
            if getattr(x, "grad_fn", None) is not None:
                raise RuleError(
                    f"{name} belongs to PyTorch's graph, which cannot be copied.", "observe under torch.no_grad()"
                )
        return Observation, tuple(getattr(self, field.name) for field in fields(self))


def observation(result: dict[str, Any], queries: int, keys: int, *, sinks: bool = False) -> Observation:
    """An Observation from statistics, or an engine's arrays, by name; `sinks` says whether the problem had any."""
    state: State | None = result.pop("logsumexp", None)
    arrays = joined_arrays(result) | ({} if state is None else state._asdict())
    return Observation(**arrays, queries=queries, keys=keys, sinks=sinks)


def _check_part(other: Any) -> None:
    if not isinstance(other, Observation):
        raise DtypeError(f"the other part is a {type(other).__name__}: expected an Observation.", "A.observe(…)")


def _check_without_sinks(part: Observation) -> None:
    if part.sinks:
        raise RuleError(
            "a part has sinks in its denominators already: they would count twice.",
            "observe every part without sinks, merge the parts, and add them once: merged.with_sinks(sinks).",
        )


def _pick_heads(name: str, value: Any, axis: int, chosen: Any) -> Any:
    """Index the heads axis, after checking that it exists and has those heads."""
    if value.ndim < -axis:
        raise SelectionError(
            f"{name} has shape {tuple(value.shape)}: a matrix of two axes is one head, with no axis to choose from."
        )
    count = value.shape[axis]
    if isinstance(chosen, slice):
        places: Any = as_slice(read_slice("heads", chosen, count))
        if places.step is not None and places.step < 0:
            places = list(range(count)[places])
    elif isinstance(chosen, (list, tuple, range)) or (isinstance(chosen, np.ndarray) and chosen.ndim == 1):
        room.check_room("the heads chosen", len(chosen) * 8, "name each head once.")
        places = [read_place("head", head, count) for head in chosen]
    else:
        places = read_place("head", chosen, count)
    rest = (slice(None),) * (-axis - 1)
    return value[(Ellipsis, np.array(places, np.int64) if isinstance(places, list) else places, *rest)]
