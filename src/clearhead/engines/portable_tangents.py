"""The portable engine's derivatives along a direction: forward mode, and the tangent of the backward pass.

core/directions.py has the formulas. Sums are in float64; memory O(queries + keys) beyond inputs and answers.
"""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from clearhead.core import spans, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, group_size
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Kept, Upstream, room_for_columns
from clearhead.engines.online_softmax import Values, mix
from clearhead.engines.portable_tiles import (
    KEY_BLOCK,
    QUERY_BLOCK,
    Head,
    add_groups,
    add_shared,
    distances,
    heads_of,
    log_weight_tiles,
    packed,
    padded,
    sandwich,
)
from clearhead.engines.products import pieces, product

Block = TypeVar("Block")
_quiet = np.errstate(all="ignore")  # NaN and infinity are legal values, and need no warning


class Tile(NamedTuple):
    """A block's weights and the tangents of its logits, (QUERY_BLOCK, KEY_BLOCK), 0 where masked or past the end."""

    head: Head
    rows: slice
    cols: slice
    logs: Array  # ln a, -inf where masked
    visible: Array
    weights: Array
    logits: Array  # ṡ
    by_score: Array | float  # the derivative of a logit by the score q·k: scale·c'
    bend: Array | float  # the tangent of `by_score`
    score: Array  # the tangent of the score

    @property
    def at(self) -> tuple[int, int]:
        return self.head.batch, self.head.index

    @property
    def block(self) -> int:
        return self.cols.start // KEY_BLOCK

    def tall(self, per_query: Array) -> Array:
        """Numbers per query as a column, 0 past the end."""
        return padded(per_query[self.at][self.rows, None], QUERY_BLOCK)


def tiles(problem: Problem, q: Array, k: Array, along: Directions, logsumexp: Array) -> Iterator[Tile]:
    """Every block that is not fully masked."""
    for head in heads_of(problem, k):
        at = head.batch, head.index
        key_at = head.batch, problem.kv_head_of(head.index)
        keys = None if along.k is None else [turned(block) for block in packed(along.k[key_at])]
        for rows, cols, logs in log_weight_tiles(problem, head, q, logsumexp):
            visible = ~np.isneginf(logs)
            block = cols.start // KEY_BLOCK
            queries = padded(q[at][rows], QUERY_BLOCK)
            changed = np.zeros_like(logs)
            if along.q is not None:
                changed += product(padded(along.q[at][rows], QUERY_BLOCK), head.keys[block], KEY_BLOCK)
            if keys is not None:
                changed += product(queries, keys[block], KEY_BLOCK)
            scale = problem.scale[head.index]
            by_score: Array | float = scale
            bend: Array | float = 0.0
            if problem.softcap is not None:
                bent = np.tanh(scale * product(queries, head.keys[block], KEY_BLOCK) / problem.softcap)
                slope = 1 - bent**2
                by_score = scale * slope
                bend = np.where(visible, -2 * scale**2 / problem.softcap * bent * slope * changed, 0.0)
            logits = by_score * changed
            height, width = rows.stop - rows.start, cols.stop - cols.start
            if along.bias is not None:
                logits[:height, :width] += along.bias[at][rows, cols].astype(np.float64)
            if along.spans is not None:
                labels = visibility.spans_of(problem, *at, rows, cols)[:2]
                logits[:height, :width] += spans.added(*labels, along.spans[at])
            logits = np.where(visible, logits, 0.0)
            yield Tile(head, rows, cols, logs, visible, np.exp(logs), logits, by_score, bend, changed)


@_quiet
def row_tangents(
    problem: Problem, q: Array, k: Array, v: Array | None, along: Directions, want: Wanted, logsumexp: Array
) -> dict[str, Array]:
    """The tangents of the row statistics asked for, given the log-sum-exp, in one pass over the keys."""
    rows = problem.batch, problem.heads, problem.queries
    mean, mass, logs, far, own, own_weights = (np.zeros(rows) for _ in range(6))  # sums of a·ṡ, a, a·ln a, …
    logs_mean, far_mean = np.zeros(rows), np.zeros(rows)
    d_v = 0 if v is None else v.shape[-1]
    output, mixed = np.zeros((*rows, d_v)), np.zeros((*rows, d_v))
    values, moving = (Shared(problem, x, Values.of) for x in (v, along.v))
    for tile in tiles(problem, q, k, along, logsumexp):
        at, height = (*tile.at, tile.rows), tile.rows.stop - tile.rows.start
        change = tile.weights * tile.logits
        mean[at] += change.sum(axis=1)[:height]
        mass[at] += tile.weights.sum(axis=1)[:height]
        if (block := values.block(tile)) is not None:
            output[at] += mix(tile.weights, tile.visible, block)[:height]
            mixed[at] += mix(change, tile.visible, block)[:height]
            if (block := moving.block(tile)) is not None:
                mixed[at] += mix(tile.weights, tile.visible, block)[:height]
        if want.entropy:
            finite = np.where(tile.weights > 0, tile.logs, 0.0)
            logs[at] += (tile.weights * finite).sum(axis=1)[:height]
            logs_mean[at] += (change * finite).sum(axis=1)[:height]
        if want.distance or want.own:
            away = distances(problem, tile.head.batch, tile.rows, tile.cols)
            here = tile.visible & (away == 0)
            far[at] += (tile.weights * away).sum(axis=1)[:height]
            far_mean[at] += (change * away).sum(axis=1)[:height]
            own[at] += np.where(here, change, 0.0).sum(axis=1)[:height]
            own_weights[at] += np.where(here, tile.weights, 0.0).sum(axis=1)[:height]
    found = {"logsumexp_tangent": mean + _of_sinks(problem, along, logsumexp)}
    middle = found["logsumexp_tangent"]
    if v is not None:
        found["output_tangent"] = mixed - middle[..., None] * output
    if want.entropy:
        found["entropy_tangent"] = -logs_mean + middle * logs - (mean - middle * mass)
    if want.distance:
        found["distance_tangent"] = far_mean - middle * far
    if want.own:
        found["own_tangent"] = own - middle * own_weights
    usual = statistics_dtype(problem.dtype)
    own_dtype = usual if want.keep_float32 else problem.dtype
    return {name: x.astype(own_dtype if name == "output_tangent" else usual, copy=False) for name, x in found.items()}


@_quiet
def column_tangents(
    problem: Problem, q: Array, k: Array, along: Directions, kept: Kept, want: Wanted
) -> dict[str, Array]:
    """The tangents of the column statistics asked for, in one pass over the tangents of the weights."""
    found = room_for_columns(problem, want, frozenset(("received", "image", "groups")))
    for tile in tiles(problem, q, k, along, kept.logsumexp):
        add_columns(found, problem, tile, _moved(tile, kept.tangent), want)
    usual = statistics_dtype(problem.dtype)
    return {name: array.astype(usual, copy=False) for name, array in found.items()}


def add_columns(found: dict[str, Array], problem: Problem, tile: Tile, part: Array, want: Wanted) -> None:
    """Add a block's part, one number for each weight, to the column statistics asked for."""
    rows, cols = tile.rows, tile.cols
    part = part[: rows.stop - rows.start, : cols.stop - cols.start]
    total = {name: array[tile.at] for name, array in found.items()}
    if want.received:
        total["received"][cols] += part.sum(axis=0)
    if want.image is not None:
        high, tall = areas(want.image[0], problem.queries, rows)
        wide, broad = areas(want.image[1], problem.keys, cols)
        total["image"][high, wide] += sandwich(tall, part, broad)
    if want.groups is not None:
        add_groups(total["groups"], part, want.groups[0][tile.head.batch, rows], want.groups[1][tile.head.batch, cols])


@_quiet
def gradient_tangents(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    kept: Kept,
    upstream: Upstream,
    changing: Upstream,
) -> dict[str, Array]:
    """The tangents of the gradients of q, k, v, the bias and the table of spans, in one pass."""
    values = v if upstream.output is not None or changing.output is not None else None
    found = {name: np.zeros(x.shape) for name, x in (("q", q), ("k", k), ("v", values)) if x is not None}
    if upstream.bias is not None:
        found["bias"] = np.zeros(upstream.bias)
    if upstream.spans is not None:
        found["spans"] = np.zeros(upstream.spans)
    of_values, of_moving = (Shared(problem, x, turned) for x in (values, along.v))
    for tile in tiles(problem, q, k, along, kept.logsumexp):
        at, rows, cols = tile.at, tile.rows, tile.cols
        height, width = rows.stop - rows.start, cols.stop - cols.start
        moved = _moved(tile, kept.tangent)
        given, given_moving = (_rows_of(x.output, tile) for x in (upstream, changing))
        slope = _slope(problem, tile, upstream) + _times(given, of_values.block(tile))
        bent = _slope(problem, tile, changing) + _times(given_moving, of_values.block(tile))
        bent += _times(given, of_moving.block(tile))
        if upstream.entropy is not None:  # the tangent of ln a
            bent -= tile.tall(upstream.entropy) * np.where(tile.visible, tile.logits - tile.tall(kept.tangent), 0.0)
        by_logit = np.where(tile.visible, tile.weights * slope, 0.0)
        moving = np.where(tile.visible, moved * slope + tile.weights * bent, 0.0)
        if upstream.bias is not None:
            add_shared(found["bias"], at, rows, cols, moving[:height, :width])
        if upstream.spans is not None:
            labels = visibility.spans_of(problem, *at, rows, cols)[:2]
            total = found["spans"][tuple(i if n > 1 else 0 for i, n in zip(at, upstream.spans, strict=False))]
            spans.add_sums(total, *labels, moving[:height, :width])
        if values is not None:
            place = tile.head.batch, tile.head.index // group_size(problem.heads, values.shape[1])
            seen = tile.visible.T
            if given is not None:
                found["v"][place][cols] += mix(moved.T, seen, Values.of(given))[:width]
            if given_moving is not None:
                found["v"][place][cols] += mix(tile.weights.T, seen, Values.of(given_moving))[:width]
        by_score = np.where(tile.visible, tile.by_score * by_logit, 0.0)
        moving = np.where(tile.visible, tile.by_score * moving + tile.bend * by_logit, 0.0)
        key_at = tile.head.batch, problem.kv_head_of(tile.head.index)
        for name, mine, other, place, into, swap in (
            ("q", k[key_at][cols], None if along.k is None else along.k[key_at][cols], at, rows, False),
            ("k", q[at][rows], None if along.q is None else along.q[at][rows], key_at, cols, True),
        ):
            size = QUERY_BLOCK if swap else KEY_BLOCK
            left, fixed, seen = (x.T if swap else x for x in (moving, by_score, tile.visible))
            found[name][place][into] += mix(left, seen, Values.of(padded(mine, size)))[: into.stop - into.start]
            if other is not None:
                found[name][place][into] += mix(fixed, seen, Values.of(padded(other, size)))[: into.stop - into.start]
    usual = statistics_dtype(problem.dtype)
    dtypes = {"bias": usual, "spans": usual} | (dict.fromkeys("qkv", usual) if upstream.keep_float32 else {})
    return {name: array.astype(dtypes.get(name, problem.dtype), copy=False) for name, array in found.items()}


def _moved(tile: Tile, middle: Array) -> Array:
    """The tangents of a block's weights."""
    moved: Array = np.where(tile.visible, tile.weights * (tile.logits - tile.tall(middle)), 0.0)
    return moved


def _of_sinks(problem: Problem, along: Directions, logsumexp: Array) -> Array | float:
    """The part of the log-sum-exp's tangent that the sinks' tangents make."""
    if along.sinks is None or problem.sinks is None:
        return 0.0
    return sink_weights(np, problem.sinks, logsumexp) * along.sinks[:, None]


def _slope(problem: Problem, tile: Tile, upstream: Upstream) -> Array:
    """What an upstream gradient adds to a weight's derivative, without the output's part."""
    slope = np.zeros_like(tile.logs)
    slope += tile.tall(upstream.rows)
    if upstream.entropy is not None:
        slope -= tile.tall(upstream.entropy) * np.where(tile.visible, tile.logs, 0.0)
    if upstream.distance is not None or upstream.own is not None:
        away = distances(problem, tile.head.batch, tile.rows, tile.cols)
        if upstream.distance is not None:
            slope += tile.tall(upstream.distance) * away
        if upstream.own is not None:
            slope += tile.tall(upstream.own) * (away == 0)
    return slope


def _rows_of(output: Array | None, tile: Tile) -> Array | None:
    return None if output is None else padded(output[tile.at][tile.rows], QUERY_BLOCK)


class Shared(Generic[Block]):
    """The blocks of one array of keys or values, made once for the heads that share them."""

    def __init__(self, problem: Problem, x: Array | None, make: Callable[[Array], Block]) -> None:
        self.x, self.make = x, make
        self.group = 1 if x is None else group_size(problem.heads, x.shape[1])
        self.place: tuple[int, int] | None = None
        self.blocks: list[Block] = []

    def block(self, tile: Tile) -> Block | None:
        """The tile's block; None where there is no array."""
        if self.x is None:
            return None
        place = tile.head.batch, tile.head.index // self.group
        if place != self.place:
            self.blocks, self.place = [self.make(block) for block in packed(self.x[place])], place
        return self.blocks[tile.block]


def turned(block: Array) -> Array:
    """A block of rows, transposed and cut for products."""
    return pieces(block.T)


def _times(given: Array | None, turned: Array | None) -> Array | float:
    """Upstream gradients times values: one number for each weight."""
    return 0.0 if given is None or turned is None else product(given, turned, KEY_BLOCK)
