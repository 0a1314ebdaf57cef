"""What single edges did: the one table of what is observed of contributions and cuts, and what a row must know for it.

With g_i the derivative of some number by the output o_i of query i, and t_ij = g_i·v_j, the contribution of an edge is
a_ij·t_ij, and its cut what g_i·o_i changes by when query i may not see key j: a_ij/(1 - a_ij)·(g_i·o_i - t_ij).

1 - a_ij may have no digits left where a_ij is near 1, which only the largest weight of a row can be. For that key, the
answer of all other keys is computed apart: m_i = g_i·o'_i, by their own softmax. Then the cut is a_ij·(m_i - t_ij),
where nothing is subtracted from 1. A sink is one more of the others, which adds nothing to m_i.

Where a cut edge's weight moves to the row's sink instead, e_ij = a_ij·(g_i·v_0 - t_ij), or -a_ij·t_ij with learned
sinks: contributions of the values v_0 - v_j, or -v_j, of the kind "moved".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args

import numpy as np

from clearhead.core import state as states
from clearhead.core.arrays import on_cpu, to_device_of
from clearhead.core.axes import Array, brief, part_of
from clearhead.core.state import State
from clearhead.core.statistics import PER_KEY, PER_QUERY, Request, Statistic
from clearhead.errors import check_known
from clearhead.loading import load

Kind = Literal["contribution", "cut", "moved", "norm"]
Rest = Literal["renormalise", "first"]
Order = Literal["magnitude", "largest", "smallest"]
ORDERS: tuple[str, ...] = get_args(Order)


def read_rest(rest: Any) -> Rest:
    """Where a cut edge's weight goes. Raises UnknownNameError for another word."""
    check_known("rest", [rest], get_args(Rest))
    return cast("Rest", rest)


class Ranked(NamedTuple):
    """Each query's first effects in some order, and the keys they fall on; 0 and -1 where there are fewer."""

    values: Any
    indices: Any

    def __repr__(self) -> str:
        return brief("Ranked", self._asdict())


class Strongest(NamedTuple):
    """The edges of largest effect, by magnitude: their places and values, each (≤ k,)."""

    batch: Any
    head: Any
    query: Any
    key: Any
    value: Any

    def __repr__(self) -> str:
        return brief("Strongest", self._asdict())

    def _repr_html_(self) -> str:
        shown: str = load("view.objects").html_of(self)
        return shown


class SignedImage(NamedTuple):
    """The matrix as a picture: the mean under each pixel, and what `larger` leaves of the effects there."""

    mean: Any
    largest: Any

    def __repr__(self) -> str:
        return brief("SignedImage", self._asdict())


_IMAGE, _GROUPS = ("heads", "height", "width"), ("heads", "query groups", "key groups")
_FIRST, _LARGEST = "each query's k first e_ij in some order", "the k e_ij of largest magnitude, and i·keys + j"
# fmt: off
EFFECTS: dict[str, Statistic] = {  # parts over disjoint keys are computed with the terms of the whole row
    "by_key": Statistic(PER_KEY, "flag", "edges", "after", "added", None, "Σ_i e_ij"),
    "by_query": Statistic(PER_QUERY, "flag", "edges", "added", "after", None, "Σ_j e_ij"),
    "top": Statistic((*PER_QUERY, "k"), "count", "edges", "strongest", "after", None, _FIRST, Ranked),
    "strongest": Statistic(("heads", "k"), "count", "edges", "strongest", "strongest", None, _LARGEST, Ranked),
    "image": Statistic(_IMAGE, "size", "edges", None, "after", None, "e under each pixel: mean, largest", SignedImage),
    "groups": Statistic(_GROUPS, "labels", "edges", "added", "added", None, "Σ of e_ij between labelled spans"),
}
# fmt: on


class AskedEffects(TypedDict, total=False):
    """What `EffectMatrix.observe` can be asked for, besides the order of `top`."""

    by_key: bool
    by_query: bool
    top: int | None
    strongest: int | None
    image: tuple[int, int] | None
    groups: tuple[Any, Any] | None


@dataclass(frozen=True, eq=False, slots=True)
class WantedEffects(Request):
    """What to observe of a matrix of effects."""

    table = EFFECTS
    by_key: bool = False
    by_query: bool = False
    top: int | None = None
    order: Order = "magnitude"  # of `top`
    strongest: int | None = None


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Effects:
    """What was observed of a matrix of effects, (…, heads, …); None where it was not asked for.

    Made by `EffectMatrix.observe`; each field has the answer of the method of its name.

    >>> import numpy as np, clearhead as ch
    >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).cut_effects(np.eye(3), np.eye(3)).observe(by_key=True, top=2)
    Effects(by_key (3,), top Ranked(values (3, 2), indices (3, 2)))
    """

    by_key: Any = None
    by_query: Any = None
    top: Ranked | None = None
    strongest: Strongest | None = None
    image: SignedImage | None = None
    groups: Any = None

    def __repr__(self) -> str:
        return brief("Effects", {name: getattr(self, name) for name in EFFECTS})


class Others(NamedTuple):
    """Each row's key of the largest logit, and what all its other keys answer, (batch, heads, queries) each.

    The arrays are float64 but for the index, in the CPU's memory, and without sinks.
    """

    strongest: Array  # the index of the key with the largest logit, the earlier one of equal logits; -1: no key is seen
    logit: Array  # its logit; -inf where no key is seen
    term: Array  # its t
    largest: Array  # the state of the other keys' logits; -inf and 0 where there are none
    log_sum: Array
    others: Array  # the mean of the other keys' t, by their own softmax; 0 where there are none


def no_keys(shape: tuple[int, ...]) -> Others:
    """The state of rows that see no key."""
    nothing = [np.full(shape, x) for x in (-np.inf, 0.0, -np.inf, 0.0, 0.0)]
    return Others(np.full(shape, -1), *nothing)


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """What each row must know for its effects, (batch, heads, queries) in the statistics' dtype, where q lies."""

    kind: Kind
    state: State
    whole: Array | None = None  # g_i·o_i
    others: Array | None = None  # m_i
    strongest: Array | None = None  # the key for which m_i stands; -1 where no key is seen

    def part(self, batches: Array | None, heads: range | None, queries: range) -> "Terms":
        """The terms of some batches, heads and queries; None is all."""
        part = batches, heads, queries
        arrays = {name: getattr(self, name) for name in ("whole", "others", "strongest")}
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
    seen = others.strongest >= 0
    rest = State(others.largest, others.log_sum), others.others
    if sinks is not None:
        sink = np.where(seen, sinks[:, None], -np.inf)
        rest = joined(rest, alone(sink, np.zeros(sink.shape)))
    _, whole = joined(alone(others.logit, others.term), rest)
    numbers = (np.where(seen, whole, 0), rest[1])
    made = [*(x.astype(state.largest.dtype) for x in numbers), others.strongest]
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
    first, second = (_ranks(np.asarray(numbers, np.float64)) for numbers in (x, y))
    if len(x) < 3 or not np.ptp(first) or not np.ptp(second):
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), 12)


def _ranks(x: Array) -> Array:
    order = np.sort(x)
    return np.asarray(np.searchsorted(order, x, "left") + np.searchsorted(order, x, "right")) / 2
