"""What is kept of many effects: each query's first ones, the strongest of a matrix, the largest under a pixel."""

import numpy as np

from clearhead.core.arrays import on_cpu
from clearhead.core.axes import Array
from clearhead.core.effects import Order, Strongest

_MOST = float(np.finfo(np.float64).max)


def first(values: Array, places: Array, order: Order, count: int) -> tuple[Array, Array]:
    """The first `count` along the last axis in this order, and their places; of equal ones the one listed earlier.

    A place of -1 is free: it comes last, and its value becomes 0.
    """
    by = np.clip({"magnitude": -np.abs(values), "largest": -values, "smallest": values}[order], -_MOST, _MOST)
    rank = np.argsort(np.where(places < 0, np.inf, by), axis=-1, kind="stable")[..., :count]
    chosen = np.take_along_axis(places, rank, axis=-1)
    return np.where(chosen < 0, 0.0, np.take_along_axis(values, rank, axis=-1)), chosen


def merged_lists(a: tuple[Array, Array], b: tuple[Array, Array], order: Order) -> tuple[Array, Array]:
    """Merge two lists that `first` made of disjoint places, into one of a's length; of equal effects the earlier place.

    >>> a, b = (np.array([3.0, -1.0]), np.array([7, 8])), (np.array([-3.0, 0.0]), np.array([2, -1]))
    >>> merged_lists(a, b, "magnitude")
    (array([-3.,  3.]), array([2, 7]))
    """
    values, places = (np.concatenate(pair, axis=-1) for pair in zip(a, b, strict=True))
    by_place = np.argsort(places, axis=-1, kind="stable")
    sorted_values, sorted_places = (np.take_along_axis(x, by_place, axis=-1) for x in (values, places))
    return first(sorted_values, sorted_places, order, a[0].shape[-1])


def take_strongest(arrays: dict[str, Array], keys: int, count: int | None) -> Strongest | None:
    """The strongest of all batches and heads, (≤ count,) each, from those of each, which leave `arrays`; None without.

    strongest_values and strongest_indices are (batch, heads, k); an index is query·keys + key, -1 is free.
    """
    if "strongest_values" not in arrays:
        return None
    values, places = (on_cpu(arrays.pop(f"strongest_{name}")) for name in ("values", "indices"))
    batch, head, rank = np.nonzero(places >= 0)
    value, place = values[batch, head, rank], places[batch, head, rank]
    order = np.lexsort((place, head, batch, -np.abs(value)))[:count]
    query, key = np.divmod(place[order], max(1, keys))
    return Strongest(batch[order], head[order], query, key, value[order])


def larger(a: Array, b: Array) -> Array:
    """What `SignedImage.largest` shows of two effects: the larger in magnitude, of equal ones the positive, or NaN.

    The places do not matter, so parts of a picture merge in any order.

    >>> larger(np.array([-2.0, -1.0, np.nan]), np.array([1.0, 1.0, 3.0]))
    array([-2.,  1., nan])
    """
    result: Array = np.where((np.abs(a) > np.abs(b)) | ((np.abs(a) == np.abs(b)) & (a > b)) | np.isnan(a), a, b)
    return result


def largest_under(x: Array, shares: Array) -> Array:
    """What `larger` leaves of the rows of x that each pixel covers, (pixels, columns); shares as from `areas`."""
    covers = shares > 1e-9  # a share is at least one over the number of rows, or a rounding error
    used, result = covers.any(axis=1), np.zeros((len(covers), x.shape[1]))
    first_row, last = covers.argmax(axis=1), covers.shape[1] - covers[:, ::-1].argmax(axis=1)
    bounds = np.stack([first_row, last], axis=1)[used].reshape(-1)  # every second part lies between two pixels
    more = np.concatenate([x, np.zeros((1, x.shape[1]))])
    result[used] = larger(np.maximum.reduceat(more, bounds)[::2], np.minimum.reduceat(more, bounds)[::2])
    return result
