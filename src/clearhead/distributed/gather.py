"""gather: every rank fetches the keys and values that its queries may see, and computes as if it were alone.

With a window those are its own and its neighbours' last ones; with a causal rule those before its last query. The
answers have the bits of the whole computed on one machine, wherever the fetched keys begin with the first.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead import backward
from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed.exchange import everywhere, swap
from clearhead.distributed.layouts import common, needed
from clearhead.distributed.perkeys import PerKey
from clearhead.distributed.shards import Shards
from clearhead.observations import Wanted
from clearhead.problem import Problem


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Keys and values of neighbouring positions, fetched from their owners."""

    keys: range
    k: Array
    v: Array | None


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One piece of this rank's queries, with the run that holds all keys it may see."""

    at: slice
    problem: Problem
    run: int


def bytes_fetched(shards: Shards) -> list[int]:
    """What each rank receives in a forward pass."""
    found = []
    for rank, own in enumerate(shards.query_pieces):
        keys = sum(len(span) for span in needed(shards.whole, own))
        kept = sum(len(common(span, piece)) for span in needed(shards.whole, own) for piece in shards.key_pieces[rank])
        found.append((keys - kept) * key_bytes(shards))
    return found


def key_bytes(shards: Shards) -> int:
    """Bytes of one position's key and value."""
    width = shards.k.shape[-1] + (0 if shards.v is None else shards.v.shape[-1])
    return shards.whole.batch * shards.whole.kv_heads * width * shards.k.dtype.itemsize


def fetch(shards: Shards) -> tuple[list[Run], list[Part]]:
    """The runs that this rank needs, and its pieces of queries."""
    what = "gather of keys"
    arrays = [x for x in (shards.k, shards.v) if x is not None]
    send = [[x[:, :, here] for here, _ in _slices(shards, shards.rank, to) for x in arrays] for to in _everyone(shards)]
    shapes = [
        [(*x.shape[:2], len(keys), x.shape[3]) for _, keys in _slices(shards, source, shards.rank) for x in arrays]
        for source in _everyone(shards)
    ]
    got = swap(shards.ranks, what, send, shapes, shards.k.dtype)
    runs = []
    for span in needed(shards.whole, shards.query_pieces[shards.rank]):
        full = [np.empty((*x.shape[:2], len(span), x.shape[3]), x.dtype) for x in arrays]
        for source in _everyone(shards):
            for place, (_, keys) in enumerate(_slices(shards, source, shards.rank)):
                if keys.start in span:
                    for array, part in zip(full, got[source][place * len(arrays) :], strict=False):
                        array[:, :, keys.start - span.start : keys.stop - span.start] = part
        runs.append(Run(span, full[0], full[1] if len(full) > 1 else None))
    return runs, _parts(shards, runs)


def _parts(shards: Shards, runs: list[Run]) -> list[Part]:
    segments = None
    if shards.kv_segments is not None:
        shapes = [(shards.whole.batch, sum(map(len, own))) for own in shards.key_pieces]
        segments = np.empty((shards.whole.batch, shards.whole.keys), np.int64)
        for rank, labels in enumerate(everywhere(shards.ranks, "gather of segments", shards.kv_segments, shapes)):
            start = 0
            for piece in shards.key_pieces[rank]:
                segments[:, piece.start : piece.stop] = labels[:, start : start + len(piece)]
                start += len(piece)
    found = []
    for at, rows in shards.own_rows():
        spans = needed(shards.whole, (rows,))
        problem = shards.problem(at, rows, segments)
        run = next((i for i, one in enumerate(runs) if spans and spans[0].start in one.keys), -1)
        found.append(Part(at, problem.take(keys=runs[run].keys if run >= 0 else range(0)), run))
    return found


def _everyone(shards: Shards) -> range:
    return range(shards.ranks.world)


def _slices(shards: Shards, owner: int, reader: int) -> list[tuple[slice, range]]:
    """What `reader` needs of `owner`: where in the owner's shard, and which positions."""
    found, start = [], 0
    for piece in shards.key_pieces[owner]:
        for span in needed(shards.whole, shards.query_pieces[reader]):
            keys = common(piece, span)
            if keys:
                here = start + keys.start - piece.start
                found.append((slice(here, here + len(keys)), keys))
        start += len(piece)
    return found


def run_arrays(shards: Shards, runs: list[Run], part: Part) -> tuple[Array, Array | None]:
    """Keys and values that a piece reads; none where it may see no key."""
    if part.run >= 0:
        return runs[part.run].k, runs[part.run].v
    return shards.k[:, :, :0], None if shards.v is None else shards.v[:, :, :0]


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries; `top` by position in the whole sequence."""
    runs, parts = fetch(shards)
    found: list[dict[str, Array]] = []
    for part in parts:
        k, v = run_arrays(shards, runs, part)
        answers = dict(shards.engine.rows(part.problem, shards.q[:, :, part.at], k, v, want))
        if "top_indices" in answers and part.run >= 0:
            indices = answers["top_indices"]
            answers["top_indices"] = np.where(indices < 0, -1, indices + runs[part.run].keys.start)
        answers.pop("received", None)
        found.append(answers)
    return {name: np.concatenate([answers[name] for answers in found], axis=2) for name in found[0]}


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, bias: bool) -> dict[str, Array]:
    """The loss's derivatives by this rank's q, k and v (and its rows of the bias, and its part of the sinks')."""
    runs, parts = fetch(shards)
    dtype = statistics_dtype(shards.whole.dtype)
    sums = [[np.zeros(x.shape, dtype) for x in (run.k, run.v) if x is not None] for run in runs]
    q = []
    found: dict[str, Any] = {}
    for part in parts:
        k, v = run_arrays(shards, runs, part)
        rows = shards.q[:, :, part.at]
        own = [{name: x[:, :, part.at] for name, x in side.items()} for side in (answers, by)]
        shape = shards.bias_shape(part.problem) if bias else None
        one = backward.gradients(shards.engine, part.problem, (rows, k, v), *own, bias=shape, unrounded=True)
        q.append(one["q"])
        if part.run >= 0:
            for total, name in zip(sums[part.run], ("k", "v"), strict=False):
                total += one[name]
        if bias:
            rows_of_bias = np.zeros((*one["bias"].shape[:3], shards.whole.keys), dtype)
            if part.run >= 0:
                span = runs[part.run].keys
                rows_of_bias[..., span.start : span.stop] = one["bias"]
            found.setdefault("bias", []).append(rows_of_bias)
        if "sinks" in one:
            found["sinks"] = found.get("sinks", 0.0) + one["sinks"]
    if bias:
        found["bias"] = np.concatenate(found["bias"], axis=2)
    return {**found, "q": np.concatenate(q, axis=2), **give_back(shards, runs, sums)}


def give_back(shards: Shards, runs: list[Run], sums: list[list[Array]]) -> dict[str, Array]:
    """What was summed for fetched keys goes to their owners, who add it in the order of the ranks."""
    names = ("k", "v") if shards.v is not None else ("k",)
    shapes = [(*x.shape[:2], x.shape[3]) for x in (shards.k, shards.v) if x is not None]
    dtype = statistics_dtype(shards.whole.dtype)
    parts = swap_back(shards, "return of derivatives", runs, sums, shapes, dtype)
    found = {}
    for at, name in enumerate(names):
        own = shards.k if name == "k" else shards.v
        assert own is not None
        total = np.zeros(own.shape, dtype)
        for here, arrays in parts:
            total[:, :, here] += arrays[at]
        found[name] = total
    return found


def swap_back(
    shards: Shards, what: str, runs: list[Run], sums: list[list[Array]], shapes: list[Any], dtype: np.dtype[Any]
) -> list[tuple[slice, list[Array]]]:
    """Parts of arrays (batch, heads, keys of a run, …) at their owners: where in the shard, and the arrays, by rank."""
    count = len(shapes)

    def cut(keys: range) -> list[Array]:
        run = next(i for i, one in enumerate(runs) if keys.start in one.keys)
        start = runs[run].keys.start
        return [x[:, :, keys.start - start : keys.stop - start] for x in sums[run]]

    send = [[x for _, keys in _slices(shards, owner, shards.rank) for x in cut(keys)] for owner in _everyone(shards)]
    expected = [
        [(*shape[:2], len(keys), *shape[2:]) for _, keys in _slices(shards, shards.rank, reader) for shape in shapes]
        for reader in _everyone(shards)
    ]
    got = swap(shards.ranks, what, send, expected, dtype)
    found = []
    for reader in _everyone(shards):
        for place, (here, _) in enumerate(_slices(shards, shards.rank, reader)):
            found.append((here, got[reader][place * count : (place + 1) * count]))
    return found


def columns(shards: Shards, ask: PerKey) -> list[Array]:
    """Sums for this rank's keys: each rank's own queries first, then those of all."""
    runs, parts = fetch(replace(shards, v=None))
    lead = (shards.whole.batch, shards.whole.heads)
    sums = [ask.nothing(*lead, len(run.keys)) for run in runs]
    for part in parts:
        if part.run >= 0:
            rows = [x[:, :, part.at] for x in ask.rows]
            found = ask.find(part.problem, shards.q[:, :, part.at], runs[part.run].k, rows)
            ask.add(sums[part.run], slice(None), found)
    shapes = [(*lead, *ask.tail)] * len(ask.names)
    totals = ask.nothing(*lead, shards.k.shape[2])
    for here, arrays in swap_back(shards, "return of what keys received", runs, sums, shapes, np.dtype(np.float64)):
        ask.add_listed(totals, here, arrays)
    return totals
