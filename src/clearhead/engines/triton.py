"""The Triton engine: launches the kernels in gpu/ on tensors in a GPU's memory; no arithmetic of its own.

Sums are in float32 (float64 for float64). Products of float32 inputs use full precision unless PyTorch allows TF32
(torch.backends.cuda.matmul.allow_tf32); of float32 numbers beside 16-bit inputs, three products of TF32. Triton's
interpreter runs the same kernels on the CPU's memory if TRITON_INTERPRET is set: slowly, for tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.effects import Edges, Others, WantedEffects, merged, no_keys
from clearhead.core.problem import Inputs, Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Kept, Upstream, in_one_dtype, unsupported

try:
    import torch
    import triton

    from clearhead.engines.gpu import columns as column_kernels
    from clearhead.engines.gpu import row_pass
    from clearhead.engines.gpu import rows as row_kernels
    from clearhead.engines.gpu import tensors as gpu
    from clearhead.engines.gpu.backward import Derivatives, Moving, in_parts
    from clearhead.engines.gpu.column_pass import ColumnPass
    from clearhead.engines.gpu.effect_pass import EffectPass

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
        device = gpu.device_of(args[0][1])  # type: ignore[index]
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
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against + unsupported("the triton engine", RULES, problem)


@_there
@in_one_dtype
def rows(inputs: Inputs, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    run = partial(row_pass.answers, inputs)
    return _arrays(row_pass.in_slices(run, want, MOST_D, inputs.v if want.output else None), inputs.q)


@_there
def columns(inputs: Inputs, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the log-sum-exp; images are computed in bands of queries."""
    return _arrays(ColumnPass(inputs, logsumexp=logsumexp).answers(want), inputs.q)


@_there
def weights(inputs: Inputs, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    return gpu.from_tensor(ColumnPass(inputs, logsumexp=logsumexp).tile(), inputs.q)


@_there
def transposed(inputs: Inputs, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    return gpu.from_tensor(ColumnPass(inputs, logsumexp=logsumexp).transposed(g), inputs.q)


def _arrays(tensors: "dict[str, torch.Tensor]", like: Array) -> dict[str, Array]:
    return {name: gpu.from_tensor(tensor, like) for name, tensor in tensors.items()}


@_there
@in_one_dtype
def gradients(inputs: Inputs, logsumexp: Array, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k, v, bias and spans. Each element has one writer: results are deterministic."""
    return _derivatives(inputs, logsumexp, upstream)


def _derivatives(
    inputs: Inputs, logsumexp: Array, upstream: Upstream, moving: "Moving | None" = None
) -> dict[str, Array]:
    problem, q, _, v = inputs
    number = gpu.statistics(problem) if upstream.keep_float32 else gpu.torch_dtype(problem.dtype)
    if v is None or upstream.output is None or v.shape[-1] <= MOST_D:
        return _arrays(Derivatives(inputs, logsumexp, upstream, moving).all(number), q)
    parts = in_parts(inputs, logsumexp, upstream, moving, MOST_D)
    return _arrays({name: x if name in ("bias", "spans") else x.to(number) for name, x in parts.items()}, q)


@_there
@in_one_dtype
def tangents(
    inputs: Inputs, along: Directions, want: Wanted, logsumexp: Array | None = None, output: Array | None = None
) -> dict[str, Array]:
    """The tangents of the output and of the row statistics; a row pass first where the log-sum-exp is unknown."""
    problem, q, _, v = inputs
    values = v if want.output else None
    results = {}
    exact = output is not None and output.dtype == statistics_dtype(problem.dtype)  # a rounded one would lose digits
    if logsumexp is None or (values is not None and not exact):
        asked = replace(want, logsumexp=True) if logsumexp is None else Wanted(output=True)
        results = rows(inputs, replace(asked, keep_float32=True))
        output = results.get("output")
    known = results["logsumexp"] if logsumexp is None else logsumexp

    def run(want: Wanted, v: Array | None, moved: Array | None, output: Array | None) -> "dict[str, torch.Tensor]":
        return row_pass.tangents(inputs._replace(v=v), replace(along, v=moved), want, known, output)

    moved = row_pass.in_slices(run, want, MOST_D, values, along.v, output)
    answers = {f"{name}_tangent": gpu.from_tensor(tensor, q) for name, tensor in moved.items()}
    if logsumexp is not None:
        return answers
    number = statistics_dtype(problem.dtype) if want.keep_float32 else problem.dtype
    return {name: x.astype(number) if name == "output" else x for name, x in results.items()} | answers


@_there
def column_tangents(inputs: Inputs, along: Directions, kept: Kept, want: Wanted) -> dict[str, Array]:
    """The tangents of the column statistics, from tangents of weights."""
    return _arrays(ColumnPass(inputs, kept=kept, along=along).answers(want), inputs.q)


@_there
@in_one_dtype
def gradient_tangents(
    inputs: Inputs, along: Directions, kept: Kept, upstream: Upstream, changing: Upstream
) -> dict[str, Array]:
    """The tangents of the gradients. Each element has one writer: results are deterministic."""
    if upstream.output is None and changing.output is None:
        inputs = inputs._replace(v=None)
    if upstream.output is None and changing.output is not None:
        moved = gpu.strided(changing.output).tensor
        upstream = replace(upstream, output=gpu.from_tensor(torch.zeros(changing.output.shape).to(moved), inputs.q))
    return _derivatives(inputs, kept.logsumexp, upstream, Moving(along, kept, changing))


@_there
def others(edges: Edges) -> Others:
    """Each row's strongest key and what all its other keys answer, in the CPU's memory, in one pass over the keys."""
    problem = edges.problem
    result = no_keys((problem.batch, problem.heads, problem.queries))
    if result.logit.size and problem.keys:
        for part in EffectPass(edges, row_pass.split_of(problem, 1)).others():
            strongest, *rest = (x.cpu().numpy() for x in part)
            result = merged(result, Others(strongest.astype(np.int64), *[x.astype(np.float64) for x in rest]), 0)
    return result


@_there
def effects(edges: Edges, want: WantedEffects) -> dict[str, Array]:
    """What is wanted of the matrix of effects: one pass by queries, one by keys, and one for each band of an image."""
    return _arrays(EffectPass(edges, row_pass.split_of(edges.problem, 1)).effects(want), edges.q)


@_there
def effect_tile(edges: Edges) -> Array:
    """Every effect of this (small) problem, (batch, heads, queries, keys)."""
    return gpu.from_tensor(EffectPass(edges).tile(), edges.q)


@_there
def effect_product(edges: Edges, x: Array, *, transposed: bool) -> Array:
    """E·x, (batch, heads, queries, d), or with `transposed` Eᵀ·x, (batch, heads, keys, d)."""
    run = EffectPass(edges)
    return gpu.from_tensor(run.transposed(x) if transposed else run.product(x), edges.q)
