"""One attention problem whose sequence lies in pieces on many ranks: read, compared with the others', described once.

Positions are those of the whole sequence, so every rule means what it means on one machine; a rank's part is the same
problem for some of its rows, and a block of keys the same problem for some of its columns.
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
from clearhead.arrays import FLOATS, adopt, device_of, on_cpu, plain, to_torch
from clearhead.axes import Array
from clearhead.device import DeviceArray
from clearhead.distributed.layouts import LAYOUTS, Layout, Pieces, pieces
from clearhead.distributed.ranks import OWN, Ranks, must_equal
from clearhead.engines.base import Engine
from clearhead.engines.remote import Remote
from clearhead.errors import ClearheadError, DistributedError, shown, unknown
from clearhead.problem import Described, Problem, Rules, check_names, describe
from clearhead.room import array_bytes, check_room

METHODS = ("gather", "ring", "ulysses", "merge", "auto")
Found = TypeVar("Found")
DENSE = ("bias", "mask")
_SHARDED = (*DENSE, "query_segments", "kv_segments")  # rules whose values lie in pieces too


@dataclass(frozen=True, eq=False, slots=True)
class Shards:
    """What one rank knows."""

    ranks: Ranks
    whole: Problem  # of all queries and keys, without the rules in _SHARDED
    q: Array  # this rank's, (batch, heads, queries, d_k), in the CPU's memory
    k: Array
    v: Array | None
    device: torch.device  # where the tensors are, and the answers go
    prefix: tuple[int, ...]
    query_pieces: list[Pieces]  # by rank
    key_pieces: list[Pieces]
    bias: Array | None  # (batch, heads, this rank's queries, all keys)
    mask: Array | None
    query_segments: Array | None  # (batch, this rank's queries)
    kv_segments: Array | None  # (batch, this rank's keys)
    lead: dict[str, tuple[int, int]]  # bias and mask as they were given: for how many batches and heads, 1 or all
    engine: Engine  # computes on the device, for arrays in the CPU's memory
    kept: dict[str, Any] = field(default_factory=dict, init=False)  # by a method, for its further passes

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def own_rows(self) -> list[tuple[slice, range]]:
        """Pieces of queries: where in its shard, and which positions."""
        return placed(self.query_pieces[self.rank])

    def own_keys(self) -> list[tuple[slice, range]]:
        return placed(self.key_pieces[self.rank])

    def dense(self) -> dict[str, Array]:
        """Bias and mask as they were given, (batch or 1, heads or 1, this rank's queries, all keys)."""
        full = {name: getattr(self, name) for name in DENSE}
        return {name: x[: self.lead[name][0], : self.lead[name][1]] for name, x in full.items() if x is not None}

    def bias_shape(self, part: Problem) -> tuple[int, int, int, int]:
        """The bias's derivative in a part of the problem: summed over the batches and heads that share it."""
        batch, heads = self.lead["bias"]
        return min(batch, part.batch), min(heads, part.heads), part.queries, part.keys

    def give(self, array: Array) -> Tensor:
        """An answer (…, heads, …) as a tensor where q is."""
        found: Tensor = to_torch(torch, np.ascontiguousarray(array)).to(self.device)
        return found

    def problem(self, at: slice, rows: range, kv_segments: Array | None) -> Problem:
        """The problem of one own piece of queries and all keys; kv_segments (batch, all keys)."""

        def mine(x: Array | None) -> Array | None:
            return None if x is None else x[:, :, at]

        segments = None if self.query_segments is None else self.query_segments[:, at]
        return replace(
            self.whole,
            rows=rows,
            bias=mine(self.bias),
            mask=mine(self.mask),
            query_segments=segments,
            kv_segments=kv_segments,
        )


def placed(own: Pieces) -> list[tuple[slice, range]]:
    """Where a rank's pieces lie in its shard, and which positions they are."""
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
) -> Shards:
    """Read this rank's shards and see that all ranks were called alike. Raises on every rank when one raises."""

    def own() -> tuple[Described, dict[str, Any]]:
        check_names(rules)
        for name, value, known in (("layout", layout, LAYOUTS), ("method", method, METHODS)):
            if not (isinstance(value, str) and value in known):
                raise unknown(name, value, known)
        engines.check_name(engine)
        with torch.no_grad():
            local = describe(q, k, v, {})
        return local, _signature(q, k, v, rules) | {"layout": layout, "method": method, "engine": engine}

    local, everybody = agreed(ranks, what, own, lambda found: found[1])
    lengths = [[other[name] for other in everybody] for name in ("queries", "keys")]
    whole = replace(_whole(q, k, rules, *map(sum, lengths)), device=device_of(local[0].q))
    content = {name: value for name, value in rules.items() if name in _SHARDED and value is not None}
    parts = _content(q, k, {}, 0)
    lead: dict[str, tuple[int, int]] = {}
    if content:
        parts, _ = agreed(
            ranks, what, lambda: _content(q, k, content, sum(lengths[1])), lambda found: _kinds(whole, content, found)
        )
        lead = {name: _lead(whole, content[name]) for name in DENSE if name in content}
    query_pieces, key_pieces = (pieces(sizes, layout) for sizes in lengths)
    chosen: Any = engines.get(engines.choose(whole, engine).engine)
    return Shards(
        ranks=ranks,
        whole=whole,
        q=on_cpu(local[0].q),
        k=on_cpu(local[0].k),
        v=None if local[0].v is None else on_cpu(local[0].v),
        device=q.device,
        lead=lead,
        prefix=local[0].problem.prefix,
        query_pieces=query_pieces,
        key_pieces=key_pieces,
        engine=Remote(chosen, local[0].q) if isinstance(local[0].q, DeviceArray) else chosen,
        **parts,
    )


def agreed(
    ranks: Ranks, what: str, own: Callable[[], Found], told: Callable[[Found], dict[str, Any]]
) -> tuple[Found, list[dict[str, Any]]]:
    """Read one's own arguments and see that all ranks read theirs, and the same: what was found, and what all told.

    What is told of own "queries" and "keys" may differ. Raises this rank's own error, or DistributedError where another
    rank had one or told something else.
    """
    found, raised = None, None
    mine: dict[str, Any] = {}
    try:
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
    """What must be the same on every rank, in words that an error can show; and how long this rank's shards are."""
    told: dict[str, Any] = {
        "q's shape without its length": [*q.shape[:-2], q.shape[-1]],
        "k's shape without its length": [*k.shape[:-2], k.shape[-1]],
        "v's shape without its length": None if v is None else [*v.shape[:-2], v.shape[-1]],
        "dtype": str(q.dtype),
        "queries": q.shape[-2],
        "keys": k.shape[-2],
    }
    for name in Rules.__annotations__:
        value = rules.get(name)
        if name in _SHARDED:
            told[name] = "given" if value is not None else "not given"
        else:
            told[name] = _told(name, value)
    return told


@torch.no_grad()
def _told(name: str, value: Any) -> Any:
    array = plain(value, name) if isinstance(value, (Tensor, np.ndarray, list)) else None
    if array is None or (array.dtype.kind not in "biuf" and array.dtype not in FLOATS):
        return shown(value.item() if isinstance(value, np.generic) else value)
    check_room(name, array_bytes(array.shape, 8), "give fewer tokens.")
    numbers = np.ascontiguousarray(array, np.float64)
    if numbers.size <= 16:
        return numbers.reshape(-1).tolist()
    return f"{array.shape} {hashlib.sha1(numbers.tobytes()).hexdigest()[:12]}"


def _whole(q: Tensor, k: Tensor, rules: Rules, queries: int, keys: int) -> Problem:
    """The rules about positions, validated against the whole sequence; the arrays take no memory."""
    plain: Any = {name: value for name, value in rules.items() if name not in _SHARDED}
    with torch.no_grad():
        return describe(_empty(q, queries), _empty(k, keys), None, plain).problem


@torch.no_grad()
def array_of(x: Any, name: str) -> Array:
    """A tensor's numbers, in the CPU's memory."""
    return on_cpu(adopt(x, name)[0])


@torch.no_grad()
def _content(q: Tensor, k: Tensor, content: Mapping[str, Any], keys: int) -> dict[str, Array | None]:
    """Bias and mask (…, this rank's queries, all keys), segments of this rank's own, as engines take them."""
    found: dict[str, Array | None] = dict.fromkeys(_SHARDED)
    dense: Any = {name: content[name] for name in DENSE if name in content}
    if dense:
        problem = describe(_empty(q, q.shape[-2]), _empty(k, keys), None, dense).problem
        found |= {"bias": problem.bias, "mask": problem.mask}
    labels: Any = {name: content[name] for name in ("query_segments", "kv_segments") if name in content}
    if labels:
        problem = describe(_empty(q, q.shape[-2]), _empty(k, k.shape[-2]), None, labels).problem
        found |= {"query_segments": problem.query_segments, "kv_segments": problem.kv_segments}
    return found


def _lead(whole: Problem, value: Any) -> tuple[int, int]:
    """For how many batches and heads a bias or mask is given: 1 where all share it."""
    shape = (1, 1, 1, *np.shape(value))
    return whole.batch if prod(shape[:-3]) > 1 else 1, shape[-3]


def _kinds(whole: Problem, content: Mapping[str, Any], found: Mapping[str, Array | None]) -> dict[str, Any]:
    """What else of bias and mask must be the same on all ranks, in words that an error can show."""
    given = {name: x for name, x in found.items() if name in DENSE and x is not None}
    told = {f"{name}'s dtype": str(x.dtype) for name, x in given.items()}
    return told | {f"{name}'s batches and heads": list(_lead(whole, content[name])) for name in given}


def _empty(x: Tensor, length: int) -> Array:
    """An array of x's kind with another length and no memory behind it."""
    dtype = adopt(x.detach()[..., :0, :], "x")[0].dtype
    return np.broadcast_to(np.zeros((), dtype), (*x.shape[:-2], length, x.shape[-1]))
