"""The few operations that edits need on NumPy arrays and PyTorch tensors alike."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.arrays import as_rule_array, statistics_dtype
from clearhead.core.axes import Array


def torch_of(x: Any) -> Any:
    """The module torch where x is a tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def numbers_like(x: Any, like: Any) -> Any:
    """Numbers as the kind of array that `like` is, with its dtype and on its device; a tensor keeps its graph."""
    torch = torch_of(like)
    if torch is None:
        return as_rule_array(x, "numbers").astype(like.dtype)
    return torch.as_tensor(x).to(like.device, like.dtype)


def chosen(inside: Any, outside: Any, heads: Sequence[int] | None) -> Any:
    """`inside` for these heads, `outside` for the others, (batch, heads, …); in the dtype of `outside`."""
    if heads is None:
        mask = np.ones(outside.shape[1], bool)
    else:
        mask = np.zeros(outside.shape[1], bool)
        mask[list(heads)] = True
    mask = mask.reshape(-1, *(1,) * (outside.ndim - 2))
    torch = torch_of(outside)
    if torch is None:
        return np.where(mask, inside, outside).astype(outside.dtype)
    return torch.where(torch.from_numpy(mask).to(outside.device), inside.to(outside.dtype), outside)


def float_sum(x: Any, real: Array | None) -> tuple[Any, Any]:
    """The sum over the real queries, (batch, heads, 1, d), in float32 or better, and how many there are."""
    torch = torch_of(x)
    whole = np.ones((1, x.shape[-2]), bool) if real is None else real
    mask = whole[:, None, :, None]
    if torch is None:
        kept = np.where(mask, x.astype(statistics_dtype(x.dtype)), 0)
        return kept.sum(-2, keepdims=True), mask.sum(-2, keepdims=True)
    mask = torch.from_numpy(mask).to(x.device)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(mask, wide, 0.0).sum(-2, keepdim=True), mask.sum(-2, keepdim=True)


def times(x: Any, factors: Array) -> Any:
    """`x` times numbers that broadcast to it, in float32 or better: half precision would round the numbers."""
    torch = torch_of(x)
    if torch is None:
        return x.astype(statistics_dtype(x.dtype), copy=False) * factors.astype(statistics_dtype(x.dtype))
    wide = x if x.dtype == torch.float64 else x.float()
    return wide * torch.from_numpy(factors).to(wide.device, wide.dtype)


def logaddexp(a: Any, b: Any) -> Any:
    """ln(e^a + e^b)."""
    torch = torch_of(a)
    return np.logaddexp(a, b) if torch is None else torch.logaddexp(a, b)


def positive_part(wanted: float, rest: Any, span: Any) -> Any:
    """The sum wanted + rest − span where that is above 0 and both are finite, else 0."""
    torch = torch_of(span)
    if torch is None:
        usable = np.isfinite(rest) & np.isfinite(span)
        gap = wanted + np.where(usable, rest, 0.0) - np.where(usable, span, 0.0)
        return np.where(usable, np.maximum(gap, 0.0), 0.0)
    usable = torch.isfinite(rest) & torch.isfinite(span)
    gap = wanted + torch.where(usable, rest, 0.0) - torch.where(usable, span, 0.0)
    return torch.where(usable, gap.clamp(min=0.0), 0.0)


def spread(x: Any, count: int) -> list[Any]:
    """One number for each head, from one number, one for all in a list, or one for each."""
    values = list(x) if isinstance(x, tuple | list | np.ndarray) else [x]
    return values * count if len(values) == 1 else values
