"""Queries of one rank meet keys of another: answers over some keys, kept in the statistics' dtype and merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clearhead import backward
from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed.layouts import Pieces, common, needed
from clearhead.distributed.shards import Shards
from clearhead.merging import Top
from clearhead.observations import Observation, Wanted, observation
from clearhead.problem import Problem

Arrays = tuple[Array, Array, Array | None]


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """Some rank's queries: where its pieces lie in q (batch, heads, queries, d_k), and the rules that go with them."""

    pieces: list[tuple[slice, range]]
    q: Array
    segments: Array | None = None
    bias: Array | None = None  # (batch, heads, queries, all keys)
    mask: Array | None = None
    away: bool = False  # at another rank, where bias and mask hold the columns of that rank's keys alone


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """Some rank's keys and values."""

    pieces: list[tuple[slice, range]]
    k: Array
    v: Array | None
    segments: Array | None


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """A piece of queries and a piece of keys that may see each other: where they lie, the problem, and q, k, v."""

    at: slice
    rows: range
    here: slice
    keys: range
    problem: Problem
    arrays: Arrays


def own_queries(shards: Shards) -> Queries:
    """Of this rank."""
    return Queries(shards.own_rows(), shards.q, shards.query_segments, shards.bias, shards.mask)


def own_keys(shards: Shards) -> Keys:
    """Of this rank."""
    return Keys(shards.own_keys(), shards.k, shards.v, shards.kv_segments)


def sees(shards: Shards, rows: range, keys: Pieces) -> bool:
    """May any of these queries see any of these keys by position?"""
    return any(common(span, piece) for span in needed(shards.whole, (rows,)) for piece in keys)


def meetings(shards: Shards, queries: Queries, keys: Keys) -> Iterator[Meeting]:
    """Each piece of the queries with each piece of the keys that it may see."""
    for here, cols in keys.pieces:
        for at, rows in queries.pieces:
            if not sees(shards, rows, (cols,)):
                continue
            seen = here if queries.away else slice(cols.start, cols.stop)
            problem = replace(
                shards.whole,
                rows=rows,
                cols=cols,
                bias=None if queries.bias is None else queries.bias[:, :, at, seen],
                mask=None if queries.mask is None else queries.mask[:, :, at, seen],
                query_segments=None if queries.segments is None else queries.segments[:, at],
                kv_segments=None if keys.segments is None else keys.segments[:, here],
            )
            v = None if keys.v is None else keys.v[:, :, here]
            yield Meeting(at, rows, here, cols, problem, (queries.q[:, :, at], keys.k[:, :, here], v))


def alone(shards: Shards, at: slice, rows: range) -> Meeting:
    """A piece of own queries that meets no key: an empty problem gives the answers of empty rows."""
    none = range(0)
    problem = replace(shards.whole, rows=rows, cols=none)
    v = None if shards.v is None else shards.v[:, :, :0]
    return Meeting(at, rows, slice(0), none, problem, (shards.q[:, :, at], shards.k[:, :, :0], v))


def asked(want: Wanted) -> Wanted:
    """What every part must answer so that the whole can be merged, and is rounded to a half once, at its end."""
    return replace(want, logsumexp=True, received=False, unrounded=True)


def answered(shards: Shards, one: Meeting, want: Wanted) -> Observation:
    """The answer over these keys alone, without sinks; `top` by position in the whole sequence."""
    answers = dict(shards.engine.rows(replace(one.problem, sinks=None), *one.arrays, asked(want)))
    answers.pop("received", None)
    if "top_indices" in answers:
        answers["top_indices"] = np.where(answers["top_indices"] < 0, -1, answers["top_indices"] + one.keys.start)
    return observation(answers, one.problem.queries, max(1, one.problem.keys), sinks=False)


def merged(before: Observation | None, part: Observation) -> Observation:
    """Both, joined by their log-sum-exp; keys=0 since indices are positions in the whole already."""
    return part if before is None else replace(before, keys=0).merge_keys(part)


def listed(one: Observation) -> dict[str, Array]:
    """An answer's arrays by name, as engines give them."""
    names = ("output", "logsumexp", "max_logit", "entropy", "distance")
    found = {name: getattr(one, name) for name in names if getattr(one, name) is not None}
    if isinstance(one.top, Top):
        found |= {"top_weights": one.top.weights, "top_indices": one.top.indices}
    return found


def finished(shards: Shards, found: Sequence[Observation | None], want: Wanted) -> dict[str, Array]:
    """What was merged for each own piece of queries, with the sinks, rounded once, side by side."""
    pieces = []
    for (at, rows), one in zip(shards.own_rows(), found, strict=True):
        whole = answered(shards, alone(shards, at, rows), want) if one is None else one
        if shards.whole.sinks is not None:
            whole = whole.with_sinks(shards.whole.sinks)
        pieces.append(listed(whole))
    joined = {name: np.concatenate([one[name] for one in pieces], axis=2) for name in pieces[0]}
    if "output" in joined:
        joined["output"] = joined["output"].astype(shards.whole.dtype, copy=False)
    return joined


def sink_gradients(shards: Shards, answers: dict[str, Array], by: dict[str, Array]) -> dict[str, Array]:
    """The loss's derivatives by the sinks, (heads,): a sink knows its row's final answer, and no key."""
    if shards.whole.sinks is None:
        return {}
    dtype = statistics_dtype(shards.whole.dtype)
    wide = [{name: x.astype(dtype, copy=False) for name, x in side.items()} for side in (answers, by)]
    return {"sinks": backward.sink_gradients(replace(shards.whole, dtype=dtype), *wide)}
