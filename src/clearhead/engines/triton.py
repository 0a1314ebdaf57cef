"""The Triton engine: launches the kernels in gpu/ on tensors in a GPU's memory; no arithmetic of its own.

It is experimental: its kernels have run in Triton's interpreter only, never on a GPU. It answers rows, columns without
groups, single weights, Aᵀ·g and the first derivative, under all rules; it has no contributions, cut effects, forward
mode or second derivatives, and its declarations say so.

Sums are in float32 (float64 for float64). Products of float32 inputs use full precision unless PyTorch allows TF32
(torch.backends.cuda.matmul.allow_tf32); of float32 numbers beside 16-bit call, three products of TF32. Triton's
interpreter runs the same kernels on the CPU's memory if TRITON_INTERPRET is set: slowly, for tests.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Upstream, in_one_dtype, unsupported

try:
    import torch
    import triton

    from clearhead.engines.gpu import columns as column_kernels
    from clearhead.engines.gpu import passes
    from clearhead.engines.gpu import rows as row_kernels
    from clearhead.engines.gpu import tensors as gpu

    STATISTICS = row_kernels.STATISTICS | column_kernels.STATISTICS
except ImportError:
    triton, STATISTICS = None, frozenset()

RULES = EVERYWHERE
MOST_D = 256
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _there(pass_: Callable[_P, _R]) -> Callable[_P, _R]:
    """Launch on q's device; in the interpreter, which computes with NumPy, silence warnings about NaN and infinity."""

    @wraps(pass_)
    def launched(*args: _P.args, **named: _P.kwargs) -> _R:
        device = gpu.device_of(cast("Call", args[0]).q)
        with torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore"):
            return pass_(*args, **named)

    return launched


def missing() -> str:
    """Why the kernels cannot run at all, as a sentence; "" if they can."""
    return "triton or torch is not installed." if triton is None else ""


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: no Triton, arrays in the CPU's memory, too large a d_k, or an unsupported rule."""
    against = [missing()] if triton is None else []
    if triton is not None and problem.device == "cpu" and not triton.knobs.runtime.interpret:
        against.append("the arrays are in the CPU's memory, and TRITON_INTERPRET is not set.")
    if problem.device.split(":")[0] not in ("cpu", "interpreter", "cuda"):
        against.append(f"the arrays are on device {problem.device}: its kernels run on CUDA's.")
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against + unsupported("the triton engine", RULES, problem)


def _arrays(tensors: "dict[str, torch.Tensor]", like: Array) -> dict[str, Array]:
    return {name: gpu.from_tensor(tensor, like) for name, tensor in tensors.items()}


@_there
@in_one_dtype
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    return _arrays(passes.observe_rows(call, want, MOST_D), call.q)


@_there
def columns(call: Call, state: State, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the rows' states."""
    return _arrays(passes.observe_columns(call, state, want), call.q)


@_there
def weights(call: Call, state: State) -> Array:
    """Every weight of this (small) problem: exp((logit - m) - l)."""
    return gpu.from_tensor(passes.weights(call, state), call.q)


@_there
def transposed(call: Call, state: State, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    return gpu.from_tensor(passes.transposed(call, state, g, MOST_D), call.q)


@_there
@in_one_dtype
def gradients(call: Call, state: State, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k, v, bias and spans. Each element has one writer: results are deterministic."""
    problem = call.problem
    number = gpu.statistics(problem) if upstream.keep_float32 else gpu.torch_dtype(problem.dtype)
    return _arrays(passes.differentiate(call, state, upstream, number, MOST_D), call.q)
