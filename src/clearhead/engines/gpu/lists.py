"""Lists of what ranks highest, each of a few slots in no order: of each query of a tile, or of a program."""

import triton
import triton.language as tl

FREE = tl.constexpr(1 << 62)  # places from here on are free


@triton.jit
def no_list(M: tl.constexpr, TOP: tl.constexpr, FLOAT: tl.constexpr):
    """The empty list of M queries: ranks, values, and keys, which are -1 and below where a slot is free."""
    keys = tl.zeros((M, TOP), tl.int32) - 1 - tl.arange(0, TOP)[None, :]
    return tl.full((M, TOP), -float("inf"), FLOAT), tl.zeros((M, TOP), FLOAT), keys


@triton.jit
def ranks_of(values, visible, ORDER: tl.constexpr):
    """What is to be listed first is largest; -inf for what is never listed, so that a value of -inf is raised."""
    rank = values
    if ORDER == "magnitude":
        rank = tl.abs(values)
    if ORDER == "smallest":
        rank = -values
    lowest = -1.7976931348623157e308 if rank.dtype == tl.float64 else -3.4028234663852886e38
    rank = tl.where(rank == -float("inf"), lowest, rank)
    return tl.where(visible & (rank == rank), rank, -float("inf"))


@triton.jit
def insert(top, rank, values, places):
    """Merge a tile (queries, keys) into the queries' lists; of equal ranks the earlier key stays.

    values   of the tile, or None where the lists' values do not matter
    places   the tile's keys, as they broadcast to it: all later than those in the lists
    """
    ranks, listed, keys = top
    weakest, best = tl.min(ranks, axis=1), tl.max(rank, axis=1)
    while tl.max((best > weakest).to(tl.int32), axis=0) > 0:
        key = tl.min(tl.where(rank == best[:, None], places, 2147483647), axis=1)
        here = places == key[:, None]
        last = tl.max(tl.where(ranks == weakest[:, None], keys, -2147483647), axis=1)
        taken = (keys == last[:, None]) & (ranks == weakest[:, None]) & (best > weakest)[:, None]
        ranks = tl.where(taken, best[:, None], ranks)
        if values is not None:
            listed = tl.where(taken, tl.sum(tl.where(here, values, 0.0), axis=1)[:, None], listed)
        keys = tl.where(taken, key[:, None], keys)
        rank = tl.where(here, -float("inf"), rank)
        weakest, best = tl.min(ranks, axis=1), tl.max(rank, axis=1)
    return ranks, listed, keys


@triton.jit
def _promising(best, weakest):
    return (best > -float("inf")).to(tl.int32) * (best >= weakest).to(tl.int32)


@triton.jit
def keep(strongest, rank, values, i, j, keys):
    """Merge a tile into a program's list, whose places are i·keys + j; of equal ranks the earlier place stays."""
    ranks, listed, places = strongest
    places_here = i.to(tl.int64)[:, None] * keys + j[None, :]
    weakest, best = tl.min(ranks, axis=0), tl.max(tl.max(rank, axis=1), axis=0)
    going = _promising(best, weakest)
    while going > 0:
        place = tl.min(tl.min(tl.where(rank == best, places_here, FREE), axis=1), axis=0)
        here = (places_here == place) & (rank == best)
        last = tl.max(tl.where(ranks == weakest, places, -1), axis=0)
        better = tl.maximum((best > weakest).to(tl.int32), (place < last).to(tl.int32))
        taken = (places == last) & (ranks == weakest) & (better > 0)
        ranks = tl.where(taken, best, ranks)
        listed = tl.where(taken, tl.sum(tl.sum(tl.where(here, values, 0.0), axis=1), axis=0), listed)
        places = tl.where(taken, place, places)
        rank = tl.where(here, -float("inf"), rank)
        weakest, best = tl.min(ranks, axis=0), tl.max(tl.max(rank, axis=1), axis=0)
        going = _promising(best, weakest) * better
    return ranks, listed, places
