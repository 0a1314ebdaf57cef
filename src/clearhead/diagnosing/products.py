"""Weights times values, and the heads or rows of an array that are wanted."""

import numpy as np

from clearhead.core.axes import Array


def weighted(weights: Array, values: Array) -> Array:
    """weights·values; a value of weight 0 is not read."""
    result = np.asarray(weights @ values)
    if not np.isfinite(result).all() and not np.isfinite(values).all():
        return _product_of_nonfinite(weights, values)
    return result


def _product_of_nonfinite(weights: Array, values: Array) -> Array:
    """weights·values, where a value of weight 0 is not read: 0·NaN would be NaN."""
    result = weights @ np.where(np.isfinite(values), values, values.dtype.type(0))
    for key in np.flatnonzero(~np.isfinite(values).all(axis=(0, 1, 3))):
        weight, value = weights[..., key, None], values[:, :, None, key]
        result = result + np.where((weight != 0) & ~np.isfinite(value), weight * value, values.dtype.type(0))
    return result


def take(x: Array, chosen: tuple[int, ...], axis: int) -> Array:
    """The chosen heads (axis 1) or rows (axis 2); the array itself where these are all."""
    if len(chosen) == x.shape[axis]:
        return x
    return x[:, list(chosen)] if axis == 1 else x[:, :, list(chosen)]
