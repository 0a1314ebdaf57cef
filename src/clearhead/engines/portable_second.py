"""Second derivatives of what attention answers along two directions: the tangent of a tangent, in NumPy.

core/directions.py has the tangents. With u and w the two directions, ṡ the logits' tangents, m those of the log-sum-exp
and s̈_ij the logits' own second derivative, which the score q·k and the softcap make:

    b_ij = a_ij·((ṡᵘ_ij - mᵘ_i)·(ṡʷ_ij - mʷ_i) + s̈_ij)
    m̈_i  = Σ_j b_ij + a_i,sink·(sinkᵘ - mᵘ_i)·(sinkʷ - mʷ_i)              of the log-sum-exp
    ä_ij = b_ij - a_ij·m̈_i
    ö_i  = Σ_j ä_ij·v_j + a_ij·(ṡᵘ_ij - mᵘ_i)·v̇ʷ_j + a_ij·(ṡʷ_ij - mʷ_i)·v̇ᵘ_j

Nothing here is differentiated again. Sums are in float64; memory O(queries + keys) beyond inputs and answers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import room_for_columns
from clearhead.engines.online_softmax import Values, mix
from clearhead.engines.portable_tangents import Shared, Tile, add_columns, row_tangents, tiles, turned
from clearhead.engines.portable_tiles import KEY_BLOCK, QUERY_BLOCK, distances, padded
from clearhead.engines.products import product

Means = tuple[Array, Array]  # the tangents of the log-sum-exp along both directions, (batch, heads, queries)
Both = tuple[Directions, Directions]


class _Bent(NamedTuple):
    """A block with both directions, (QUERY_BLOCK, KEY_BLOCK), 0 where masked or past the end.

    moved     the weights' tangents along each
    product   a·(ṡᵘ - mᵘ)·(ṡʷ - mʷ)
    bent      b
    """

    tile: Tile
    moved: tuple[Array, Array]
    product: Array
    bent: Array


@np.errstate(all="ignore")  # NaN and infinity are legal values
def second_tangents(
    problem: Problem, q: Array, k: Array, v: Array | None, both: Both, want: Wanted, logsumexp: Array
) -> dict[str, Array]:
    """The second derivatives of what is wanted along both directions, by name, given the log-sum-exp."""
    alone = Wanted(logsumexp=True)
    of_both = [row_tangents(problem, q, k, None, along, alone, logsumexp)["logsumexp_tangent"] for along in both]
    means = of_both[0], of_both[1]
    found, middle = _rows(problem, (q, k, v), both, want, logsumexp, means)
    usual = statistics_dtype(problem.dtype)
    if want.columns():
        columns = room_for_columns(problem, want, frozenset(("received", "image", "groups")))
        for one in _blocks(problem, q, k, both, logsumexp, means):
            bent = np.where(one.tile.visible, one.bent - one.tile.weights * one.tile.tall(middle), 0.0)
            add_columns(columns, problem, one.tile, bent, want)
        found |= columns
    return {name: x.astype(problem.dtype if name == "output" else usual, copy=False) for name, x in found.items()}


def _blocks(problem: Problem, q: Array, k: Array, both: Both, logsumexp: Array, means: Means) -> Iterator[_Bent]:
    moved_keys = [Shared(problem, along.k, turned) for along in both]
    for u, w in zip(*(tiles(problem, q, k, along, logsumexp) for along in both), strict=True):
        second = u.bend * w.score  # the softcap's; that of the score is q̇ᵘ·k̇ʷ + q̇ʷ·k̇ᵘ
        for along, other in zip(both, reversed(moved_keys), strict=True):
            block = other.block(u)
            if along.q is not None and block is not None:
                rows = padded(along.q[u.at][u.rows], QUERY_BLOCK)
                second = second + u.by_score * product(rows, block, KEY_BLOCK)
        rise = [
            np.where(tile.visible, tile.logits - tile.tall(mean), 0.0) for tile, mean in zip((u, w), means, strict=True)
        ]
        moved = u.weights * rise[0], u.weights * rise[1]
        twice = moved[0] * rise[1]
        yield _Bent(u, moved, twice, np.where(u.visible, twice + u.weights * second, 0.0))


def _rows(
    problem: Problem,
    arrays: tuple[Array, Array, Array | None],
    both: Both,
    want: Wanted,
    logsumexp: Array,
    means: Means,
) -> tuple[dict[str, Array], Array]:
    """The second derivatives of row statistics, and that of the log-sum-exp."""
    q, k, v = arrays
    rows, d_v = (problem.batch, problem.heads, problem.queries), 0 if v is None else v.shape[-1]
    middle = np.zeros(rows)
    sums = {name: (np.zeros(rows), np.zeros(rows)) for name in ("entropy", "distance", "own")}  # of b, and of a
    mixed, output = np.zeros((*rows, d_v)), np.zeros((*rows, d_v))
    values, *moving = (Shared(problem, x, Values.of) for x in (v, both[1].v, both[0].v))
    for one in _blocks(problem, q, k, both, logsumexp, means):
        tile = one.tile
        at, height = (*tile.at, tile.rows), tile.rows.stop - tile.rows.start
        middle[at] += one.bent.sum(axis=1)[:height]
        if (block := values.block(tile)) is not None:
            output[at] += mix(tile.weights, tile.visible, block)[:height]
            mixed[at] += mix(one.bent, tile.visible, block)[:height]
            for weights, other in zip(one.moved, moving, strict=True):
                if (block := other.block(tile)) is not None:
                    mixed[at] += mix(weights, tile.visible, block)[:height]
        away = distances(problem, tile.head.batch, tile.rows, tile.cols)
        logs = np.where(tile.weights > 0, tile.logs, 0.0)
        sums["entropy"][0][at] -= (one.bent * (logs + 1) + one.product).sum(axis=1)[:height]
        sums["entropy"][1][at] -= (tile.weights * (logs + 1)).sum(axis=1)[:height]
        for name, factor in (("distance", away), ("own", tile.visible & (away == 0))):
            for total, part in zip(sums[name], (one.bent, tile.weights), strict=True):
                total[at] += (part * factor).sum(axis=1)[:height]
    if problem.sinks is not None:
        rises = [(0.0 if x.sinks is None else x.sinks[:, None]) - mean for x, mean in zip(both, means, strict=True)]
        share = sink_weights(np, problem.sinks, logsumexp)
        middle += np.where(share == 0, 0.0, share * rises[0] * rises[1])
    found = {name: bent - middle * plain for name, (bent, plain) in sums.items() if getattr(want, name)}
    if want.logsumexp:
        found["logsumexp"] = middle
    if want.output:
        found["output"] = mixed - middle[..., None] * output
    return found, middle
