"""Partial answers: one rank's queries over another's keys, kept in the statistics' dtype until they are merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import take
from clearhead.core.statistics import Wanted
from clearhead.distributed.layouts import Pieces, common, needed
from clearhead.distributed.shards import DENSE, Names, Shards
from clearhead.ops import backward
from clearhead.ops.observation import Observation, observation, separate_arrays

Arrays = tuple[Array, Array, Array | None]


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """Some rank's queries: where its pieces lie in q (batch, heads, queries, d_k), and the rules that go with them."""

    pieces: list[tuple[slice, range]]
    q: Array
    values: dict[str, Array]  # fields of a problem along the queries, and along all keys where they have that axis
    away: bool = False  # sent to another rank, with the columns of bias and mask for that rank's keys only


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """Some rank's keys and values."""

    pieces: list[tuple[slice, range]]
    k: Array
    v: Array | None
    values: dict[str, Array]  # fields of a problem along the keys
    more: list[Array]  # what else travels with them, (batch, heads or 1, keys, …)


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """A piece of queries and a piece of keys that they may attend to, as a problem of its own.

    at, here      where the pieces lie in the arrays of queries and of keys
    rows, keys    their positions in the whole sequence
    arrays        q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v or None
    more          what else travels with these keys, (batch, heads or 1, keys, …)
    """

    at: slice
    rows: range
    here: slice
    keys: range
    problem: Problem
    arrays: Arrays
    more: list[Array]


def own_queries(shards: Shards) -> Queries:
    """The queries of this rank."""
    return Queries(shards.own_rows(), shards.q, shards.of_queries())


def own_keys(shards: Shards) -> Keys:
    """The keys and values of this rank."""
    return Keys(shards.own_keys(), shards.k, shards.v, shards.of_keys(), list(shards.more))


def sees(shards: Shards, rows: range, keys: Pieces) -> bool:
    """May any of these queries attend to any of these keys, judged by position?"""
    return any(common(span, piece) for span in needed(shards.whole, (rows,)) for piece in keys)


def meetings(shards: Shards, queries: Queries, keys: Keys) -> Iterator[Meeting]:
    """Each piece of the queries paired with each piece of the keys that it may attend to."""
    for here, cols in keys.pieces:
        for at, rows in queries.pieces:
            if not sees(shards, rows, (cols,)):
                continue
            seen = here if queries.away else slice(cols.start, cols.stop)
            own, theirs = take(queries.values, {"queries": at, "keys": seen}), take(keys.values, {"keys": here})
            problem = replace(shards.whole, rows=rows, cols=cols, **own, **theirs)
            v = None if keys.v is None else keys.v[:, :, here]
            more = [x[:, :, here] for x in keys.more]
            yield Meeting(at, rows, here, cols, problem, (queries.q[:, :, at], keys.k[:, :, here], v), more)


def alone(shards: Shards, at: slice, rows: range) -> Meeting:
    """A piece of own queries with no keys, whose answers are those of empty rows."""
    none = range(0)
    nothing = {name: x for name, x in shards.values.items() if name not in DENSE}
    problem = replace(shards.whole, rows=rows, cols=none, **take(nothing, {"queries": at, "keys": none}))
    v = None if shards.v is None else shards.v[:, :, :0]
    return Meeting(at, rows, slice(0), none, problem, (shards.q[:, :, at], shards.k[:, :, :0], v), [])


def asked(want: Wanted) -> Wanted:
    """The request for one part: with the log-sum-exp, to merge by, and unrounded: the merged output is rounded once."""
    return replace(want.only(want.rows()), logsumexp=True, keep_float32=True)


def answered(shards: Shards, one: Meeting, want: Wanted) -> Observation:
    """The partial answer over these keys, without sinks; indices of `top` count in the whole sequence."""
    answers = dict(shards.engine.rows(replace(one.problem, sinks=None), *one.arrays, asked(want)))
    answers.pop("received", None)
    if "top_indices" in answers:
        answers["top_indices"] = np.where(answers["top_indices"] < 0, -1, answers["top_indices"] + one.keys.start)
    return observation(answers, one.problem.queries, max(1, one.problem.keys), sinks=False)


def merged(before: Observation | None, part: Observation) -> Observation:
    """Merge two partial answers by their log-sum-exp; keys=0, since indices count in the whole sequence already."""
    return part if before is None else replace(before, keys=0).merge_keys(part)


def finished(shards: Shards, found: Sequence[Observation | None], want: Wanted) -> dict[str, Array]:
    """The final answers, by name: the merged answers of each own piece, with sinks, concatenated and rounded once.

    `found` has one entry for each own piece of queries; None stands for one that may attend to no key.
    """
    pieces = []
    for (at, rows), one in zip(shards.own_rows(), found, strict=True):
        whole = answered(shards, alone(shards, at, rows), want) if one is None else one
        if shards.whole.sinks is not None:
            whole = whole.with_sinks(shards.whole.sinks)
        pieces.append(separate_arrays(whole))
    joined = {name: np.concatenate([one[name] for one in pieces], axis=2) for name in pieces[0]}
    if "output" in joined:
        joined["output"] = joined["output"].astype(shards.whole.dtype, copy=False)
    return joined


def no_spans(shards: Shards, asked: Names) -> dict[str, Array]:
    """Zeros in which the gradient of the table of spans is summed, where it is asked for."""
    shapes = shards.shapes(shards.whole, asked & {"spans"})
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def sink_gradients(shards: Shards, answers: dict[str, Array], by: dict[str, Array]) -> dict[str, Array]:
    """The gradients of the sinks, (heads,): they depend on each row's final answers only, and on no key."""
    if shards.whole.sinks is None:
        return {}
    dtype = statistics_dtype(shards.whole.dtype)
    wide = [{name: x.astype(dtype, copy=False) for name, x in side.items()} for side in (answers, by)]
    return {"sinks": backward.sink_gradients(replace(shards.whole, dtype=dtype), *wide)}
