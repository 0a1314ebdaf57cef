"""What can be asked besides the output, and how two partial answers become one.

row statistics (one pass)                                     axes
    logsumexp   ln Σ_j exp(s_ij), with the sink               (…, heads, queries)
    max_logit   max_j s_ij                                    (…, heads, queries)
    entropy     -Σ_j a_ij ln a_ij, in nats                    (…, heads, queries)
    distance    Σ_j a_ij |position of i - j|                  (…, heads, queries)
    top         the k strongest a_ij and their j              (…, heads, queries, k), twice
column statistics (a second pass, given the log-sum-exp)
    received    Σ_i a_ij                                      (…, heads, keys)
    peak        max_i a_ij                                    (…, heads, keys)
    image       mean of a over each pixel's area              (…, heads, height, width)
    groups      Σ of a_ij between labelled spans              (…, heads, query groups, key groups)

Answers over disjoint keys merge by the log-sum-exp algebra of online softmax (Milakov & Gimelshein 2018); answers over
disjoint queries, whose log-sum-exp is final, add.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from clearhead import notebook
from clearhead.arrays import plain, read
from clearhead.axes import Array, as_slice
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.problem import Problem
from clearhead.values import one_per_head

ROW_STATISTICS = ("logsumexp", "max_logit", "entropy", "distance", "top")
COLUMN_STATISTICS = ("received", "peak", "image", "groups")


class Top(NamedTuple):
    """Each query's strongest weights and the keys they fall on, strongest first; 0 and -1 where fewer are visible."""

    weights: Any
    indices: Any


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
    distance: bool = False
    top: int | None = None
    received: bool = False
    peak: bool = False
    image: tuple[int, int] | None = None
    groups: Groups | None = None
    unrounded: bool = False  # the output in the statistics' dtype, for a sum over ranks

    def rows(self) -> bool:
        """Is the output or any row statistic asked for?"""
        return self.output or self.top is not None or any(getattr(self, name) for name in ROW_STATISTICS[:-1])

    def output_alone(self) -> bool:
        """Is nothing observed?"""
        return self.output and not self.columns() and not replace(self, output=False).rows()

    def columns(self) -> bool:
        """Is any column statistic asked for?"""
        return self.received or self.peak or self.image is not None or self.groups is not None

    def for_queries(self, queries: range) -> "Wanted":
        """The same request for some queries only: their labels go with them."""
        if self.groups is None:
            return self
        return replace(self, groups=self.groups._replace(queries=self.groups.queries[:, as_slice(queries)]))


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """Everything that was asked for, together; None where it was not. Made by `AttentionMatrix.observe`.

    >>> import numpy as np, clearhead as ch
    >>> seen = ch.AttentionMatrix(np.eye(2), np.eye(2), causal=True).observe(received=True)
    >>> seen.received.round(2), seen.entropy
    (array([1.33, 0.67]), None)
    """

    output: Any = None
    logsumexp: Any = None
    max_logit: Any = None
    entropy: Any = None
    received: Any = None
    peak: Any = None
    top: Top | None = None
    distance: Any = None
    image: Any = None
    groups: Any = None
    queries: int = 0
    keys: int = 0

    __repr__ = notebook.shapes

    def merge_keys(self, other: "Observation") -> "Observation":
        """Join this answer over some keys with another over the keys that follow them, for the same queries.

        Exact: outputs and row statistics are weighed by exp(L_part - L). Both parts need their log-sum-exp, and must
        have been computed without sinks; `with_sinks` adds those at the end. Column statistics cannot be joined this
        way, since they need the final log-sum-exp: asking for them raises RuleError.

        >>> import numpy as np, clearhead as ch
        >>> q, k, v = np.ones((2, 4)), np.eye(6, 4), np.eye(6, 3)
        >>> part = [ch.AttentionMatrix(q, k[s]).observe(v[s], logsumexp=True) for s in (np.s_[:3], np.s_[3:])]
        >>> bool(np.allclose(part[0].merge_keys(part[1]).output, ch.attention(q, k, v)))
        True
        """
        for part in (self, other):
            _check_weighable(part)
        return _merge(self, other)

    def with_sinks(self, sinks: Any) -> "Observation":
        """The same answer with one extra logit per head, (heads,), in each row's denominator.

        Raises RuleError as `merge_keys` does, and what `attention` raises for sinks.
        """
        _check_weighable(self)
        lse, restore = read(self.logsumexp, "logsumexp")
        heads = lse.shape[-2] if lse.ndim > 1 else 1
        logits = one_per_head("sinks", sinks, heads, lse.ndim + 1)
        if logits is None:
            return self
        extra = np.broadcast_to(logits[:, None] if lse.ndim > 1 else logits, lse.shape)
        kept = restore(np.where(np.isneginf(lse), -np.inf, extra).astype(lse.dtype))
        empty = Observation(logsumexp=kept, queries=self.queries, keys=0)
        return _merge(self, empty)

    def merge_queries(self, other: "Observation") -> "Observation":
        """Join this answer over some queries with another over the queries that follow them, for the same keys.

        Row statistics stand one after the other, received and groups add, peak takes the larger. Images stand one
        above the other where their pixels are equally high, and raise RuleError where not.
        """
        if self.keys != other.keys:
            raise ShapeError(
                f"one part has {self.keys} keys, the other {other.keys}: parts over queries share all keys."
            )
        if self.image is not None and other.image is not None:
            _check_pixels(self, other)
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name not in ("queries", "keys")):
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                joined[name] = None
            elif name == "top":
                joined[name] = Top(*(_stack(x, y, -2) for x, y in zip(a, b, strict=True)))
            elif name in ROW_STATISTICS:
                joined[name] = _stack(a, b, -1)
            elif name in ("output", "image"):
                joined[name] = _stack(a, b, -2)
            elif name == "groups":
                joined[name] = _add_groups(a, b)
            else:
                joined[name] = _combine(a, b, np.maximum if name == "peak" else np.add)
        return Observation(**joined, queries=self.queries + other.queries, keys=self.keys)

    def among(self, keys: int, start: int = 0) -> "Observation":
        """The same answer where these keys are some of `keys`, from the place `start`; nothing looks at the others.

        Raises RuleError for images and groups, which are about other keys then.
        """
        if (self.keys, start) == (keys, 0):
            return self
        if self.image is not None or self.groups is not None:
            raise RuleError("images and groups do not follow when keys are added: observe them from the whole matrix.")
        after = keys - start - self.keys
        top = self.top
        if top is not None and start:
            indices, restore = read(top.indices, "top")
            top = Top(top.weights, restore(np.where(indices < 0, -1, indices + start)))
        received, peak = (_pad(x, start, after) for x in (self.received, self.peak))
        return replace(self, top=top, received=received, peak=peak, keys=keys)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("queries", "keys")}
        some = {name: value[0] if name == "top" else value for name, value in found.items() if value is not None}
        return notebook.observed({name: read(x, name)[0].astype(np.float64) for name, x in some.items()})

    def heads(self, chosen: Any) -> "Observation":
        """The same answer for some heads: an index, a slice or a list of the heads' axis (…, heads, …)."""
        found: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name not in ("queries", "keys")):
            value = getattr(self, name)
            if name == "top" and value is not None:
                found[name] = Top(*(x[:, chosen] for x in value))
            else:
                found[name] = None if value is None else value[:, chosen]
        return Observation(**found, queries=self.queries, keys=self.keys)


def observation(found: dict[str, Any], queries: int, keys: int) -> Observation:
    """What engines answered, by name, as an Observation."""
    given = dict(found)
    if "top_weights" in given:
        given["top"] = Top(given.pop("top_weights"), given.pop("top_indices"))
    return Observation(**given, queries=queries, keys=keys)


def wanted(problem: Problem, asked: dict[str, Any]) -> Wanted:
    """Validate what was asked for."""
    checked = check_asked(asked)
    return Wanted(**{**checked, "groups": _labels(problem, checked.get("groups"))})


def check_asked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Validate what can be without the problem: everything but the groups' labels."""
    for name in ("logsumexp", "max_logit", "entropy", "distance", "received", "peak"):
        if not isinstance(asked.get(name, False), (bool, np.bool_)):
            raise RuleError(f"{name} is {asked[name]!r}: expected True or False.")
    _check_sides(asked.get("groups"))
    return {**asked, "top": _count("top", asked.get("top")), "image": _size(asked.get("image"))}


def areas(pixels: int, size: int, chosen: slice) -> tuple[slice, Array]:
    """The pixels that some of `size` cells fall on, and each cell's share in their means, (pixels, cells).

    Pixel r covers r·size/pixels … (r+1)·size/pixels; a cell that a border cuts counts in part, so that the picture's
    mean is the matrix's mean. float64, O(pixels touched · cells).
    """
    step = size / pixels
    first = min(int(chosen.start / step), pixels - 1)
    last = min(int(np.ceil(chosen.stop / step)), pixels)
    edges = np.arange(first, last + 1) * step
    cells = np.arange(chosen.start, chosen.stop)
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return slice(first, last), np.maximum(overlap, 0.0) / step


@np.errstate(invalid="ignore")  # -inf - -inf where neither part sees a key
def _merge(a: Observation, b: Observation) -> Observation:
    """The (log-sum-exp, weighted sums) algebra; what a part lacks counts as nothing where it saw no key."""
    lse_a, restore = read(a.logsumexp, "logsumexp")
    lse_b = read(b.logsumexp, "logsumexp")[0]
    if lse_a.shape != lse_b.shape:
        raise ShapeError(f"the parts have log-sum-exp {lse_a.shape} and {lse_b.shape}: they must be the same queries.")
    work_a, work_b = lse_a.astype(np.float64), lse_b.astype(np.float64)
    lse = np.logaddexp(work_a, work_b)
    share_a, share_b = (np.where(np.isneginf(part), 0.0, np.exp(part - lse)) for part in (work_a, work_b))

    def weigh(x: Any, y: Any) -> Any:
        if x is None or (y is None and b.keys):
            return None
        left, back = read(x, "part")
        tail = (1,) * (left.ndim - lse.ndim)
        total = left.astype(np.float64) * share_a.reshape(lse.shape + tail)
        if y is not None:
            total = total + read(y, "part")[0].astype(np.float64) * share_b.reshape(lse.shape + tail)
        return back(total.astype(left.dtype))

    return Observation(
        output=weigh(a.output, b.output),
        logsumexp=restore(lse.astype(lse_a.dtype)),
        max_logit=a.max_logit if b.keys == 0 else _combine(a.max_logit, b.max_logit, np.maximum),
        entropy=_merge_entropy(a, b, lse, share_a, share_b),
        distance=weigh(a.distance, b.distance),
        top=_merge_top(a, b, share_a, share_b),
        queries=a.queries,
        keys=a.keys + b.keys,
    )


def _merge_entropy(a: Observation, b: Observation, lse: Array, share_a: Array, share_b: Array) -> Any:
    """H = Σ_part share·(H_part + L - L_part)."""
    if a.entropy is None or (b.entropy is None and b.keys):
        return None
    first, restore = read(a.entropy, "entropy")
    total = np.zeros(lse.shape)
    for part, share in ((a, share_a), (b, share_b)):
        if part.entropy is not None:
            own = read(part.logsumexp, "logsumexp")[0].astype(np.float64)
            rise = np.where(share > 0, lse - np.where(share > 0, own, 0.0), 0.0)
            total = total + share * (read(part.entropy, "entropy")[0] + np.where(share > 0, rise, 0.0))
    return restore(total.astype(first.dtype))


def _merge_top(a: Observation, b: Observation, share_a: Array, share_b: Array) -> Top | None:
    if a.top is None or (b.top is None and b.keys):
        return None
    (weights, back), (indices, back_indices) = (read(x, "top") for x in a.top)
    found, places, count = weights * share_a[..., None], indices, weights.shape[-1]
    if b.top is not None:
        more, at = (read(x, "top")[0] for x in b.top)
        count = min(count, more.shape[-1])
        found = np.concatenate([found, more * share_b[..., None]], axis=-1)
        places = np.concatenate([places, np.where(at < 0, -1, at + a.keys)], axis=-1)
    order = np.argsort(np.where(places < 0, 1.0, -found), axis=-1, kind="stable")[..., :count]
    return Top(
        back(np.take_along_axis(found, order, axis=-1).astype(weights.dtype)),
        back_indices(np.take_along_axis(places, order, axis=-1)),
    )


def _combine(a: Any, b: Any, how: np.ufunc) -> Any:
    if a is None or b is None:
        return None
    left, restore = read(a, "part")
    return restore(how(left, read(b, "part")[0]))


def _stack(a: Any, b: Any, axis: int) -> Any:
    left, restore = read(a, "part")
    return restore(np.concatenate([left, read(b, "part")[0]], axis=axis))


def _pad(x: Any, before: int, after: int) -> Any:
    if x is None:
        return None
    array, restore = read(x, "part")
    return restore(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(before, after)]))


def _add_groups(a: Any, b: Any) -> Any:
    """The sum of two tables (…, query groups, key groups); a query group that one part has not got adds nothing."""
    (left, restore), (right, _) = read(a, "groups"), read(b, "groups")
    if left.shape[-1] != right.shape[-1]:
        raise ShapeError(f"one part has {left.shape[-1]} key groups, the other {right.shape[-1]}: they share all keys.")
    total = np.zeros((*left.shape[:-2], max(left.shape[-2], right.shape[-2]), left.shape[-1]), left.dtype)
    for part in (left, right):
        total[..., : part.shape[-2], :] += part
    return restore(total)


def _check_weighable(part: Observation) -> None:
    """Can this answer be weighed against another by its log-sum-exp?"""
    if part.logsumexp is None:
        raise RuleError("a part has no logsumexp: parts over keys are weighed by it.", "observe(logsumexp=True)")
    column = next((name for name in COLUMN_STATISTICS if getattr(part, name) is not None), None)
    if column:
        raise RuleError(
            f"{column} over some keys only cannot be merged: a column statistic needs the final log-sum-exp.",
            "observe it from the whole matrix, or over disjoint queries and merge_queries.",
        )


def _check_pixels(a: Observation, b: Observation) -> None:
    high_a, high_b = a.image.shape[-2], b.image.shape[-2]
    if a.queries * high_b != b.queries * high_a or a.image.shape[-1] != b.image.shape[-1]:
        raise RuleError(
            f"the images' pixels differ: {a.queries} queries on {high_a} rows and {b.queries} on {high_b}.",
            "choose heights so that each pixel covers equally many queries, and one width.",
        )


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise RuleError(f"{name} is {value!r}: expected a whole number from 1 up.", f"{name}=8")
    return int(value)


def _size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise RuleError(f"image is {value!r}: expected (height, width) in pixels.", "image=(256, 256)")
    height, width = (_count("image", side) for side in value)
    return None if height is None or width is None else (height, width)


def _labels(problem: Problem, value: Any) -> Groups | None:
    if value is None:
        return None
    sides = (("query_groups", value[0], problem.queries), ("key_groups", value[1], problem.keys))
    queries, keys = (_label_row(problem, name, labels, size) for name, labels, size in sides)
    return Groups(queries, keys, (int(queries.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1))


def _check_sides(value: Any) -> None:
    if value is not None and (not isinstance(value, (tuple, list)) or len(value) != 2):
        raise RuleError(f"groups is {type(value).__name__}: expected (query_groups, key_groups).")


def _label_row(problem: Problem, name: str, value: Any, size: int) -> Array:
    labels = plain(value, name)
    if labels.dtype.kind not in "iu" and labels.size:
        raise DtypeError(f"{name} is {labels.dtype}: expected whole numbers, one label per token, below 0 for none.")
    lead = problem.prefix[:-1]
    if labels.shape not in ((size,), (*lead, size)):
        raise ShapeError(f"{name} has shape {labels.shape}: expected ({size},), one label per token.")
    spread = np.broadcast_to(labels.astype(np.int64), (*lead, size)).reshape(problem.batch, size)
    if spread.max(initial=-1) >= max(size, 1 << 20):
        raise RuleError(f"{name} goes up to {spread.max()}: labels are 0, 1, 2, …, one per group.")
    return spread
