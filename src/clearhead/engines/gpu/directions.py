"""A direction as the kernels read it; core/directions.py has the formulas."""

import torch

from clearhead.core.arrays import statistics_dtype
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.engines.gpu import labels
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.inputs import Direction

STILL = Direction(*(None,) * len(Direction._fields))
Steps = tuple[int, ...]


def direction(
    problem: Problem, along: Directions | None, device: torch.device, output: gpu.StridedTensor | None = None
) -> tuple[Direction, Steps]:
    """The direction as the kernels read it, and its strides; `output` is the tangent of dO."""
    if along is None:
        return STILL, (0,) * 16
    given = along.given
    moved = {name: gpu.as_tensor(given[name]) for name in "qkv" if name in given}
    still = gpu.StridedTensor(torch.empty(0), (0, 0, 0, 0))
    steps = [step for name in "qkv" for step in moved.get(name, still).strides]
    number = statistics_dtype(problem.dtype)
    found = STILL._replace(**{name: x.tensor for name, x in moved.items()})
    if along.bias is not None:
        bias = gpu.as_tensor(along.bias, device)
        found = found._replace(bias=bias.tensor)
        found = found._replace(**dict(zip(("bias_b", "bias_h", "bias_i", "bias_j"), bias.strides, strict=True)))
    if along.spans is not None:
        table = labels.with_none(labels.own_axes(along.spans))
        strides = dict(zip(("table_b", "table_h", "table_i"), gpu.steps_of(table, 3), strict=True))
        found = found._replace(table=gpu.to_device(table, number, device), **strides)
    if along.sinks is not None and problem.sinks is not None:
        found = found._replace(sinks=gpu.to_device(along.sinks, number, device))
    if output is not None:
        found = found._replace(output=output.tensor)
    return found, (*steps, *(output or still).strides)
