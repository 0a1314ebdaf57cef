"""One attention problem whose sequence is sharded over ranks: read, compared between ranks, and described once.

Positions count in the whole sequence, so every rule means what it means on one machine. A rank's part is the whole
problem restricted to some queries, and a block of keys is the whole problem restricted to some keys.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import engines
from clearhead.core import observations
from clearhead.core.arrays import (
    FLOATS,
    as_array,
    as_rule_array,
    check_tensor,
    device_of,
    on_cpu,
    statistics_dtype,
    to_torch,
)
from clearhead.core.axes import Array, as_places, group_size
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import Described, Problem, describe
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rules import EVERYWHERE, FIELDS, Rules, check_names, check_supported, flat, take, turned_on
from clearhead.core.rules import RULES as TABLE
from clearhead.core.statistics import Wanted
from clearhead.distributed.layout import (
    LAYOUTS,
    Layout,
    Pieces,
    common,
    pieces,
    placed,
    positions_of,
    union,
    visible,
    within,
)
from clearhead.distributed.messages import Kind
from clearhead.distributed.ranks import Ranks, agreed
from clearhead.engines.base import Engine
from clearhead.engines.remote import Remote
from clearhead.errors import RuleError, check_known, shown

METHODS = ("gather", "ring", "merge", "auto")
Names = frozenset[str]  # the rules in {"bias", "spans"} whose gradients are asked for
RULES = EVERYWHERE


def _in_pieces(field: str) -> bool:
    """Does a rule's field have an axis of queries or keys, so that each rank passes its own part?"""
    return not {"queries", "keys"}.isdisjoint(FIELDS[field])


# Rules whose values are sharded too: DENSE have axes for both queries and keys, _LABELS for one of them.
DENSE = tuple(name for name, rule in TABLE.items() if any({"queries", "keys"} <= {*x} for x in rule.fields.values()))
_LABELS = tuple(name for name, rule in TABLE.items() if name not in DENSE and any(map(_in_pieces, rule.fields)))
_SHARDED = (*DENSE, *_LABELS)


@dataclass(frozen=True, eq=False)
class Shards:
    """The sharded problem as one rank knows it: the whole problem's description, and this rank's own arrays."""

    ranks: Ranks
    whole: Problem  # of all queries and keys, without the values of the rules in _SHARDED
    q: Array  # this rank's, (batch, heads, queries, d_k), in the CPU's memory
    k: Array
    v: Array | None
    device: torch.device  # where the tensors are, and the answers go
    prefix: tuple[int, ...]
    query_pieces: list[Pieces]  # by rank
    key_pieces: list[Pieces]
    # Fields of the rules in _SHARDED, by name: of own queries and all keys (DENSE), own queries, or own keys (_LABELS).
    values: dict[str, Array]
    lead: dict[str, tuple[int, int]]  # how many batches and heads bias, mask and spans were given for, 1 or all
    engine: Engine  # computes on the device, for arrays in the CPU's memory
    more: tuple[Array, ...] = ()  # what else travels with the keys, (batch, heads or 1, own keys, …)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of statistics and of gradients: float32, or float64 for float64."""
        return statistics_dtype(self.whole.dtype)

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of own queries and own keys."""
        return self.q.shape[2], self.k.shape[2]

    def local(self) -> Problem:
        """The problem with the sizes of this rank's own queries and keys, for reading its arguments."""
        queries, keys = self.lengths
        return replace(self.whole, rows=range(queries), cols=range(keys), prefix=self.prefix)

    @cached_property
    def spans(self) -> dict[range, range]:
        """The keys that each piece of queries, of any rank, may attend to, judged by position."""
        return {rows: visible(self.whole, rows) for held in self.query_pieces for rows in held}

    def sees(self, rows: range, keys: Pieces) -> bool:
        """May any query of this piece attend to any of these keys, judged by position?"""
        return any(common(self.spans[rows], piece) for piece in keys)

    @cached_property
    def needed(self) -> list[list[range]]:
        """The keys that any of a rank's queries may attend to, in runs, by rank."""
        return [union([self.spans[rows] for rows in held]) for held in self.query_pieces]

    @cached_property
    def hops(self) -> list[int]:
        """How many steps around the ring each rank's keys must travel, by rank."""
        world = self.ranks.world

        def reached(owner: int, step: int) -> bool:
            return any(self.sees(rows, self.key_pieces[owner]) for rows in self.query_pieces[(owner + step) % world])

        return [max((step for step in range(world) if reached(owner, step)), default=0) for owner in range(world)]

    def dense(self) -> dict[str, Array]:
        """Bias and mask as they were given, (batch or 1, heads or 1, this rank's queries, all keys)."""
        full = {name: self.values[name] for name in DENSE if name in self.values}
        return {name: x[: self.lead[name][0], : self.lead[name][1]] for name, x in full.items()}

    def of_queries(self) -> dict[str, Array]:
        """The sharded fields that have an axis of queries, for own queries."""
        return {name: x for name, x in self.values.items() if "queries" in FIELDS[name]}

    def of_keys(self) -> dict[str, Array]:
        """The sharded fields that have an axis of keys and none of queries, for own keys."""
        return {name: x for name, x in self.values.items() if "queries" not in FIELDS[name]}

    def shapes(self, part: Problem, asked: Names) -> dict[str, Any]:
        """The shapes of the gradients of bias and spans in a part; batches and heads that share one are summed."""
        table = (0, 0, 0, 0) if part.span_table is None else part.span_table.shape
        tails = {"bias": (part.queries, part.keys), "spans": (table[2], table[3])}
        leads = {name: (min(self.lead[name][0], part.batch), min(self.lead[name][1], part.heads)) for name in asked}
        return {name: (*leads[name], *tails[name]) for name in asked}

    def zeros(self, length: int, *tail: int) -> Array:
        """Zeros in float64, (batch, heads, length, …), so that adding rank by rank keeps accuracy."""
        return np.zeros((self.whole.batch, self.whole.heads, length, *tail))

    def give(self, array: Array) -> Tensor:
        """An answer (…, heads, …) as a tensor on q's device."""
        tensor: Tensor = to_torch(torch, np.asarray(array, order="C")).to(self.device)
        return tensor

    def shaped(self, array: Array) -> Tensor:
        """An answer (batch, heads, …) as a tensor with the caller's axes."""
        return self.give(array.reshape(self.prefix + array.shape[2:]))

    def take(self, queries: range, keys: range) -> "Shards":
        """The same for some queries and keys of the whole sequence, given by ranges that step forwards."""
        pairs = (queries, self.query_pieces), (keys, self.key_pieces)
        kept = [[tuple(within(chosen, piece) for piece in held) for held in by_rank] for chosen, by_rank in pairs]
        rows, cols = (held_places(chosen, by_rank[self.rank]) for chosen, by_rank in pairs)
        values = take(self.of_queries(), {"queries": rows}) | take(self.of_keys(), {"keys": cols})
        q, k, v = self.q[:, :, rows], self.k[:, :, cols], None if self.v is None else self.v[:, :, cols]
        return replace(self, q=q, k=k, v=v, query_pieces=kept[0], key_pieces=kept[1], values=values)

    def take_heads(self, lead: Sequence[range]) -> tuple["Shards", Callable[[Array], Array]]:
        """The same for some batches and heads, with a key head for each query head; and what takes them of an array.

        lead    the chosen indices of each batch axis, and of the heads last
        """
        heads = lead[-1] if lead else range(1)
        batches = np.arange(self.whole.batch).reshape(self.prefix[:-1])[np.ix_(*lead[:-1])].reshape(-1)

        def chosen(x: Array) -> Array:
            group = group_size(self.whole.heads, x.shape[1])
            return x[:, as_places(np.asarray(heads) // max(1, group))][as_places(batches)]

        whole = self.whole.take(batches=batches, heads=heads)
        values = take(self.values, {"batch": batches, "heads": heads})
        v = None if self.v is None else chosen(self.v)
        return replace(self, whole=whole, q=chosen(self.q), k=chosen(self.k), v=v, values=values), chosen


def held_places(chosen: range, held: Pieces) -> slice | Array:
    """Where the chosen positions that a rank holds lie in its shard."""
    parts = [(where.start - piece.start, within(chosen, piece)) for where, piece in placed(held)]
    return as_places(positions_of(range(x.start + shift, x.stop + shift, x.step) for shift, x in parts))


def kind(name: str, x: Array, **sizes: int) -> Kind:
    """The shape and dtype of a rule's field like x, but with other sizes along named axes, such as queries=3."""
    shape = tuple(sizes.get(axis, size) for axis, size in zip(FIELDS[name], x.shape, strict=True))
    return shape, x.dtype


def read(
    what: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    rules: Rules,
    ranks: Ranks,
    *,
    layout: Layout,
    method: str,
    engine: str | None,
    num_threads: int | None,
    output: bool = False,
    recording: bool | None = None,
) -> Shards:
    """Read this rank's arguments and check that all ranks were called alike; all ranks must call it.

    what      the public function's name, for errors
    output    is the output asked for? Then v must be given, and memory for A·v must be free
    recording does PyTorch record a graph of the call? None: as it says now

    Raises on every rank when one raises: its own error there, DistributedError on the others.
    """

    def local() -> tuple[Described, dict[str, Any]]:
        check_names(rules)
        check_supported("clearhead.distributed", RULES, turned_on(rules))
        _check_gradients(rules, recording=torch.is_grad_enabled() if recording is None else recording)
        check_tensor(q, "q")
        check_tensor(k, "k")
        if output and v is None:
            check_tensor(v, "v")
        check_known("layout", [layout], LAYOUTS)
        check_known("method", [method], METHODS)
        engines.check_name(engine)
        with torch.no_grad():
            described = describe(q, k, v, {}, num_threads)
        if output and described.v is not None:
            observations.check_room(described.problem, Wanted(output=True), described.v.shape[-1])
        return described, _signature(q, k, v, rules) | {"layout": layout, "method": method, "engine": engine}

    one, everybody = agreed(ranks, what, local)
    queries, keys = ([other[name] for other in everybody] for name in ("queries", "keys"))
    alike = {name: value for name, value in rules.items() if name not in _SHARDED}
    whole = _described(q, k, sum(queries), sum(keys), alike)
    whole = replace(whole, device=device_of(one.q), num_threads=one.problem.num_threads)
    content = {name: value for name, value in rules.items() if name in _SHARDED and value is not None}
    parts: dict[str, Any] = {}
    lead: dict[str, tuple[int, int]] = {}
    if content:

        def fields() -> tuple[tuple[dict[str, Any], dict[str, tuple[int, int]]], dict[str, Any]]:
            made, leads = _content(q, k, content, sum(keys)), _leads(whole, content)
            compared = {name: fingerprint(name, x) for name, x in made.items() if not _in_pieces(name)}
            compared |= {f"{name}'s dtype": str(made[name].dtype) for name in DENSE if name in made}
            return (made, leads), compared | {f"{name}'s batches and heads": [*pair] for name, pair in leads.items()}

        (parts, lead), _ = agreed(ranks, what, fields)
    values: dict[str, Any] = {name: x for name, x in parts.items() if _in_pieces(name)}
    whole = replace(whole, **{name: x for name, x in parts.items() if name not in values})
    chosen: Any = engines.get(engines.choose(replace(whole, **values), engine).engine)  # with all rules in use
    return Shards(
        ranks=ranks,
        whole=whole,
        q=on_cpu(one.q),
        k=on_cpu(one.k),
        v=None if one.v is None else on_cpu(one.v),
        device=q.device,
        values=values,
        lead=lead,
        prefix=one.problem.prefix,
        query_pieces=pieces(queries, layout),
        key_pieces=pieces(keys, layout),
        engine=Remote(chosen, one.q) if isinstance(one.q, DeviceArray) else chosen,
    )


def _check_gradients(rules: Rules, *, recording: bool) -> None:
    """Raise RuleError for a rule that requires a gradient and has none."""
    for name, x in flat(rules).items():
        asks = isinstance(x, Tensor) and x.requires_grad and recording
        if asks and name not in ("bias", "sinks", "spans[2]"):
            raise RuleError(f"{name} requires grad, and has no derivative here.", f"{name}.detach()")


def _signature(q: Tensor, k: Tensor, v: Tensor | None, rules: Rules) -> dict[str, Any]:
    """What must be the same on every rank, as text and numbers that an error can show; and the numbers of positions."""
    tensors = {"q": q, "k": k, "v": v}
    shapes = {name: None if x is None else [*x.shape[:-2], x.shape[-1]] for name, x in tensors.items()}
    signature: dict[str, Any] = {f"{name}'s shape without its length": shape for name, shape in shapes.items()}
    signature |= {"dtype": str(q.dtype), "queries": q.shape[-2], "keys": k.shape[-2]}
    sharded = {name: "not given" if rules.get(name) is None else "given" for name in _SHARDED}
    return signature | {name: sharded.get(name) or fingerprint(name, rules.get(name)) for name in TABLE}


@torch.no_grad()
def fingerprint(name: str, value: Any) -> Any:
    """An argument as text and numbers that ranks can compare and an error can show; of a large array its hash."""
    array = as_rule_array(value, name) if isinstance(value, (Tensor, np.ndarray, list)) else None
    if array is None or (array.dtype.kind not in "biuf" and array.dtype not in FLOATS):
        return shown(value.item() if isinstance(value, np.generic) else value)
    check_room(name, array_bytes(array.shape, 8), "give fewer tokens.")
    numbers = np.ascontiguousarray(array, np.float64)
    if numbers.size <= 16:
        return numbers.reshape(-1).tolist()
    return f"{array.shape} {hashlib.sha1(numbers.tobytes()).hexdigest()[:12]}"


@torch.no_grad()
def array_of(x: Any, name: str) -> Array:
    """A tensor as an array in the CPU's memory, without its graph."""
    return on_cpu(as_array(x, name)[0])


@torch.no_grad()
def _described(q: Tensor, k: Tensor, queries: int, keys: int, rules: Any) -> Problem:
    """The validated problem of so many queries and keys, whose q and k are replaced by zeros that take no memory."""

    def empty(x: Tensor, length: int) -> Array:
        dtype = as_array(x.detach()[..., :0, :], "x")[0].dtype
        return np.broadcast_to(np.zeros((), dtype), (*x.shape[:-2], length, x.shape[-1]))

    return describe(empty(q, queries), empty(k, keys), None, rules).problem


def _content(q: Tensor, k: Tensor, content: Mapping[str, Any], keys: int) -> dict[str, Array]:
    """The validated fields of the rules in _SHARDED: for own queries and all keys, for own queries, or for own keys."""
    fields: dict[str, Array] = {}
    for names, count in ((DENSE, keys), (_LABELS, k.shape[-2])):
        rules = {name: content[name] for name in names if name in content}
        if rules:
            problem = _described(q, k, q.shape[-2], count, rules)
            fields |= {field: getattr(problem, field) for name in rules for field in TABLE[name].fields}
    return fields


def _leads(whole: Problem, content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many batches and heads a bias, a mask and the table of spans are given for: 1 where all share it."""
    counts = {}
    for name in (*DENSE, "spans"):
        if name in content:
            shape = (1, 1, 1, *np.shape(content[name][2] if name == "spans" else content[name]))
            counts[name] = whole.batch if prod(shape[:-3]) > 1 else 1, shape[-3]
    return counts
