"""What single edges did: the one table of what is observed of contributions and cuts, and what a row must know for it.

With g_i the derivative of some number by the output o_i of query i, and t_ij = g_i·v_j, the contribution of an edge is
a_ij·t_ij, and its cut what g_i·o_i changes by when query i may not see key j: a_ij/(1 - a_ij)·(g_i·o_i - t_ij).

1 - a_ij may have no digits left where a_ij is near 1, which only the largest weight of a row can be. For that key, the
answer of all other keys is computed apart: m_i = g_i·o'_i, by their own log-sum-exp. Then the cut is a_ij·(m_i - t_ij),
where nothing is subtracted from 1. A sink is one more of the others, which adds nothing to m_i.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, cast, get_args

import numpy as np

from clearhead.core.arrays import on_cpu, to_device_of
from clearhead.core.axes import Array, as_slice, brief
from clearhead.core.statistics import PER_KEY, PER_QUERY, Groups

Kind = Literal["contribution", "cut", "norm"]
Order = Literal["magnitude", "largest", "smallest"]
ORDERS: tuple[str, ...] = get_args(Order)


class Effect(NamedTuple):
    """One thing that is observed of a matrix of effects e_ij.

    axes          of its arrays, after the batch axes
    asked         as in core/statistics.py
    over_keys     how parts over disjoint keys merge, each computed with the terms of the whole row: one after the
                  other, added, or the strongest of both
    over_queries  how parts over disjoint queries merge
    definition    in one line
    parts         the names of its arrays, where there are several
    """

    axes: tuple[str, ...]
    asked: Literal["flag", "count", "size", "labels"]
    over_keys: Literal["after", "added", "strongest"] | None
    over_queries: Literal["after", "added", "strongest"]
    definition: str
    parts: tuple[str, ...] = ()


_PAIR = ("values", "indices")
EFFECTS: dict[str, Effect] = {
    "by_key": Effect(PER_KEY, "flag", "after", "added", "Σ_i e_ij"),
    "by_query": Effect(PER_QUERY, "flag", "added", "after", "Σ_j e_ij"),
    "top": Effect((*PER_QUERY, "k"), "count", "strongest", "after", "each query's k first e_ij in some order", _PAIR),
    "strongest": Effect(
        ("heads", "k"), "count", "strongest", "strongest", "the k e_ij of largest magnitude, and i·keys + j", _PAIR
    ),
    "image": Effect(
        ("heads", "height", "width"), "size", None, "after", "e under each pixel: mean and largest", ("mean", "largest")
    ),
    "groups": Effect(
        ("heads", "query groups", "key groups"), "labels", "added", "added", "Σ of e_ij between labelled spans"
    ),
}


class AskedEffects(TypedDict, total=False):
    """What `CauseMatrix.observe` can be asked for, besides the order of `top`."""

    by_key: bool
    by_query: bool
    top: int | None
    strongest: int | None
    image: tuple[int, int] | None
    groups: tuple[Any, Any] | None


@dataclass(frozen=True, eq=False, slots=True)
class WantedEffects:
    """What to observe of a matrix of effects, validated."""

    by_key: bool = False
    by_query: bool = False
    top: int | None = None
    order: Order = "magnitude"  # of `top`
    strongest: int | None = None
    image: tuple[int, int] | None = None
    groups: Groups | None = None

    def names(self) -> list[str]:
        """What is asked for, in the order of the table."""
        return [name for name in EFFECTS if getattr(self, name) is not None and getattr(self, name) is not False]


def shapes(sizes: Mapping[str, int], want: WantedEffects) -> dict[str, tuple[int, ...]]:
    """The shape of each array wanted, by name, such as top_values; `sizes` has batch, heads, queries and keys."""
    height, width = want.image or (0, 0)
    rows, cols = (0, 0) if want.groups is None else want.groups.counts
    own = {**sizes, "height": height, "width": width, "query groups": rows, "key groups": cols}
    found: dict[str, tuple[int, ...]] = {}
    for name in want.names():
        axes = [getattr(want, name) if axis == "k" else own[axis] for axis in EFFECTS[name].axes]
        found |= dict.fromkeys(arrays_of(name), (own["batch"], *axes))
    return found


def arrays_of(name: str) -> list[str]:
    """The arrays of an effect, as engines call them.

    >>> arrays_of("by_key"), arrays_of("image")
    (['by_key'], ['image_mean', 'image_largest'])
    """
    return [f"{name}_{part}" for part in EFFECTS[name].parts] or [name]


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


class SignedImage(NamedTuple):
    """The matrix as a picture: the mean under each pixel, and what `larger` leaves of the effects there."""

    mean: Any
    largest: Any

    def __repr__(self) -> str:
        return brief("SignedImage", self._asdict())


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Effects:
    """What was observed of a matrix of effects, (…, heads, …); None where it was not asked for.

    Made by `CauseMatrix.observe`; each field has the answer of the method of its name.

    >>> import numpy as np, clearhead as ch
    >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).cuts(np.eye(3), np.eye(3)).observe(by_key=True, top=2)
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


class ObservableEffects:
    """One method for each thing that is observed of effects; each asks `observe` for it alone.

    Ask `observe` for several at once: they share the passes over the keys. A sharded matrix answers for its own queries
    and keys, on every rank at once; of the whole matrix are strongest, image and groups, the same on every rank.
    """

    if TYPE_CHECKING:

        def observe(self, *, order: Order = "magnitude", **asked: Unpack[AskedEffects]) -> Effects:
            """Everything asked for, together."""

    def by_key(self) -> Any:
        """Σ_i e_ij, (…, heads, keys): what each key did in all rows together. Summed in float64.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_key()
        array([2., 6.])
        """
        return self.observe(by_key=True).by_key

    def by_query(self) -> Any:
        """Σ_j e_ij, (…, heads, queries). Contributions along g sum to g_i·o_i; cuts do not sum to anything simple.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_query()
        array([4., 4.])
        """
        return self.observe(by_query=True).by_query

    def top(self, k: int, order: Order = "magnitude") -> Ranked:
        """The k first effects of each query and their keys, (…, heads, queries, k) each.

        order   "magnitude" (largest |e| first), "largest" (most positive first) or "smallest" (most negative first)

        Of equal effects the earlier key comes first. Only keys that the rules allow are listed, and no effect that is
        NaN; the rest has effect 0 and index -1. Raises RuleError for another order, or unless k is a whole number from
        1 up. O(queries·keys·(d_k + d_v)) time, O(queries·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
        >>> A.cuts(np.array([1.0, 0.0, 4.0]), np.ones(3)).top(2, "smallest").indices.tolist()
        [[0, -1], [0, 1], [2, 0]]
        """
        return cast("Ranked", self.observe(top=_count(k), order=order).top)

    def strongest(self, k: int) -> Strongest:
        """The k edges of largest magnitude in the whole matrix: batch, head, query, key and value, each (≤ k,).

        `batch` counts over all leading axes together. Of equal effects the earlier place comes first. Only edges that
        the rules allow are listed, and no effect that is NaN. Raises RuleError unless k is a whole number from 1 up.
        O(queries·keys·(d_k + d_v)) time, O(batch·heads·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> E.strongest(2).key, E.strongest(2).value.round(3)
        (array([2, 2]), array([1.884, 1.058]))
        """
        found = self.observe(strongest=_count(k)).strongest
        return cast("Strongest", found)

    def image(self, height: int, width: int) -> SignedImage:
        """The matrix as a picture, (…, heads, height, width): the mean under each pixel, and what is largest there.

        `largest` is the effect of largest magnitude, with its sign, of all cells that a pixel covers, if only in part;
        of two equal ones the positive, and NaN where there is one. Raises RuleError unless both sides are whole numbers
        from 1 up.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
        >>> A.cuts(np.array([1.0, 0.0, 4.0]), np.ones(3)).image(1, 1).largest.round(3)
        array([[-1.649]])
        """
        return cast("SignedImage", self.observe(image=(height, width)).image)

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of e_ij between labelled spans, (…, heads, query groups, key groups); labels as in AttentionMatrix.groups.

        Effects of single edges do not add up to that of a whole span where it is a cut: see `spans`. Raises ShapeError,
        DtypeError or RuleError for labels that do not fit.
        """
        return self.observe(groups=(query_groups, key_groups)).groups


def _count(k: Any) -> Any:
    """What to ask of `observe`, which checks it: None, which there asks for nothing, is as wrong as 0."""
    return 0 if k is None else k


class Others(NamedTuple):
    """Each row's key of the largest logit, and what all its other keys answer, (batch, heads, queries) each.

    The arrays are float64 but for the index, in the CPU's memory, and without sinks. Two of them over disjoint keys
    merge into one.
    """

    strongest: Array  # the index of the key with the largest logit, the earlier one of equal logits; -1: no key is seen
    logit: Array  # its logit; -inf where no key is seen
    term: Array  # its t
    logsumexp: Array  # of the other keys' logits; -inf where there are none
    others: Array  # the mean of the other keys' t, by their own softmax; 0 where there are none


def no_keys(shape: tuple[int, ...]) -> Others:
    """The state of rows that see no key."""
    nothing = [np.full(shape, x) for x in (-np.inf, 0.0, -np.inf, 0.0)]
    return Others(np.full(shape, -1), *nothing)


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """What each row must know for its effects, (batch, heads, queries) in the statistics' dtype, where q lies."""

    kind: Kind
    logsumexp: Array
    whole: Array | None = None  # g_i·o_i
    others: Array | None = None  # m_i
    strongest: Array | None = None  # the key for which m_i stands; -1 where no key is seen

    def part(self, batches: Any, heads: Any, queries: range) -> "Terms":
        """The terms of some batches, heads and queries; batches and heads index arrays."""
        rows = as_slice(queries)
        arrays = {name: getattr(self, name) for name in ("logsumexp", "whole", "others", "strongest")}
        kept = {name: x[batches][:, heads][:, :, rows] for name, x in arrays.items() if x is not None}
        return replace(self, **kept)

    def among(self, keys: range) -> "Terms":
        """The terms of the whole rows for some keys only: where each row's strongest key is among them."""
        if self.strongest is None:
            return self
        strongest = on_cpu(self.strongest)
        place, between = np.divmod(strongest - keys.start, keys.step)
        inside = (strongest >= 0) & (between == 0) & (place >= 0) & (place < len(keys))
        return replace(self, strongest=to_device_of(np.where(inside, place, -1), self.strongest))


@np.errstate(invalid="ignore")
def merged(a: Others, b: Others, keys: int) -> Others:
    """The state of rows over the keys of a and of b, whose keys follow the `keys` of a."""
    later = Others(np.where(b.strongest < 0, -1, b.strongest + keys), *b[1:])
    first = (a.logit >= later.logit) | (later.strongest < 0)  # of equal logits the earlier key
    best = [np.where(first, x, y) for x, y in zip(a[:3], later[:3], strict=True)]
    lost = [np.where(first, y, x) for x, y in zip(a[1:3], later[1:3], strict=True)]
    rest = joined((a.logsumexp, a.others), (later.logsumexp, later.others), (lost[0], lost[1]))
    return Others(best[0], best[1], best[2], *rest)


@np.errstate(invalid="ignore", over="ignore")
def terms_of_cuts(others: Others, sinks: Array | None, logsumexp: Array) -> Terms:
    """The terms of cuts from each row's state over all keys, on the device of the log-sum-exp; sinks (heads,)."""
    seen = others.strongest >= 0
    rest = others.logsumexp, others.others
    if sinks is not None:
        sink = np.where(seen, sinks[:, None], -np.inf)
        rest = joined(rest, (sink, np.zeros(sink.shape)))
    _, whole = joined((others.logit, others.term), rest)
    numbers = (np.where(seen, whole, 0), rest[1])
    made = [*(x.astype(logsumexp.dtype) for x in numbers), others.strongest]
    return Terms("cut", logsumexp, *(to_device_of(x, logsumexp) for x in made))


@np.errstate(invalid="ignore", over="ignore")
def joined(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """The log-sum-exp and the mean of parts that each have theirs; -inf and 0 where all are empty."""
    total = np.logaddexp.reduce([lse for lse, _ in parts])
    safe = np.where(np.isneginf(total), 0.0, total)
    mean = np.zeros(total.shape)
    for lse, own in parts:
        mean = mean + np.where(np.isneginf(lse), 0.0, np.exp(lse - safe) * own)
    return total, mean
