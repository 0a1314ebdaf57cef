"""The portable engine's matrices of effects: contributions and cuts of single edges, streaming over blocks of keys.

core/effects.py has the formulas. Sums are in float64; memory O(queries + keys) beyond inputs and answers.
"""

from collections.abc import Iterator

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.call import Call
from clearhead.core.effect_lists import first, larger, largest_under
from clearhead.core.effects import Order, Others, Terms, WantedEffects, merged, no_keys
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.engines.base import room_for_effects
from clearhead.engines.online_softmax import Values, mix
from clearhead.engines.portable_tiles import (
    KEY_BLOCK,
    QUERY_BLOCK,
    Head,
    add_groups,
    heads_of,
    key_blocks,
    log_weight_tiles,
    logits_of,
    packed,
    padded,
    sandwich,
)
from clearhead.engines.products import pieces, product

_quiet = np.errstate(all="ignore")  # NaN and infinity are legal values, and need no warning


@_quiet
def others(call: Call, g: Array) -> Others:
    """Each row's strongest key and what all its other keys answer, in one pass over the keys."""
    problem, q, k, v = call.problem, call.q, call.k, call.v
    assert v is not None
    result = no_keys((problem.batch, problem.heads, problem.queries))
    for head in heads_of(problem, k):
        values = turned_values(problem, head, v)
        for block in blocks(problem.queries, QUERY_BLOCK):
            queries, along = (padded(x[head.batch, head.index, block], QUERY_BLOCK) for x in (q, g))
            state = no_keys((QUERY_BLOCK,))
            for cols in key_blocks(problem, head.batch, block):
                logits = logits_of(problem, head, block, cols, queries)
                if logits is not None:
                    terms = product(along, values[cols.start // KEY_BLOCK], KEY_BLOCK)
                    state = merged(state, _of_block(logits, terms), cols.start)
            for array, part in zip(result, state, strict=True):
                array[head.batch, head.index, block] = part[: block.stop - block.start]
    return result


def _of_block(logits: Array, terms: Array) -> Others:
    """The state of rows over one block of logits and terms (queries, keys); logits are overwritten."""
    rows, best = np.arange(len(logits)), logits.argmax(axis=-1)
    top, seen = logits[rows, best], ~np.isneginf(logits)
    of_top = np.where(seen[rows, best], terms[rows, best], 0.0)
    logits[rows, best] = -np.inf
    maximum = logits.max(axis=-1)
    shares = np.exp(logits - np.where(np.isneginf(maximum), 0.0, maximum)[:, None])
    total = shares.sum(axis=-1)
    mean = np.where(np.isneginf(logits), 0.0, shares * terms).sum(axis=-1) / np.where(total == 0, 1.0, total)
    index = np.where(seen.any(axis=-1), best, -1)
    return Others(index, top, of_top, maximum, np.log(np.where(total == 0, 1.0, total)), mean)


@_quiet
def effects(call: Call, g: Array, terms: Terms, want: WantedEffects) -> dict[str, Array]:
    """What is wanted of the matrix of effects, in one pass over weights recomputed with the rows' states.

    Lists and largest effects are chosen among effects that are rounded as `effect_tile` rounds them, sums are of
    effects in float64.
    """
    problem = call.problem
    result, dtype = room_for_effects(problem, want), statistics_dtype(problem.dtype)
    for head, block, cols, tile, visible in _tiles(call, g, terms):
        total = {name: array[head.batch, head.index] for name, array in result.items()}
        rounded = tile.astype(dtype)
        if want.by_key:
            total["by_key"][cols] += tile.sum(axis=0)
        if want.by_query:
            total["by_query"][block] += tile.sum(axis=1)
        if want.top is not None:
            _insert(total["top_values"][block], total["top_indices"][block], rounded, visible, cols.start, want.order)
        if want.strongest is not None:
            places = np.arange(block.start, block.stop)[:, None] * problem.keys + np.arange(cols.start, cols.stop)
            kept = total["strongest_values"], total["strongest_indices"]
            _keep_strongest(*kept, rounded[visible], places[visible])
        if want.image is not None:
            high, tall = areas(want.image[0], problem.queries, block)
            wide, broad = areas(want.image[1], problem.keys, cols)
            total["image_mean"][high, wide] += sandwich(tall, tile, broad)
            here = largest_under(largest_under(rounded, tall).T, broad).T
            total["image_largest"][high, wide] = larger(here, total["image_largest"][high, wide])
        if want.groups is not None:
            add_groups(total["groups"], tile, want.groups[0][head.batch, block], want.groups[1][head.batch, cols])
    return {name: x if x.dtype == np.int64 else x.astype(dtype, copy=False) for name, x in result.items()}


@_quiet
def effect_tile(call: Call, g: Array, terms: Terms) -> Array:
    """Every effect of this (small) problem, (batch, heads, queries, keys)."""
    problem = call.problem
    result = np.zeros((problem.batch, problem.heads, problem.queries, problem.keys), statistics_dtype(problem.dtype))
    for head, block, cols, tile, _ in _tiles(call, g, terms):
        result[head.batch, head.index, block, cols] = tile
    return result


@_quiet
def effect_product(call: Call, g: Array, terms: Terms, x: Array, *, transposed: bool) -> Array:
    """E·x, (batch, heads, queries, d), or with `transposed` Eᵀ·x, (batch, heads, keys, d)."""
    problem = call.problem
    size = problem.keys if transposed else problem.queries
    result = np.zeros((problem.batch, problem.heads, size, x.shape[-1]))
    for head, block, cols, tile, visible in _tiles(call, g, terms):
        rows_of_x = x[head.batch, head.index * x.shape[1] // problem.heads]
        into, left, seen, right = (cols, tile.T, visible.T, block) if transposed else (block, tile, visible, cols)
        result[head.batch, head.index, into] += mix(left, seen, Values.of(rows_of_x[right].astype(np.float64)))
    return result.astype(statistics_dtype(problem.dtype), copy=False)


def turned_values(problem: Problem, head: Head, v: Array) -> list[Array]:
    """The pieces of vᵀ for each block of the keys that a head attends to."""
    return [pieces(block.T) for block in packed(v[head.batch, head.index // group_size(problem.heads, v.shape[1])])]


def _tiles(call: Call, g: Array, terms: Terms) -> Iterator[tuple[Head, slice, slice, Array, Array]]:
    """(head, queries, keys, effects, which pairs are visible) for every block that is not fully masked."""
    problem, q, k, v = call.problem, call.q, call.k, call.v
    assert v is not None
    for head in heads_of(problem, k):
        here = head.batch, head.index
        values = turned_values(problem, head, v)
        for block, cols, logs in log_weight_tiles(problem, head, q, terms.state):
            height, width = block.stop - block.start, cols.stop - cols.start
            along = product(padded(g[here][block], QUERY_BLOCK), values[cols.start // KEY_BLOCK], KEY_BLOCK)
            visible, weights = ~np.isneginf(logs[:height, :width]), np.exp(logs[:height, :width])
            effects = _effects(terms, here, block, cols, weights, along[:height, :width])
            yield head, block, cols, np.where(visible, effects, 0.0), visible


def _effects(terms: Terms, here: tuple[int, int], block: slice, cols: slice, weights: Array, along: Array) -> Array:
    if terms.whole is None or terms.others is None or terms.strongest is None:
        contributions: Array = weights * along
        return contributions
    whole, others, strongest = (x[here][block, None] for x in (terms.whole, terms.others, terms.strongest))
    alone = np.arange(cols.start, cols.stop) == strongest
    return np.where(alone, weights * (others - along), weights / (1 - weights) * (whole - along))


def _insert(values: Array, indices: Array, tile: Array, visible: Array, first_key: int, order: Order) -> None:
    """Put a tile's effects into each query's list of the first k in this order; of equal ones the earlier key."""
    keys = np.broadcast_to(np.arange(first_key, first_key + tile.shape[1]), tile.shape)
    all_values = np.concatenate([values, tile], axis=-1)
    places = np.concatenate([indices, np.where(visible & ~np.isnan(tile), keys, -1)], axis=-1)
    values[:], indices[:] = first(all_values, places, order, values.shape[-1])


def _keep_strongest(values: Array, places: Array, more: Array, more_places: Array) -> None:
    """Put more effects into a list of the strongest; of equal ones the earlier place. -1 marks a free place.

    NaN sorts behind the free places, so it is never listed.
    """
    all_values, here = np.concatenate([values, more]), np.concatenate([places, more_places])
    by = np.where(here < 0, np.inf, -np.abs(all_values))
    if len(all_values) > 4 * len(values):  # sort few of many
        near = np.flatnonzero(by <= np.partition(by, len(values) - 1)[len(values) - 1])
        all_values, here, by = all_values[near], here[near], by[near]
    rank = np.lexsort((here, by))[: len(values)]
    values[:], places[:] = all_values[rank], here[rank]
