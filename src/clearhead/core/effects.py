"""Effects of single edges: the formulas of contributions and cuts, and the numbers per row that they need.

With g_i the gradient of some number at the output o_i of query i, and t_ij = g_i·v_j, an edge's contribution is
a_ij·t_ij. Its cut is the change of g_i·o_i when query i may not see key j: a_ij/(1 - a_ij)·(g_i·o_i - t_ij).

A row's largest weight may be so near 1 that 1 - a_ij has no digits left. For its key, the output o'_i of all other keys
is computed by their own softmax, m_i = g_i·o'_i, and the cut is a_ij·(m_i - t_ij), where nothing is subtracted from 1.
A sink counts among the other keys, with a value of 0.

With rest="first", a cut edge's weight moves to the first key instead, e_ij = a_ij·(g_i·v_0 - t_ij), or to the learned
sink, -a_ij·t_ij: these are contributions of the values v_0 - v_j, or -v_j, of the kind "moved".
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
    """Read where a cut edge's weight goes. Raises UnknownNameError for another word."""
    check_known("rest", [rest], get_args(Rest))
    return cast("Rest", rest)


Others = Mapping[str, Array]  # each row's strongest key, and the softmax of its other keys, by the names of `no_keys`


def no_keys(shape: tuple[int, ...]) -> dict[str, Array]:
    """What an engine's `others` returns for rows that see no key: float64, the index int64, without sinks.

    strongest         the index of the key with the largest logit, the earlier of equal ones; -1 if there is none
    logit, term       its logit and its t
    largest, log_sum  the state of the other keys' logits
    others            the mean of the other keys' t, by their own softmax
    """
    numbers = {"logit": -np.inf, "term": 0.0, "largest": -np.inf, "log_sum": 0.0, "others": 0.0}
    return {"strongest": np.full(shape, -1)} | {name: np.full(shape, x) for name, x in numbers.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """The numbers per row that effects need, (batch, heads, queries) in the statistics' dtype, on q's device."""

    kind: Kind
    state: State
    whole: Array | None = None  # g_i·o_i
    others: Array | None = None  # m_i
    strongest: Array | None = None  # the key for which m_i is used; -1 where no key is seen
    g: Any = None  # (batch, heads, queries, d_v) in the problem's dtype, like the call's v

    def part(self, batches: Array | None, heads: range | None, queries: range) -> "Terms":
        """The terms of some batches, heads and queries; None is all."""
        part = batches, heads, queries
        arrays = {name: getattr(self, name) for name in ("whole", "others", "strongest", "g")}
        kept = {name: part_of(x, *part) for name, x in arrays.items() if x is not None}
        return replace(self, state=State(*(part_of(x, *part) for x in self.state)), **kept)

    def among(self, keys: range) -> "Terms":
        """The same terms for a tile of these keys: `strongest` becomes an index among them, -1 where it is not one."""
        if self.strongest is None:
            return self
        strongest = on_cpu(self.strongest)
        place, between = np.divmod(strongest - keys.start, keys.step)
        inside = (strongest >= 0) & (between == 0) & (place >= 0) & (place < len(keys))
        return replace(self, strongest=to_device_of(np.where(inside, place, -1), self.strongest))


@np.errstate(invalid="ignore", over="ignore")
def terms_of_cuts(others: Others, sinks: Array | None, state: State) -> Terms:
    """Compute the terms of cuts from `others` and each row's state, on the state's device; sinks (heads,)."""
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
    """Merge parts of a row into one state and one mean; an empty row has the state (-inf, 0) and mean 0."""
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
