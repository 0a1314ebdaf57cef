"""merge: keys stay where they are; queries travel to the ranks whose keys they may see, and partial answers come home.

They come with their log-sum-exp, in the statistics' dtype, and are merged in the order of the ranks. The method for
decoding, where queries are few and keys are many (tree attention; pass-Q of Yang et al. 2024).
"""

from dataclasses import replace

import numpy as np

from clearhead import backward
from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed.exchange import Kind, Messages
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

Pieces = list[tuple[slice, range]]


def reason_not(shards: Shards) -> str:
    """Why not; "" where it can."""
    if shards.bias is not None or shards.mask is not None:
        return "a mask or bias lies with the queries, and they travel without it"
    return ""


def bytes_moved(shards: Shards) -> list[int]:
    """What each rank receives in a forward pass: others' queries, and partial outputs of its own with log-sum-exp."""
    whole, world = shards.whole, shards.ranks.world
    wide = statistics_dtype(whole.dtype).itemsize
    answer = (1 + (0 if shards.v is None else shards.v.shape[-1])) * wide
    found = []
    for rank in range(world):
        others = [other for other in range(world) if other != rank]
        come = sum(_count(visits(shards, other, rank)) for other in others) * whole.d_k * whole.dtype.itemsize
        back = sum(_count(visits(shards, rank, other)) for other in others) * answer
        found.append(whole.batch * whole.heads * (come + back))
    return found


def visits(shards: Shards, reader: int, owner: int) -> Pieces:
    """The pieces of `reader`'s queries that may see keys of `owner`."""
    own = placed(shards.query_pieces[reader])
    return [(at, rows) for at, rows in own if rows and sees(shards, rows, shards.key_pieces[owner])]


def _count(pieces: Pieces) -> int:
    return sum(len(rows) for _, rows in pieces)


def _visitors(shards: Shards, what: str, arrays: list[Array]) -> dict[int, tuple[Queries, list[Array]]]:
    """By rank, the queries that come to this rank's keys, with further arrays (batch, heads, queries, …) of theirs."""
    segments = shards.query_segments
    travelling = [shards.q, *arrays, *([] if segments is None else [segments[:, None]])]
    send, expect = {}, {}
    for rank in range(shards.ranks.world):
        there, here = visits(shards, shards.rank, rank), visits(shards, rank, shards.rank)
        send[rank] = [np.concatenate([x[:, :, at] for at, _ in there], axis=2) for x in travelling if there]
        count = _count(here)
        expect[rank] = [((*x.shape[:2], count, *x.shape[3:]), x.dtype) for x in travelling if here]
    got = Messages(shards.ranks, what, send, expect).arrays()
    found = {}
    for rank in range(shards.ranks.world):
        here = placed(tuple(rows for _, rows in visits(shards, rank, shards.rank)))
        if here:
            labels = None if segments is None else got[rank][-1][:, 0]
            found[rank] = Queries(here, got[rank][0], labels), got[rank][1 : 1 + len(arrays)]
    return found


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
            answer = observation(part, at.stop - at.start, 1)
            found[at.start] = merged(found.get(at.start), answer)
    return finished(shards, [found.get(at.start) if rows else None for at, rows in shards.own_rows()], want)


def _room(shards: Shards, at: slice, rows: range, want: Wanted) -> dict[str, Array]:
    """Arrays like those that come back for a piece of own queries."""
    one = alone(shards, at, rows)
    return room_for_rows(one.problem, one.arrays[2], asked(want))


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, bias: bool) -> dict[str, Array]:
    """The loss's derivatives by this rank's q, k and v, and its part of the sinks'."""
    assert not bias, "reason_not refuses it"
    dtype = statistics_dtype(shards.whole.dtype)
    keys = own_keys(shards)
    totals = {name: np.zeros(x.shape, dtype) for name, x in (("k", keys.k), ("v", keys.v)) if x is not None}
    rows = [answers["logsumexp"], answers["output"].astype(dtype), by["output"].astype(dtype)]
    send = {}
    visitors = _visitors(shards, "queries to keys, backward", rows)
    for reader, (queries, (logsumexp, output, upstream)) in visitors.items():
        total = np.zeros(queries.q.shape, dtype)
        for one in meetings(shards, queries, keys):
            at = one.at
            own = {"logsumexp": logsumexp[:, :, at], "output": output[:, :, at]}, {"output": upstream[:, :, at]}
            part = backward.gradients(shards.engine, replace(one.problem, sinks=None), one.arrays, *own)
            total[:, :, at] += part["q"]
            for name, whole in totals.items():
                whole[:, :, one.here] += part[name]
        send[reader] = [total]
    own_visits = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    kinds: dict[int, list[Kind]] = {
        rank: [((*shards.q.shape[:2], _count(pieces), shards.q.shape[3]), dtype)]
        for rank, pieces in own_visits.items()
        if pieces
    }
    got = Messages(shards.ranks, "return of derivatives", send, kinds).arrays()
    q = np.zeros(shards.q.shape, dtype)
    for rank in sorted(kinds):
        for (at, _), (there, _) in zip(own_visits[rank], placed(tuple(r for _, r in own_visits[rank])), strict=True):
            q[:, :, at] += got[rank][0][:, :, there]
    return {"q": q, **totals, **sink_gradients(shards, answers, by)}


def columns(shards: Shards, ask: PerKey) -> list[Array]:
    """Sums for this rank's keys: queries come with what is asked of them, and nothing goes back."""
    keys = own_keys(shards)
    totals = ask.nothing(shards.whole.batch, shards.whole.heads, keys.k.shape[2])
    for queries, rows in _visitors(shards, "queries to keys, columns", ask.rows).values():
        for one in meetings(shards, queries, keys):
            part = ask.find(one.problem, *one.arrays[:2], [x[:, :, one.at] for x in rows])
            ask.add(totals, one.here, part)
    return totals
