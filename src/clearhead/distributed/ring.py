"""ring: keys and values go around from rank to rank, and each rank adds what its queries see in them.

While a block is computed the next one travels. A block goes only as far as some rank's queries may see it, so a window
keeps it among neighbours. Partial outputs stay in the statistics' dtype until the last is merged by its log-sum-exp.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead import backward
from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed.exchange import Kind, Messages, swap
from clearhead.distributed.gather import key_bytes, widened
from clearhead.distributed.layouts import common, needed
from clearhead.distributed.shards import Shards
from clearhead.observations import Observation, Top, Wanted, observation
from clearhead.problem import Problem

Block = list[Array]  # keys (batch, kv_heads, own keys, d_k), values if there are, segments if there are


def hops(shards: Shards) -> list[int]:
    """How many steps each rank's keys must go."""
    world = shards.ranks.world
    spans = [needed(shards.whole, own) for own in shards.query_pieces]
    found = []
    for owner in range(world):
        seen = [
            step
            for step in range(world)
            if any(common(span, piece) for span in spans[(owner + step) % world] for piece in shards.key_pieces[owner])
        ]
        found.append(max(seen, default=0))
    return found


def bytes_sent_on(shards: Shards) -> list[int]:
    """What each rank receives in a forward pass."""
    far, world = hops(shards), shards.ranks.world
    sizes = [sum(map(len, own)) for own in shards.key_pieces]
    return [
        sum(sizes[(rank - step) % world] for step in range(1, world) if far[(rank - step) % world] >= step)
        * key_bytes(shards)
        for rank in range(world)
    ]


def _laps(shards: Shards, block: Block, what: str) -> Any:
    """Each block that comes by, with its owner; the next one is under way while the caller works."""
    world, rank, far = shards.ranks.world, shards.rank, hops(shards)
    for step in range(world):
        owner, after = (rank - step) % world, (rank - step - 1) % world
        present = far[owner] >= step
        coming = far[after] > step and step + 1 < world
        sent = {(rank + 1) % world: block} if present and far[owner] > step else {}
        expected = {(rank - 1) % world: _kinds(shards, after)} if coming else {}
        hop = Messages(shards.ranks, what, sent, expected)
        if present:
            yield owner, step, block
        came = hop.arrays()
        block = came[(rank - 1) % world] if coming else []


def _kinds(shards: Shards, owner: int) -> list[Kind]:
    """Shapes and dtypes of a block of `owner`'s keys."""
    keys = sum(map(len, shards.key_pieces[owner]))
    found = [((*x.shape[:2], keys, *x.shape[3:]), x.dtype) for x in (shards.k, shards.v) if x is not None]
    if shards.kv_segments is not None:
        found.append(((shards.kv_segments.shape[0], keys), shards.kv_segments.dtype))
    return found


def _meetings(shards: Shards, owner: int, block: Block) -> Any:
    """Each own piece of queries with each piece of a block's keys that it may see: problem, arrays and places."""
    segments = None
    if shards.kv_segments is not None:
        segments = np.zeros((shards.whole.batch, shards.whole.keys), np.int64)
    start = 0
    for keys in shards.key_pieces[owner]:
        here = slice(start, start + len(keys))
        start += len(keys)
        if segments is not None:
            segments[:, keys.start : keys.stop] = block[-1][:, here]
        for at, rows in shards.own_rows():
            if any(common(span, keys) for span in needed(shards.whole, (rows,))):
                problem = shards.problem(at, rows, segments).take(keys=keys)
                k, v = block[0][:, :, here], None if shards.v is None else block[1][:, :, here]
                yield at, here, keys, widened(problem, shards.q[:, :, at], k, v)


def attend(shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics of this rank's queries; `top` by position in the whole sequence."""
    merged: list[Observation | None] = [None] * len(shards.own_rows())
    places = {rows.start: i for i, (_, rows) in enumerate(shards.own_rows())}
    asked = replace(want, logsumexp=True, received=False)
    for owner, _, block in _laps(shards, _own_block(shards), "ring of keys"):
        for _, _, keys, (problem, (q, k, v)) in _meetings(shards, owner, block):
            part = _part(shards, replace(problem, sinks=None), q, k, v, asked, keys.start)
            place = places[problem.rows.start]
            before = merged[place]
            # keys=0: indices are positions in the whole already, and are not moved by what lies before
            merged[place] = part if before is None else replace(before, keys=0).merge_keys(part)
    found = []
    for place, (at, rows) in enumerate(shards.own_rows()):
        one = merged[place]
        if one is None:  # nothing to see: an empty problem gives the answers of empty rows
            problem, (q, k, v) = _nothing(shards, at, rows)
            one = _part(shards, problem, q, k, v, asked, 0)
        if shards.whole.sinks is not None:
            one = one.with_sinks(shards.whole.sinks)
        found.append(_listed(one))
    joined = {name: np.concatenate([one[name] for one in found], axis=2) for name in found[0]}
    if "output" in joined:
        joined["output"] = joined["output"].astype(shards.whole.dtype, copy=False)
    return joined


def _part(
    shards: Shards, problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted, start: int
) -> Observation:
    answers = dict(shards.engine.rows(problem, q, k, v, want))
    answers.pop("received", None)
    if "top_indices" in answers:
        answers["top_indices"] = np.where(answers["top_indices"] < 0, -1, answers["top_indices"] + start)
    return observation(answers, problem.queries, max(1, problem.keys))


def _listed(one: Observation) -> dict[str, Array]:
    names = ("output", "logsumexp", "max_logit", "entropy", "distance")
    found = {name: getattr(one, name) for name in names if getattr(one, name) is not None}
    if isinstance(one.top, Top):
        found |= {"top_weights": one.top.weights, "top_indices": one.top.indices}
    return found


def _nothing(shards: Shards, at: slice, rows: range) -> tuple[Problem, tuple[Array, Array, Array | None]]:
    segments = None if shards.kv_segments is None else np.zeros((shards.whole.batch, shards.whole.keys), np.int64)
    problem = replace(shards.problem(at, rows, segments), sinks=None).take(keys=range(0))
    v = None if shards.v is None else shards.v[:, :, :0]
    return widened(problem, shards.q[:, :, at], shards.k[:, :, :0], v)


def _own_block(shards: Shards) -> Block:
    return [x for x in (shards.k, shards.v, shards.kv_segments) if x is not None]


def differentiate(shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, bias: bool) -> dict[str, Array]:
    """The loss's derivatives by this rank's q, k and v (and its rows of the bias, and its part of the sinks')."""
    dtype = statistics_dtype(shards.whole.dtype)
    found: dict[str, Any] = {"q": np.zeros(shards.q.shape, dtype)}
    if bias:
        found["bias"] = np.zeros((*shards.q.shape[:3], shards.whole.keys), dtype)
    sums: dict[int, list[Array]] = {}
    done = set()
    for owner, _, block in _laps(shards, _own_block(shards), "ring of keys, backward"):
        count = 1 if shards.v is None else 2
        total = [np.zeros(x.shape, dtype) for x in block[:count]]
        for at, here, keys, (problem, arrays) in _meetings(shards, owner, block):
            own = [{name: x[:, :, at].astype(dtype, copy=False) for name, x in side.items()} for side in (answers, by)]
            shape = (problem.batch, problem.heads, problem.queries, problem.keys) if bias else None
            one = backward.gradients(shards.engine, problem, arrays, *own, bias=shape)
            found["q"][:, :, at] += one["q"]
            for part, name in zip(total, ("k", "v"), strict=False):
                part[:, :, here] += one[name]
            if bias:
                found["bias"][:, :, at, keys.start : keys.stop] = one["bias"]
            if (
                "sinks" in one and at.start not in done
            ):  # a row's sink sees all keys: its part is the same in each block
                done.add(at.start)
                found["sinks"] = found.get("sinks", 0.0) + one["sinks"]
        sums[owner] = total
    return {**found, **_home(shards, sums, dtype)}


def _home(shards: Shards, sums: dict[int, list[Array]], dtype: np.dtype[Any]) -> dict[str, Array]:
    """What was summed for each block goes to its owner, who adds in the order of the ranks."""
    world, rank, far = shards.ranks.world, shards.rank, hops(shards)
    own = [x for x in (shards.k, shards.v) if x is not None]
    send = [sums.get(owner, []) for owner in range(world)]
    shapes = [[x.shape for x in own] if (reader - rank) % world <= far[rank] else [] for reader in range(world)]
    got = swap(shards.ranks, "return of derivatives", send, shapes, dtype)
    found = {name: np.zeros(x.shape, dtype) for name, x in zip(("k", "v"), own, strict=False)}
    for arrays in got:
        for name, array in zip(found, arrays, strict=False):
            found[name] += array
    return found


def columns(shards: Shards, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """What this rank's keys received, and their peaks: a second lap, with keys alone."""
    keys_only = replace(shards, v=None)
    names = [name for name in ("received", "peak") if getattr(want, name)]
    lead = (shards.whole.batch, shards.whole.heads)
    sums: dict[int, list[Array]] = {}
    asked = Wanted(received=want.received, peak=want.peak)
    for owner, _, block in _laps(keys_only, _own_block(keys_only), "second lap of keys"):
        total = [np.zeros((*lead, block[0].shape[2])) for _ in names]
        for at, here, _, (problem, (q, k, _)) in _meetings(keys_only, owner, block):
            one = shards.engine.columns(problem, q, k, logsumexp[:, :, at], asked)
            for part, name in zip(total, names, strict=True):
                part[:, :, here] = (
                    part[:, :, here] + one[name] if name == "received" else np.maximum(part[:, :, here], one[name])
                )
        sums[owner] = total
    world, rank, far = shards.ranks.world, shards.rank, hops(shards)
    shape = (*lead, shards.k.shape[2])
    shapes = [[shape] * len(names) if (reader - rank) % world <= far[rank] else [] for reader in range(world)]
    got = swap(
        shards.ranks,
        "return of column statistics",
        [sums.get(o, []) for o in range(world)],
        shapes,
        np.dtype(np.float64),
    )
    found = {name: np.zeros(shape) for name in names}
    for arrays in got:
        for name, array in zip(found, arrays, strict=False):
            found[name] = found[name] + array if name == "received" else np.maximum(found[name], array)
    return {name: array.astype(statistics_dtype(shards.whole.dtype)) for name, array in found.items()}
