"""Weights or effects of a sharded matrix by index: queries travel to the keys' ranks, which send the tiles to all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, as_places, as_slice, group_size
from clearhead.core.problem import Problem
from clearhead.core.rules import take
from clearhead.distributed.exchange import Kind, Messages
from clearhead.distributed.layouts import Pieces
from clearhead.distributed.partials import Arrays
from clearhead.distributed.shards import Shards, agreed, kind, placed
from clearhead.engines.base import Engine
from clearhead.ops.indexing import check_weights, expand
from clearhead.ops.transposed import index_of_matrix

Compute = Callable[[Engine, Problem, Arrays, Sequence[Array]], Array]
Section = tuple[slice, slice, range]  # where among the chosen positions, where in the shard, and which positions


def sections(chosen: range, own: Pieces) -> list[Section]:
    """The chosen positions that lie in these pieces, one section for each piece that has some."""
    found, places = [], np.asarray(chosen)
    for at, piece in placed(own):
        inside = np.flatnonzero((places >= piece.start) & (places < piece.stop))
        if inside.size:
            among = slice(int(inside[0]), int(inside[-1]) + 1)
            held = chosen[among]
            shift = at.start - piece.start
            here = as_slice(range(held.start + shift, held.stop + shift, held.step))
            found.append((among, here, held))
    return found


def weights(engine: Engine, problem: Problem, arrays: Arrays, own: Sequence[Array]) -> Array:
    """A tile of weights, which needs the log-sum-exp of its queries."""
    return engine.weights(problem, *arrays[:2], own[0])


def by_index(
    what: str,
    shards: Shards,
    shape: tuple[int, ...],
    key: Any,
    known: Callable[[], tuple[Compute, Sequence[Array]]],
    *,
    transposed: bool = False,
) -> Tensor:
    """What a matrix of this shape, or its transpose, has at an index that all ranks give: the same on every rank.

    what     weights or effects
    known    computes what `tile` takes; called once all ranks have given the index

    Raises on every rank: SelectionError or SizeError on that with a wrong index, DistributedError on the others.
    """

    def own() -> tuple[list[int | range], bool]:
        part, swap = index_of_matrix(key, (*shape[:-2], shape[-1], shape[-2])) if transposed else (key, False)
        index = expand(part, shape, WEIGHTS)
        check_weights(_sizes(index), statistics_dtype(shards.whole.dtype), shards.whole.device, what)
        return index, swap

    called = f"{what} by index"
    (index, swap), _ = agreed(shards.ranks, called, own, lambda found: {"index": str(found[0])})
    chosen = [range(p, p + 1) if isinstance(p, int) else p for p in index]
    found = np.empty(_sizes(index), statistics_dtype(shards.whole.dtype))
    if found.size:
        with shards.ranks.together(called):
            compute, rows = known()
            found = tile(shards, compute, rows, chosen[:-2], *chosen[-2:]).reshape(found.shape)
    return shards.give(found.swapaxes(-1, -2) if swap else found)


def _sizes(index: Sequence[int | range]) -> tuple[int, ...]:
    return tuple(len(p) for p in index if not isinstance(p, int))


def tile(
    shards: Shards, compute: Compute, known: Sequence[Array], lead: Sequence[range], rows: range, cols: range
) -> Array:
    """The tile of the chosen batches, heads, queries and keys, (batch, heads, queries, keys), on every rank.

    compute      compute(engine, problem, arrays, known) computes some queries' part with some keys, as `weights`
    known        what it needs of own queries: arrays (batch, heads, own queries, …)
    lead         the chosen indices of each leading axis of the matrix: of the batch axes, and of the heads last
    rows, cols   the chosen queries and keys, by position in the whole sequence
    """
    shards, known = _heads(shards, known, lead)
    world = shards.ranks.world
    asked = [sections(rows, own) for own in shards.query_pieces]
    held = [sections(cols, own) for own in shards.key_pieces]
    send = {to: [x for one in asked[shards.rank] for x in _rows(shards, known, one, held[to])] for to in range(world)}
    kinds = {
        source: [kind for one in asked[source] for kind in _row_kinds(shards, known, one, held[shards.rank])]
        for source in range(world)
    }
    came = Messages(shards.ranks, "queries to keys, weights", send, kinds).arrays()
    mine = []
    for source in range(world):
        arrays = iter(came[source])
        for _, _, positions in asked[source]:
            for _, here, keys in held[shards.rank]:
                q, *own = [next(arrays) for _ in range(1 + len(known))]
                values: dict[str, Any] = {name: next(arrays) for name in shards.of_queries()}
                values |= take(shards.of_keys(), {"keys": here})
                problem = replace(shards.whole, rows=positions, cols=keys, **values)
                v = None if shards.v is None else shards.v[:, :, here]
                mine.append(compute(shards.engine, problem, (q, shards.k[:, :, here], v), own))
    dtype = statistics_dtype(shards.whole.dtype)
    batch, heads = shards.whole.batch, shards.whole.heads
    spots = {
        owner: [(q, k) for source in range(world) for q, _, _ in asked[source] for k, _, _ in held[owner]]
        for owner in range(world)
    }
    sizes = {
        owner: [((batch, heads, q.stop - q.start, k.stop - k.start), dtype) for q, k in spots[owner]]
        for owner in range(world)
    }
    got = Messages(shards.ranks, "weights", dict.fromkeys(range(world), mine), sizes).arrays()
    whole = np.empty((batch, heads, len(rows), len(cols)), dtype)
    for owner in range(world):
        for (at, to), part in zip(spots[owner], got[owner], strict=True):
            whole[:, :, at, to] = part
    return whole


def _rows(shards: Shards, known: Sequence[Array], asked: Section, held: Sequence[Section]) -> list[Array]:
    """What each section of keys needs of a section of own queries: q, what is known of them, and the rules' fields."""
    _, at, _ = asked
    found = []
    for _, _, keys in held:
        rules = take(shards.of_queries(), {"queries": at, "keys": keys})
        found += [shards.q[:, :, at], *(x[:, :, at] for x in known), *rules.values()]
    return found


def _row_kinds(shards: Shards, known: Sequence[Array], asked: Section, held: Sequence[Section]) -> list[Kind]:
    """The shapes and dtypes of what `_rows` sends on another rank."""
    batch, heads, count = shards.whole.batch, shards.whole.heads, len(asked[2])
    found: list[Kind] = []
    for _, _, keys in held:
        found += [((batch, heads, count, *x.shape[3:]), x.dtype) for x in (shards.q, *known)]
        found += [kind(name, x, queries=count, keys=len(keys)) for name, x in shards.of_queries().items()]
    return found


def _heads(shards: Shards, known: Sequence[Array], lead: Sequence[range]) -> tuple[Shards, list[Array]]:
    """The shards and what is known of own queries for some batches and heads, with a key head for each query head."""
    heads = lead[-1] if lead else range(1)
    sizes = shards.prefix[:-1]
    batches = np.arange(shards.whole.batch).reshape(sizes)[np.ix_(*lead[:-1])].reshape(-1)
    chosen, places = as_slice(heads), as_places(batches)
    shared = as_places(shards.whole.kv_head_of(np.asarray(heads)))
    v = shards.v
    if v is not None:
        of_values = as_places(np.asarray(heads) // group_size(shards.whole.heads, v.shape[1]))
        v = v[:, of_values][places]
    part = replace(
        shards,
        whole=shards.whole.take(batches=batches, heads=heads),
        q=shards.q[:, chosen][places],
        k=shards.k[:, shared][places],
        v=v,
        values=take(shards.values, {"batch": batches, "heads": heads}),
    )
    return part, [x[:, chosen][places] for x in known]
