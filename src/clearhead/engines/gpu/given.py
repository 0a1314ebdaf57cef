"""What kernels are given: arrays as tensors with strides, a problem's rules as numbers and pointers, sizes of tiles."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from triton import knobs, language, next_power_of_2

from clearhead.arrays import bfloat16, statistics_dtype, to_torch
from clearhead.axes import Array
from clearhead.device import DeviceArray
from clearhead.engines.gpu.rules import Rules
from clearhead.problem import Problem

_FAR = 1 << 29  # positions within this are counted in 32 bits
# Tiles by padded width: rows owned, rows passed by, warps, stages. Chosen so that registers do not spill (ptxas -v for
# sm_90a, Triton 3.6 and 3.9); not measured.
_SIZES: dict[tuple[str, bool], dict[int, tuple[int, int, int, int]]] = {
    ("rows", True): {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    ("rows", False): {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (64, 32, 8, 1)},
    ("columns", True): {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    ("columns", False): {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (64, 32, 8, 1)},
    ("gradients", True): {64: (128, 64, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
    ("gradients", False): {64: (64, 32, 8, 2), 128: (32, 32, 8, 1), 256: (32, 32, 8, 1)},
}
_TORCH = {
    np.dtype(np.bool_): torch.uint8,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    bfloat16: torch.bfloat16,
    np.dtype(np.float16): torch.float16,
}
_OF_SEGMENTS = ("query_segments", "kv_segments", "first_key", "end_key", "first_query", "end_query")
_described: WeakKeyDictionary[Problem, tuple[tuple[torch.device, int], Rules]] = WeakKeyDictionary()


class Given(NamedTuple):
    """A tensor and its strides in elements, 0 where all share one place."""

    tensor: torch.Tensor
    strides: tuple[int, ...]


class Tiles(NamedTuple):
    """How the kernels cut a problem, and how they compute."""

    owned: int  # rows of the side whose answers a program makes
    passed: int  # rows of the other side at a time
    warps: int
    stages: int
    number: Any  # the dtype of sums
    precision: str


def place_of(x: Array) -> torch.device:
    """The device on which the kernels are to find an array."""
    return x.tensor.device if isinstance(x, DeviceArray) else torch.device("cpu")


def given(x: Array, device: torch.device | None = None) -> Given:
    """An array as kernels read it, without a copy where its strides allow."""
    if not x.size:  # a pointer to nothing is none
        return Given(torch.zeros(1, dtype=_TORCH[x.dtype], device=place_of(x)), (0,) * x.ndim)
    if isinstance(x, DeviceArray):
        return Given(x.tensor.view(torch.uint8) if x.tensor.dtype == torch.bool else x.tensor, x.tensor.stride())
    shared = [size > 1 and step == 0 for size, step in zip(x.shape, x.strides, strict=True)]
    own = x[tuple(slice(0, 1) if one else slice(None) for one in shared)]
    if not own.flags.writeable or not own.flags.aligned or any(step < 0 or step % x.itemsize for step in own.strides):
        own = own.copy()
    tensor = to_torch(torch, own.view(np.uint8) if own.dtype == np.bool_ else own)
    if device is not None:
        tensor = tensor.to(device)
    strides = tensor.stride()
    return Given(tensor, tuple(0 if one else step for one, step in zip(shared, strides, strict=True)))


def gapless(x: Array, number: torch.dtype) -> torch.Tensor:
    """An array in that dtype with every place its own, one after the other."""
    tensor = x.tensor if isinstance(x, DeviceArray) else given(np.ascontiguousarray(x)).tensor
    return tensor.to(number).contiguous()


def taken(tensor: torch.Tensor, like: Array) -> Array:
    """A tensor as an array of the same kind as `like`."""
    if isinstance(like, DeviceArray):
        return DeviceArray(tensor)
    return tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def statistics(problem: Problem) -> torch.dtype:
    """The dtype of statistics and of sums."""
    return _TORCH[statistics_dtype(problem.dtype)]


def own_dtype(problem: Problem) -> torch.dtype:
    """The dtype of q, k and v."""
    return _TORCH[problem.dtype]


def padded(width: int) -> int:
    """The width of a tile that holds so many columns: a power of two, 16 or more."""
    return max(16, next_power_of_2(width))


def tiles(problem: Problem, width: int, what: str) -> Tiles:
    """For a pass (a name in _SIZES) over rows of at most `width` numbers.

    The second size decides the bits; it depends on dtype and width alone.
    """
    number = language.float64 if problem.dtype == np.float64 else language.float32
    precision = "tf32" if problem.dtype == np.float32 and _tf32() else "ieee"
    if knobs.runtime.interpret:
        return Tiles(32, 32, 4, 1, number, precision)
    halves, wide = problem.dtype.itemsize == 2, min(256, max(64, padded(max(width, problem.d_k))))
    return Tiles(*_SIZES[what, halves][wide], number, precision)


def _tf32() -> bool:
    """Was PyTorch told that TF32 will do? Its newer setting, where there is one; reading the older beside it raises."""
    setting: Any = torch.backends.cuda.matmul
    newer = getattr(setting, "fp32_precision", None)
    return bool(setting.allow_tf32 if newer is None else newer == "tf32")


def rules(problem: Problem, device: torch.device) -> Rules:
    """The problem as the kernels read it, put into the device's memory once.

    Once for each stream that takes turns: memory is given back to the stream it came from, which must be its reader.
    """
    place = device, _stream(device)
    known = _described.get(problem)
    if known is None or known[0] != place:
        known = _described[problem] = place, _describe(problem, device)
    return known[1]


def _stream(device: torch.device) -> int:
    """The stream on which kernels are launched there."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _describe(problem: Problem, device: torch.device) -> Rules:
    number = statistics_dtype(problem.dtype)
    near = bool((np.abs(problem.query_offset) <= _FAR).all())

    def sent(x: Array | None, dtype: Any) -> torch.Tensor | None:
        return None if x is None else torch.from_numpy(np.ascontiguousarray(x, dtype)).to(device)

    def reach(side: int | None) -> int | None:
        return min(side, 2 * _FAR) if near and side is not None else side

    left, right = problem.window
    if problem.causal:
        right = 0
    bias, mask = (None if x is None else given(x, device) for x in (problem.bias, problem.mask))
    segments = _segments(problem.query_segments, problem.kv_segments)
    offset = sent(problem.query_offset, np.int32 if near else np.int64)
    constexpr = language.constexpr
    assert offset is not None
    return Rules(
        heads=problem.heads,
        queries=problem.queries,
        keys=problem.keys,
        numbers=sent(np.array([problem.scale, problem.softcap or 1.0]), number),
        softcap=constexpr(problem.softcap is not None),
        content=constexpr(bias is not None or mask is not None or bool(segments)),
        rows=problem.rows.start,
        row_step=constexpr(problem.rows.step),
        cols=problem.cols.start,
        col_step=constexpr(problem.cols.step),
        left=reach(left),
        right=reach(right),
        offset=offset,
        kv_lengths=sent(problem.kv_lengths, np.int32),
        query_lengths=sent(problem.query_lengths, np.int32),
        **{name: sent(segments.get(name), np.int32) for name in _OF_SEGMENTS},
        slopes=sent(problem.alibi_slopes, number),
        sinks=sent(problem.sinks, number),
        bias=None if bias is None else bias.tensor,
        **dict(zip(("bias_b", "bias_h", "bias_i", "bias_j"), _steps(bias), strict=True)),
        mask=None if mask is None else mask.tensor,
        **dict(zip(("mask_b", "mask_h", "mask_i", "mask_j"), _steps(mask), strict=True)),
    )


def _steps(x: Given | None) -> tuple[int | None, ...]:
    return (None,) * 4 if x is None else x.strides


def _segments(queries: Array | None, keys: Array | None) -> dict[str, Array]:
    """Rules' entries about segments: numbers for the labels, equal in a batch where labels are, and where they lie.

    Counted in runs of equal labels, of which packed documents have few.
    """
    if queries is None or keys is None:
        return {}
    sides, runs = (queries, keys), (_runs(queries), _runs(keys))
    labels = np.concatenate([side.reshape(-1)[starts] for side, (starts, _) in zip(sides, runs, strict=True)])
    batch = np.concatenate([starts // side.shape[1] for side, (starts, _) in zip(sides, runs, strict=True)])
    ranks = np.unique(labels, return_inverse=True)[1]
    numbers = np.unique(ranks + batch * len(ranks), return_inverse=True)[1]
    apart = np.split(numbers, [len(runs[0][0])])
    found: dict[str, Array] = {}
    for own, other, name, kind in ((0, 1, "query_segments", "query"), (1, 0, "kv_segments", "key")):
        (starts, lengths), size = runs[own], sides[own].shape[1]
        first, end = np.full(len(numbers), size), np.zeros(len(numbers), np.int64)
        np.minimum.at(first, apart[own], starts % max(1, size))
        np.maximum.at(end, apart[own], starts % max(1, size) + lengths)
        found[name] = np.repeat(apart[own], lengths)
        found[f"first_{kind}"] = np.repeat(first[apart[other]], runs[other][1])
        found[f"end_{kind}"] = np.repeat(end[apart[other]], runs[other][1])
    return found


def _runs(labels: Array) -> tuple[Array, Array]:
    """Where runs of equal labels start in (batch, tokens), counted through all, and how long they are."""
    new = np.ones(labels.shape, bool)
    new[:, 1:] = labels[:, 1:] != labels[:, :-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=labels.size)
