"""The one table of statistics: what can be observed of attention, along which axes, and how two parts become one.

All that lists statistics is derived from `STATISTICS`: the keywords of `observe` and their checks, the answers' sizes,
how they merge, which derivatives there are, PyTorch's operators, saved files, notebooks.
`Watched`, `Asked`, `Wanted`, `Answers` and `Observable` repeat the list for type checkers and for readers; a test
compares them. Each engine declares the statistics that it computes, and is never asked for another.

effects.py has a second table of the same kind: what is observed of contributions and cuts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, TypeVar

from clearhead.core.axes import Array, as_slice, brief
from clearhead.core.state import State

PER_QUERY, PER_KEY = ("heads", "queries"), ("heads", "keys")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Statistic(NamedTuple):
    """One thing that can be observed; a_ij is the weight and s_ij the logit of query i and key j.

    axes          of its array, after the batch axes
    asked         how a caller asks for it: a flag (True), a count (a whole number), a size (height, width), labels (of
                  queries and of keys), or by giving v
    computed      rows: in the pass over keys that computes the output; columns: in a second pass, which needs the final
                  log-sum-exp L; edges: from the effects of single edges
    over_keys     how parts over disjoint keys merge: weighed by exp(L_part - L), the larger, entropy's own formula, the
                  strongest of both, logsumexp (the merged state itself), one after the other, added; None: they cannot,
                  since the final L is needed, or pixels overlap
    over_queries  how parts over disjoint queries merge: one after the other, added, the larger, or the strongest
    derivative    the form of its part in the gradient of the logits: one term per row, one per key, a product of low
                  rank, single entries; None: it has no derivative
    definition    in one line
    kind          the named tuple of its arrays, where there are several
    """

    axes: tuple[str, ...]
    asked: Literal["flag", "count", "size", "labels", "v"]
    computed: Literal["rows", "columns", "edges"]
    over_keys: Literal["weighed", "larger", "entropy", "strongest", "logsumexp", "after", "added"] | None
    over_queries: Literal["after", "added", "larger", "strongest"]
    derivative: Literal["row", "key", "rank", "entries"] | None
    definition: str
    kind: Any = None

    @property
    def heads_axis(self) -> int:
        """The axis that runs along the heads, counted from the end."""
        return -len(self.axes)

    @property
    def queries_axis(self) -> int | None:
        """The axis that runs along the queries, counted from the end; None where they are reduced."""
        places = [place for place, axis in enumerate(self.axes) if axis in ("queries", "height", "query groups")]
        return places[0] - len(self.axes) if places else None

    @property
    def smooth(self) -> bool:
        """Is it a sum over the weights? The largest of them jumps from key to key, and has no second derivative."""
        return not {self.over_keys, self.over_queries} & {"larger", "strongest"}


Table = Mapping[str, Statistic]


class Top(NamedTuple):
    """Each query's strongest weights and the keys they fall on, strongest first; 0 and -1 where fewer are visible."""

    weights: Any
    indices: Any

    def __repr__(self) -> str:
        return brief("Top", self._asdict())


_PICTURE, _TABLE = ("heads", "height", "width"), ("heads", "query groups", "key groups")
_VALUES, _RANKED = (*PER_QUERY, "d_v"), (*PER_QUERY, "k")
# fmt: off
STATISTICS: dict[str, Statistic] = {
    "output": Statistic(_VALUES, "v", "rows", "weighed", "after", "row", "Σ_j a_ij·v_j"),
    "logsumexp": Statistic(PER_QUERY, "flag", "rows", "logsumexp", "after", "row", "ln Σ_j exp(s_ij), with the sink",
                           State),
    "max_logit": Statistic(PER_QUERY, "flag", "rows", "larger", "after", "entries", "max_j s_ij"),
    "entropy": Statistic(PER_QUERY, "flag", "rows", "entropy", "after", "row", "-Σ_j a_ij ln a_ij, in nats"),
    "received": Statistic(PER_KEY, "flag", "columns", None, "added", "key", "Σ_i a_ij"),
    "peak": Statistic(PER_KEY, "flag", "columns", None, "larger", "entries", "max_i a_ij"),
    "top": Statistic(_RANKED, "count", "rows", "strongest", "after", "entries",
                     "the k strongest a_ij and their j", Top),
    "distance": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "row", "Σ_j a_ij |position of i - j|"),
    "diagonal": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "entries", "a_ij of the key at i's position"),
    "image": Statistic(_PICTURE, "size", "columns", None, "after", "rank", "mean of a over each pixel's area"),
    "groups": Statistic(_TABLE, "labels", "columns", None, "added", "rank", "Σ of a_ij between labelled spans"),
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


class Groups(NamedTuple):
    """Which span each query and each key belongs to, and how many spans there are."""

    queries: Array  # labels, (batch, queries)
    keys: Array  # (batch, keys)
    counts: tuple[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What to observe, validated: a field for each entry of its table, of which every table has these two."""

    table: ClassVar[Table]
    image: tuple[int, int] | None = None
    groups: Groups | None = None

    def names(self) -> list[str]:
        """What is asked for, in the order of the table."""
        kind: Any = type(self)
        names, values = _reader(kind)
        each = zip(names, values(self), strict=True)
        return [name for name, value in each if value is not None and value is not False]

    def shape(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of each array of one entry; `sizes` has batch, heads, queries, keys and whatever else is needed."""
        height, width = self.image or (0, 0)
        rows, columns = (0, 0) if self.groups is None else self.groups.counts
        each = {"height": height, "width": width, "query groups": rows, "key groups": columns, "k": getattr(self, name)}
        return sizes["batch"], *(each[axis] if axis in each else sizes[axis] for axis in self.table[name].axes)


@dataclass(frozen=True, eq=False, slots=True)
class Wanted(Request):
    """What to observe of the weights."""

    table = STATISTICS
    output: bool = False
    logsumexp: bool = False
    max_logit: bool = False
    entropy: bool = False
    received: bool = False
    peak: bool = False
    top: int | None = None
    distance: bool = False
    diagonal: bool = False
    keep_float32: bool = False  # answer the output in the statistics' dtype, to be rounded by the caller

    def rows(self) -> list[str]:
        """The statistics asked for that the row pass computes."""
        return [name for name in self.names() if STATISTICS[name].computed == "rows"]

    def columns(self) -> list[str]:
        """The statistics asked for that the column pass computes."""
        return [name for name in self.names() if STATISTICS[name].computed == "columns"]

    def only(self, names: Iterable[str]) -> "Wanted":
        """The same request, restricted to these statistics."""
        kept, nothing = set(names), type(self)()
        return replace(self, **{name: getattr(nothing, name) for name in self.names() if name not in kept})

    def for_queries(self, queries: range) -> "Wanted":
        """The same request for some queries only: of the queries' labels, theirs are kept."""
        if self.groups is None:
            return self
        return replace(self, groups=self.groups._replace(queries=self.groups.queries[:, as_slice(queries)]))


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Answers:
    """What was observed, (…, heads, …); None where it was not asked for.

    The log-sum-exp is there as two arrays, the rows' `state`, which has digits that their sum may not have.
    """

    output: Any = None
    largest: Any = None
    log_sum: Any = None
    max_logit: Any = None
    entropy: Any = None
    received: Any = None
    peak: Any = None
    top: Top | None = None
    distance: Any = None
    diagonal: Any = None
    image: Any = None
    groups: Any = None

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
        return {name: self.state if one.kind is State else getattr(self, name) for name, one in STATISTICS.items()}


@cache
def _reader(kind: type[Request]) -> tuple[tuple[str, ...], Callable[[Request], tuple[Any, ...]]]:
    """The names in the table among the fields of a request, and a function that reads them all at once."""
    has = {field.name for field in fields(kind)}
    names = tuple(name for name in kind.table if name in has)
    return names, attrgetter(*names)


def listed(**facts: Any) -> tuple[str, ...]:
    """The statistics of which all these facts hold, in the order of the table.

    >>> listed(axes=("heads", "keys"))
    ('received', 'peak')
    """
    return tuple(
        name for name, one in STATISTICS.items() if all(getattr(one, fact) == value for fact, value in facts.items())
    )


def askable() -> tuple[str, ...]:
    """What can be asked for by name; the output is asked for by giving v."""
    return tuple(name for name, one in STATISTICS.items() if one.asked != "v")


def smooth(**facts: Any) -> tuple[str, ...]:
    """The statistics of which all these facts hold and that do not jump from key to key."""
    return tuple(name for name in listed(**facts) if STATISTICS[name].smooth)


def arrays_of(name: str, table: Table = STATISTICS) -> tuple[str, ...]:
    """The arrays of an entry, as engines call them.

    >>> arrays_of("entropy"), arrays_of("top")
    (('entropy',), ('top_weights', 'top_indices'))
    """
    kind = table[name].kind
    if kind is State:
        return State._fields
    return (name,) if kind is None else tuple(f"{name}_{part}" for part in kind._fields)


def joined_arrays(arrays: Mapping[str, Any], table: Table = STATISTICS) -> dict[str, Any]:
    """An engine's arrays by entry: top_weights and top_indices become a Top; a row's state stays two arrays."""
    result = dict(arrays)
    for name, one in table.items():
        if one.kind not in (None, State) and f"{name}_{one.kind._fields[0]}" in result:
            result[name] = one.kind(*(result.pop(array) for array in arrays_of(name, table)))
    return result


def separate_arrays(answers: Any, table: Table = STATISTICS) -> dict[str, Any]:
    """What was observed, as arrays with the engines' names: the inverse of joined_arrays."""
    result: dict[str, Any] = {}
    for name, one in table.items():
        value = answers.state if one.kind is State else getattr(answers, name)
        if value is not None:
            result |= zip(arrays_of(name, table), (value,) if one.kind is None else value, strict=True)
    return result


def lacking(want: Wanted, declared: Collection[str]) -> list[str]:
    """The statistics that are wanted but not among the declared ones."""
    return [name for name in want.names() if name not in declared]


def explained(names: Iterable[str]) -> Callable[[_Function], _Function]:
    """A decorator that replaces STATISTICS in a docstring by a line about each of these statistics."""

    def put(function: _Function) -> _Function:
        each = [(f"{name}={_EXAMPLES[STATISTICS[name].asked]}", STATISTICS[name]) for name in names]
        lines = [f"        {ask:<24}  {one.definition:<37}(…, {', '.join(one.axes)})" for ask, one in each]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("        STATISTICS", "\n".join(lines))
        return function

    return put
