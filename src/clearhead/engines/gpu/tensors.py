"""The kernels' arguments: arrays as tensors with strides, the rules of a problem, and the sizes of tiles."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from triton import knobs, language, next_power_of_2

from clearhead.core import visibility
from clearhead.core.arrays import bfloat16, statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import Problem
from clearhead.engines.base import one_scale
from clearhead.engines.gpu import labels
from clearhead.engines.gpu.rules import Rules

_FAR = 1 << 29  # positions up to this size are stored in 32 bits
# Tiles by what a pass computes, bytes of a number and padded width: the fields of Tiles from `owned` to `chunk`. Chosen
# by what `python -m benchmarks.compiled` prints: at most 99 KiB of shared memory, which every GPU since sm_80 has, and
# few registers that spill. No speed has been measured.
_SIZES: dict[str, dict[int, dict[int, tuple[int, int, int, int, int]]]] = {
    "rows": {
        2: {64: (128, 64, 8, 3, 0), 128: (128, 64, 8, 2, 0), 256: (64, 32, 8, 1, 0)},
        4: {64: (64, 32, 8, 2, 0), 128: (32, 32, 8, 2, 0), 256: (32, 16, 8, 1, 0)},
        8: {64: (32, 16, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (16, 16, 8, 1, 0)},
    },
    "columns": {
        2: {64: (128, 64, 8, 3, 0), 128: (128, 64, 8, 2, 0), 256: (64, 32, 8, 2, 0)},
        4: {64: (64, 32, 8, 2, 16), 128: (64, 32, 8, 2, 16), 256: (64, 32, 8, 2, 16)},
        8: {64: (32, 16, 8, 2, 16), 128: (32, 16, 8, 2, 16), 256: (32, 16, 8, 2, 16)},
    },
    "column products": {
        2: {64: (64, 32, 8, 2, 0), 128: (64, 32, 8, 2, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 32, 8, 2, 16), 128: (32, 32, 8, 2, 16), 256: (32, 32, 8, 2, 16)},
        8: {64: (32, 16, 8, 2, 16), 128: (32, 16, 8, 2, 16), 256: (32, 16, 8, 2, 16)},
    },
    "gradients": {
        2: {64: (64, 32, 8, 2, 0), 128: (64, 32, 8, 2, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 32, 8, 2, 16), 128: (32, 32, 8, 2, 16), 256: (32, 16, 8, 1, 16)},
        8: {64: (32, 16, 8, 1, 16), 128: (16, 16, 8, 1, 16), 256: (16, 16, 8, 1, 16)},
    },
    "row tangents": {
        2: {64: (64, 32, 8, 2, 0), 128: (64, 32, 8, 1, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 32, 8, 2, 16), 128: (32, 32, 8, 2, 16), 256: (32, 16, 8, 1, 16)},
        8: {64: (32, 16, 8, 1, 16), 128: (16, 16, 8, 1, 16), 256: (16, 16, 8, 1, 16)},
    },
    "column tangents": {
        2: {64: (64, 32, 8, 2, 0), 128: (64, 32, 8, 1, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 32, 8, 2, 16), 128: (32, 32, 8, 2, 16), 256: (32, 32, 8, 2, 16)},
        8: {64: (32, 16, 8, 1, 16), 128: (32, 16, 8, 1, 16), 256: (32, 16, 8, 1, 16)},
    },
    "gradient tangents": {
        2: {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 0), 256: (32, 16, 8, 1, 0)},
        4: {64: (32, 32, 8, 1, 16), 128: (32, 16, 8, 2, 16), 256: (16, 16, 8, 1, 16)},
        8: {64: (32, 16, 8, 1, 16), 128: (16, 16, 8, 1, 16), 256: (16, 16, 8, 1, 16)},
    },
    "effects": {
        2: {64: (64, 32, 8, 2, 0), 128: (64, 32, 8, 2, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 32, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (32, 16, 8, 1, 0)},
        8: {64: (32, 32, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (16, 16, 8, 1, 0)},
    },
    "effect products": {
        2: {64: (32, 16, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (32, 32, 8, 1, 0)},
        4: {64: (32, 16, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (32, 16, 8, 1, 0)},
        8: {64: (32, 16, 8, 1, 0), 128: (32, 16, 8, 1, 0), 256: (16, 16, 8, 1, 0)},
    },
}
_TORCH = {
    np.dtype(np.bool_): torch.uint8,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    bfloat16: torch.bfloat16,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.int64): torch.int64,
}
_LABELS = ("query_segments", "kv_segments", "query_spans", "key_spans", "key_sets", *labels.RANGES)
_described: WeakKeyDictionary[Problem, tuple[tuple[torch.device, int], Rules]] = WeakKeyDictionary()


class StridedTensor(NamedTuple):
    """A tensor and its strides in elements, 0 along axes that are broadcast."""

    tensor: torch.Tensor
    strides: tuple[int, ...]


class Tiles(NamedTuple):
    """The sizes of the tiles that the kernels cut a problem into, and the precision they compute in."""

    owned: int  # queries or keys whose results one program computes
    passed: int  # how many of the other side it reads at a time
    warps: int
    stages: int
    chunk: int  # columns of q, k, v that a product reads at a time; 0: all, and they stay
    number: Any  # Triton's dtype of sums
    precision: str


def device_of(x: Array) -> torch.device:
    """The device on which an array lies; the CPU for NumPy arrays, which the interpreter reads there."""
    return x.tensor.device if isinstance(x, DeviceArray) else torch.device("cpu")


def as_tensor(x: Array, device: torch.device | None = None) -> StridedTensor:
    """An array as a tensor, without a copy where its strides allow; on `device`, where given."""
    if not x.size:  # an empty tensor has no address to pass
        return StridedTensor(torch.zeros(1, dtype=_TORCH[x.dtype], device=device_of(x)), (0,) * x.ndim)
    if isinstance(x, DeviceArray):
        return StridedTensor(
            x.tensor.view(torch.uint8) if x.tensor.dtype == torch.bool else x.tensor, x.tensor.stride()
        )
    broadcast = [size > 1 and step == 0 for size, step in zip(x.shape, x.strides, strict=True)]
    single = x[tuple(slice(0, 1) if shared else slice(None) for shared in broadcast)]
    flags, steps = single.flags, single.strides
    if not flags.writeable or not flags.aligned or any(step < 0 or step % x.itemsize for step in steps):
        single = single.copy()  # PyTorch would refuse it or warn
    tensor = to_torch(torch, single.view(np.uint8) if single.dtype == np.bool_ else single)
    if device is not None:
        tensor = tensor.to(device)
    strides = tensor.stride()
    return StridedTensor(tensor, tuple(0 if shared else step for shared, step in zip(broadcast, strides, strict=True)))


def contiguous(x: Array, number: torch.dtype) -> torch.Tensor:
    """An array as a contiguous tensor of dtype `number`; broadcast axes are written out."""
    tensor = x.tensor if isinstance(x, DeviceArray) else as_tensor(np.ascontiguousarray(x)).tensor
    return tensor.to(number).contiguous()


def from_tensor(tensor: torch.Tensor, like: Array) -> Array:
    """A tensor as an array of the same kind as `like`: NumPy or DeviceArray."""
    if isinstance(like, DeviceArray):
        return DeviceArray(tensor)
    return tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def statistics(problem: Problem) -> torch.dtype:
    """The dtype of statistics and of sums."""
    return _TORCH[statistics_dtype(problem.dtype)]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's name for a dtype."""
    return _TORCH[dtype]


def input_dtype(problem: Problem) -> torch.dtype:
    """The dtype of q, k and v."""
    return _TORCH[problem.dtype]


def padded(width: int) -> int:
    """The width of a tile for rows of `width` numbers: the next power of two, at least 16."""
    return max(16, next_power_of_2(width))


def tiles(problem: Problem, width: int, what: str) -> Tiles:
    """The tiles for a pass (a name in _SIZES) over rows of at most `width` numbers.

    `passed` decides the order of sums, hence the bits of the results; it depends on dtype and width alone.
    """
    number = language.float64 if problem.dtype == np.float64 else language.float32
    precision = "tf32" if problem.dtype == np.float32 and _tf32() else "ieee"
    size, wide = problem.dtype.itemsize, min(256, max(64, padded(max(width, problem.d_k))))
    sizes = (32, 32, 4, 1, 16 * (size > 2)) if knobs.runtime.interpret else _SIZES[what][size][wide]
    found = Tiles(*sizes, number, precision)
    if problem.span_table is not None:  # reading a table takes many registers
        found = found._replace(owned=min(found.owned, 64))
    return found


def _tf32() -> bool:
    """Whether PyTorch is set to allow TF32. Reading the older setting where a newer exists would raise."""
    setting: Any = torch.backends.cuda.matmul
    newer = getattr(setting, "fp32_precision", None)
    return bool(setting.allow_tf32 if newer is None else newer == "tf32")


def rules(problem: Problem, device: torch.device) -> Rules:
    """The problem as the kernels read it, copied to the device once, and again if the current stream changes.

    PyTorch reuses freed memory on the stream it was allocated on, so that stream must be the one that reads it.
    """
    place = device, _stream(device)
    known = _described.get(problem)
    if known is None or known[0] != place:
        known = _described[problem] = place, _describe(problem, device)
    return known[1]


def _stream(device: torch.device) -> int:
    """The stream on which kernels are launched on that device."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def to_device(x: Array, dtype: Any, device: torch.device) -> torch.Tensor:
    """An array in the CPU's memory as a contiguous tensor of another dtype on `device`."""
    whole = np.ascontiguousarray(x, dtype)
    if min(whole.strides, default=0) < 0:  # NumPy calls an axis of size 1 contiguous whatever its stride
        whole = whole.copy()
    return torch.from_numpy(whole).to(device)


def _describe(problem: Problem, device: torch.device) -> Rules:
    number = statistics_dtype(problem.dtype)
    near = bool((np.abs(problem.query_offset) <= _FAR).all())

    def sent(x: Array | None, dtype: Any) -> torch.Tensor | None:
        return None if x is None else to_device(x, dtype, device)

    def reach(side: int | None) -> int | None:
        return min(side, 2 * _FAR) if near and side is not None else side

    left, right = visibility.reach(problem)
    bias, mask = (None if x is None else as_tensor(x, device) for x in (problem.bias, problem.mask))
    segments, spans = labels.segments(problem), labels.spans(problem)
    table, sets = spans.get("table"), spans.get("sets")
    offset = sent(problem.query_offset, np.int32 if near else np.int64)
    constexpr = language.constexpr
    assert offset is not None
    return Rules(
        heads=problem.heads,
        queries=problem.queries,
        keys=problem.keys,
        numbers=sent(np.array([one_scale(problem), problem.softcap or 1.0]), number),
        scales=sent(problem.scale, number) if (problem.scale != one_scale(problem)).any() else None,
        softcap=constexpr(problem.softcap is not None),
        content=constexpr(bias is not None or mask is not None or bool(segments) or sets is not None),
        rows=problem.rows.start,
        row_step=constexpr(problem.rows.step),
        cols=problem.cols.start,
        col_step=constexpr(problem.cols.step),
        left=reach(left),
        right=reach(right),
        offset=offset,
        kv_lengths=sent(problem.kv_lengths, np.int32),
        query_lengths=sent(problem.query_lengths, np.int32),
        **{name: sent(_narrower(name, segments, spans), np.int32) for name in _LABELS},
        table=sent(table, number),
        **dict(zip(("table_b", "table_h", "table_i"), steps_of(table, 3), strict=True)),
        sets=sent(sets, np.uint8),
        **dict(zip(("sets_n", "sets_h"), steps_of(sets, 2), strict=True)),
        slopes=sent(problem.alibi_slopes, number),
        sinks=sent(problem.sinks, number),
        bias=None if bias is None else bias.tensor,
        **dict(zip(("bias_b", "bias_h", "bias_i", "bias_j"), _steps(bias), strict=True)),
        mask=None if mask is None else mask.tensor,
        **dict(zip(("mask_b", "mask_h", "mask_i", "mask_j"), _steps(mask), strict=True)),
    )


def by_name(**tensors: StridedTensor | None) -> dict[str, Any]:
    """A kernel's arguments `x` and `x_strides` for each tensor x; None and strides of 0 for one that is not there."""
    named: dict[str, Any] = {}
    for name, x in tensors.items():
        named[name], named[f"{name}_strides"] = (None, (0, 0, 0, 0)) if x is None else x
    return named


def _steps(x: StridedTensor | None) -> tuple[int | None, ...]:
    return (None,) * 4 if x is None else x.strides


def steps_of(x: Array | None, count: int) -> tuple[int | None, ...]:
    """The first strides of an array once it is contiguous, in elements; 0 along axes of size 1."""
    if x is None:
        return (None,) * count
    steps = np.ascontiguousarray(x).strides[:count]
    return tuple(0 if size == 1 else step // x.itemsize for size, step in zip(x.shape, steps, strict=False))


def _narrower(name: str, *found: labels.Fields) -> Array | None:
    """The field of that name; where segments and spans both have a range, what lies in both."""
    arrays = [fields[name].reshape(-1) for fields in found if name in fields]
    if len(arrays) < 2:
        return arrays[0] if arrays else None
    return (np.maximum if name.startswith("first") else np.minimum)(*arrays)
