"""The table of statistics: what can be observed of attention's weights and of effects, and how partial results merge.

Every list of statistics is derived from `STATISTICS`: the keywords of `observe` and their checks, the answers' sizes,
how they merge, their derivatives, PyTorch's operators, notebooks. `Watched`, `Asked`, `AskedEffects`, `Wanted`,
`Observation` and the methods of matrices repeat it for type checkers and for readers; a test compares them.
Each engine declares the statistics that it computes, and is never asked for another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from clearhead.core.axes import Array, as_slice, brief
from clearhead.core.state import State

PER_QUERY, PER_KEY = ("heads", "queries"), ("heads", "keys")
Matrix = Literal["weights", "effects"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Statistic(NamedTuple):
    """One entry of the table; a_ij is the weight, s_ij the logit and e_ij the effect of query i and key j.

    axes          of its array, after the batch axes
    asked         how a caller asks for it: a flag (True), a count (a whole number), a size (height, width), labels (of
                  queries and of keys), or by giving v
    computed      rows: in the pass over keys that computes the output; columns: in a second pass over weights, which
                  needs the final log-sum-exp L; edges: in the pass over effects, which computes all their statistics
    over_keys     how parts over disjoint keys merge: weighed by exp(L_part - L), the larger, entropy's own formula, the
                  strongest of both, logsumexp (the merged state itself), concatenated (after), added; None: not at all,
                  since the final L is needed, or pixels overlap
    over_queries  how parts over disjoint queries merge: concatenated (after), added, the larger, or the strongest
    derivative    the form of its term in the gradient of the logits: one number per row, one per key, or another, which
                  is recomputed; None: no derivative, which holds for every statistic of effects
    definition    its formula in one line
    of            the matrices that have it, each with the named tuple of its arrays, or None for one array
    """

    axes: tuple[str, ...]
    asked: Literal["flag", "count", "size", "labels", "v"]
    computed: Literal["rows", "columns", "edges"]
    over_keys: Literal["weighed", "larger", "entropy", "strongest", "logsumexp", "after", "added"] | None
    over_queries: Literal["after", "added", "larger", "strongest"]
    derivative: Literal["row", "key", "other"] | None
    definition: str
    of: Mapping[Matrix, Any] = {"weights": None}


class Top(NamedTuple):
    """Each query's strongest weights and the keys they fall on, strongest first; 0 and -1 where fewer are visible."""

    weights: Any
    indices: Any


class Ranked(NamedTuple):
    """Each query's strongest effects by magnitude, and the keys they fall on; 0 and -1 where there are fewer."""

    values: Any
    indices: Any


class Strongest(NamedTuple):
    """The edges of largest effect, by magnitude: their places and values, each (≤ k,)."""

    batch: Any
    head: Any
    query: Any
    key: Any
    value: Any


for _kind in (Top, Ranked, Strongest):
    setattr(_kind, "__repr__", lambda self: brief(type(self).__name__, self._asdict()))  # noqa: B010

_PICTURE, _TABLE = ("heads", "height", "width"), ("heads", "query groups", "key groups")
_VALUES, _RANKED = (*PER_QUERY, "d_v"), (*PER_QUERY, "k")
_EFFECTS: dict[Matrix, Any] = {"effects": None}
# fmt: off
STATISTICS: dict[str, Statistic] = {
    "output": Statistic(_VALUES, "v", "rows", "weighed", "after", "row", "Σ_j a_ij·v_j"),
    "logsumexp": Statistic(PER_QUERY, "flag", "rows", "logsumexp", "after", "row", "ln Σ_j exp(s_ij), with the sink",
                           {"weights": State}),
    "max_logit": Statistic(PER_QUERY, "flag", "rows", "larger", "after", "other", "max_j s_ij"),
    "entropy": Statistic(PER_QUERY, "flag", "rows", "entropy", "after", "row", "-Σ_j a_ij ln a_ij, in nats"),
    "received": Statistic(PER_KEY, "flag", "columns", None, "added", "key", "Σ_i a_ij"),
    "peak": Statistic(PER_KEY, "flag", "columns", None, "larger", "other", "max_i a_ij"),
    "by_key": Statistic(PER_KEY, "flag", "edges", "after", "added", None, "Σ_i e_ij", _EFFECTS),
    "by_query": Statistic(PER_QUERY, "flag", "edges", "added", "after", None, "Σ_j e_ij", _EFFECTS),
    "top": Statistic(_RANKED, "count", "rows", "strongest", "after", "other",
                     "the k strongest a_ij and their j", {"weights": Top, "effects": Ranked}),
    "strongest": Statistic(("heads", "k"), "count", "edges", "strongest", "strongest", None,
                           "the k e_ij of largest magnitude, and i·keys + j", {"effects": Ranked}),
    "distance": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "row", "Σ_j a_ij |position of i - j|"),
    "diagonal": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "other", "a_ij of the key at i's position"),
    "image": Statistic(_PICTURE, "size", "columns", None, "after", "other", "mean of a over each pixel's area",
                       {"weights": None, "effects": None}),
    "groups": Statistic(_TABLE, "labels", "columns", None, "added", "other", "Σ of a_ij between labelled spans",
                        {"weights": None, "effects": None}),
}
# fmt: on
_EXAMPLES = {"flag": "True", "count": "8", "size": "(256, 256)", "labels": "(labels, labels)"}


class Watched(TypedDict, total=False):
    """What can be observed in each layer of a running model."""

    max_logit: bool
    entropy: bool
    received: bool
    peak: bool
    top: int | None
    distance: bool
    diagonal: bool
    image: tuple[int, int] | None


class Asked(Watched, total=False):
    """What `observe` can be asked for besides the output."""

    logsumexp: bool
    groups: tuple[Any, Any] | None


class AskedEffects(TypedDict, total=False):
    """What `EffectMatrix.observe` can be asked for."""

    by_key: bool
    by_query: bool
    top: int | None
    strongest: int | None
    image: tuple[int, int] | None
    groups: tuple[Any, Any] | None


Groups = tuple[Array, Array, tuple[int, int]]  # labels (batch, queries) and (batch, keys), how many of each


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """What to observe of weights or of effects, validated: a field for each statistic."""

    output: bool = False
    logsumexp: bool = False
    max_logit: bool = False
    entropy: bool = False
    received: bool = False
    peak: bool = False
    by_key: bool = False
    by_query: bool = False
    top: int | None = None
    strongest: int | None = None
    distance: bool = False
    diagonal: bool = False
    image: tuple[int, int] | None = None
    groups: Groups | None = None
    of: Matrix = "weights"
    keep_float32: bool = False  # answer the output in the statistics' dtype, to be rounded by the caller

    def names(self) -> list[str]:
        """The requested statistics, in the order of the table."""
        return [name for name in STATISTICS if (x := getattr(self, name, None)) is not None and x is not False]

    def shape(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of each array of a statistic; `sizes` has batch, heads, queries, keys and, for the output, d_v."""
        height, width = self.image or (0, 0)
        rows, columns = (0, 0) if self.groups is None else self.groups[2]
        each = {"height": height, "width": width, "query groups": rows, "key groups": columns, "k": getattr(self, name)}
        return sizes["batch"], *(each[axis] if axis in each else sizes[axis] for axis in STATISTICS[name].axes)

    def rows(self) -> list[str]:
        """The requested statistics that the row pass computes; none for effects."""
        return [name for name in self.names() if self.of == "weights" and STATISTICS[name].computed == "rows"]

    def columns(self) -> list[str]:
        """The requested statistics that the column pass computes; all for effects."""
        return [name for name in self.names() if self.of == "effects" or STATISTICS[name].computed == "columns"]

    def for_queries(self, queries: range) -> "Wanted":
        """The same request for some queries only, with their labels."""
        if self.groups is None:
            return self
        labels, keys, counts = self.groups
        return replace(self, groups=(labels[:, as_slice(queries)], keys, counts))


def listed(of: Matrix = "weights", **facts: Any) -> tuple[str, ...]:
    """The statistics of a matrix whose entries have these values, in the order of the table.

    >>> listed(axes=("heads", "keys"))
    ('received', 'peak')
    """
    each = ((name, one) for name, one in STATISTICS.items() if of in one.of)
    return tuple(name for name, one in each if all(getattr(one, fact) == value for fact, value in facts.items()))


def askable(of: Matrix = "weights") -> tuple[str, ...]:
    """The statistics that are requested by name; the output is requested by giving v."""
    return tuple(name for name, one in STATISTICS.items() if of in one.of and one.asked != "v")


def smooth(**facts: Any) -> tuple[str, ...]:
    """As `listed`, only sums over weights: a largest or strongest weight jumps, and has no second derivative."""
    each = ((name, STATISTICS[name]) for name in listed(**facts))
    return tuple(name for name, one in each if not {one.over_keys, one.over_queries} & {"larger", "strongest"})


def arrays_of(name: str, of: Matrix = "weights") -> tuple[str, ...]:
    """The arrays of a statistic, as engines call them.

    >>> arrays_of("entropy"), arrays_of("top"), arrays_of("top", "effects")
    (('entropy',), ('top_weights', 'top_indices'), ('top_values', 'top_indices'))
    """
    kind = STATISTICS[name].of.get(of)
    if kind is State:
        return State._fields
    return (name,) if kind is None else tuple(f"{name}_{part}" for part in kind._fields)


def joined_arrays(arrays: Mapping[str, Any], of: Matrix = "weights") -> dict[str, Any]:
    """An engine's arrays by statistic: top_weights and top_indices become a Top; a row's state stays two arrays."""
    result = dict(arrays)
    for name, one in STATISTICS.items():
        kind = one.of.get(of)
        if kind not in (None, State) and arrays_of(name, of)[0] in result:
            result[name] = kind(*(result.pop(array) for array in arrays_of(name, of)))
    return result


def explained(names: Iterable[str]) -> Callable[[_Function], _Function]:
    """A decorator that replaces STATISTICS in a docstring by a line about each of these statistics."""

    def put(function: _Function) -> _Function:
        each = [(f"{name}={_EXAMPLES[STATISTICS[name].asked]}", STATISTICS[name]) for name in names]
        lines = [f"        {ask:<24}  {one.definition:<37}(…, {', '.join(one.axes)})" for ask, one in each]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("        STATISTICS", "\n".join(lines))
        return function

    return put
