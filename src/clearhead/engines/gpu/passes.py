"""The passes over one problem: prepares its arrays and rules, and launches the kernels."""

from collections.abc import Callable
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
        self.problem, self.device = call.problem, gpu.device_of(call.q)
        self.number = gpu.torch_dtype(statistics_dtype(self.problem.dtype))
        values = call.v if g is None else g
        self.sizes = gpu.sizes(self.problem, kind, 0 if values is None else values.shape[-1])
        self.rules = gpu.rules(self.problem, self.device)
        given = call.q, call.k, call.v, g
        self.inputs = Inputs(*(None if x is None else gpu.strided(x, self.problem) for x in given))

    def launch(self, kernel: Any, length: int, **arguments: Any) -> None:
        """Run a kernel over `length` queries or keys of every head, M of them in each program."""
        sizes = self.sizes
        programs = -(-length // sizes.M) * self.problem.batch * self.problem.heads
        if programs:
            kernel[(programs,)](
                inputs=self.inputs, rules=self.rules, sizes=TileSizes(*sizes[:2], *map(language.constexpr, sizes[2:])),
                **arguments, num_warps=8, num_stages=sizes.STAGES,
            )  # fmt: skip

    def contiguous(self, x: Array | None) -> torch.Tensor | None:
        """Numbers per query or key, in the statistics' dtype."""
        return None if x is None else gpu.contiguous(x, self.number)

    def states(self, state: State) -> State:
        """The rows' states."""
        return State(*map(self.contiguous, state))

    def zeros(self, *axes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor (batch, heads, …) for results, 0 where nothing is written."""
        shape = self.problem.batch, self.problem.heads, *axes
        return torch.zeros(shape, dtype=dtype or self.number, device=self.device)

    def rooms(self, kinds: dict[str, Kind]) -> Answers:
        """Tensors for results of these shapes and dtypes, by name."""
        return {name: self.zeros(*shape[2:], dtype=gpu.torch_dtype(dtype)) for name, (shape, dtype) in kinds.items()}


@_there
@in_one_dtype
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics; with more than MOST_D columns of v, one pass for each slice of them."""
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
    results, most = run.rooms(row_kinds(problem, v, want, row_kernels.OF_ROWS)), want.top or 0
    slots = max(2, next_power_of_2(most))
    run.launch(row_kernels.rows, problem.queries, want=Results(**results), count=most, TOP=slots)
    return results


@_there
def columns(call: Call, state: State, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the rows' states."""
    run, problem = Pass(call.with_values(None), "observed"), call.problem
    results = run.rooms(kinds(problem, want, want.columns(), row_kernels.OF_COLUMNS))
    run.launch(row_kernels.columns, problem.keys, state=run.states(state), to=Results(**results))
    return _arrays(results, call.q)


@_there
def weights(call: Call, state: State) -> Array:
    """Every weight of this (small) problem, (batch, heads, queries, keys): exp((logit - m) - l)."""
    run, problem = Pass(call.with_values(None), "observed"), call.problem
    result = run.zeros(problem.queries, problem.keys)
    run.launch(row_kernels.columns, problem.keys, state=run.states(state), to=Results(weights=result))
    return gpu.from_tensor(result, call.q)


@_there
def transposed(call: Call, state: State, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d): the kernel `keys` computes it as dV."""
    keys, parts, none = call.problem.keys, [], Upstream(cast("Array", None))
    g = g.astype(max(g.dtype, call.problem.dtype, key=lambda kind: kind.itemsize), copy=False)  # weights round to it
    for start in range(0, max(1, g.shape[-1]), MOST_D):
        run = Pass(call.with_values(None), "gradients", g[..., start : start + MOST_D])
        parts.append(run.zeros(keys, run.sizes.d_v))
        run.launch(gradient_kernels.keys, keys, state=run.states(state), loss=none, out_k=None, out_v=parts[-1])
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
            call.with_values(v[..., some]), state, upstream._replace(output=output[..., some]),
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
    results = {name: run.zeros(*shape[2:]) for name, shape in shapes.items()}
    numbers: Any = {name: run.contiguous(getattr(upstream, name)) for name in ("rows", "keys", "entropy", "distance")}
    known = {"state": run.states(state), "loss": Upstream(**numbers)}
    run.launch(gradient_kernels.keys, problem.keys, **known, out_k=results["k"], out_v=results.get("v"))
    run.launch(gradient_kernels.queries, problem.queries, **known, out=results["q"])
    for name, (batch, heads, *rest) in shapes.items():  # a head of k or v has the sum of its query heads'
        group = problem.heads // max(1, heads)
        results[name] = results[name].reshape(batch, heads, group, *rest).sum(2).to(number)
    return results
