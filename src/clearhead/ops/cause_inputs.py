"""Reads what matrices of effects are made of: values, the derivative g by the head's output, and W_O for norms."""

from typing import Any

import numpy as np

from clearhead.core import room
from clearhead.core.arrays import FLOATS, as_array, broadcast, device_of, on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.effects import Kind, read_rest
from clearhead.core.observations import operand, values_of
from clearhead.errors import DtypeError, RuleError, ShapeError

Inputs = tuple[
    Any, Array, Array
]  # the AttentionMatrix, v (batch, its heads, keys, d_v), g (batch, heads, queries, d_v)

_BLOCK = 4096  # keys whose projected values are held at a time


def contributions(weights: Any, v: Any, g: Any, output: Any) -> tuple[Kind, Any, Array, Array]:
    """The inputs of contributions along g; of norms where g is None. Raises RuleError where g and W_O are given."""
    if g is None:
        return "norm", *norms(weights, v, output)
    if output is not None:
        raise RuleError(
            "output is given together with g: it is for norms, and g has been carried through W_O.", "leave it out."
        )
    return "contribution", *along_g(weights, v, g)


def cut_effects(weights: Any, v: Any, g: Any, rest: Any) -> tuple[Kind, Any, Array, Array]:
    """The inputs of cuts; with rest="first" values that are v_0 - v_j, or -v_j where there are learned sinks."""
    weights, values, along = along_g(weights, v, g)
    if read_rest(rest) == "renormalise":
        return "cut", weights, values, along
    dtype = statistics_dtype(values.dtype)
    _check_room(values, dtype)
    shifted = on_cpu(values).astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = (shifted[:, :, :1] if weights.call.problem.sinks is None else 0) - shifted
    return "moved", *_in_one_dtype(weights, to_device_of(shifted, values), along)


def along_g(weights: Any, v: Any, g: Any) -> Inputs:
    """Validated v and g, in one dtype with q and k."""
    problem = weights.call.problem
    values = values_of(problem, v, problem.kv_heads, problem.heads)
    along = operand(problem, as_array(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    if along.shape[-1] != values.shape[-1]:
        raise ShapeError(
            f"g has {along.shape[-1]} columns but v has d_v {values.shape[-1]}: g is the derivative by the head's "
            "output, which has v's columns.",
            "o = A @ v; g, = torch.autograd.grad(number, o)",
        )
    rows = problem.batch, problem.heads, problem.queries
    return _in_one_dtype(weights, values, broadcast(along, (*rows, along.shape[-1])))


def norms(weights: Any, v: Any, output: Any) -> Inputs:
    """‖v_j‖, or ‖v_j·W_O‖ for every query head, as values of one column; g is 1."""
    problem = weights.call.problem
    values = values_of(problem, v, problem.kv_heads, problem.heads)
    projection = None if output is None else _projection(weights, output, values.shape[-1])
    _check_room(values, np.dtype(np.float64))
    result = _norms(on_cpu(values), projection, problem.heads).astype(statistics_dtype(values.dtype))
    ones = broadcast(np.ones((), result.dtype), (problem.batch, problem.heads, problem.queries, 1))
    return _in_one_dtype(weights, to_device_of(result, values), to_device_of(ones, values))


def _in_one_dtype(weights: Any, v: Array, g: Array) -> Inputs:
    """Convert all to their common dtype: theirs where it is one, else float64 if any is float64, else float32."""
    dtypes = {weights.call.problem.dtype, v.dtype, g.dtype}
    if len(dtypes) == 1:
        return weights, v, g
    dtype = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    _check_room(v, dtype)
    known = weights.known_state if statistics_dtype(dtype) == weights.dtype else None
    return weights.with_call(weights.call.astype(dtype), known), v.astype(dtype), g.astype(dtype)


def _projection(weights: Any, output: Any, d_v: int) -> Array:
    """W_O in float64, (heads·d_v, d_model)."""
    projection = on_cpu(as_array(output, "output", weights.call.problem.device)[0])
    if projection.dtype not in FLOATS:
        raise DtypeError(f"output is {projection.dtype}: expected float64, float32, bfloat16 or float16.")
    rows = weights.call.problem.heads * d_v
    if projection.ndim != 2 or projection.shape[0] != rows:
        turned = projection.ndim == 2 and projection.shape[1] == rows
        raise ShapeError(
            f"output has shape {projection.shape}: expected W_O, (heads·d_v {rows}, d_model).",
            "a linear layer's weight is (d_model, heads·d_v): output=weight.T" if turned else "",
        )
    return projection.astype(np.float64)


@np.errstate(invalid="ignore", over="ignore")
def _norms(v: Array, weights: Array | None, heads: int) -> Array:
    """‖v_j‖, (batch, heads of v, keys, 1), or with W_O ‖v_j·W_O‖, (batch, heads, keys, 1)."""
    batch, kv_heads, keys, d_v = v.shape
    result = np.empty((batch, kv_heads if weights is None else heads, keys, 1))
    for head in range(result.shape[1]):
        for part in blocks(keys, _BLOCK):
            values = v[:, head // group_size(result.shape[1], kv_heads), part].astype(np.float64)
            projected = values if weights is None else values @ weights[head * d_v : (head + 1) * d_v]
            result[:, head, part] = np.linalg.norm(projected, axis=-1, keepdims=True)
    return result


def _check_room(v: Array, dtype: np.dtype[Any]) -> None:
    size = room.array_bytes(v.shape, dtype.itemsize)
    room.check_room(f"v in {dtype}", size, "give fewer columns of v.", device_of(v))
