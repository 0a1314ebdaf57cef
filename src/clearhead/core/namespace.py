"""The few operations that NumPy and PyTorch write differently; the definition calls all others by one name in both."""

import sys
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import DeviceArray, as_rule_array, to_torch
from clearhead.core.axes import Array

_FEW = 64  # up to so many entries are picked one by one; more are found by sorting all
_WITHOUT_FLOAT64 = ("mps", "xpu")


def namespace(x: Any) -> Any:
    """The module numpy or torch, whose functions take x."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def raw(x: Any) -> Any:
    """The tensor of a DeviceArray; a NumPy array is returned as it is."""
    return x.tensor if isinstance(x, DeviceArray) else x


def wrapped(x: Any, like: Array) -> Array:
    """The inverse of `raw`, as the kind of array that `like` is."""
    return cast("Array", DeviceArray(x)) if isinstance(like, DeviceArray) else x


def astype(x: Any, dtype: Any) -> Any:
    """Convert x to a dtype of NumPy's."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x, dtype)
    return x.to(getattr(sys.modules["torch"], np.dtype(dtype).name))


def dtype_name(x: Any) -> str:
    """The name of an array's dtype, float32 for example."""
    return str(x.dtype).removeprefix("torch.")


def on_host(x: Any) -> Array:
    """The same numbers as a NumPy array."""
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def full(like: Any, shape: tuple[int, ...], value: float, dtype: Any = None) -> Any:
    """An array of one value on the device of `like`; without a dtype, in float64 (float32 if the device lacks it)."""
    if isinstance(like, np.ndarray):
        return np.full(shape, value, dtype or np.float64)
    without = dtype is None and like.device.type in _WITHOUT_FLOAT64
    torch, name = sys.modules["torch"], "float32" if without else np.dtype(dtype or np.float64).name
    return torch.full(shape, value, dtype=getattr(torch, name), device=like.device)


def beside(x: Any, like: Any) -> Any:
    """Convert a NumPy array or a DeviceArray to the kind and device of `like`, and floats to its dtype."""
    x = raw(x)
    if isinstance(like, np.ndarray):
        return x.astype(like.dtype, copy=False) if x.dtype.kind not in "iub" else x
    torch = sys.modules["torch"]
    if isinstance(x, np.ndarray):
        x = to_torch(torch, np.array(x))  # copied: its strides may be negative
    return x.to(like.device, like.dtype if x.is_floating_point() else None)


def numbers_like(x: Any, like: Any) -> Any:
    """Convert any numbers to the kind, dtype and device of `like`; a tensor keeps its graph."""
    if isinstance(like, np.ndarray):
        return as_rule_array(x, "numbers").astype(like.dtype)
    return sys.modules["torch"].as_tensor(x).to(like.device, like.dtype)


def still(x: Any) -> Any:
    """The same numbers, through which no derivative is taken."""
    return x if isinstance(x, np.ndarray) else x.detach()


def largest(x: Any, axis: int = -1) -> Any:
    """The largest number along an axis, which stays with size 1; -inf where there is none."""
    if not x.shape[axis]:
        return namespace(x).sum(x, axis=axis, keepdims=True) - np.inf
    return namespace(x).amax(x, axis=axis, keepdims=True)


def take(x: Any, places: Any, axis: int) -> Any:
    """NumPy's take_along_axis, for arrays with any numbers of axes."""
    most = max(x.ndim, places.ndim)
    x, places = (y.reshape((1,) * (most - y.ndim) + tuple(y.shape)) for y in (x, places))
    return np.take_along_axis(x, places, axis) if isinstance(x, np.ndarray) else x.take_along_dim(places, axis)


def ranked(x: Any, count: int) -> tuple[Any, Any]:
    """The `count` largest numbers along the last axis, largest first, and their places; of equal ones the earlier.

    -inf and -1 where there are fewer numbers above -inf.
    """
    xp, size = namespace(x), x.shape[-1]
    numbers = full(x, (*x.shape[:-1], count), -np.inf, dtype_name(x))
    places = full(x, numbers.shape, -1, np.int64)
    if isinstance(x, np.ndarray) and count <= _FEW:
        left = x.copy()
        for rank in range(min(count, size)):
            best = left.argmax(axis=-1)[..., None]
            numbers[..., rank : rank + 1] = np.take_along_axis(left, best, axis=-1)
            places[..., rank : rank + 1] = best
            np.put_along_axis(left, best, -np.inf, axis=-1)
    else:
        order = np.argsort(-x, axis=-1, kind="stable") if isinstance(x, np.ndarray) else (-x).argsort(stable=True)
        found = min(count, size)
        places[..., :found] = order[..., :found]
        numbers[..., :found] = take(x, order[..., :found], -1)
    return numbers, xp.where(xp.isneginf(numbers), -1, places)


def surely_finite(x: Any) -> bool:
    """Is every number finite? False for tensors, where finding out would wait for the device."""
    return isinstance(x, np.ndarray) and bool(np.isfinite(x).all())
