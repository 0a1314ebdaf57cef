"""gather: every rank fetches the keys and values that its queries may attend to, and computes on its own.

Under a window these are its own keys and the nearest ones of its neighbours; under a causal rule those up to its last
query. The output has the bits of a computation on one machine if the fetched keys begin with the first key.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS
from clearhead.core.statistics import Wanted
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.edges import EdgeQuestion, of_columns
from clearhead.distributed.exchange import everywhere, swap
from clearhead.distributed.layouts import common, needed
from clearhead.distributed.partials import Meeting
from clearhead.distributed.shards import Names, Shards, kind, placed
from clearhead.ops import backward


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """A run of consecutive keys and values, fetched from their owners: (batch, kv_heads, keys, d_k or d_v)."""

    keys: range
    k: Array
    v: Array | None
    more: list[Array]  # what else travels with the keys


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One piece of this rank's queries: where it lies in the shard, its problem, and the run of its keys or -1."""

    at: slice
    problem: Problem
    run: int


def bytes_fetched(shards: Shards) -> list[int]:
    """The bytes that each rank receives in a forward pass."""
    found = []
    for rank, own in enumerate(shards.query_pieces):
        keys = sum(len(span) for span in needed(shards.whole, own))
        kept = sum(len(common(span, piece)) for span in needed(shards.whole, own) for piece in shards.key_pieces[rank])
        found.append((keys - kept) * key_bytes(shards))
    return found


def key_bytes(shards: Shards) -> int:
    """The bytes of the keys and values at one position, all batches and heads together."""
    width = shards.k.shape[-1] + (0 if shards.v is None else shards.v.shape[-1])
    return shards.whole.batch * shards.whole.kv_heads * width * shards.k.dtype.itemsize


def fetch(shards: Shards) -> tuple[list[Run], list[Part]]:
    """Fetch the runs of keys that this rank needs; these, and its pieces of queries with their run."""
    what = "gather of keys"
    arrays = [x for x in (shards.k, shards.v, *shards.more) if x is not None]
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
        k, *rest = full
        v = None if shards.v is None else rest.pop(0)
        runs.append(Run(span, k, v, rest))
    return runs, _parts(shards, runs)


def _parts(shards: Shards, runs: list[Run]) -> list[Part]:
    of_keys = {name: whole_of(shards, "gather of segments", name, x, "keys") for name, x in shards.of_keys().items()}
    found = []
    for at, rows in shards.own_rows():
        spans = needed(shards.whole, (rows,))
        problem = shards.problem(at, rows, of_keys)
        run = next((i for i, one in enumerate(runs) if spans and spans[0].start in one.keys), -1)
        found.append(Part(at, problem.take(keys=runs[run].keys if run >= 0 else range(0)), run))
    return found


def whole_of(shards: Shards, what: str, name: str, x: Array, side: str) -> Array:
    """All-gather a rule's field along "queries" or "keys": from each rank's own positions to the whole sequence."""
    axis, pieces = FIELDS[name].index(side), shards.query_pieces if side == "queries" else shards.key_pieces
    sizes = [sum(map(len, own)) for own in pieces]
    whole = np.empty(kind(name, x, **{side: sum(sizes)})[0], x.dtype)
    parts = everywhere(shards.ranks, what, x, [kind(name, x, **{side: size})[0] for size in sizes])
    before = (slice(None),) * axis
    for part, own in zip(parts, pieces, strict=True):
        for at, piece in placed(own):
            whole[(*before, slice(piece.start, piece.stop))] = part[(*before, at)]
    return whole


def _everyone(shards: Shards) -> range:
    return range(shards.ranks.world)


def _slices(shards: Shards, owner: int, reader: int) -> list[tuple[slice, range]]:
    """The keys of rank `owner` that rank `reader` needs: where in the owner's shard, and at which positions."""
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
    """The keys and values that a piece of queries reads; empty arrays where it may attend to none."""
    if part.run >= 0:
        return runs[part.run].k, runs[part.run].v
    return shards.k[:, :, :0], None if shards.v is None else shards.v[:, :, :0]


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries, by name; indices of `top` count in the whole sequence."""
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


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
    """The gradients of this rank's q, k and v, and where asked of its rows of the bias; its share of others.

    answers    what attention answered for this rank's queries, (batch, heads, own queries, …), by name
    by         the upstream gradient: the derivatives by those answers, of the same shapes

    Returns them by name, in the statistics' dtype.
    """
    runs, parts = fetch(shards)
    dtype = statistics_dtype(shards.whole.dtype)
    sums = [[np.zeros(x.shape, dtype) for x in (run.k, run.v) if x is not None] for run in runs]
    q = []
    found: dict[str, Any] = {}
    for part in parts:
        k, v = run_arrays(shards, runs, part)
        rows = shards.q[:, :, part.at]
        own = [{name: x[:, :, part.at] for name, x in side.items()} for side in (answers, by)]
        shapes = shards.shapes(part.problem, asked)
        one = backward.gradients(shards.engine, part.problem, (rows, k, v), *own, **shapes, keep_float32=True)
        q.append(one["q"])
        if part.run >= 0:
            for total, name in zip(sums[part.run], ("k", "v"), strict=False):
                total += one[name]
        if "bias" in asked:
            rows_of_bias = np.zeros((*one["bias"].shape[:3], shards.whole.keys), dtype)
            if part.run >= 0:
                span = runs[part.run].keys
                rows_of_bias[..., span.start : span.stop] = one["bias"]
            found.setdefault("bias", []).append(rows_of_bias)
        for name in {"sinks", "spans"} & one.keys():
            found[name] = found.get(name, 0.0) + one[name]
    if "bias" in asked:
        found["bias"] = np.concatenate(found["bias"], axis=2)
    return {**found, "q": np.concatenate(q, axis=2), **give_back(shards, runs, sums)}


def give_back(shards: Shards, runs: list[Run], sums: list[list[Array]]) -> dict[str, Array]:
    """Send the gradients of fetched keys and values to their owners, who add them in the order of the ranks."""
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
    """Send sums (batch, heads, keys of a run, …) to the owners of the keys.

    Returns what this rank's own keys received, in the order of the ranks: where in the shard, and the arrays.
    """
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


def columns(shards: Shards, ask: ColumnSums) -> list[Array]:
    """Sums for this rank's keys: each rank sums over its own queries, and the owner of a key adds these sums."""
    return meet(replace(shards, v=None), of_columns(shards, ask))[1]


def meet(shards: Shards, ask: EdgeQuestion) -> tuple[list[Array], list[Array]]:
    """The answers per query and per key for this rank's own: keys are fetched, and sums return to their owners."""
    runs, parts = fetch(shards)
    found = ask.per_query(shards.q.shape[2])
    sums = [ask.per_key(len(run.keys)) for run in runs]
    for part in parts:
        if part.run >= 0:
            run, rows = runs[part.run], part.problem.rows
            arrays = shards.q[:, :, part.at], run.k, run.v
            one = Meeting(part.at, rows, slice(None), run.keys, part.problem, arrays, run.more)
            ask.meet(one, ask.rows, found, sums[part.run])
    totals = ask.per_key(shards.k.shape[2])
    shapes = [(*x.shape[:2], *x.shape[3:]) for x in totals]
    for here, back in swap_back(shards, "return of sums over queries", runs, sums, shapes, np.dtype(np.float64)):
        ask.add(totals, here, back)
    return found, totals
