"""Attention on DTensors: each rank computes its part, and DTensor's redistribution moves what has to move.

If q is sharded over batch or heads, nothing is communicated. If it is sharded over queries, keys and values are
all-gathered, this rank's queries keep their positions, and sums or maxima over queries become partial results that
DTensor reduces. Other placements are refused before anything is communicated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import pad

from clearhead.core.arrays import as_rule_array, statistics_dtype
from clearhead.core.call import Given, describe
from clearhead.core.observations import wanted
from clearhead.core.problem import Problem
from clearhead.core.rule_values import as_int64
from clearhead.core.rules import RULES, Rules, check_names, flat, joined
from clearhead.core.statistics import STATISTICS, Wanted
from clearhead.core.torch_state import graphed
from clearhead.errors import DtypeError, RuleError
from clearhead.loading import load
from clearhead.ops import torch_recorded
from clearhead.ops.observation import Observation

Axis = int | str  # of an array: the number of q's axis, "kv_heads", "keys", or "" for one that is never sharded
_AXES = {
    name if len(rule.fields) == 1 else f"{name}[{place}]": axes
    for name, rule in RULES.items()
    for place, axes in enumerate(rule.fields.values())
}  # of each array of a rule, by its name in `flat`
_REDUCED = {"added": "sum", "larger": "max"}  # how DTensor reduces the ranks' partial results over queries


def check(given: Given) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check a matrix of DTensors, and return its shape and dtype. Raises as `describe`, DtypeError for placements."""
    problem = _Shards(given).problem
    return problem.shape, statistics_dtype(problem.dtype)


def observe(given: Given, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
    """Answer the requested statistics as DTensors; parameters and errors as `AttentionMatrix.observe`."""
    return _Shards(given).observe(v, asked, queries)


def mix(given: Given, v: Any) -> Any:
    """Compute A·v, for a v with the axes of k."""
    return observe(given, v, {}).output


def transposed(given: Given, _: Any) -> NoReturn:
    """Refuse Aᵀ·g."""
    raise refused(given, "A.T @ g")


def refused(_: Given, what: str, __: str = "") -> RuleError:
    """Make the error for something that is not computed for DTensors."""
    return RuleError(
        f"{what}: not computed for DTensors, and q is one.",
        "attention, A.observe and A @ v take DTensors; q.full_tensor() gathers all of q on every rank.",
    )


class _Shards:
    """A call on DTensors: how q is sharded, and which part this rank has."""

    def __init__(self, given: Given) -> None:
        if torch.compiler.is_compiling():
            raise RuleError("q is a DTensor: attention on DTensors is not compiled.", "torch.compiler.disable")
        check_names(given.rules)
        self.given = given
        q, k, rules, *_ = given
        self.q, self.k = q, k
        self.rules = flat(rules)
        self.problem = _described(q, k, None, self.rules)
        self.queries = q.ndim - 2  # the number of that axis
        self.split = [place.dim if isinstance(place, Shard) else None for place in q.placements]  # by the mesh's axes
        axes = [axis for axis in self.split if axis is not None]
        plain = all(isinstance(place, (Shard, Replicate)) for place in q.placements)
        if not plain or len(set(axes)) < len(axes) or max(axes, default=0) > self.queries:
            raise DtypeError(
                f"q is {q.placements}: expected each axis of the mesh to replicate q, or to shard one more axis of "
                "batch, heads and queries.",
                _redistributed("q", [*[Replicate()] * (len(self.split) - 1), Shard(self.queries)]),
            )
        self.local = _local_ranges("q", q)
        self._check_fits("k", k, self._axes("batch", "kv_heads", "keys", ""))
        for name, x in self.rules.items():
            if isinstance(x, DTensor):
                self._check_fits(name, x, self._axes(*_AXES[name]))
            elif isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                raise DtypeError(
                    f"{name} requires grad and is no DTensor: each rank would get only a part of its gradient.",
                    f"distribute_tensor({name}, q.device_mesh, {[Replicate()] * len(self.split)})",
                )

    def observe(self, v: Any, asked: Mapping[str, Any], queries: slice) -> Observation:
        axes = self._axes("batch", "kv_heads", "keys", "")
        if v is not None:
            _described(self.q, self.k, v, {})
            self._check_fits("v", v, axes)
        want = wanted(self.problem, asked, output=v is not None)
        self._check_asked(want, v, queries)
        local = dict(asked)
        if want.groups is not None:
            sides = zip(asked["groups"], ("queries", "keys"), strict=True)
            local["groups"] = tuple(self._part("groups", side, self._axes("batch", axis)) for side, axis in sides)
        q = self._part("q", self.q, tuple(range(self.q.ndim)))
        k, values = (self._part(name, x, axes) for name, x in (("k", self.k), ("v", v)))
        part = self.given._replace(q=q, k=k, rules=self._rules())
        if graphed(q, k, values, *flat(part.rules).values()):
            seen = torch_recorded.observe(part, values, local, queries)
        else:
            matrix = load("ops.matrix").AttentionMatrix(q, k, engine=part.engine, **part.rules)
            seen = matrix.observe(values, queries=queries, **local)
        rows = len(range(self.problem.queries)[queries])
        width = 0 if v is None else v.shape[-1]
        sizes = {"batch": 0, "heads": 0, "queries": rows, "keys": self.problem.keys, "d_v": width}
        parts = {name: x for name, x in seen.statistics().items() if x is not None}
        whole = {name: self._whole(name, x, want, sizes) for name, x in parts.items()}
        state: Any = whole.pop("logsumexp", None)
        return replace(seen, queries=rows, **whole, **({} if state is None else state._asdict()))

    def _axes(self, *names: str) -> tuple[Axis, ...]:
        """Turn names of axes into numbers of q's axes; "batch" becomes every axis of q before its heads."""
        heads = (self.queries - 1,) if self.queries else ()
        known: dict[str, tuple[Axis, ...]] = {
            "batch": tuple(range(self.queries - 1)),
            "heads": heads,
            "kv_heads": ("kv_heads",) * len(heads),
            "queries": (self.queries,),
            "keys": ("keys",),
        }
        return tuple(axis for name in names for axis in known.get(name, ("",)))

    def _check_fits(self, name: str, x: Any, axes: tuple[Axis, ...]) -> None:
        """Raise DtypeError unless x is a DTensor whose placements fit those of q."""
        if not isinstance(x, DTensor) or x.device_mesh != self.q.device_mesh:
            kind = f"on {x.device_mesh}" if isinstance(x, DTensor) else f"a {type(x).__name__}"
            raise DtypeError(
                f"{name} is {kind}: expected a DTensor on q's mesh, {self.q.device_mesh}.",
                f"distribute_tensor({name}, q.device_mesh, {[Replicate()] * len(self.split)})",
            )
        right = [self._placement(x, axes, split) for split in self.split]
        if any(place not in (Replicate(), one) for place, one in zip(x.placements, right, strict=True)):
            raise DtypeError(
                f"{name} is {x.placements} and q is {self.q.placements}: expected {name} to be {tuple(right)}.",
                _redistributed(name, right),
            )
        _local_ranges(name, x)

    def _placement(self, x: DTensor, axes: tuple[Axis, ...], split: int | None) -> Placement:
        """The placement that x needs on an axis of the mesh that shards q along `split`, or replicates q if None."""
        of_heads = split is not None and split == self.queries - 1 >= 0
        ranks = self.q.device_mesh.shape[self.split.index(split)] if of_heads else 1
        whole = self.problem.group == 1 or self.problem.kv_heads % ranks == 0  # groups of heads on each rank
        for place, axis in zip(range(-1, -1 - x.ndim, -1), reversed(axes), strict=False):
            same = axis == split and x.shape[place] == self.q.shape[split]
            gathered = axis == "keys" and split == self.queries and self.queries not in axes
            if same or gathered or (axis == "kv_heads" and of_heads and whole):
                return Shard(x.ndim + place)
        return Replicate()

    def _check_asked(self, want: Wanted, v: Any, queries: slice) -> None:
        """Raise RuleError for a request that cannot be merged from the queries of several ranks."""
        if self.queries not in self.split:
            return
        hint = "redistribute q, k and v over heads, or over none: q.redistribute(placements=[Shard(1)])."
        if queries != slice(None):
            raise RuleError("`queries` was given, but q is sharded over queries.", hint)
        if want.image is not None:
            raise RuleError("image is not computed where q is sharded over queries; groups is.", hint)
        arrays = (self.q, self.k, v, *self.rules.values())
        if want.peak and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arrays):
            raise RuleError("peak has no derivative where q is sharded over queries.", "with torch.no_grad(): A.peak()")

    def _part(self, name: str, x: Any, axes: tuple[Axis, ...]) -> Any:
        """Return this rank's part of a DTensor, or of an array that every rank holds in full."""
        done: Sequence[Axis | None] = ()
        if isinstance(x, DTensor):
            done = [axes[place.dim - x.ndim] if isinstance(place, Shard) else None for place in x.placements]
            places = [Replicate() if axis == "keys" else one for axis, one in zip(done, x.placements, strict=True)]
            slopes = [  # where q is sharded, each rank has a different part of the gradient of a replicated array
                Partial() if split is not None and one.is_replicate() else one
                for split, one in zip(self.split, places, strict=True)
            ]
            x = x.redistribute(placements=places).to_local(grad_placements=slopes)
            x = x if type(x) in (Tensor, torch.nn.Parameter) else x.clone()  # waits until all of it has arrived
        elif axes and isinstance(x, (list, tuple)):
            x = as_rule_array(x, name)
        for place in range(-min(len(axes), getattr(x, "ndim", 0)), 0):
            axis = axes[place]
            if axis == "kv_heads" and axis not in done:
                x = self._of_heads(x)
            elif isinstance(axis, int) and axis not in done and x.shape[place] == self.q.shape[axis]:  # not 1, for all
                x = x[(..., slice(self.local[axis].start, self.local[axis].stop), *(slice(None),) * (-place - 1))]
        return x

    def _of_heads(self, x: Tensor) -> Tensor:
        """Take the key heads of this rank's query heads; one per query head if the rank's share splits a group."""
        heads, group = self.local[self.queries - 1], self.problem.group
        used = [head // group for head in heads]
        whole = range(used[0], used[-1] + 1) if used else range(0)
        if len(whole) <= 1 or len(used) == group * len(whole):
            return x.narrow(self.queries - 1, whole.start, len(whole))
        return x.index_select(self.queries - 1, torch.tensor(used, device=x.device))

    def _rules(self) -> Rules:
        """The rules of this rank's part, with positions among all keys."""
        local = {name: self._part(name, x, self._axes(*_AXES.get(name, ()))) for name, x in self.rules.items()}
        rows = self.local[self.queries]
        offset, lengths = local.get("query_offset"), local.get("query_lengths")
        if len(rows) < self.problem.queries:
            local["query_offset"] = rows.start + (0 if offset is None else _whole_numbers("query_offset", offset))
        if len(rows) < self.problem.queries and lengths is not None:
            local["query_lengths"] = np.clip(_whole_numbers("query_lengths", lengths) - rows.start, 0, len(rows))
        return joined(local)

    def _whole(self, name: str, x: Any, want: Wanted, sizes: Mapping[str, int]) -> Any:
        """Wrap this rank's part of a statistic as a DTensor."""
        if isinstance(x, tuple):
            return type(x)(*(self._whole(name, one, want, sizes) for one in x))
        shape = (*self.problem.prefix, *want.shape(name, sizes)[2:])
        if name == "groups":  # this rank's labels may end before those of others
            x = pad(x, [n for axis in (-1, -2) for n in (0, shape[axis] - x.shape[axis])])
        reduction = _REDUCED.get(STATISTICS[name].over_queries)
        places: list[Placement] = [
            Replicate() if axis is None else Partial(reduction) if axis == self.queries and reduction else Shard(axis)
            for axis in self.split
        ]
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.q.device_mesh, places, shape=torch.Size(shape), stride=strides)


def _described(q: Any, k: Any, v: Any, rules: Mapping[str, Any]) -> Problem:
    """Describe the unsharded problem, with zeros that take no memory in place of a DTensor's numbers."""

    def blank(x: Any) -> Any:
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape) if isinstance(x, DTensor) else x

    with torch.no_grad():
        whole = joined({name: blank(x) for name, x in rules.items()})
        return describe(blank(q), blank(k), blank(v), whole).problem


def _local_ranges(name: str, x: DTensor) -> list[range]:
    """The indices of each axis of x on this rank, split as torch.chunk does. Raises DtypeError for another split."""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        raise DtypeError(f"this rank is not in the mesh of {name}, {x.device_mesh}.")
    ranges = [range(size) for size in x.shape]
    for rank, ranks, placement in zip(coordinate, x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            each = -(-len(ranges[placement.dim]) // ranks)
            ranges[placement.dim] = ranges[placement.dim][rank * each : (rank + 1) * each]
    with torch.no_grad():
        held, expected = tuple(x.to_local().shape), tuple(map(len, ranges))
    if held != expected:
        raise DtypeError(
            f"{name} has shape {held} on this rank, of {tuple(x.shape)} in all: expected {expected}.",
            f"distribute_tensor({name}, mesh, placements) shards as torch.chunk does.",
        )
    return ranges


def _whole_numbers(name: str, value: Any) -> Any:
    return as_int64(name, as_rule_array(value, name))


def _redistributed(name: str, placements: Sequence[Placement]) -> str:
    return f"{name}.redistribute(placements={list(placements)})"
