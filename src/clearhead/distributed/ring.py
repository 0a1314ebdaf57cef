"""ring: each rank's keys and values travel from rank to rank, and every rank merges in what its queries attend to.

While one block of keys is computed the next one travels. A block travels only as far as some rank's queries may attend
to it, so under a window it stays among neighbours. Partial outputs are kept in the statistics' dtype and merged by
their log-sum-exp (ring attention, Liu et al. 2023).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.statistics import Wanted
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.edges import EdgeQuestion, of_columns
from clearhead.distributed.exchange import Kind, Messages, swap
from clearhead.distributed.gather import key_bytes
from clearhead.distributed.layouts import common, needed
from clearhead.distributed.partials import (
    Keys,
    answered,
    finished,
    meetings,
    merged,
    no_spans,
    own_queries,
    sink_gradients,
)
from clearhead.distributed.shards import Names, Shards, kind, placed
from clearhead.ops import backward
from clearhead.ops.observation import Observation

Block = list[Array]  # keys (batch, kv_heads, own keys, d_k), values, what else travels with them, rules' fields


def hops(shards: Shards) -> list[int]:
    """How many steps around the ring each rank's keys must travel, by rank."""
    world = shards.ranks.world
    spans = [needed(shards.whole, own) for own in shards.query_pieces]
    found = []
    for owner in range(world):
        seen = [
            step
            for step in range(world)
            if any(common(span, piece) for span in spans[(owner + step) % world] for piece in shards.key_pieces[owner])
        ]
        found.append(max(seen, default=0))
    return found


def bytes_sent_on(shards: Shards) -> list[int]:
    """The bytes that each rank receives in a forward pass."""
    far, world = hops(shards), shards.ranks.world
    sizes = [sum(map(len, own)) for own in shards.key_pieces]
    return [
        sum(sizes[(rank - step) % world] for step in range(1, world) if far[(rank - step) % world] >= step)
        * key_bytes(shards)
        for rank in range(world)
    ]


def _laps(shards: Shards, block: Block, what: str) -> Any:
    """Yield (owner, step, block) for each block that reaches this rank; the next travels while the caller computes."""
    world, rank, far = shards.ranks.world, shards.rank, hops(shards)
    for step in range(world):
        owner, after = (rank - step) % world, (rank - step - 1) % world
        present = far[owner] >= step
        coming = far[after] > step and step + 1 < world
        sent = {(rank + 1) % world: block} if present and far[owner] > step else {}
        expected = {(rank - 1) % world: _kinds(shards, after)} if coming else {}
        hop = Messages(shards.ranks, what, sent, expected)
        if present:
            yield owner, step, block
        came = hop.arrays()
        block = came[(rank - 1) % world] if coming else []


def _kinds(shards: Shards, owner: int) -> list[Kind]:
    """Shapes and dtypes of a block of `owner`'s keys."""
    keys = sum(map(len, shards.key_pieces[owner]))
    own = [x for x in (shards.k, shards.v, *shards.more) if x is not None]
    found = [((*x.shape[:2], keys, *x.shape[3:]), x.dtype) for x in own]
    return found + [kind(name, x, keys=keys) for name, x in shards.of_keys().items()]


def _keys(shards: Shards, owner: int, block: Block) -> Keys:
    v, rest = (None, block[1:]) if shards.v is None else (block[1], block[2:])
    more, fields = rest[: len(shards.more)], rest[len(shards.more) :]
    values = dict(zip(shards.of_keys(), fields, strict=True))
    return Keys(placed(shards.key_pieces[owner]), block[0], v, values, more)


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries, by name; indices of `top` count in the whole sequence."""
    found: dict[int, Observation] = {}  # by the start of a piece of queries in the shard
    for owner, _, block in _laps(shards, _own_block(shards), "ring of keys"):
        for one in meetings(shards, own_queries(shards), _keys(shards, owner, block)):
            found[one.at.start] = merged(found.get(one.at.start), answered(shards, one, want))
    return finished(shards, [found.get(at.start) if rows else None for at, rows in shards.own_rows()], want)


def _own_block(shards: Shards) -> Block:
    return [x for x in (shards.k, shards.v, *shards.more, *shards.of_keys().values()) if x is not None]


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
    """The gradients of this rank's q, k and v, and where asked of its rows of the bias; its share of others.

    answers    what attention answered for this rank's queries, (batch, heads, own queries, …), by name
    by         the upstream gradient: the derivatives by those answers, of the same shapes

    Returns them by name, in the statistics' dtype.
    """
    dtype = statistics_dtype(shards.whole.dtype)
    found: dict[str, Any] = {"q": np.zeros(shards.q.shape, dtype)}
    if "bias" in asked:
        found["bias"] = np.zeros((*shards.lead["bias"], shards.q.shape[2], shards.whole.keys), dtype)
    found |= no_spans(shards, asked)
    sums: dict[int, list[Array]] = {}
    for owner, _, block in _laps(shards, _own_block(shards), "ring of keys, backward"):
        count = 1 if shards.v is None else 2
        total = [np.zeros(x.shape, dtype) for x in block[:count]]
        for one in meetings(shards, own_queries(shards), _keys(shards, owner, block)):
            at = one.at
            own = [{name: x[:, :, at] for name, x in side.items()} for side in (answers, by)]
            shapes = shards.shapes(one.problem, asked)
            part = backward.gradients(shards.engine, one.problem, one.arrays, *own, **shapes, keep_float32=True)
            found["q"][:, :, at] += part["q"]
            for sum_, name in zip(total, ("k", "v"), strict=False):
                sum_[:, :, one.here] += part[name]
            if "spans" in asked:
                found["spans"] += part["spans"]
            if "bias" in asked:
                found["bias"][:, :, at, one.keys.start : one.keys.stop] = part["bias"]
        sums[owner] = total
    return {**found, **sink_gradients(shards, answers, by), **_home(shards, sums, dtype)}


def _home(shards: Shards, sums: dict[int, list[Array]], dtype: np.dtype[Any]) -> dict[str, Array]:
    """Send the gradients of each block to its owner, who adds them in the order of the ranks."""
    own = [x for x in (shards.k, shards.v) if x is not None]
    found = {name: np.zeros(x.shape, dtype) for name, x in zip(("k", "v"), own, strict=False)}
    for arrays in _returned(shards, "return of derivatives", sums, [x.shape for x in own], dtype):
        for name, array in zip(found, arrays, strict=True):
            found[name] += array
    return found


def _returned(
    shards: Shards, what: str, sums: dict[int, list[Array]], shapes: list[Any], dtype: np.dtype[Any]
) -> list[list[Array]]:
    """Send what was summed for each block to its owner; what came here for own keys, in the order of the ranks."""
    world, rank, far = shards.ranks.world, shards.rank, hops(shards)
    expected = [shapes if (reader - rank) % world <= far[rank] else [] for reader in range(world)]
    got = swap(shards.ranks, what, [sums.get(owner, []) for owner in range(world)], expected, dtype)
    return [arrays for arrays in got if arrays]


def columns(shards: Shards, ask: ColumnSums) -> list[Array]:
    """Sums for this rank's keys: keys travel a second time, without values, and the sums return to their owners."""
    return meet(replace(shards, v=None), of_columns(shards, ask))[1]


def meet(shards: Shards, ask: EdgeQuestion) -> tuple[list[Array], list[Array]]:
    """The answers per query and per key for this rank's own: keys travel, and sums return to their owners."""
    found = ask.per_query(shards.q.shape[2])
    sums: dict[int, list[Array]] = {}
    for owner, _, block in _laps(shards, _own_block(shards), "further lap of keys"):
        sums[owner] = ask.per_key(block[0].shape[2])
        for one in meetings(shards, own_queries(shards), _keys(shards, owner, block)):
            ask.meet(one, ask.rows, found, sums[owner])
    totals = ask.per_key(shards.k.shape[2])
    dtype = np.dtype(np.float64)
    for arrays in _returned(shards, "return of sums over queries", sums, [x.shape for x in totals], dtype):
        ask.add(totals, slice(None), arrays)
    return found, totals
