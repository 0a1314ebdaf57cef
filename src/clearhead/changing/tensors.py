"""The few operations that edits need on NumPy arrays and PyTorch tensors alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.arrays import as_rule_array, statistics_dtype, torch_of
from clearhead.core.axes import Array


def library(x: Any) -> Any:
    """NumPy or torch: the functions of both that are called here have the same names and arguments."""
    return torch_of(x) or np


def numbers_like(x: Any, like: Any) -> Any:
    """Numbers as the kind of array that `like` is, with its dtype and on its device; a tensor keeps its graph."""
    torch = torch_of(like)
    if torch is None:
        return as_rule_array(x, "numbers").astype(like.dtype)
    return torch.as_tensor(x).to(like.device, like.dtype)


def chosen(inside: Any, outside: Any, heads: Sequence[int] | None) -> Any:
    """`inside` for these heads, `outside` for the others, (batch, heads, …); in the dtype of `outside`."""
    mask = np.zeros((outside.shape[1], *(1,) * (outside.ndim - 2)), bool)
    mask[slice(None) if heads is None else list(heads)] = True
    return library(outside).where(_flags_near(mask, outside), numbers_like(inside, outside), outside)


def float_sum(x: Any, real: Array | None) -> tuple[Any, Any]:
    """The sum over the real queries, (batch, heads, 1, d), in float32 or better, and how many there are."""
    mask = _flags_near((np.ones((1, x.shape[-2]), bool) if real is None else real)[:, None, :, None], x)
    return library(x).where(mask, _wide(x), 0.0).sum(-2, keepdims=True), mask.sum(-2, keepdims=True)


def times(x: Any, factors: Array) -> Any:
    """`x` times numbers that broadcast to it, in float32 or better: half precision would round the numbers."""
    return _wide(x) * numbers_like(factors, _wide(x))


def _wide(x: Any) -> Any:
    torch = torch_of(x)
    if torch is None:
        return x.astype(statistics_dtype(x.dtype), copy=False)
    return x if x.dtype == torch.float64 else x.float()


def _flags_near(flags: Array, like: Any) -> Any:
    torch = torch_of(like)
    return flags if torch is None else torch.from_numpy(flags).to(like.device)


def spread(x: Any, count: int) -> list[Any]:
    """One number for each head, from one number, one for all in a list, or one for each."""
    values = list(x) if isinstance(x, tuple | list | np.ndarray) else [x]
    return values * count if len(values) == 1 else values
