"""The passes over one problem: its arrays and rules as the kernels read them, and the launch of the kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from triton import language, next_power_of_2

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Kind, Upstream, in_one_dtype, kinds, row_kinds
from clearhead.engines.gpu import MOST_D
from clearhead.engines.gpu import gradients as gradient_kernels
from clearhead.engines.gpu import rows as row_kernels
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.gradients import Loss
from clearhead.engines.gpu.rules import Inputs, Results, TileSizes

Answers = dict[str, torch.Tensor]
STATISTICS = row_kernels.OF_ROWS | row_kernels.OF_COLUMNS
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


def _arrays(tensors: Answers, like: Array) -> dict[str, Array]:
    return {name: gpu.from_tensor(tensor, like) for name, tensor in tensors.items()}


class Pass:
    """What the kernels of a pass share: arrays, with g (batch, heads or 1, queries, d_v), rules and sizes."""

    def __init__(self, call: Call, kind: str, g: Array | None = None) -> None:
        problem, q, k, v = call.problem, call.q, call.k, call.v
        self.problem, self.device = problem, gpu.device_of(q)
        self.number = gpu.torch_dtype(statistics_dtype(problem.dtype))
        self.heads = problem.batch * problem.heads
        self.empty = not self.heads * problem.queries * problem.keys
        values = v if g is None else g
        self.sizes = gpu.sizes(problem, kind, 0 if values is None else values.shape[-1])
        self.rules = gpu.rules(problem, self.device)
        self.inputs = Inputs(*(None if x is None else gpu.strided(x, problem) for x in (q, k, v, g)))

    def launch(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Run so many programs of a kernel."""
        sizes = self.sizes
        kernel[(programs,)](
            inputs=self.inputs, rules=self.rules, sizes=TileSizes(*sizes[:2], *map(language.constexpr, sizes[2:])),
            **arguments, num_warps=8, num_stages=sizes.STAGES,
        )  # fmt: skip

    def strips(self, length: int) -> int:
        """How many programs it takes for so many queries or keys of a head, M a program."""
        return -(-length // self.sizes.M)

    def contiguous(self, x: Array | None) -> torch.Tensor | None:
        """Numbers per query or key, in the statistics' dtype."""
        return None if x is None else gpu.contiguous(x, self.number)

    def states(self, state: State) -> State:
        """The rows' states."""
        return State(*map(self.contiguous, state))

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor for results, 0 where nothing is written."""
        return torch.zeros(shape, dtype=dtype or self.number, device=self.device)

    def rooms(self, kinds: dict[str, Kind]) -> Answers:
        """Tensors for results of these shapes and dtypes, by name."""
        return {name: self.zeros(*shape, dtype=gpu.torch_dtype(dtype)) for name, (shape, dtype) in kinds.items()}


@_there
@in_one_dtype
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics; an output with more than MOST_D columns in slices, the rest with the first."""
    return _arrays(_rows(call, want), call.q)


def _rows(call: Call, want: Wanted) -> Answers:
    problem, v = call.problem, call.v if want.output else None
    if v is not None and v.shape[-1] > MOST_D:
        results, outputs = Answers(), []
        for start in range(0, v.shape[-1], MOST_D):
            part = _rows(call.with_values(v[..., start : start + MOST_D]), want)
            outputs.append(part.pop("output"))
            results = results or part
            want = Wanted(output=True, keep_float32=want.keep_float32)
        return {**results, "output": torch.cat(outputs, -1)}
    run = Pass(call.with_values(v), "observed")
    results = run.rooms(row_kinds(problem, v, want, row_kernels.OF_ROWS))
    if run.heads * problem.queries:  # without keys too: their states are -inf and 0 then
        slots = max(2, next_power_of_2(want.top or 0))
        run.launch(
            row_kernels.rows, run.strips(problem.queries) * run.heads, want=Results(**results), count=want.top or 0,
            TOP=slots,
        )  # fmt: skip
    return results


@_there
def columns(call: Call, state: State, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the rows' states."""
    run, problem = Pass(call.with_values(None), "observed"), call.problem
    results = run.rooms(kinds(problem, want, want.columns(), row_kernels.OF_COLUMNS))
    _columns(run, state, Results(**results))
    return _arrays(results, call.q)


@_there
def weights(call: Call, state: State) -> Array:
    """Every weight of this (small) problem, (batch, heads, queries, keys): exp((logit - m) - l)."""
    run, problem = Pass(call.with_values(None), "observed"), call.problem
    result = run.zeros(problem.batch, problem.heads, problem.queries, problem.keys)
    _columns(run, state, Results(weights=result))
    return gpu.from_tensor(result, call.q)


def _columns(run: Pass, state: State, to: Results) -> None:
    if not run.empty:
        programs = run.strips(run.problem.keys) * run.heads
        run.launch(row_kernels.columns, programs, state=run.states(state), to=to)


@_there
def transposed(call: Call, state: State, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d): what the kernel `keys` answers for v."""
    problem = call.problem
    parts = []
    for start in range(0, max(1, g.shape[-1]), MOST_D):
        run = Pass(call.with_values(None), "gradients", g[..., start : start + MOST_D])
        parts.append(run.zeros(problem.batch, problem.heads, problem.keys, run.sizes.d_v))
        if not run.empty:
            loss = Loss(run.states(state))
            programs = run.strips(problem.keys) * run.heads
            run.launch(gradient_kernels.keys, programs, loss=loss, out_k=None, out_v=parts[-1])
    return gpu.from_tensor(torch.cat(parts, -1), call.q)


@_there
def gradients(call: Call, state: State, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k and v. Each element has one writer: results are deterministic.

    Values with more than MOST_D columns are taken in slices, whose gradients add up, as dS is linear in dO.
    """
    v, output, number = call.v, upstream.output, gpu.torch_dtype(call.problem.dtype)
    if v is None or output is None or v.shape[-1] <= MOST_D:
        return _arrays(_gradients(call, state, upstream, number), call.q)
    sums, by_v = Answers(), []
    for start in range(0, v.shape[-1], MOST_D):
        some = slice(start, start + MOST_D)
        part = _gradients(
            call.with_values(v[..., some]), state, replace(upstream, output=output[..., some]),
            gpu.torch_dtype(statistics_dtype(call.problem.dtype)),
        )  # fmt: skip
        by_v.append(part.pop("v"))
        sums = {name: sums[name] + x if sums else x for name, x in part.items()}
        nothing = gpu.from_tensor(torch.zeros(upstream.rows.shape, device=by_v[0].device), call.q)
        upstream = Upstream(nothing, output)
    sums["v"] = torch.cat(by_v, -1)
    return _arrays({name: x.to(number) for name, x in sums.items()}, call.q)


def _gradients(call: Call, state: State, upstream: Upstream, number: torch.dtype) -> Answers:
    call = call.with_values(None) if upstream.output is None else call
    problem = call.problem
    run = Pass(call, "gradients", None if call.v is None else upstream.output)
    shapes = {name: x.shape for name, x in zip("qkv", (call.q, call.k, call.v), strict=True) if x is not None}
    results = {name: run.zeros(problem.batch, problem.heads, *shape[2:]) for name, shape in shapes.items()}
    if not run.empty:
        names = (name for name in Loss._fields if name != "state")
        loss = Loss(run.states(state), *(run.contiguous(getattr(upstream, name)) for name in names))
        run.launch(
            gradient_kernels.keys, run.strips(problem.keys) * run.heads, loss=loss, out_k=results["k"],
            out_v=results.get("v"),
        )  # fmt: skip
        run.launch(gradient_kernels.queries, run.strips(problem.queries) * run.heads, loss=loss, out=results["q"])
    for name, (batch, heads, *rest) in shapes.items():  # a head of k or v has the sum of its query heads'
        group = problem.heads // max(1, heads)
        results[name] = results[name].reshape(batch, heads, group, *rest).sum(2).to(number)
    return results
