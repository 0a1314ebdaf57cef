"""merge: keys stay where they are; queries travel to the ranks whose keys they may see, and partial answers come home.

They come with their log-sum-exp, in the statistics' dtype, and are merged in the order of the ranks. The method for
decoding, where queries are few and keys are many (tree attention; pass-Q of Yang et al. 2024).
"""

from math import prod
from typing import Any

import numpy as np

from clearhead import backward
from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed.exchange import Kind, Messages
from clearhead.distributed.layouts import Pieces
from clearhead.distributed.partials import (
    Queries,
    alone,
    answered,
    asked,
    finished,
    listed,
    meetings,
    merged,
    own_keys,
    sees,
    sink_gradients,
)
from clearhead.distributed.perkeys import PerKey
from clearhead.distributed.shards import Shards, placed
from clearhead.engines.base import room_for_rows
from clearhead.observations import Observation, Wanted, observation

Visits = list[tuple[slice, range]]


def bytes_moved(shards: Shards) -> list[int]:
    """What each rank receives in a forward pass: others' queries with their rules, and partial outputs of its own."""
    whole, world = shards.whole, shards.ranks.world
    wide = statistics_dtype(whole.dtype).itemsize
    answer = (1 + (0 if shards.v is None else shards.v.shape[-1])) * wide
    found = []
    for rank in range(world):
        others = [other for other in range(world) if other != rank]
        come = sum(_count(visits(shards, other, rank)) for other in others)
        back = sum(_count(visits(shards, rank, other)) for other in others)
        keys = sum(map(len, shards.key_pieces[rank]))
        rows = sum(prod(x.shape[:2]) * x.itemsize for x in shards.dense().values()) * keys
        numbers = come * whole.d_k * whole.dtype.itemsize + back * answer
        found.append(whole.batch * whole.heads * numbers + come * rows)
    return found


def visits(shards: Shards, reader: int, owner: int) -> Visits:
    """The pieces of `reader`'s queries that may see keys of `owner`."""
    own = placed(shards.query_pieces[reader])
    return [(at, rows) for at, rows in own if rows and sees(shards, rows, shards.key_pieces[owner])]


def _count(pieces: Visits) -> int:
    return sum(len(rows) for _, rows in pieces)


def _visitors(shards: Shards, what: str, arrays: list[Array]) -> dict[int, tuple[Queries, list[Array]]]:
    """By rank, the queries that come to this rank's keys, with further arrays (batch, heads, queries, …) of theirs."""
    segments, dense = shards.query_segments, shards.dense()
    travelling = [shards.q, *arrays, *([] if segments is None else [segments[:, None]])]
    lead = (shards.whole.batch, shards.whole.heads)
    send, expect = {}, {}
    for rank in range(shards.ranks.world):
        there, here = visits(shards, shards.rank, rank), visits(shards, rank, shards.rank)
        columns = _columns(shards.key_pieces[rank])
        given = [*travelling, *(x[..., columns] for x in dense.values())]
        send[rank] = [np.concatenate([x[:, :, at] for at, _ in there], axis=2) for x in given if there]
        tails = [x.shape[3:] for x in travelling] + [shards.k.shape[2:3]] * len(dense)
        come = zip([*travelling, *dense.values()], tails, strict=True)
        expect[rank] = [((*x.shape[:2], _count(here), *tail), x.dtype) for x, tail in come if here]
    got = Messages(shards.ranks, what, send, expect).arrays()
    found = {}
    for rank in range(shards.ranks.world):
        here = placed(tuple(rows for _, rows in visits(shards, rank, shards.rank)))
        if here:
            labels = None if segments is None else got[rank][1 + len(arrays)][:, 0]
            rows = got[rank][len(travelling) :]
            rules = {name: np.broadcast_to(x, lead + x.shape[2:]) for name, x in zip(dense, rows, strict=True)}
            found[rank] = Queries(here, got[rank][0], labels, away=True, **rules), got[rank][1 : 1 + len(arrays)]
    return found


def _columns(keys: Pieces) -> Array:
    """Where a rank's keys stand among all."""
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in keys])


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries; `top` by position in the whole sequence."""
    keys, send = own_keys(shards), {}
    for reader, (queries, _) in _visitors(shards, "queries to keys", []).items():
        parts: dict[int, Observation] = {}
        for one in meetings(shards, queries, keys):
            parts[one.at.start] = merged(parts.get(one.at.start), answered(shards, one, want))
        send[reader] = [x for at, _ in queries.pieces for _, x in sorted(listed(parts[at.start]).items())]
    own = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    rooms = {at.start: _room(shards, at, rows, want) for at, rows in shards.own_rows() if rows}
    kinds = {
        rank: [(x.shape, x.dtype) for at, _ in pieces for _, x in sorted(rooms[at.start].items())]
        for rank, pieces in own.items()
        if pieces
    }
    got = Messages(shards.ranks, "partial answers", send, kinds).arrays()
    found: dict[int, Observation] = {}
    for rank in sorted(kinds):
        arrays = iter(got[rank])
        for at, _ in own[rank]:
            part = {name: next(arrays) for name in sorted(rooms[at.start])}
            answer = observation(part, at.stop - at.start, 1, sinks=False)
            found[at.start] = merged(found.get(at.start), answer)
    return finished(shards, [found.get(at.start) if rows else None for at, rows in shards.own_rows()], want)


def _room(shards: Shards, at: slice, rows: range, want: Wanted) -> dict[str, Array]:
    """Arrays like those that come back for a piece of own queries."""
    one = alone(shards, at, rows)
    return room_for_rows(one.problem, one.arrays[2], asked(want))


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, bias: bool) -> dict[str, Array]:
    """The loss's derivatives by this rank's q, k and v (and its rows of the bias, and its part of the sinks')."""
    dtype = statistics_dtype(shards.whole.dtype)
    keys = own_keys(shards)
    totals = {name: np.zeros(x.shape, dtype) for name, x in (("k", keys.k), ("v", keys.v)) if x is not None}
    rows = [x for side in (answers, by) for x in side.values()]
    send = {}
    visitors = _visitors(shards, "queries to keys, backward", rows)
    for reader, (queries, given) in visitors.items():
        total = np.zeros(queries.q.shape, dtype)
        by_bias = np.zeros((*shards.lead["bias"], total.shape[2], keys.k.shape[2]), dtype) if bias else None
        for one in meetings(shards, queries, keys):
            at = one.at
            here = iter([x[:, :, at] for x in given])
            own = [{name: next(here) for name in side} for side in (answers, by)]
            shape = shards.bias_shape(one.problem) if bias else None
            part = backward.gradients(shards.engine, one.problem, one.arrays, *own, bias=shape, unrounded=True)
            total[:, :, at] += part["q"]
            if by_bias is not None:
                by_bias[:, :, at, one.here] = part["bias"]
            for name, whole in totals.items():
                whole[:, :, one.here] += part[name]
        send[reader] = [total] if by_bias is None else [total, by_bias]
    return {**_returned(shards, send, dtype, bias=bias), **totals, **sink_gradients(shards, answers, by)}


def _returned(shards: Shards, send: dict[int, list[Array]], dtype: np.dtype[Any], *, bias: bool) -> dict[str, Array]:
    """What visits found out about their queries comes home: derivatives by q and the bias, added by rank."""
    own = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    found = {"q": np.zeros(shards.q.shape, dtype)}
    if bias:
        found["bias"] = np.zeros((*shards.lead["bias"], shards.q.shape[2], shards.whole.keys), dtype)
    kinds: dict[int, list[Kind]] = {}
    for rank, pieces in own.items():
        widths = {"q": shards.q.shape[3], "bias": sum(map(len, shards.key_pieces[rank]))}
        shapes = [(*x.shape[:2], _count(pieces), widths[name]) for name, x in found.items()]
        kinds[rank] = [(shape, dtype) for shape in shapes if pieces]
    got = Messages(shards.ranks, "return of derivatives", send, kinds).arrays()
    for rank, pieces in own.items():
        for (at, _), (there, _) in zip(pieces, placed(tuple(rows for _, rows in pieces)), strict=True):
            found["q"][:, :, at] += got[rank][0][:, :, there]
            if bias:
                found["bias"][:, :, at, _columns(shards.key_pieces[rank])] = got[rank][1][:, :, there]
    return found


def columns(shards: Shards, ask: PerKey) -> list[Array]:
    """Sums for this rank's keys: queries come with what is asked of them, and nothing goes back."""
    keys = own_keys(shards)
    totals = ask.nothing(shards.whole.batch, shards.whole.heads, keys.k.shape[2])
    for queries, rows in _visitors(shards, "queries to keys, columns", ask.rows).values():
        for one in meetings(shards, queries, keys):
            part = ask.find(one.problem, *one.arrays[:2], [x[:, :, one.at] for x in rows])
            ask.add(totals, one.here, part)
    return totals
