"""What can be asked besides the output, and the answer.

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

merging.py says how two partial answers become one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from clearhead import merging, notebook, room
from clearhead.arrays import plain, read, statistics_dtype
from clearhead.axes import WEIGHTS, Array, as_slice, brief, named
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError, shown
from clearhead.merging import STATISTICS, Top
from clearhead.problem import Problem
from clearhead.values import as_int64, one_per_head, read_place, read_slice, whole_number

ROW_STATISTICS = ("logsumexp", "max_logit", "entropy", "distance")


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
        return self.output or self.top is not None or any(getattr(self, name) for name in ROW_STATISTICS)

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


@dataclass(frozen=True, eq=False, slots=True, repr=False)
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
    sinks: bool = False  # do the log-sum-exp and all weights count a sink?

    def merge_keys(self, other: "Observation") -> "Observation":
        """Join this answer over some keys with another over the keys that follow them, for the same queries.

        Exact: outputs and row statistics are weighed by exp(L_part - L). Both parts need their log-sum-exp, and must
        have been computed without sinks; `with_sinks` adds those at the end. Raises RuleError where a part has no
        log-sum-exp, has sinks already, has a column statistic, which needs the final log-sum-exp, or has what the other
        part has not; ShapeError where the parts are of different queries.

        >>> import numpy as np, clearhead as ch
        >>> q, k, v = np.ones((2, 4)), np.eye(6, 4), np.eye(6, 3)
        >>> part = [ch.AttentionMatrix(q, k[s]).observe(v[s], logsumexp=True) for s in (np.s_[:3], np.s_[3:])]
        >>> bool(np.allclose(part[0].merge_keys(part[1]).output, ch.attention(q, k, v)))
        True
        """
        _check_part(other)
        for part in (self, other):
            _check_without_sinks(part)
        found = merging.over_keys(self._found(), other._found(), self.keys)
        return Observation(**found, queries=self.queries, keys=self.keys + other.keys)

    def with_sinks(self, sinks: Any) -> "Observation":
        """The same answer with one extra logit per head, (heads,), in each row's denominator.

        Raises RuleError as `merge_keys` does, and what `attention` raises for sinks.
        """
        _check_without_sinks(self)
        merging.check_weighable(self._found())
        lse, restore = read(self.logsumexp, "logsumexp")
        heads = lse.shape[-2] if lse.ndim > 1 else 1
        logits = one_per_head("sinks", sinks, heads, lse.ndim + 1)
        if logits is None:
            return self
        extra = np.broadcast_to(logits[:, None] if lse.ndim > 1 else logits, lse.shape)
        kept = restore(np.where(np.isneginf(lse), -np.inf, extra).astype(lse.dtype))
        found = merging.weighed(self._found(), {"logsumexp": kept}, self.keys)
        return Observation(**found, queries=self.queries, keys=self.keys, sinks=True)

    def merge_queries(self, other: "Observation") -> "Observation":
        """Join this answer over some queries with another over the queries that follow them, for the same keys.

        Row statistics stand one after the other, received and groups add, peak takes the larger. Images stand one
        above the other where their pixels are equally high. Raises RuleError where they are not, where only one part
        has sinks, and for what only one part was asked for; ShapeError where the parts have other keys or heads.
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
            _check_pixels(self, other)
        found = merging.over_queries(self._found(), other._found())
        return Observation(**found, queries=self.queries + other.queries, keys=self.keys, sinks=self.sinks)

    def among(self, keys: int, start: int = 0) -> "Observation":
        """The same answer where these keys are some of `keys`, from the place `start`; nothing looks at the others.

        Raises RuleError for images and groups, which are about other keys then, and where they do not fit.
        """
        start = whole_number("start", start, 0)
        keys = whole_number("keys", keys, start + self.keys)
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

    def heads(self, chosen: int | slice | Sequence[int]) -> "Observation":
        """The same answer for some heads: an index, which drops the heads' axis, a slice or a list of indices.

        The heads' axis is the last but one of numbers per query or key, (…, heads, queries), and the last but two of
        output, top, image and groups. Raises SelectionError where there is no such head, or no axis of heads.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.ones((2, 3, 4)), np.ones((2, 3, 4))).observe(logsumexp=True, top=1)
        >>> seen.heads(1).logsumexp.shape, seen.heads([1]).top.weights.shape
        ((3,), (1, 3, 1))
        """
        found = self._found()
        for name, value in found.items():
            axis = STATISTICS[name].heads
            if name == "top" and value is not None:
                found[name] = Top(*(_pick_heads(name, x, axis, chosen) for x in value))
            elif value is not None:
                found[name] = _pick_heads(name, value, axis, chosen)
        return replace(self, **found)

    def _found(self) -> dict[str, Any]:
        """The answers by name, None where not asked for."""
        return {name: getattr(self, name) for name in STATISTICS}

    def __repr__(self) -> str:
        found = self._found() | {"top": None if self.top is None else self.top.weights}
        return brief("Observation", {"queries": self.queries, "keys": self.keys, **found})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled where no tensor hangs on a graph; RuleError where one does."""
        arrays = {**self._found(), "top": None if self.top is None else self.top.weights}
        for name, x in arrays.items():
            if getattr(x, "grad_fn", None) is not None:
                raise RuleError(
                    f"{name} hangs on PyTorch's graph, which is not copied.", "observe under torch.no_grad()"
                )
        return Observation, tuple(getattr(self, field.name) for field in fields(self))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return notebook.observed({
            name: read(value[0] if name == "top" else value, name)[0].astype(np.float64)
            for name, value in self._found().items() if value is not None
        })  # fmt: skip


def observation(found: dict[str, Any], queries: int, keys: int, *, sinks: bool) -> Observation:
    """What engines answered, by name, as an Observation; `sinks` says whether the problem had any."""
    given = dict(found)
    if "top_weights" in given:
        given["top"] = Top(given.pop("top_weights"), given.pop("top_indices"))
    return Observation(**given, queries=queries, keys=keys, sinks=sinks)


def wanted(problem: Problem, asked: dict[str, Any]) -> Wanted:
    """Validate what was asked for."""
    checked = check_asked(asked)
    return Wanted(**{**checked, "groups": _labels(problem, checked.get("groups"))})


def check_asked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Validate what can be without the problem: everything but the groups' labels."""
    for name in ("logsumexp", "max_logit", "entropy", "distance", "received", "peak"):
        if not isinstance(asked.get(name, False), (bool, np.bool_)):
            raise RuleError(f"{name} is {shown(asked[name])}: expected True or False.")
    _check_sides(asked.get("groups"))
    top = asked.get("top")
    count = None if top is None else whole_number("top", top, 1, hint="top=8")
    return {**asked, "top": count, "image": _size(asked.get("image"))}


def check_room(problem: Problem, want: Wanted, width: int = 0) -> None:
    """Raise SizeError where the answers, with what they are summed in, are larger than memory; `width` is d_v.

    Nothing else that grows with the input is kept, so this is said before any work.
    """
    cells, itemsize = problem.batch * problem.heads, statistics_dtype(problem.dtype).itemsize
    rows, summed = cells * problem.queries, itemsize + 8  # sums are float64 until they are whole
    size = {"the output": rows * width * (itemsize if want.unrounded else problem.dtype.itemsize) * want.output}
    size["statistics per query"] = rows * itemsize * 4
    size["statistics per key"] = cells * problem.keys * summed * (want.received + want.peak)
    hints = {}
    if want.top is not None:
        name = f"top={want.top:,}"
        size[name], hints[name] = rows * want.top * (itemsize + 8), "top=8"
    if want.image is not None:
        name = f"image={want.image}"
        size[name], hints[name] = cells * prod(want.image) * summed, "image=(256, 256)"
    if want.groups is not None:
        name = f"groups of {want.groups.counts[0]:,} by {want.groups.counts[1]:,} labels"
        size[name], hints[name] = cells * prod(want.groups.counts) * summed, "labels are 0, 1, 2, …, one per group."
    total = sum(size.values())
    if total > room.SMALL:
        most = max(size, key=lambda name: size[name])
        what = f"{most} of {named(problem.shape, WEIGHTS)}"
        room.check_room(what, total, hints.get(most, "observe(queries=slice(0, 4096)) takes a part."), problem.device)


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


def _check_pixels(a: Observation, b: Observation) -> None:
    (high_a, wide_a), (high_b, wide_b) = (read(part.image, "image")[0].shape[-2:] for part in (a, b))
    if a.queries * high_b != b.queries * high_a or wide_a != wide_b:
        raise RuleError(
            f"the images' pixels differ: {a.queries} queries on {high_a} rows and {b.queries} on {high_b}.",
            "choose heights so that each pixel covers equally many queries, and one width.",
        )


def _pad(x: Any, before: int, after: int) -> Any:
    if x is None:
        return None
    array, restore = read(x, "part")
    return restore(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(before, after)]))


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
    """Index the axis of the heads, after checking that it is there and has those heads."""
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


def _size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise RuleError(f"image is {shown(value)}: expected (height, width) in pixels.", "image=(256, 256)")
    height, width = (
        whole_number(f"image's {side}", pixels, 1, hint="image=(256, 256)")
        for side, pixels in zip(("height", "width"), value, strict=True)
    )
    return height, width


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
    spread = np.broadcast_to(as_int64(name, labels), (*lead, size)).reshape(problem.batch, size)
    if spread.max(initial=-1) >= max(size, 1 << 20):
        raise RuleError(f"{name} goes up to {spread.max()}: labels are 0, 1, 2, …, one per group.")
    return spread
