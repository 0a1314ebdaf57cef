"""ulysses: ranks exchange positions for heads, so that each computes the whole sequence for some heads; then back.

Outputs have the bits of a computation on one machine. The number of query heads must be a multiple of the
number of ranks, that of key heads a multiple or a divisor of it (DeepSpeed-Ulysses, Jacobs et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS, take
from clearhead.core.statistics import Wanted
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.exchange import swap
from clearhead.distributed.gather import whole_of
from clearhead.distributed.layouts import Pieces
from clearhead.distributed.shards import Names, Shards
from clearhead.ops import backward


def reason_not(shards: Shards) -> str:
    """Why this method cannot run; "" where it can."""
    world, heads, kv_heads = shards.ranks.world, shards.whole.heads, shards.whole.kv_heads
    if heads % world or (kv_heads % world and world % max(1, kv_heads)):
        return f"{heads} heads with {kv_heads} key heads do not divide among {world} ranks"
    return ""


def heads_of(rank: int, world: int, heads: int) -> slice:
    """The heads, out of `heads`, that a rank needs; with fewer key heads than ranks, some ranks share one."""
    first = rank * heads // world
    return slice(first, max(first + 1, (rank + 1) * heads // world))


def bytes_moved(shards: Shards) -> list[int]:
    """The bytes that each rank receives in a forward pass: its heads of q, k and v, and its rows of the output."""
    world, problem = shards.ranks.world, shards.whole
    d_v = 0 if shards.v is None else shards.v.shape[-1]
    found = []
    for rank in range(world):
        queries, keys = (sum(map(len, pieces[rank])) for pieces in (shards.query_pieces, shards.key_pieces))
        come = (problem.queries - queries) * problem.heads * problem.d_k // world
        come += (problem.keys - keys) * max(1, problem.kv_heads // world) * (problem.d_k + d_v)
        come += queries * problem.heads * d_v * (world - 1) // world
        rows = sum(x.shape[0] * max(1, x.shape[1] // world) * x.itemsize for x in shards.dense().values())
        others = (problem.queries - queries) * problem.keys
        found.append(come * problem.batch * problem.dtype.itemsize + others * rows)
    return found


class ByHeads:
    """The whole sequence for this rank's heads: q, k and v after the exchange, and their problem."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.q = self.to_heads(shards.q, shards.query_pieces)
        self.k = self.to_heads(shards.k, shards.key_pieces)
        self.v = None if shards.v is None else self.to_heads(shards.v, shards.key_pieces)
        self.problem = self._problem()
        self.answers: dict[str, Array] = {}

    @staticmethod
    def of(shards: Shards) -> "ByHeads":
        """The exchanged arrays of these shards: exchanged on the first call, and kept for further passes."""
        if "by heads" not in shards.kept:
            shards.kept["by heads"] = ByHeads(shards)
        found: ByHeads = shards.kept["by heads"]
        return found

    def _problem(self) -> Problem:
        shards, whole = self.shards, self.shards.whole
        count = whole.heads // shards.ranks.world
        mine = range(shards.rank * count, (shards.rank + 1) * count)
        dense = shards.dense()
        values: dict[str, Any] = {}
        for name, x in (shards.values | dense).items():
            side = "queries" if "queries" in FIELDS[name] else "keys"
            if name in dense:
                rows = self.to_heads(x, shards.query_pieces)
                values[name] = np.broadcast_to(rows, (whole.batch, count, *rows.shape[2:]))
            else:
                values |= take({name: whole_of(shards, "exchange of segments", name, x, side)}, {"heads": mine})
        return replace(whole.take(heads=mine), kv_heads=self.k.shape[1], **values)

    def to_heads(self, x: Array, pieces: Sequence[Pieces]) -> Array:
        """Exchange (batch, heads, own positions, d) for (batch, own heads, all positions, d)."""
        ranks = self.shards.ranks
        send = [[x[:, heads_of(rank, ranks.world, x.shape[1])]] for rank in range(ranks.world)]
        count = send[ranks.rank][0].shape[1]
        shapes = [[(x.shape[0], count, sum(map(len, own)), x.shape[3])] for own in pieces]
        return _in_order([part[0] for part in swap(ranks, "exchange of heads", send, shapes, x.dtype)], pieces)

    def to_rows(self, x: Array, pieces: Sequence[Pieces], heads: int | None = None) -> Array:
        """Exchange (batch, own heads, all positions, …) for (batch, heads, own positions, …).

        `heads` is the number of all heads; None is that of the query heads. Where ranks share a head, their arrays are
        added in rank order.
        """
        heads = self.shards.whole.heads if heads is None else heads
        ranks = self.shards.ranks
        flat = x.reshape(*x.shape[:3], prod(x.shape[3:]))
        send = [[np.concatenate([flat[:, :, p.start : p.stop] for p in own], axis=2)] for own in pieces]
        own = sum(map(len, pieces[ranks.rank]))
        shapes = [[(x.shape[0], x.shape[1], own, flat.shape[3])]] * ranks.world
        got = [part[0] for part in swap(ranks, "exchange of positions", send, shapes, x.dtype)]
        if heads % ranks.world:
            whole = np.zeros((x.shape[0], heads, *got[0].shape[2:]), x.dtype)
            for rank, part in enumerate(got):  # ranks that share a head have a part of its sum each
                whole[:, heads_of(rank, ranks.world, heads)] += part
        else:
            whole = np.concatenate(got, axis=1)
        return whole.reshape(x.shape[0], heads, own, *x.shape[3:])

    def attend(self, want: Wanted) -> dict[str, Array]:
        """The output and row statistics of all queries for this rank's heads, by name; kept for `differentiate`."""
        asked = replace(want, received=False, logsumexp=True)
        found = dict(self.shards.engine.rows(self.problem, self.q, self.k, self.v, asked))
        self.answers |= found
        return {name: x for name, x in found.items() if want.logsumexp or name != "logsumexp"}

    def columns(self, ask: ColumnSums) -> list[Array]:
        """Sums for this rank's keys, (batch, heads, own keys, …), in the order of ask.names."""
        found = ask.find(self.problem, self.q, self.k, [self._of_queries(x) for x in ask.rows])
        return [self.to_rows(found[name], self.shards.key_pieces) for name in ask.names]

    def _of_queries(self, x: Array) -> Array:
        """Exchange (batch, heads, own queries, …) for (batch, own heads, all queries, …)."""
        moved = self.to_heads(x.reshape(*x.shape[:3], prod(x.shape[3:])), self.shards.query_pieces)
        return moved.reshape(*moved.shape[:3], *x.shape[3:])

    def differentiate(self, answers: dict[str, Array], by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
        """The gradients of q, k, v and bias for own positions; of sinks and spans, 0 but for this rank's heads."""
        known = {name: self._of_queries(x) for name, x in answers.items() if name not in self.answers}
        known |= {name: x for name, x in self.answers.items() if name in {*answers, "logsumexp"}}
        loss = {name: self._of_queries(x) for name, x in by.items()}
        shapes = self.shards.shapes(self.problem, asked)
        arrays = self.q, self.k, self.v
        engine = self.shards.engine
        one = backward.gradients(engine, self.problem, arrays, known, loss, **shapes, keep_float32=True)
        by_query, by_key = self.shards.query_pieces, self.shards.key_pieces
        heads, kv_heads = self.shards.whole.heads, self.shards.whole.kv_heads
        sides = {"q": (by_query, heads), "k": (by_key, kv_heads)}
        if self.shards.v is not None:
            sides["v"] = by_key, self.shards.v.shape[1]
        if "bias" in asked:
            sides["bias"] = by_query, self.shards.lead["bias"][1]
        found = {name: self.to_rows(one[name], *side) for name, side in sides.items() if name in one}
        count = self.problem.heads
        mine = slice(self.shards.rank * count, (self.shards.rank + 1) * count)
        if "sinks" in one:
            found["sinks"] = np.zeros(self.shards.whole.heads)
            found["sinks"][mine] = one["sinks"]
        if "spans" in one:
            found["spans"] = np.zeros(self.shards.shapes(self.shards.whole, frozenset({"spans"}))["spans"])
            found["spans"][:, mine if self.shards.lead["spans"][1] > 1 else slice(None)] = one["spans"]
        return found


def _in_order(parts: Sequence[Array], pieces: Sequence[Pieces]) -> Array:
    """Join the ranks' arrays (batch, heads, positions of a rank, d) in the order of positions."""
    size = sum(len(piece) for own in pieces for piece in own)
    whole = np.empty((*parts[0].shape[:2], size, parts[0].shape[3]), parts[0].dtype)
    for part, own in zip(parts, pieces, strict=True):
        start = 0
        for piece in own:
            whole[:, :, piece.start : piece.stop] = part[:, :, start : start + len(piece)]
            start += len(piece)
    return whole
