"""One attention problem whose sequence is sharded over ranks: read, compared between ranks, and described once.

Positions count in the whole sequence, so every rule means what it means on one machine. A rank's part is the whole
problem restricted to some queries, and a block of keys is the whole problem restricted to some keys.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from clearhead import engines
from clearhead.core import observations
from clearhead.core.arrays import FLOATS, as_array, as_rule_array, check_tensor, device_of, on_cpu, to_torch
from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import Described, Problem, describe
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rules import FIELDS, Rules, check_names, check_supported, flat, given, take
from clearhead.core.rules import RULES as TABLE
from clearhead.core.statistics import Wanted
from clearhead.distributed.exchange import Kind
from clearhead.distributed.layouts import LAYOUTS, Layout, Pieces, pieces
from clearhead.distributed.ranks import OWN, Ranks, must_equal
from clearhead.engines.base import Engine
from clearhead.engines.remote import Remote
from clearhead.errors import ClearheadError, DistributedError, RuleError, shown, unknown

METHODS = ("gather", "ring", "ulysses", "merge", "auto")
Found = TypeVar("Found")
Names = frozenset[str]  # the rules in {"bias", "spans"} whose gradients are asked for
RULES = frozenset({
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip


def _in_pieces(field: str) -> bool:
    """Does a rule's field have an axis of queries or keys, so that each rank passes its own part?"""
    return not {"queries", "keys"}.isdisjoint(FIELDS[field])


# Rules whose values are sharded too: DENSE have axes for both queries and keys, _LABELS for one of them.
DENSE = tuple(name for name, rule in TABLE.items() if any({"queries", "keys"} <= {*x} for x in rule.fields.values()))
_LABELS = tuple(name for name, rule in TABLE.items() if name not in DENSE and any(map(_in_pieces, rule.fields)))
_SHARDED = (*DENSE, *_LABELS)


@dataclass(frozen=True, eq=False, slots=True)
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
    kept: dict[str, Any] = field(default_factory=dict, init=False)  # what a method keeps for its further passes

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def local(self) -> Problem:
        """The problem with the sizes of this rank's own queries and keys, for reading its arguments."""
        return replace(self.whole, rows=range(self.q.shape[2]), cols=range(self.k.shape[2]), prefix=self.prefix)

    def own_rows(self) -> list[tuple[slice, range]]:
        """Own pieces of queries: where in the shard, and which positions."""
        return placed(self.query_pieces[self.rank])

    def own_keys(self) -> list[tuple[slice, range]]:
        return placed(self.key_pieces[self.rank])

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

    def give(self, array: Array) -> Tensor:
        """An answer (…, heads, …) as a tensor on q's device."""
        found: Tensor = to_torch(torch, np.asarray(array, order="C")).to(self.device)
        return found

    def problem(self, at: slice, rows: range, of_keys: Mapping[str, Any]) -> Problem:
        """The problem of one own piece of queries over all keys; `of_keys` are the fields along all keys."""
        return replace(self.whole, rows=rows, **take(self.of_queries(), {"queries": at}), **of_keys)


def kind(name: str, x: Array, **sizes: int) -> Kind:
    """The shape and dtype of a rule's field like x, but with other sizes along named axes, such as queries=3."""
    shape = tuple(sizes.get(axis, size) for axis, size in zip(FIELDS[name], x.shape, strict=True))
    return shape, x.dtype


def placed(own: Pieces) -> list[tuple[slice, range]]:
    """For each of a rank's pieces where it lies in the shard, and its positions."""
    found, start = [], 0
    for piece in own:
        found.append((slice(start, start + len(piece)), piece))
        start += len(piece)
    return found


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

    def own() -> tuple[Described, dict[str, Any]]:
        check_names(rules)
        check_supported("clearhead.distributed", RULES, given(rules))
        _check_gradients(rules, recording=torch.is_grad_enabled() if recording is None else recording)
        check_tensor(q, "q")
        check_tensor(k, "k")
        if output and v is None:
            check_tensor(v, "v")
        for name, value, known in (("layout", layout, LAYOUTS), ("method", method, METHODS)):
            if not (isinstance(value, str) and value in known):
                raise unknown(name, value, known)
        engines.check_name(engine)
        with torch.no_grad():
            local = describe(q, k, v, {}, num_threads)
        if output and local.v is not None:
            observations.check_room(local.problem, Wanted(output=True), local.v.shape[-1])
        return local, _signature(q, k, v, rules) | {"layout": layout, "method": method, "engine": engine}

    local, everybody = agreed(ranks, what, own, lambda found: found[1])
    lengths = [[other[name] for other in everybody] for name in ("queries", "keys")]
    threads = local[0].problem.num_threads
    whole = replace(_whole(q, k, rules, *map(sum, lengths)), device=device_of(local[0].q), num_threads=threads)
    content = {name: value for name, value in rules.items() if name in _SHARDED and value is not None}
    parts: dict[str, Any] = {}
    lead: dict[str, tuple[int, int]] = {}
    if content:
        parts, _ = agreed(
            ranks, what, lambda: _content(q, k, content, sum(lengths[1])), lambda found: _kinds(whole, content, found)
        )
        lead = {name: _lead(whole, x) for name, x in _shared(content).items()}
    values: dict[str, Any] = {name: x for name, x in parts.items() if _in_pieces(name)}
    whole = replace(whole, **{name: x for name, x in parts.items() if name not in values})
    query_pieces, key_pieces = (pieces(sizes, layout) for sizes in lengths)
    chosen: Any = engines.get(engines.choose(replace(whole, **values), engine).engine)  # with all rules in use
    return Shards(
        ranks=ranks,
        whole=whole,
        q=on_cpu(local[0].q),
        k=on_cpu(local[0].k),
        v=None if local[0].v is None else on_cpu(local[0].v),
        device=q.device,
        values=values,
        lead=lead,
        prefix=local[0].problem.prefix,
        query_pieces=query_pieces,
        key_pieces=key_pieces,
        engine=Remote(chosen, local[0].q) if isinstance(local[0].q, DeviceArray) else chosen,
    )


def _check_gradients(rules: Rules, *, recording: bool) -> None:
    """Raise RuleError for a rule that requires a gradient and has none."""
    for name, x in flat(rules).items():
        asks = isinstance(x, Tensor) and x.requires_grad and recording
        if asks and name not in ("bias", "sinks", "spans[2]"):
            raise RuleError(f"{name} requires grad, and has no derivative here.", f"{name}.detach()")


def agreed(
    ranks: Ranks, what: str, own: Callable[[], Found], told: Callable[[Found], dict[str, Any]]
) -> tuple[Found, list[dict[str, Any]]]:
    """Read this rank's arguments, and check that all ranks could read theirs and were given the same.

    own     reads this rank's arguments; may raise
    told    what of them the ranks compare, by name, as JSON can write it; only "queries" and "keys" may differ

    Returns what `own` returned, and what every rank told, by rank. Raises the error of this rank's own `own`, or
    DistributedError where another rank had one or told something else. All ranks must call it.
    """
    found, raised = None, None
    mine: dict[str, Any] = {}
    try:
        if ranks.refused is not None:
            raise ranks.refused
        found = own()
        mine = told(found)
    except (ClearheadError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raised = error
    refused = "" if raised is None else raised.one_line() if isinstance(raised, ClearheadError) else repr(raised)
    everybody = ranks.agree(what, mine | {"refused": refused})
    if raised is not None:
        ranks.part(range(ranks.world))
        raise raised
    try:
        for rank, other in enumerate(everybody):
            if other["refused"]:
                raise DistributedError(f"{what}: rank {rank} was refused: {other['refused']}")
        must_equal(what, everybody, [name for name in mine if name not in OWN])
    except DistributedError:
        ranks.part(range(ranks.world))
        raise
    return found, everybody  # type: ignore[return-value]  # nothing was raised


def _signature(q: Tensor, k: Tensor, v: Tensor | None, rules: Rules) -> dict[str, Any]:
    """What must be the same on every rank, as text and numbers that an error can show; and own numbers of positions."""
    told: dict[str, Any] = {
        "q's shape without its length": [*q.shape[:-2], q.shape[-1]],
        "k's shape without its length": [*k.shape[:-2], k.shape[-1]],
        "v's shape without its length": None if v is None else [*v.shape[:-2], v.shape[-1]],
        "dtype": str(q.dtype),
        "queries": q.shape[-2],
        "keys": k.shape[-2],
    }
    for name in TABLE:
        value = rules.get(name)
        if name in _SHARDED:
            told[name] = "given" if value is not None else "not given"
        else:
            told[name] = fingerprint(name, value)
    return told


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


def _whole(q: Tensor, k: Tensor, rules: Rules, queries: int, keys: int) -> Problem:
    """The whole problem without the rules in _SHARDED, validated; q and k are replaced by broadcast zeros."""
    as_rule_array: Any = {name: value for name, value in rules.items() if name not in _SHARDED}
    with torch.no_grad():
        return describe(_empty(q, queries), _empty(k, keys), None, as_rule_array).problem


@torch.no_grad()
def array_of(x: Any, name: str) -> Array:
    """A tensor as an array in the CPU's memory, without its graph."""
    return on_cpu(as_array(x, name)[0])


@torch.no_grad()
def _content(q: Tensor, k: Tensor, content: Mapping[str, Any], keys: int) -> dict[str, Array]:
    """The validated fields of the rules in _SHARDED: for own queries and all keys, for own queries, or for own keys."""
    found: dict[str, Array] = {}
    for names, count in ((DENSE, keys), (_LABELS, k.shape[-2])):
        own: Any = {name: content[name] for name in names if name in content}
        if own:
            problem = describe(_empty(q, q.shape[-2]), _empty(k, count), None, own).problem
            found |= {field: getattr(problem, field) for name in own for field in TABLE[name].fields}
    return found


def _shared(content: Mapping[str, Any]) -> dict[str, Any]:
    """The values that batches and heads may share: bias, mask and the table of spans, by the rule's name."""
    return {
        name: content[name][2] if name == "spans" else content[name] for name in (*DENSE, "spans") if name in content
    }


def _lead(whole: Problem, value: Any) -> tuple[int, int]:
    """The numbers of batches and heads that a bias, mask or table is given for: 1 where all share it."""
    shape = (1, 1, 1, *np.shape(value))
    return whole.batch if prod(shape[:-3]) > 1 else 1, shape[-3]


def _kinds(whole: Problem, content: Mapping[str, Any], found: Mapping[str, Array]) -> dict[str, Any]:
    """What of these rules must be the same on all ranks, as text and numbers that an error can show."""
    told: dict[str, Any] = {name: fingerprint(name, x) for name, x in found.items() if not _in_pieces(name)}
    told |= {f"{name}'s dtype": str(found[name].dtype) for name in DENSE if name in found}
    leads = {name: list(_lead(whole, x)) for name, x in _shared(content).items()}
    return told | {f"{name}'s batches and heads": lead for name, lead in leads.items()}


def _empty(x: Tensor, length: int) -> Array:
    """A broadcast zero with the dtype and shape of x but for its length, which takes no memory."""
    dtype = as_array(x.detach()[..., :0, :], "x")[0].dtype
    return np.broadcast_to(np.zeros((), dtype), (*x.shape[:-2], length, x.shape[-1]))
