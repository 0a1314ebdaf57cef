"""Exact weights of a sharded matrix, read by index: queries go to the keys asked for, and tiles to all ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.arrays import statistics_dtype
from clearhead.axes import Array, as_places, as_slice
from clearhead.distributed.exchange import Messages
from clearhead.distributed.layouts import Pieces
from clearhead.distributed.shards import Shards, placed

Section = tuple[slice, slice, range]  # where among the chosen, where in the shard, which positions


def sections(chosen: range, own: Pieces) -> list[Section]:
    """The chosen positions that lie in these pieces."""
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


def tile(shards: Shards, logsumexp: Array, lead: Sequence[range], rows: range, cols: range) -> Array:
    """Weights (batch, heads, queries, keys) of the chosen batches, heads, queries and keys, on every rank."""
    shards, logsumexp = _heads(shards, logsumexp, lead)
    world = shards.ranks.world
    asked = [sections(rows, own) for own in shards.query_pieces]
    held = [sections(cols, own) for own in shards.key_pieces]
    send = {
        to: [x for one in asked[shards.rank] for x in _rows(shards, logsumexp, one, held[to])] for to in range(world)
    }
    kinds = {
        source: [kind for one in asked[source] for kind in _row_kinds(shards, logsumexp, one, held[shards.rank])]
        for source in range(world)
    }
    came = Messages(shards.ranks, "queries to keys, weights", send, kinds).arrays()
    mine = []
    for source in range(world):
        arrays = iter(came[source])
        for _, _, positions in asked[source]:
            for _, here, keys in held[shards.rank]:
                own = {name: next(arrays) for name in _names(shards)}
                mine.append(_weights(shards, own, positions, here, keys))
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
        for (q, k), part in zip(spots[owner], got[owner], strict=True):
            whole[:, :, q, k] = part
    return whole


def _names(shards: Shards) -> list[str]:
    rules = ("query_segments", "bias", "mask")
    return ["q", "logsumexp", *(name for name in rules if getattr(shards, name) is not None)]


def _rows(shards: Shards, logsumexp: Array, asked: Section, held: Sequence[Section]) -> list[Array]:
    """For each piece of keys what it needs of some own queries, in the order of `_names`."""
    _, at, _ = asked
    found = []
    for _, _, keys in held:
        for name in _names(shards):
            if name == "logsumexp":
                found.append(logsumexp[:, :, at])
            elif name == "query_segments":
                assert shards.query_segments is not None
                found.append(shards.query_segments[:, at])
            else:
                x = getattr(shards, name)[:, :, at]
                found.append(x if name == "q" else x[..., as_slice(keys)])
    return found


def _row_kinds(shards: Shards, logsumexp: Array, asked: Section, held: Sequence[Section]) -> list[tuple[Any, Any]]:
    """Shapes and dtypes of the same, from another rank."""
    batch, heads, count = shards.whole.batch, shards.whole.heads, len(asked[2])
    found = []
    for _, _, keys in held:
        shapes = {
            "q": (batch, heads, count, shards.whole.d_k),
            "logsumexp": (batch, heads, count),
            "query_segments": (batch, count),
            "bias": (batch, heads, count, len(keys)),
            "mask": (batch, heads, count, len(keys)),
        }
        dtypes = {name: getattr(shards, name).dtype for name in _names(shards) if name != "logsumexp"}
        dtypes["logsumexp"] = logsumexp.dtype
        found += [(shapes[name], dtypes[name]) for name in _names(shards)]
    return found


def _weights(shards: Shards, own: dict[str, Array], rows: range, here: slice, keys: range) -> Array:
    problem = replace(
        shards.whole,
        rows=rows,
        cols=keys,
        bias=own.get("bias"),
        mask=own.get("mask"),
        query_segments=own.get("query_segments"),
        kv_segments=None if shards.kv_segments is None else shards.kv_segments[:, here],
    )
    return shards.engine.weights(problem, own["q"], shards.k[:, :, here], own["logsumexp"])


def _heads(shards: Shards, logsumexp: Array, lead: Sequence[range]) -> tuple[Shards, Array]:
    """The same for some batches and heads only, one key head for each query head."""
    heads = lead[-1] if lead else range(1)
    sizes = shards.prefix[:-1]
    batches = np.arange(shards.whole.batch).reshape(sizes)[np.ix_(*lead[:-1])].reshape(-1)
    chosen, places = as_slice(heads), as_places(batches)
    group = shards.whole.heads // shards.whole.kv_heads

    def both(x: Array | None) -> Array | None:
        return None if x is None else x[:, chosen][places]

    def per_batch(x: Array | None) -> Array | None:
        return None if x is None else x[places]

    part = replace(
        shards,
        whole=shards.whole.take_heads(batches, heads),
        q=shards.q[:, chosen][places],
        k=shards.k[:, as_places(np.asarray(heads) // group)][places],
        bias=both(shards.bias),
        mask=both(shards.mask),
        query_segments=per_batch(shards.query_segments),
        kv_segments=per_batch(shards.kv_segments),
    )
    return part, logsumexp[:, chosen][places]
