"""merge: keys stay on their ranks; queries travel to the keys that they may attend to, and partial answers travel back.

Partial answers carry their log-sum-exp, in the statistics' dtype, and are merged in the order of the ranks. This suits
decoding, where queries are few and keys are many (tree attention; pass-Q of Yang et al. 2024).
"""

from math import prod
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.rules import FIELDS, take
from clearhead.core.statistics import Wanted
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.edges import EdgeQuestion, of_columns
from clearhead.distributed.exchange import Kind, Messages
from clearhead.distributed.layouts import Pieces
from clearhead.distributed.partials import (
    Queries,
    alone,
    answered,
    asked,
    finished,
    meetings,
    merged,
    no_spans,
    own_keys,
    sees,
    sink_gradients,
)
from clearhead.distributed.shards import Names, Shards, kind, placed
from clearhead.engines.base import row_kinds
from clearhead.ops import backward
from clearhead.ops.observation import Observation, observation, separate_arrays

Visits = list[tuple[slice, range]]


def bytes_moved(shards: Shards) -> list[int]:
    """The bytes that each rank receives in a forward pass: others' queries and their rules, and its partial outputs."""
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
    """The pieces of rank `reader`'s queries that may attend to `owner`'s keys: where in the shard, and positions."""
    own = placed(shards.query_pieces[reader])
    return [(at, rows) for at, rows in own if rows and sees(shards, rows, shards.key_pieces[owner])]


def _count(pieces: Visits) -> int:
    return sum(len(rows) for _, rows in pieces)


def _visitors(shards: Shards, what: str, arrays: list[Array]) -> dict[int, tuple[Queries, list[Array]]]:
    """Send own queries to the ranks whose keys they may attend to; by rank, the queries that came here.

    `arrays` are further arrays (batch, heads, own queries, …) to send along; they come back beside the queries.
    """
    travelling = [shards.q, *arrays]
    rules = shards.of_queries() | shards.dense()
    lead = {"batch": shards.whole.batch, "heads": shards.whole.heads}
    send, expect = {}, {}
    for rank in range(shards.ranks.world):
        there, here = visits(shards, shards.rank, rank), visits(shards, rank, shards.rank)
        if there:
            columns = _columns(shards.key_pieces[rank])
            send[rank] = [np.concatenate([x[:, :, at] for at, _ in there], axis=2) for x in travelling]
            send[rank] += [_rows_of(name, x, there, columns) for name, x in rules.items()]
        if here:
            count, keys = _count(here), shards.k.shape[2]
            expect[rank] = [((*x.shape[:2], count, *x.shape[3:]), x.dtype) for x in travelling]
            expect[rank] += [kind(name, x, queries=count, keys=keys) for name, x in rules.items()]
    got = Messages(shards.ranks, what, send, expect).arrays()
    found = {}
    for rank in range(shards.ranks.world):
        here = placed(tuple(rows for _, rows in visits(shards, rank, shards.rank)))
        if here:
            come = got[rank]
            own = zip(rules, come[len(travelling) :], strict=True)
            values = {name: np.broadcast_to(x, kind(name, x, **lead)[0]) for name, x in own}
            found[rank] = Queries(here, come[0], values, away=True), come[1 : len(travelling)]
    return found


def _rows_of(name: str, x: Array, pieces: Visits, columns: Array) -> Array:
    """A rule's field for these pieces of own queries, concatenated, and for the keys at these positions."""
    parts = [take({name: x}, {"queries": at, "keys": columns})[name] for at, _ in pieces]
    return np.concatenate(parts, axis=FIELDS[name].index("queries"))


def _columns(keys: Pieces) -> Array:
    """The positions of a rank's keys in the whole sequence."""
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in keys])


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries, by name; indices of `top` count in the whole sequence."""
    keys, send = own_keys(shards), {}
    for reader, (queries, _) in _visitors(shards, "queries to keys", []).items():
        parts: dict[int, Observation] = {}
        for one in meetings(shards, queries, keys):
            parts[one.at.start] = merged(parts.get(one.at.start), answered(shards, one, want))
        send[reader] = [x for at, _ in queries.pieces for _, x in sorted(separate_arrays(parts[at.start]).items())]
    own = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    rooms = {at.start: _kinds(shards, at, rows, want) for at, rows in shards.own_rows() if rows}
    kinds = {
        rank: [kind for at, _ in pieces for _, kind in sorted(rooms[at.start].items())]
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


def _kinds(shards: Shards, at: slice, rows: range, want: Wanted) -> dict[str, Kind]:
    """Shapes and dtypes of the arrays that come back for a piece of own queries."""
    one = alone(shards, at, rows)
    return row_kinds(one.problem, one.arrays[2], asked(want), shards.engine.STATISTICS)


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
    """The gradients of this rank's q, k and v, and where asked of its rows of the bias; its share of others.

    answers    what attention answered for this rank's queries, (batch, heads, own queries, …), by name
    by         the upstream gradient: the derivatives by those answers, of the same shapes

    Returns them by name, in the statistics' dtype.
    """
    dtype = statistics_dtype(shards.whole.dtype)
    keys = own_keys(shards)
    totals = {name: np.zeros(x.shape, dtype) for name, x in (("k", keys.k), ("v", keys.v)) if x is not None}
    rows = [x for side in (answers, by) for x in side.values()]
    spans, send = no_spans(shards, asked), {}
    visitors = _visitors(shards, "queries to keys, backward", rows)
    for reader, (queries, given) in visitors.items():
        total = np.zeros(queries.q.shape, dtype)
        by_bias = np.zeros((*shards.lead["bias"], total.shape[2], keys.k.shape[2]), dtype) if "bias" in asked else None
        for one in meetings(shards, queries, keys):
            at = one.at
            here = iter([x[:, :, at] for x in given])
            own = [{name: next(here) for name in side} for side in (answers, by)]
            shapes = shards.shapes(one.problem, asked)
            part = backward.gradients(shards.engine, one.problem, one.arrays, *own, **shapes, keep_float32=True)
            total[:, :, at] += part["q"]
            if by_bias is not None:
                by_bias[:, :, at, one.here] = part["bias"]
            if "spans" in asked:
                spans["spans"] += part["spans"]
            for name, whole in totals.items():
                whole[:, :, one.here] += part[name]
        send[reader] = [total] if by_bias is None else [total, by_bias]
    return {**_returned(shards, send, dtype, asked=asked), **totals, **spans, **sink_gradients(shards, answers, by)}


def _returned(shards: Shards, send: dict[int, list[Array]], dtype: np.dtype[Any], *, asked: Names) -> dict[str, Array]:
    """Return the gradients of visiting queries and their bias to the queries' ranks, which add them in rank order."""
    own = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    found = {"q": np.zeros(shards.q.shape, dtype)}
    if "bias" in asked:
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
            if "bias" in asked:
                found["bias"][:, :, at, _columns(shards.key_pieces[rank])] = got[rank][1][:, :, there]
    return found


def columns(shards: Shards, ask: ColumnSums) -> list[Array]:
    """Sums for this rank's keys: queries come here with the arrays that the question needs; nothing travels back."""
    return meet(shards, of_columns(shards, ask))[1]


def meet(shards: Shards, ask: EdgeQuestion) -> tuple[list[Array], list[Array]]:
    """The answers per query and per key for this rank's own: queries travel with what the question needs, and back."""
    keys = own_keys(shards)
    totals, send = ask.per_key(keys.k.shape[2]), {}
    for reader, (queries, rows) in _visitors(shards, "queries to keys, edges", ask.rows).items():
        send[reader] = ask.per_query(queries.q.shape[2])
        for one in meetings(shards, queries, keys):
            ask.meet(one, rows, send[reader], totals)
    own = {rank: visits(shards, shards.rank, rank) for rank in range(shards.ranks.world)}
    kinds = {
        rank: [(x.shape, x.dtype) for x in ask.per_query(_count(pieces))] for rank, pieces in own.items() if pieces
    }
    got = Messages(shards.ranks, "answers about edges", send, kinds).arrays()
    found = ask.per_query(shards.q.shape[2])
    for rank in sorted(kinds):
        there = placed(tuple(rows for _, rows in own[rank]))
        for (at, _), (come, _) in zip(own[rank], there, strict=True):
            ask.merge(found, at, [x[:, :, come] for x in got[rank]])
    return found, totals
