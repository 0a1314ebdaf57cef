"""What single edges did: the formulas of contributions and cuts, and what a row must know for them.

With g_i the derivative of some number by the output o_i of query i, and t_ij = g_i·v_j, the contribution of an edge is
a_ij·t_ij, and its cut what g_i·o_i changes by when query i may not see key j: a_ij/(1 - a_ij)·(g_i·o_i - t_ij).

1 - a_ij may have no digits left where a_ij is near 1, which only the largest weight of a row can be. For that key, the
answer of all other keys is computed apart: m_i = g_i·o'_i, by their own softmax. Then the cut is a_ij·(m_i - t_ij),
where nothing is subtracted from 1. A sink is one more of the others, which adds nothing to m_i.

Where a cut edge's weight moves to the row's sink instead, e_ij = a_ij·(g_i·v_0 - t_ij), or -a_ij·t_ij with learned
sinks: contributions of the values v_0 - v_j, or -v_j, of the kind "moved".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from clearhead.core import state as states
from clearhead.core.arrays import on_cpu, to_device_of
from clearhead.core.axes import Array, part_of
from clearhead.core.state import State
from clearhead.errors import check_known

Kind = Literal["contribution", "cut", "moved"]
Rest = Literal["renormalise", "first"]


def read_rest(rest: Any) -> Rest:
    """Where a cut edge's weight goes. Raises UnknownNameError for another word."""
    check_known("rest", [rest], get_args(Rest))
    return cast("Rest", rest)


Others = Mapping[str, Array]  # each row's strongest key and what all its other keys answer, by the names of `no_keys`


def no_keys(shape: tuple[int, ...]) -> dict[str, Array]:
    """What an engine's `others` answers for rows that see no key, float64 but for the index, without sinks.

    strongest         the index of the key with the largest logit, of equal ones the earlier; -1 where there is none
    logit, term       its logit and its t
    largest, log_sum  the state of the other keys' logits
    others            the mean of the other keys' t, by their own softmax
    """
    numbers = {"logit": -np.inf, "term": 0.0, "largest": -np.inf, "log_sum": 0.0, "others": 0.0}
    return {"strongest": np.full(shape, -1)} | {name: np.full(shape, x) for name, x in numbers.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """What each row must know for its effects, (batch, heads, queries) in the statistics' dtype, where q lies."""

    kind: Kind
    state: State
    whole: Array | None = None  # g_i·o_i
    others: Array | None = None  # m_i
    strongest: Array | None = None  # the key for which m_i stands; -1 where no key is seen
    g: Any = None  # (batch, heads, queries, d_v) in the problem's dtype, as the call's values have

    def part(self, batches: Array | None, heads: range | None, queries: range) -> "Terms":
        """The terms of some batches, heads and queries; None is all."""
        part = batches, heads, queries
        arrays = {name: getattr(self, name) for name in ("whole", "others", "strongest", "g")}
        kept = {name: part_of(x, *part) for name, x in arrays.items() if x is not None}
        return replace(self, state=State(*(part_of(x, *part) for x in self.state)), **kept)

    def among(self, keys: range) -> "Terms":
        """The terms of the whole rows for some keys only: where each row's strongest key is among them."""
        if self.strongest is None:
            return self
        strongest = on_cpu(self.strongest)
        place, between = np.divmod(strongest - keys.start, keys.step)
        inside = (strongest >= 0) & (between == 0) & (place >= 0) & (place < len(keys))
        return replace(self, strongest=to_device_of(np.where(inside, place, -1), self.strongest))


@np.errstate(invalid="ignore", over="ignore")
def terms_of_cuts(others: Others, sinks: Array | None, state: State) -> Terms:
    """The terms of cuts from each row's others and its state, on the device of the state; sinks (heads,)."""
    seen = others["strongest"] >= 0
    rest = State(others["largest"], others["log_sum"]), others["others"]
    if sinks is not None:
        sink = np.where(seen, sinks[:, None], -np.inf)
        rest = joined(rest, alone(sink, np.zeros(sink.shape)))
    _, whole = joined(alone(others["logit"], others["term"]), rest)
    numbers = (np.where(seen, whole, 0), rest[1])
    made = [*(x.astype(state.largest.dtype) for x in numbers), others["strongest"]]
    return Terms("cut", state, *(to_device_of(x, state.largest) for x in made))


def alone(logit: Array, term: Array) -> tuple[State, Array]:
    """A part that is one logit, as `joined` takes it."""
    return State(logit, np.zeros(logit.shape)), term


@np.errstate(invalid="ignore", over="ignore")
def joined(*parts: tuple[State, Array]) -> tuple[State, Array]:
    """The state and the mean of parts that each have theirs; nothing and 0 where all are empty."""
    whole = states.merged(np, *(state for state, _ in parts))
    mean = np.zeros(whole.largest.shape)
    for state, average in parts:
        mean = mean + np.where(np.isneginf(state.largest), 0.0, states.share(np, state, whole) * average)
    return whole, mean


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None for fewer than three numbers or all equal ones.

    >>> spearman([1, 2, 3, 4], [1, 4, 9, 16]), spearman([1, 2], [1, 2])
    (1.0, None)
    """
    sides = (np.asarray(numbers, np.float64) for numbers in (x, y))
    first, second = (sum(np.searchsorted(np.sort(side), side, way) for way in ("left", "right")) / 2 for side in sides)
    if len(x) < 3 or not np.ptp(first) or not np.ptp(second):
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), 12)
