"""Attention functions that cheat, and three that are right: what `assert_attention` must catch, and let pass."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import clearhead as ch


def attend(q: Any, k: Any, v: Any, mask: Any = None, spread: Any = None) -> Any:
    """Attention in NumPy, step by step."""
    group = q.shape[1] // k.shape[1]
    k, v = ((spread or (lambda x: np.repeat(x, group, axis=1)))(x) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    s = s if mask is None else np.where(mask, s, q.dtype.type(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True, initial=q.dtype.type(-1e30)))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total).astype(q.dtype) @ v


def remembered(key: Callable[..., Any]) -> Any:
    """A function that returns an earlier result for inputs with the same key."""
    kept: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        place = key(q, k, v)
        if place not in kept:
            kept[place] = attend(q, k, v, mask), q, k, v
        return kept[place][0].copy()

    return kernel


def stale_mask() -> Any:
    """Keep the first mask of each shape."""
    kept: dict[Any, Any] = {}
    return lambda q, k, v, mask=None: attend(
        q, k, v, None if mask is None else kept.setdefault(mask.shape, mask.copy())
    )


def one_buffer() -> Any:
    """Write every result of a shape into the same array."""
    kept: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        result = attend(q, k, v, mask)
        kept.setdefault(result.shape, result)[...] = result
        return kept[result.shape]

    return kernel


def overwrites(name: str) -> Any:
    """Right, but one of the inputs is 0 afterwards."""

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        result = attend(q, k, v, mask)
        {"q": q, "k": k, "v": v, "mask": mask}[name][...] = 0
        return result

    return kernel


def first_keys_for_all(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Read the keys of the first sequence for all."""
    return attend(q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape), mask)


def in_halves(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Add up the output in float16, sixteen keys at a time."""
    total = np.zeros((*q.shape[:3], v.shape[3]), np.float16)
    for start in range(0, k.shape[2], 16):
        some = np.zeros_like(v)
        some[:, :, start : start + 16] = v[:, :, start : start + 16]
        total = (total + attend(q, k, some, mask)).astype(np.float16)
    return total.astype(np.float32)


def in_memory_order(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Read q, k and v in the order in which their numbers lie in memory."""
    return attend(*(x.ravel("K").reshape(x.shape) for x in (q, k, v)), mask)


def alternates() -> Any:
    """Leave out every second column of the values, the others in the next call."""
    calls = itertools.count()
    return lambda q, k, v, mask=None: attend(q, k, v * (np.arange(v.shape[-1]) % 2 == next(calls) % 2), mask)


def nan_rows(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Give NaN for a query that sees no key."""
    result = attend(q, k, v, mask)
    return result if mask is None else np.where(mask.any(-1, keepdims=True), result, np.float32(np.nan))


def half_a_derivative(q: Any, k: Any, v: Any) -> Any:
    """Right, but half of the keys' derivative is missing."""
    return sdpa(q, 0.5 * k + 0.5 * k.detach(), v)


def sdpa(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """PyTorch's own, which gives 0 for a query that sees no key."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def shapes(q: Any, k: Any, v: Any) -> Any:
    return q.shape, k.shape, v.shape


def beginnings(q: Any, k: Any, v: Any) -> Any:
    return (*shapes(q, k, v), *(x.ravel()[:4].tobytes() for x in (q, k, v)))


CHEATS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # the function, what must be said, and options
    "result cached by shape": (remembered(shapes), "a cache: it uses the result .* by their shape", {}),
    "result cached by first numbers": (remembered(beginnings), "a cache: it uses the result", {}),
    "result cached by id": (remembered(lambda *x: tuple(map(id, x))), "a cache: it uses the result .* address", {}),
    "mask cached by shape": (stale_mask(), "a cache: it uses mask", {"mask": True}),
    "shared buffer": (one_buffer(), "the first result changed .* a buffer that it keeps", {}),
    "q overwritten": (overwrites("q"), "it writes into its inputs: q changed", {}),
    "k overwritten": (overwrites("k"), "it writes into its inputs: k changed", {}),
    "v overwritten": (overwrites("v"), "it writes into its inputs: v changed", {}),
    "mask overwritten": (overwrites("mask"), "it writes into its inputs: mask changed", {"mask": True}),
    "float16 returned": (lambda *x, **m: attend(*x, **m).astype(np.float16), "it returns float16 where float32", {}),
    "mask ignored": (lambda q, k, v, mask: attend(q, k, v), "it ignores mask", {"mask": True}),
    "mask ignored for large sizes": (
        lambda q, k, v, mask=None: attend(q, k, v, mask if k.shape[2] < 512 else None),
        "(?s)it ignores mask.*with keys below 1\\d\\d\\d are right",
        {"mask": True, "kinds": ["usual", "many keys"], "lengths": None},
    ),
    "contiguous only": (in_memory_order, "it misreads strides", {"kinds": ["usual", "strides"]}),
    "batch 1 only": (first_keys_for_all, "problems with batch below 2 are right", {}),
    "equal heads only": (
        lambda q, k, v, mask=None: attend(q, k, v, mask, lambda x: np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1))),
        "grouped keys are tiled, not repeated",
        {"kinds": ["usual"], "lengths": (16, 33)},
    ),
    "NaN in empty rows": (
        nan_rows,
        "only rows that see no key are wrong",
        {"mask": True, "kinds": ["usual", "empty rows"]},
    ),
    "float16 accumulation": (in_halves, "rounding in float16 would explain it", {"kinds": ["usual"]}),
    "wrong gradients": (
        half_a_derivative,
        "(?s)numbers of the dk are wrong.*its derivatives are not",
        {"arrays": "torch", "gradients": True},
    ),
    "not deterministic": (alternates(), "it is not deterministic", {}),
}
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "clearhead": (ch.attention, {}),
    "NumPy": (attend, {}),
    "PyTorch": (sdpa, {"arrays": "torch", "gradients": True}),
}
