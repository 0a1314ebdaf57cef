"""One attention problem whose sequence lies in pieces on many ranks: read, compared with the others', described once.

Positions are those of the whole sequence, so every rule means what it means on one machine; a rank's part is the same
problem for some of its rows, and a block of keys the same problem for some of its columns.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from clearhead import engines
from clearhead.arrays import Restore, adopt
from clearhead.axes import Array
from clearhead.distributed.layouts import LAYOUTS, Layout, Pieces, pieces
from clearhead.distributed.ranks import OWN, Ranks, must_equal
from clearhead.engines.base import Engine
from clearhead.errors import ClearheadError, DistributedError, unknown
from clearhead.problem import Described, Problem, Rules, check_names, describe

METHODS = ("gather", "ring", "ulysses", "merge", "auto")
Found = TypeVar("Found")
_SHARDED = ("bias", "mask", "query_segments", "kv_segments")  # rules whose values lie in pieces too


@dataclass(frozen=True, eq=False, slots=True)
class Shards:
    """What one rank knows."""

    ranks: Ranks
    whole: Problem  # of all queries and keys, without the rules in _SHARDED
    q: Array  # this rank's, (batch, heads, queries, d_k)
    k: Array
    v: Array | None
    restore: Restore
    prefix: tuple[int, ...]
    query_pieces: list[Pieces]  # by rank
    key_pieces: list[Pieces]
    bias: Array | None  # (batch, heads, this rank's queries, all keys)
    mask: Array | None
    query_segments: Array | None  # (batch, this rank's queries)
    kv_segments: Array | None  # (batch, this rank's keys)
    engine: Engine

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def own_rows(self) -> list[tuple[slice, range]]:
        """Pieces of queries: where in its shard, and which positions."""
        return placed(self.query_pieces[self.rank])

    def own_keys(self) -> list[tuple[slice, range]]:
        return placed(self.key_pieces[self.rank])

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
            if value not in known:
                raise unknown(name, value, known)
        local = describe(q.detach(), k.detach(), None if v is None else v.detach(), {})
        return local, _signature(q, k, v, rules) | {"layout": layout, "method": method, "engine": engine}

    local, everybody = agreed(ranks, what, own, lambda found: found[1])
    lengths = [[other[name] for other in everybody] for name in ("queries", "keys")]
    whole = _whole(q, k, rules, *map(sum, lengths))
    content = {name: value for name, value in rules.items() if name in _SHARDED and value is not None}
    parts = _content(q, k, {}, 0)
    if content:
        parts, _ = agreed(ranks, what, lambda: _content(q, k, content, sum(lengths[1])), lambda _: {})
    query_pieces, key_pieces = (pieces(sizes, layout) for sizes in lengths)
    return Shards(
        ranks=ranks,
        whole=whole,
        q=local[0].q,
        k=local[0].k,
        v=local[0].v,
        restore=local[0].restore,
        prefix=local[0].problem.prefix,
        query_pieces=query_pieces,
        key_pieces=key_pieces,
        engine=engines.get(engines.choose(whole, engine).engine),
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
            told[name] = _told(value)
    return told


def _told(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray, list)):
        array = np.ascontiguousarray(torch.as_tensor(value).detach().double().numpy())
        small = array.reshape(-1).tolist()
        return small if len(small) <= 16 else f"{array.shape} {hashlib.sha1(array.tobytes()).hexdigest()[:12]}"
    return str(value)


def _whole(q: Tensor, k: Tensor, rules: Rules, queries: int, keys: int) -> Problem:
    """The rules about positions, validated against the whole sequence; the arrays take no memory."""
    plain: Any = {name: value for name, value in rules.items() if name not in _SHARDED}
    for name in ("sinks", "alibi_slopes"):
        if isinstance(plain.get(name), Tensor):
            plain[name] = plain[name].detach()
    return describe(_empty(q, queries), _empty(k, keys), None, plain).problem


def _content(q: Tensor, k: Tensor, content: Mapping[str, Any], keys: int) -> dict[str, Array | None]:
    """Bias and mask (…, this rank's queries, all keys), segments of this rank's own, as engines take them."""
    found: dict[str, Array | None] = dict.fromkeys(_SHARDED)
    detached: Any = {name: x.detach() if isinstance(x, Tensor) else x for name, x in content.items()}
    dense: Any = {name: detached[name] for name in ("bias", "mask") if name in detached}
    if dense:
        problem = describe(_empty(q, q.shape[-2]), _empty(k, keys), None, dense).problem
        found |= {"bias": problem.bias, "mask": problem.mask}
    labels: Any = {name: detached[name] for name in ("query_segments", "kv_segments") if name in detached}
    if labels:
        problem = describe(_empty(q, q.shape[-2]), _empty(k, k.shape[-2]), None, labels).problem
        found |= {"query_segments": problem.query_segments, "kv_segments": problem.kv_segments}
    return found


def _empty(x: Tensor, length: int) -> Array:
    """An array of x's kind with another length and no memory behind it."""
    dtype = adopt(x.detach()[..., :0, :], "x")[0].dtype
    return np.broadcast_to(np.zeros((), dtype), (*x.shape[:-2], length, x.shape[-1]))
