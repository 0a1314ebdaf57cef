"""Parts of low rank of the gradient of A over ranks, dA_ij = X_i·Y_j: those of image, groups and received.

All three are products of A with known numbers, so their derivatives are those of further columns of the output, with Y
appended to the values and X to the output's gradient, as in ops/backward.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, group_size
from clearhead.distributed.exchange import total
from clearhead.distributed.pooled import Pooled
from clearhead.distributed.shards import Shards

Factors = tuple[Array, Array]  # X, (batch or 1, heads or 1, own queries, columns), and Y, (…, own keys, columns)


def factors(shards: Shards, pooled: Mapping[str, Pooled], by: Mapping[str, Array]) -> dict[str, Factors]:
    """X and Y for each of image, groups and received in `by`, in this order; all ranks call it.

    by    the upstream gradients: of image and groups this rank's part of their sum, of received own keys'
    """
    found = {}
    for name, whole in pooled.items():
        if name in by:
            slopes = total(shards.ranks, f"derivative by {name}", by[name].astype(np.float64))
            found[name] = whole.rows[:, None] @ slopes, whole.values[:, None]
    if "received" in by:
        found["received"] = np.ones((1, 1, shards.q.shape[2], 1)), by["received"][..., None]
    return found


def over_heads(shards: Shards, values: Array) -> Array:
    """Values (batch, kv_heads, own keys, d_v) with a head for each query head."""
    return np.repeat(values, group_size(shards.whole.heads, values.shape[1]), axis=1)


def of_own_values(shards: Shards, found: Array) -> Array:
    """The gradient of own values, the first columns of that of `joined` values, summed over heads that share them."""
    assert shards.v is not None
    batch, heads, keys, width = shards.v.shape
    own: Array = found[..., :width].reshape(batch, heads, shards.whole.heads // max(1, heads), keys, width)
    return own.sum(axis=2)


def joined(shards: Shards, parts: Iterable[Array]) -> Array:
    """Columns side by side, (batch, heads, …, all columns), in the statistics' dtype."""
    lead: Any = shards.whole.batch, shards.whole.heads
    dtype = statistics_dtype(shards.whole.dtype)
    wide = [np.broadcast_to(x, lead + x.shape[2:]).astype(dtype, copy=False) for x in parts]
    return np.concatenate(wide, axis=-1)
