"""What is kept of many effects: each query's first ones, the strongest of a matrix, the largest under a pixel."""

from typing import Any

import numpy as np

from clearhead.core.arrays import on_cpu
from clearhead.core.axes import Array
from clearhead.core.effects import Order, Strongest
from clearhead.core.namespace import beside, namespace, ranked, take


def first(values: Any, places: Any, order: Order, count: int) -> tuple[Any, Any]:
    """The first `count` along the last axis in this order, and their places; of equal ones the one listed earlier.

    A place of -1 is free: it comes last, and its value becomes 0. So does NaN, which is never listed.
    """
    xp = namespace(values)
    most = float(xp.finfo(values.dtype).max)  # an infinite effect is as strong as this
    by = xp.clip({"magnitude": abs(values), "largest": values, "smallest": -values}[order], -most, most)
    ranks = ranked(xp.where((places < 0) | xp.isnan(by), -np.inf, by), count)[1]
    if not values.shape[-1]:
        return 0.0 * ranks, ranks
    chosen, at = (take(x, xp.clip(ranks, 0, None), -1) for x in (values, places))
    return xp.where(ranks < 0, 0.0, chosen), xp.where(ranks < 0, -1, at)


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


def larger(a: Any, b: Any) -> Any:
    """What `SignedImage.largest` shows of two effects: the larger in magnitude, of equal ones the positive, or NaN.

    The places do not matter, so parts of a picture merge in any order.

    >>> larger(np.array([-2.0, -1.0, np.nan]), np.array([1.0, 1.0, 3.0]))
    array([-2.,  1., nan])
    """
    xp = namespace(a)
    return xp.where((abs(a) > abs(b)) | ((abs(a) == abs(b)) & (a > b)) | xp.isnan(a), a, b)


def largest_under(x: Any, shares: Array) -> Any:
    """What `larger` leaves of the rows of x that each pixel covers, (…, pixels, columns); shares as from `areas`."""
    covers = shares > 1e-9  # a share is at least one over the number of rows, or a rounding error
    start, count = covers.argmax(axis=1), covers.sum(axis=1)
    cells = start[:, None] + np.minimum(np.arange(count.max(initial=1)), np.maximum(count - 1, 0)[:, None])
    under = x[..., beside(cells, x), :]
    xp = namespace(x)
    result = larger(xp.amax(under, axis=-2), xp.amin(under, axis=-2))
    return xp.where(beside(count[:, None] > 0, x), result, 0.0)
