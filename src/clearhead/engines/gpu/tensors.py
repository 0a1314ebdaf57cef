"""The kernels' arguments: arrays as tensors with strides, the rules of a problem, and the sizes of tiles."""

from typing import Any

import numpy as np
import torch
from triton import knobs, language, next_power_of_2

from clearhead.core.arrays import DeviceArray, bfloat16, statistics_dtype, to_torch, unrepeated
from clearhead.core.axes import Array, group_size
from clearhead.core.files import toml_of
from clearhead.core.problem import Problem
from clearhead.engines.gpu.rules import RuleArguments, Strided, TileSizes

_FAR = 1 << 29  # positions up to this size are stored in 32 bits
_WIDTHS = 64, 128, 256  # the most numbers in a row that each entry of sizes.toml is for
_SIZES = toml_of("clearhead.engines.gpu", "sizes.toml")
_TORCH = {
    np.dtype(np.bool_): torch.uint8,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    bfloat16: torch.bfloat16,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.int64): torch.int64,
}
_LABELS = ("query_segments", "kv_segments", "query_spans", "key_spans")


def device_of(x: Array) -> torch.device:
    """The device on which an array lies; the CPU for NumPy arrays, which the interpreter reads there."""
    return x.tensor.device if isinstance(x, DeviceArray) else torch.device("cpu")


def strided(x: Array, problem: Problem | None = None, device: torch.device | None = None) -> Strided:
    """Wrap an array of four axes, without a copy if its strides allow, on `device` if one is named.

    With `problem`, each query head reads the array's head that its group shares.
    """
    share = 1 if problem is None else max(1, group_size(problem.heads, x.shape[1]))
    if not x.size:  # an empty tensor has no address to pass
        return Strided(torch.zeros(1, dtype=_TORCH[x.dtype], device=device_of(x)), 0, 0, 0, 0, share)
    if isinstance(x, DeviceArray):
        tensor = x.tensor.view(torch.uint8) if x.tensor.dtype == torch.bool else x.tensor
        return Strided._make((tensor, *tensor.stride(), share))
    tensor = _from_numpy(unrepeated(x))
    strides = [0 if step == 0 else once for step, once in zip(x.strides, tensor.stride(), strict=True)]
    return Strided._make((tensor if device is None else tensor.to(device), *strides, share))


def _from_numpy(x: Array) -> torch.Tensor:
    if not x.flags.writeable or not x.flags.aligned or any(step < 0 or step % x.itemsize for step in x.strides):
        x = x.copy()  # PyTorch would refuse it or warn
    return to_torch(torch, x.view(np.uint8) if x.dtype == np.bool_ else x)


def contiguous(x: Array, number: torch.dtype) -> torch.Tensor:
    """An array as a contiguous tensor of dtype `number`; broadcast axes are written out."""
    if not x.size:
        return torch.zeros(1, dtype=number, device=device_of(x))
    tensor = x.tensor if isinstance(x, DeviceArray) else _from_numpy(np.ascontiguousarray(x))
    return tensor.to(number).contiguous()


def from_tensor(tensor: torch.Tensor, like: Array) -> Array:
    """A tensor as an array of the same kind as `like`: NumPy or DeviceArray."""
    if isinstance(like, DeviceArray):
        return DeviceArray(tensor)
    return tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's name for a dtype."""
    return _TORCH[dtype]


def sizes(problem: Problem, kind: str, d_v: int = 0) -> TileSizes:
    """Look up the sizes of a pass in sizes.toml, for `d_v` columns of values.

    N decides the order of sums, so the bits of results; it depends only on dtype and widths.
    """
    size = problem.dtype.itemsize
    number = language.float64 if size == 8 else language.float32
    setting: Any = torch.backends.cuda.matmul
    newer = getattr(setting, "fp32_precision", None)  # where it exists, reading the older setting would raise
    tf32 = setting.allow_tf32 if newer is None else newer == "tf32"
    precision = {2: "tf32x3", 4: "tf32" if tf32 else "ieee", 8: "ieee"}[size]
    columns = max(16, next_power_of_2(problem.d_k)), max(16, next_power_of_2(d_v))
    owned, passed, stages = _SIZES[kind][str(size)][_WIDTHS.index(max(64, *columns))]
    if knobs.runtime.interpret:
        owned, passed = 32, 32
    return TileSizes(problem.d_k, d_v, owned, passed, *columns, number, precision, stages)


def to_device(x: Array, dtype: Any, device: torch.device) -> torch.Tensor:
    """An array in the CPU's memory as a contiguous tensor of another dtype on `device`."""
    whole = np.ascontiguousarray(x, dtype)
    if min(whole.strides, default=0) < 0:  # NumPy calls an axis of size 1 contiguous whatever its stride
        whole = whole.copy()
    return torch.from_numpy(whole).to(device)


def rules(problem: Problem, device: torch.device) -> RuleArguments:
    """The problem as the kernels read it, copied to the device."""
    number = statistics_dtype(problem.dtype)
    near = bool((np.abs(problem.query_offset) <= _FAR).all())

    def sent(x: Array | None, dtype: Any) -> torch.Tensor | None:
        return None if x is None else to_device(x, dtype, device)

    def reach(side: int | None) -> int | None:
        return min(side, 2 * _FAR) if near and side is not None else side

    left, right = problem.reach
    bias, mask = (None if x is None else strided(x, device=device) for x in (problem.bias, problem.mask))
    segments, spans = _segments(problem), _spans(problem)
    offset = sent(problem.query_offset, np.int32 if near else np.int64)
    constexpr = language.constexpr
    assert offset is not None
    forbidden = problem.span_table is not None and bool(np.isneginf(problem.span_table).any())
    return RuleArguments(
        heads=problem.heads,
        queries=problem.queries,
        keys=problem.keys,
        scales=sent(problem.scale, number),
        softcap=None if problem.softcap is None else sent(np.array([problem.softcap]), number),
        rows=problem.rows.start,
        row_step=constexpr(problem.rows.step),
        cols=problem.cols.start,
        col_step=constexpr(problem.cols.step),
        left=reach(left),
        right=reach(right),
        offset=offset,
        kv_lengths=sent(problem.kv_lengths, np.int32),
        query_lengths=sent(problem.query_lengths, np.int32),
        **{name: sent((segments | spans).get(name), np.int32) for name in _LABELS},
        table=None if "table" not in spans else _table(spans["table"], number, device),
        slopes=sent(problem.alibi_slopes, number),
        sinks=sent(problem.sinks, number),
        bias=bias,
        mask=mask,
        content=constexpr(bool(bias or mask or segments) or forbidden),
    )


def _table(x: Array, number: Any, device: torch.device) -> Strided:
    """Send a table of four axes to the device, contiguous, with strides of 0 along axes of size 1 but the last."""
    tensor = to_device(x, number, device)
    steps = [0 if size == 1 else step for size, step in zip(x.shape, tensor.stride(), strict=True)]
    return Strided._make((tensor, *steps[:3], 1, 1))


def _segments(problem: Problem) -> dict[str, Array]:
    """Renumber the labels of segments from 0, by name; {} if there are none."""
    sides = {name: x for name in _LABELS[:2] if (x := getattr(problem, name)) is not None}
    ranks = np.unique(np.concatenate([np.zeros(0, np.int64), *map(np.ravel, sides.values())]), return_inverse=True)[1]
    parts = np.split(ranks, np.cumsum([x.size for x in sides.values()])[:-1])
    return {name: part.reshape(x.shape) for (name, x), part in zip(sides.items(), parts, strict=False)}


def _spans(problem: Problem) -> dict[str, Array]:
    """The fields of RuleArguments about spans; tokens without a label get a last row or column of the table, zeros.

    `table` has size 1 along batch and heads if they share it.
    """
    queries, keys = problem.query_spans, problem.key_spans
    if queries is None or keys is None or problem.span_table is None:
        return {}
    table = unrepeated(problem.span_table, 2)
    most = np.finfo(statistics_dtype(problem.dtype)).max / 2  # so that a finite number stays finite in units of ln 2
    table = np.where(np.isneginf(table), table, np.clip(table, -most, most))
    labels = (np.where(x < 0, size, x) for x, size in zip((queries, keys), table.shape[2:], strict=True))
    table = np.pad(table, ((0, 0), (0, 0), (0, 1), (0, 1)))
    return dict(zip(("query_spans", "key_spans", "table"), (*labels, table), strict=True))
