"""The one table of statistics: what can be observed of attention, along which axes, and how two parts become one.

All that lists statistics is derived from `STATISTICS`: the keywords of `observe` and their checks, the answers' sizes,
how they merge, PyTorch's operators, what ranks exchange, saved files, notebooks. `Watched`, `Asked`, `Wanted`,
`Answers` and `Observable` repeat the list for type checkers and for readers; a test compares them. Each engine declares
the statistics that it computes, and is never asked for another.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from clearhead.core.axes import Array, as_slice, brief

PER_QUERY, PER_KEY = ("heads", "queries"), ("heads", "keys")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Statistic(NamedTuple):
    """One thing that can be observed; a_ij is the weight and s_ij the logit of query i and key j.

    axes          of its array, after the batch axes
    asked         how a caller asks for it: a flag (True), a count (a whole number), a size (height, width), labels (of
                  queries and of keys), or by giving v
    computed      rows: in the pass over keys that computes the output; columns: in a second pass, which needs the final
                  log-sum-exp L
    over_keys     how parts over disjoint keys merge: weighed by exp(L_part - L), the larger, entropy's own formula, the
                  strongest of both, logsumexp (the merged L itself); None: they cannot, since the final L is needed
    over_queries  how parts over disjoint queries merge: one after the other, added, or the larger
    derivative    the form of its part in the gradient of the logits: one term per row, one per key, a product of low
                  rank, single entries; None: it has no derivative
    definition    in one line
    parts         the names of its arrays, where there are several
    """

    axes: tuple[str, ...]
    asked: Literal["flag", "count", "size", "labels", "v"]
    computed: Literal["rows", "columns"]
    over_keys: Literal["weighed", "larger", "entropy", "strongest", "logsumexp"] | None
    over_queries: Literal["after", "added", "larger"]
    derivative: Literal["row", "key", "rank", "entries"] | None
    definition: str
    parts: tuple[str, ...] = ()

    @property
    def heads_axis(self) -> int:
        """The axis that runs along the heads, counted from the end."""
        return -len(self.axes)

    @property
    def queries_axis(self) -> int | None:
        """The axis that runs along the queries, counted from the end; None where they are reduced."""
        places = [at for at, axis in enumerate(self.axes) if axis in ("queries", "height", "query groups")]
        return places[0] - len(self.axes) if places else None


_PICTURE, _TABLE = ("heads", "height", "width"), ("heads", "query groups", "key groups")
_VALUES, _RANKED = (*PER_QUERY, "d_v"), (*PER_QUERY, "k")
# fmt: off
STATISTICS: dict[str, Statistic] = {
    "output": Statistic(_VALUES, "v", "rows", "weighed", "after", "row", "Σ_j a_ij·v_j"),
    "logsumexp": Statistic(PER_QUERY, "flag", "rows", "logsumexp", "after", "row", "ln Σ_j exp(s_ij), with the sink"),
    "max_logit": Statistic(PER_QUERY, "flag", "rows", "larger", "after", "entries", "max_j s_ij"),
    "entropy": Statistic(PER_QUERY, "flag", "rows", "entropy", "after", "row", "-Σ_j a_ij ln a_ij, in nats"),
    "received": Statistic(PER_KEY, "flag", "columns", None, "added", "key", "Σ_i a_ij"),
    "peak": Statistic(PER_KEY, "flag", "columns", None, "larger", "entries", "max_i a_ij"),
    "top": Statistic(_RANKED, "count", "rows", "strongest", "after", "entries", "the k strongest a_ij and their j",
                     ("weights", "indices")),
    "distance": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "row", "Σ_j a_ij |position of i - j|"),
    "own": Statistic(PER_QUERY, "flag", "rows", "weighed", "after", "entries", "a_ij of the key at i's own position"),
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
    own: bool
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
class Wanted:
    """What to observe, validated."""

    output: bool = False
    logsumexp: bool = False
    max_logit: bool = False
    entropy: bool = False
    received: bool = False
    peak: bool = False
    top: int | None = None
    distance: bool = False
    own: bool = False
    image: tuple[int, int] | None = None
    groups: Groups | None = None
    keep_float32: bool = False  # answer the output in the statistics' dtype, to be rounded once after a sum over ranks

    def names(self) -> list[str]:
        """What is asked for, in the order of the table."""
        kind: Any = type(self)
        names, values = _reader(kind)
        each = zip(names, values(self), strict=True)
        return [name for name, value in each if value is not None and value is not False]

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


class Top(NamedTuple):
    """Each query's strongest weights and the keys they fall on, strongest first; 0 and -1 where fewer are visible."""

    weights: Any
    indices: Any

    def __repr__(self) -> str:
        return brief("Top", self._asdict())


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Answers:
    """What was observed, (…, heads, …); None where it was not asked for."""

    output: Any = None
    logsumexp: Any = None
    max_logit: Any = None
    entropy: Any = None
    received: Any = None
    peak: Any = None
    top: Top | None = None
    distance: Any = None
    own: Any = None
    image: Any = None
    groups: Any = None


class Observable:
    """One method for each statistic; each asks `observe` for it alone.

    Answers have the statistics' dtype (float32, or float64 for float64) and are the kind of array that q is. Ask
    `observe` for several at once: they share the passes over the keys, O(queries·keys·d_k) time each, with memory for
    the answers only. A sharded matrix answers for its own queries and keys, on every rank at once. Every method raises
    SizeError where its answer is larger than memory, and EngineError where the engine does not compute it.
    """

    if TYPE_CHECKING:

        def observe(self, v: Any = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Answers:
            """Everything asked for, together."""

    def logsumexp(self) -> Any:
        """L_i = ln(Σ_j exp(s_ij) + exp(sink)), (…, heads, queries), by the natural logarithm; s_ij are the logits.

        -inf where a query may attend to no key. Computed once and kept.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).logsumexp().round(2)
        array([0.  , 0.69])
        """
        return self.observe(logsumexp=True).logsumexp

    def max_logit(self) -> Any:
        """The largest logit of each query, max_j s_ij over the keys it may attend to, (…, heads, queries).

        The logit is what softmax is taken of: after scale, softcap, bias and ALiBi, and without sinks. -inf where a
        query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).max_logit()
        array([0., 0.])
        """
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        """-Σ_j a_ij ln a_ij in nats, (…, heads, queries); 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).entropy().round(2)
        array([0.  , 0.69])
        """
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        """Σ_j a_ij·|position of query i - j|, the mean distance attended over, in tokens, (…, heads, queries).

        The position of query i is i + query_offset. 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).distance()
        array([0. , 0.5])
        """
        return self.observe(distance=True).distance

    def own(self) -> Any:
        """The weight that each query gives the key at its own position, (…, heads, queries); 0 where there is none.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).own()
        array([1. , 0.5])
        """
        return self.observe(own=True).own

    def top(self, k: int) -> Top | None:
        """The k strongest weights of each query and their keys, (…, heads, queries, k) each, strongest first.

        Of equal weights the earlier key comes first. Where a query may attend to fewer than k keys, the rest has weight
        0 and index -1. Indices are int64. Raises RuleError unless k is a whole number from 1 up.
        """
        return self.observe(top=k).top

    def received(self) -> Any:
        """Σ_i a_ij, the sum of the weights that each key receives, (…, heads, keys).

        The accumulated attention score of H2O (Zhang et al. 2023).

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).received()
        array([1.5, 0.5])
        """
        return self.observe(received=True).received

    def peak(self) -> Any:
        """max_i a_ij, the largest weight that any query gives each key, (…, heads, keys); 0 where none may do so.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).peak()
        array([1. , 0.5])
        """
        return self.observe(peak=True).peak

    def image(self, height: int, width: int) -> Any:
        """The matrix as a picture, (…, heads, height, width): each pixel is the mean of the weights over its area.

        Its mean is the mean of the matrix. Raises RuleError unless both are whole numbers from 1 up.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).image(1, 1)
        array([[0.5]])
        """
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of a_ij between labelled spans, (…, heads, query groups, key groups).

        query_groups is (queries,) or (…, queries), key_groups (keys,) or (…, keys): whole numbers 0, 1, 2, …; a token
        whose label is below 0 belongs to no group. Raises DtypeError, ShapeError or RuleError for other labels.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).groups([0, 0], [0, 1])
        array([[1.5, 0.5]])
        """
        return self.observe(groups=(query_groups, key_groups)).groups


@cache
def _reader(kind: type[Wanted]) -> tuple[tuple[str, ...], Callable[[Wanted], tuple[Any, ...]]]:
    """The names of the statistics among the fields of `Wanted`, and a function that reads them all at once."""
    names = tuple(field.name for field in fields(kind) if field.name in STATISTICS)
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


def arrays_of(name: str) -> tuple[str, ...]:
    """The arrays of a statistic, as engines call them.

    >>> arrays_of("entropy"), arrays_of("top")
    (('entropy',), ('top_weights', 'top_indices'))
    """
    parts = STATISTICS[name].parts
    return tuple(f"{name}_{part}" for part in parts) if parts else (name,)


def lacking(want: Wanted, declared: Collection[str]) -> list[str]:
    """The statistics that are wanted but not among the declared ones."""
    return [name for name in want.names() if name not in declared]


def explained(names: Iterable[str]) -> Callable[[_Function], _Function]:
    """A decorator that replaces STATISTICS in a docstring by a line about each of these statistics."""

    def put(function: _Function) -> _Function:
        told = [(f"{name}={_EXAMPLES[STATISTICS[name].asked]}", STATISTICS[name]) for name in names]
        lines = [f"        {ask:<24}  {one.definition:<37}(…, {', '.join(one.axes)})" for ask, one in told]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("        STATISTICS", "\n".join(lines))
        return function

    return put
