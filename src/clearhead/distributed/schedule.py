"""gather, ring and merge: how queries and the keys that they may attend to meet, are asked, and answers come home.

gather   every rank fetches all keys that its queries may attend to, and each piece of its queries meets all of them at
         once. Under a window these are its own keys and the nearest ones of its neighbours; under a causal rule those
         up to its last query.
ring     each rank's keys travel from rank to rank, only as far as some rank's queries may attend to them. While one
         block of keys is computed the next one travels (ring attention, Liu et al. 2023).
merge    keys stay; queries travel to the keys that they may attend to. This suits decoding, where queries are few and
         keys are many (tree attention; pass-Q of Yang et al. 2024).

Answers per key return to the keys' rank, and by merge answers per query to the queries'; both are merged in the order
of the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from clearhead.core.axes import Array, as_places, as_slice
from clearhead.core.problem import Inputs, Problem
from clearhead.core.rules import FIELDS, take
from clearhead.distributed.layout import Placed, common, count, placed, places, positions_of
from clearhead.distributed.messages import Kind, Messages
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.sharded_problem import Shards, kind

Merge = Callable[[list[Array], list[Array]], list[Array]]
Parts = tuple[list[Array], list[Array]]  # answers per query and per key
Keys = tuple[Placed, list[Array]]  # where pieces of keys lie in the arrays that `travelling` lists, and these


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """Some rank's queries: where its pieces lie in q (batch, heads, queries, d_k), and what goes with them."""

    pieces: Placed
    q: Array
    values: dict[str, Array]  # fields of a problem along the queries, and along all keys where they have that axis
    rows: Sequence[Array]  # what a question needs of them, (batch, heads or 1, queries, …)
    away: bool = False  # sent to another rank, with the columns of bias and mask for that rank's keys only


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """A piece of queries and a piece of keys that they may attend to, as a problem of its own.

    rows, cols    where the pieces lie in the arrays of queries and of keys
    inputs        its problem's rows and cols are their positions in the whole sequence
    more          what else travels with these keys, (batch, heads or 1, keys, …)
    """

    rows: slice
    cols: slice
    inputs: Inputs
    more: list[Array]

    @property
    def problem(self) -> Problem:
        return self.inputs.problem


def _nothing(_count: int) -> list[Array]:
    return []


def added(a: list[Array], b: list[Array]) -> list[Array]:
    """The sums of two lists of arrays."""
    return [x + y for x, y in zip(a, b, strict=True)]


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """What is asked wherever queries meet keys, and how the answers of all meetings become one.

    find        find(meeting, rows) answers for one piece of queries and one of keys: arrays per query, arrays per key
    rows        what it needs of this rank's queries: arrays (batch, heads or 1, own queries, …)
    per_query   per_query(n): the answers of n queries that see no key, (batch, heads, n, …)
    merged      merges answers per query over disjoint keys
    per_key     per_key(n): the answers of n keys that no query sees, (batch, heads, n, …)
    over        merges answers per key over disjoint queries
    """

    find: Callable[[Meeting, Sequence[Array]], Parts]
    rows: Sequence[Array] = ()
    per_query: Callable[[int], list[Array]] = _nothing
    merged: Merge = added
    per_key: Callable[[int], list[Array]] = _nothing
    over: Merge = added

    def ask(self, queries: Queries, keys: Keys, shards: Shards, by_query: list[Array], by_key: list[Array]) -> None:
        """Ask wherever these queries meet these keys, and merge the answers into those so far."""
        for one in meetings(shards, queries, keys):
            per_query, per_key = self.find(one, [x[:, :, one.rows] for x in queries.rows])
            merge_into(self.merged, by_query, one.rows, per_query)
            merge_into(self.over, by_key, one.cols, per_key)


def merge_into(how: Merge, into: list[Array], index: Any, part: list[Array]) -> None:
    """Merge the answers of some queries or keys into those of all."""
    for whole, x in zip(into, how([x[:, :, index] for x in into], part), strict=True):
        whole[:, :, index] = x


def travelling(shards: Shards) -> list[tuple[Array, int]]:
    """What travels with own keys, and each array's axis of keys: k, v, `more`, fields of the problem."""
    arrays = [(x, 2) for x in (shards.k, shards.v, *shards.more) if x is not None]
    return arrays + [(x, FIELDS[name].index("keys")) for name, x in shards.of_keys().items()]


def kinds_of(shards: Shards, keys: int) -> list[Kind]:
    """The shapes and dtypes of what travels with so many keys."""
    return [((*x.shape[:axis], keys, *x.shape[axis + 1 :]), x.dtype) for x, axis in travelling(shards)]


def _along(axis: int, index: slice | Array) -> tuple[slice | Array, ...]:
    """The index that takes these places of an axis."""
    return (*[slice(None)] * axis, index)


def meetings(shards: Shards, queries: Queries, keys: Keys) -> Iterator[Meeting]:
    """Each piece of the queries paired with each piece of the keys that it may attend to."""
    (pieces, arrays), axes = keys, [axis for _, axis in travelling(shards)]
    for cols, positions in pieces:
        columns = cols if queries.away else as_slice(positions)
        k, *rest = (x[_along(axis, cols)] for x, axis in zip(arrays, axes, strict=True))
        v = None if shards.v is None else rest.pop(0)
        more, values = rest[: len(shards.more)], rest[len(shards.more) :]
        for rows, piece in queries.pieces:
            if shards.sees(piece, (positions,)):
                fields = take(queries.values, {"queries": rows, "keys": columns})
                fields |= zip(shards.of_keys(), values, strict=True)
                problem = replace(shards.whole, rows=piece, cols=positions, **fields)
                yield Meeting(rows, cols, Inputs(problem, queries.q[:, :, rows], k, v), more)


def meet(method: str, shards: Shards, question: Question) -> Parts:
    """Ask a question wherever queries meet keys; all ranks call it. The answers per own query and per own key."""
    ranks, answers = shards.ranks, {}
    by_query, by_key = question.per_query(shards.lengths[0]), question.per_key(shards.lengths[1])
    if method == "merge":
        keys = placed(shards.key_pieces[ranks.rank]), [x for x, _ in travelling(shards)]
        for reader, queries in _visitors(shards, question).items():
            answers[reader] = question.per_query(queries.q.shape[2])
            question.ask(queries, keys, shards, answers[reader], by_key)
        parts = [visits(shards, ranks.rank, owner) for owner in range(ranks.world)]
        return _brought_home("answers to queries", ranks, answers, by_query, parts, question.merged), by_key
    queries = Queries(placed(shards.query_pieces[ranks.rank]), shards.q, shards.of_queries(), question.rows)
    for owners, keys in gathered(shards) if method == "gather" else around(shards):
        of_keys = question.per_key(count(keys[0]))
        question.ask(queries, keys, shards, by_query, of_keys)
        answers |= {owner: [x[:, :, index] for x in of_keys] for owner, index in owners.items()}
    parts = [sent(method, shards, ranks.rank, reader) for reader in range(ranks.world)]
    return by_query, _brought_home("return of sums over queries", ranks, answers, by_key, parts, question.over)


def sent(method: str, shards: Shards, owner: int, reader: int) -> Placed:
    """The keys of rank `owner` that `reader` receives, or has itself: where in the owner's shard, and positions.

    By gather those that it may attend to; by ring all, where they travel as far as that.
    """
    held = placed(shards.key_pieces[owner])
    if method == "ring":
        return held if (reader - owner) % shards.ranks.world <= shards.hops[owner] else []
    parts = []
    for where, piece in held:
        for span in shards.needed[reader]:
            keys = common(piece, span)
            if keys:
                start = where.start + keys.start - piece.start
                parts.append((slice(start, start + len(keys)), keys))
    return parts


def bytes_received(method: str, shards: Shards) -> list[int]:
    """The bytes that each rank receives in a forward pass, by rank."""
    if method == "merge":
        return _bytes_of_queries(shards)
    world, sizes = range(shards.ranks.world), [sum(map(len, held)) for held in shards.key_pieces]
    if method == "gather":
        keys = [sum(map(len, shards.needed[r])) - count(sent(method, shards, r, r)) for r in world]
    else:
        keys = [sum(sizes[x] for x in world if 0 < (r - x) % len(world) <= shards.hops[x]) for r in world]
    width = shards.k.shape[-1] + (0 if shards.v is None else shards.v.shape[-1])
    each = shards.whole.batch * shards.whole.kv_heads * width * shards.k.dtype.itemsize
    return [number * each for number in keys]


def _bytes_of_queries(shards: Shards) -> list[int]:
    """The bytes that each rank receives by merge: others' queries and their rules, and its own partial outputs."""
    whole, answer = shards.whole, 1 + (0 if shards.v is None else shards.v.shape[-1])
    world = range(shards.ranks.world)

    def coming(reader: int, owner: int) -> int:
        keys = shards.key_pieces[owner]
        return sum(len(rows) for rows in shards.query_pieces[reader] if reader != owner and shards.sees(rows, keys))

    visiting = np.array([[coming(reader, owner) for owner in world] for reader in world])
    counted = []
    for come, back, held in zip(visiting.sum(0).tolist(), visiting.sum(1).tolist(), shards.key_pieces, strict=True):
        rules = sum(prod(x.shape[:2]) * x.itemsize for x in shards.dense().values()) * sum(map(len, held))
        numbers = come * whole.d_k * whole.dtype.itemsize + back * answer * shards.dtype.itemsize
        counted.append(whole.batch * whole.heads * numbers + come * rules)
    return counted


Owners = dict[int, slice | Array]  # by rank, where its keys lie among some keys


def gathered(shards: Shards) -> Iterator[tuple[Owners, Keys]]:
    """Yield all keys that own queries may attend to, fetched from their owners, once."""
    world, rank, arrays = range(shards.ranks.world), shards.rank, travelling(shards)
    send = {}
    for reader in world:
        index = places(sent("gather", shards, rank, reader))
        send[reader] = [x[_along(axis, index)] for x, axis in arrays]
    parts = {owner: sent("gather", shards, owner, rank) for owner in world}
    expect = {owner: kinds_of(shards, count(part)) for owner, part in parts.items()}
    came = Messages(shards.ranks, "gather of keys", send, expect).arrays()
    runs = placed(shards.needed[rank])
    whole = [np.empty(shape, dtype) for shape, dtype in kinds_of(shards, count(runs))]
    fetched = positions_of(shards.needed[rank])
    owners = {owner: as_places(np.searchsorted(fetched, positions_of(x for _, x in parts[owner]))) for owner in world}
    for owner, index in owners.items():
        for full, part, (_, axis) in zip(whole, came[owner], arrays, strict=True):
            full[_along(axis, index)] = part
    yield owners, (runs, whole)


def around(shards: Shards) -> Iterator[tuple[Owners, Keys]]:
    """Yield each rank's keys that reach this rank; the next ones travel while the caller computes."""
    world, rank = shards.ranks.world, shards.rank
    hops, block = shards.hops, [x for x, _ in travelling(shards)]
    for step in range(world):
        owner, after = (rank - step) % world, (rank - step - 1) % world
        coming = hops[after] > step and step + 1 < world
        send = {(rank + 1) % world: block} if hops[owner] > step else {}
        pieces = placed(shards.key_pieces[after])
        expect = {(rank - 1) % world: kinds_of(shards, count(pieces))} if coming else {}
        message = Messages(shards.ranks, "ring of keys", send, expect)
        if hops[owner] >= step:
            yield {owner: slice(None)}, (placed(shards.key_pieces[owner]), block)
        came = message.arrays()
        block = came[(rank - 1) % world] if coming else []


def _brought_home(
    what: str, ranks: Ranks, answers: dict[int, list[Array]], local: list[Array], parts: list[Placed], how: Merge
) -> list[Array]:
    """Send answers to the ranks that own their keys or queries, and merge what comes from all ranks.

    answers   by the rank that they go to
    local     those about this rank's positions so far, into which they are merged
    parts     which of the own positions a rank's answers are about, by rank
    """
    expect = {
        rank: [((*x.shape[:2], count(part), *x.shape[3:]), x.dtype) for x in local]
        for rank, part in enumerate(parts)
        if local and part
    }
    came = Messages(ranks, what, answers, expect).arrays()
    for rank in expect:
        merge_into(how, local, places(parts[rank]), came[rank])
    return local


def visits(shards: Shards, reader: int, owner: int) -> Placed:
    """The pieces of rank `reader`'s queries that may attend to `owner`'s keys: where in the shard, and positions."""
    held = placed(shards.query_pieces[reader])
    return [(where, rows) for where, rows in held if shards.sees(rows, shards.key_pieces[owner])]


def _visitors(shards: Shards, question: Question) -> dict[int, Queries]:
    """Send own queries, with what the question needs of them, to the keys that they may attend to.

    Returns the queries that came here, by rank.
    """
    arrays = [shards.q, *question.rows]
    rules = shards.of_queries() | shards.dense()
    lead = {"batch": shards.whole.batch, "heads": shards.whole.heads}
    send, expect, come = {}, {}, {}
    for rank in range(shards.ranks.world):
        there, here = visits(shards, shards.rank, rank), visits(shards, rank, shards.rank)
        if there:
            index = places(there)
            columns = positions_of(shards.key_pieces[rank])
            send[rank] = [x[:, :, index] for x in arrays]
            send[rank] += take(rules, {"queries": index, "keys": columns}).values()
        if here:
            come[rank] = placed([rows for _, rows in here])
            queries, keys = count(here), shards.lengths[1]
            expect[rank] = [((*x.shape[:2], queries, *x.shape[3:]), x.dtype) for x in arrays]
            expect[rank] += [kind(name, x, queries=queries, keys=keys) for name, x in rules.items()]
    got = Messages(shards.ranks, "queries to keys", send, expect).arrays()
    visitors = {}
    for rank, pieces in come.items():
        q, *rows = got[rank][: len(arrays)]
        fields = zip(rules, got[rank][len(arrays) :], strict=True)
        values = {name: np.broadcast_to(x, kind(name, x, **lead)[0]) for name, x in fields}
        visitors[rank] = Queries(pieces, q, values, rows, away=True)
    return visitors
