"""Attention in PyTorch's graph: one function, whose first derivative is fused and whose others are recomputed.

A node answers a Task by the engines, in one fused pass: results, Aᵀ·g, or the gradients of inputs from what is upstream
of results. Its gradients are such a node again; forward mode, and what is differentiated a second time, come from
torch_recomputed.py. Nodes are made only where something may differentiate or map them.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.call import Call, describe
from clearhead.core.observations import operand, wanted
from clearhead.core.problem import Problem
from clearhead.core.rules import BROADCAST
from clearhead.core.statistics import Wanted, listed
from clearhead.core.torch_state import has_dual_level, transforms
from clearhead.derivatives import backward, batching, torch_recomputed
from clearhead.derivatives.arguments import LABELS, Task, by_rule, part
from clearhead.derivatives.recomputed import INPUTS, Tensors, still_of
from clearhead.engines.base import Engine
from clearhead.errors import RuleError

_FUSED = frozenset({*listed(derivative="row"), *listed(derivative="key"), "log_sum"})


def compute(task: Task, x: Tensors) -> Tensors:
    """Answer a task, by name: with a node where PyTorch records one, and tangents where inputs carry them."""
    if "torch._dynamo" in sys.modules:  # where it runs this part uncompiled, it would still compile single functions
        return torch.compiler.disable(_compute)(task, x)  # type: ignore[no-untyped-call]
    return _compute(task, x)


def _compute(task: Task, x: Tensors) -> Tensors:
    recorded = torch.is_grad_enabled() and any(one.requires_grad for one in x.values())
    if not recorded and not has_dual_level() and not transforms():
        return answer(task, x)
    answers = _Node.apply(task, tuple(x), *x.values())  # type: ignore[no-untyped-call]
    return dict(zip(task.answers, answers, strict=True))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(task: Task, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(answer(task, dict(zip(names, tensors, strict=True))).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.task, ctx.names, *tensors = inputs
        ctx.set_materialize_grads(False)
        results = zip(ctx.task.answers, output, strict=True)
        ctx.mark_non_differentiable(*(x for name, x in results if not x.is_floating_point() or name == "largest"))
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        task, x, results = _saved(ctx)
        upstream = {name: grad for name, grad in zip(results, grads, strict=True) if grad is not None}
        needed = tuple(compress(x, ctx.needs_input_grad[2:]))
        along = partial(_gradients, task, x, results, needed)
        found = batching.one_call(along, upstream, x.values()) if upstream else {}
        return None, None, *(found.get(name) for name in x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        task, *sides = _saved(ctx)
        x, results = ({name: still_of(one) for name, one in side.items()} for side in sides)
        moving = {name: x for name, x in zip(x, tangents[2:], strict=True) if x is not None}
        check_differentiable(moving)
        moved = batching.one_call(partial(torch_recomputed.tangents, task, x, results), moving, x.values())
        return tuple(moved.get(name) for name in results)

    @staticmethod
    def vmap(info: Any, dims: Any, task: Task, names: tuple[str, ...], *tensors: Tensor) -> Any:
        x, axes = (dict(zip(names, side, strict=True)) for side in (tensors, dims[2:]))
        results = batching.mapped(compute, task, x, axes, info.batch_size)
        return tuple(results.values()), (0,) * len(results)


_Node.forward.__signature__ = signature(_Node.forward)  # type: ignore[attr-defined]  # PyTorch reads it at each call


def _saved(ctx: Any) -> tuple[Task, Tensors, Tensors]:
    """A node's task, tensors and results."""
    tensors, count = ctx.saved_tensors, len(ctx.names)  # a checkpoint lets them be read once
    x, results = dict(zip(ctx.names, tensors, strict=False)), tensors[count:]
    return ctx.task, x, dict(zip(ctx.task.answers, results, strict=True))


def check_differentiable(needed: Iterable[str]) -> None:
    """Raise RuleError for an input without a derivative."""
    if "alibi_slopes" in needed:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )


def _gradients(task: Task, x: Tensors, results: Tensors, needed: Sequence[str], upstream: Tensors) -> Tensors:
    """The gradients of the needed tensors of a node, by name."""
    check_differentiable(needed)
    if task.is_gradient:
        return torch_recomputed.gradients_gradients(task, x, upstream, needed)
    if "g" in x:
        return gradients_of_product(task, x, upstream["product"], needed)
    backward.check_derivatives(upstream)
    known = {name: one for name, one in results.items() if name in backward.READS}
    return gradients(task, x, known, upstream, tuple(name for name in INPUTS if name in needed))


def gradients(task: Task, x: Tensors, known: Tensors, upstream: Tensors, needed: tuple[str, ...]) -> Tensors:
    """The gradients of these inputs, from what is upstream of results; the rows' states are among the known results."""
    parts = {f"known:{name}": one for name, one in known.items()} | {f"by:{name}": y for name, y in upstream.items()}
    return compute(replace(task, answers=needed, is_gradient=True), {**x, **parts}) if needed else {}


def gradients_of_product(task: Task, x: Tensors, u: Tensor, needed: Iterable[str]) -> Tensors:
    """The gradients of u·Aᵀ·g, which is g·A·u."""
    wide = {**x, **{name: one.to(u.dtype) for name, one in (("q", x["q"]), ("k", x["k"]), ("v", u))}}
    g = wide.pop("g").to(u.dtype)
    values = replace(task, answers=("output", "largest", "log_sum"), is_gradient=False)
    seen = compute(values, wide)
    found = gradients(values, wide, seen, {"output": g}, tuple(name for name in INPUTS if name in needed))
    return {name: one.to(x[name].dtype) for name, one in {**found, "g": seen["output"]}.items() if name in needed}


def answer(task: Task, x: Tensors) -> Tensors:
    """Answer a task by an engine; nothing is recorded here."""
    if task.is_gradient:
        return _gradient(task, x)
    call, rows, engine = _call(task, x)
    if "g" in x:
        return _product(call, engine, x["g"])
    v = x.get("v")
    want = _wanted(task, x, call.problem, output=v is not None).for_queries(rows)
    call = _chosen(call, rows)
    results = engines.answer(engines.able(engine, call.problem, want, task.engine), call, want)
    return {name: _tensor(call.problem.restore(results[name])) for name in task.answers}


def _call(task: Task, x: Tensors, answering: str = "") -> tuple[Call, range, Engine]:
    """The whole call of a task, which of its queries are meant, and the engine, which can compute `answering`."""
    k, v = x["k"], x.get("v")
    usual = v is not None and v.shape[:-1] == k.shape[:-1]
    call = describe(x["q"], k, v if usual else None, by_rule(task, x), task.num_threads)
    problem = call.problem
    if v is not None and not usual:
        values = as_array(v, "v", problem.device)[0]
        call = call.with_values(operand(problem, values, "v", problem.keys, (problem.kv_heads, problem.heads))[0])
    if answering:
        engine = engines.get(engines.choose_for(answering, problem, task.engine).engine)
    else:
        engine = engines.chosen(problem, task.engine)
    return call, range(problem.queries)[task.queries], engine


def _chosen(call: Call, rows: range) -> Call:
    return call if rows == range(call.problem.queries) else call.take(queries=rows)


def _wanted(task: Task, x: Tensors, problem: Problem, *, output: bool) -> Wanted:
    state = "log_sum" in task.answers
    if not task.asked and LABELS[0] not in x:
        return Wanted(output=output, logsumexp=state)
    groups = {"groups": tuple(x[name] for name in LABELS)} if LABELS[0] in x else {}
    return wanted(problem, {**task.asked, **groups, "logsumexp": state}, output=output)


def _product(call: Call, engine: Engine, g: Tensor) -> Tensors:
    """Aᵀ·g, (…, heads, keys, d), in the dtype of statistics."""
    problem = call.problem
    columns = operand(problem, as_array(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    product = engine.transposed(call, engines.state_of(engine, call), columns)
    return {"product": _tensor(problem.restore(product))}


def _gradient(task: Task, x: Tensors) -> Tensors:
    """The gradients of inputs, each with the input's own shape and dtype."""
    if x["q"].device.type != "cpu" and not _FUSED.issuperset(part(x, "by")):  # more than the device's kernels have
        return torch_recomputed.gradients(task, x)
    whole, rows, engine = _call(task, x, "gradients")
    call = _chosen(whole, rows)
    problem = call.problem
    known, by = ({name: _block(problem, y) for name, y in part(x, role).items()} for role in ("known", "by"))
    groups = None
    if LABELS[0] in x:
        groups = _wanted(task, x, whole.problem, output=False).for_queries(rows).groups
    shapes = {name: _shared_shape(problem, name, x[name]) for name in ("bias", "span_table") if name in task.answers}
    bias, spans = shapes.get("bias"), shapes.get("span_table")
    made = backward.gradients(engine, call, known, by, groups=groups, bias=bias, spans=spans)
    if "spans" in made:
        made["span_table"] = made.pop("spans")
    return {name: _as_input(whole.problem, rows, name, x[name], made.get(name)) for name in task.answers}


def _block(problem: Problem, x: Tensor) -> Array:
    """A tensor (…, heads, …) as an array (batch, heads, …)."""
    array = as_array(x, "gradient")[0]
    return array.reshape(problem.batch, problem.heads, *array.shape[len(problem.prefix) :])


def _shared_shape(problem: Problem, name: str, x: Tensor) -> tuple[int, int, int, int]:
    """The shape in which a bias's or a table's gradient is asked for, from the input's: 1 where it is broadcast."""
    *lead, heads, height, width = 1, 1, 1, *x.shape
    batch = problem.batch if any(size != 1 for size in lead) else 1
    return batch, heads, problem.queries if name == "bias" and height != 1 else height, width


def _as_input(problem: Problem, rows: range, name: str, x: Tensor, array: Array | None) -> Tensor:
    """The gradient of an input with the input's own shape and dtype; `rows` are the queries that it is about."""
    if array is None:  # the loss does not use the output
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    gradient = _tensor(array)
    if rows != range(problem.queries) and (name == "q" or (name == "bias" and x.ndim > 1 and x.shape[-2] != 1)):
        full = gradient.new_zeros((*gradient.shape[:-2], problem.queries, gradient.shape[-1]))
        gradient = full.index_copy(-2, torch.tensor(rows, dtype=torch.int64, device=gradient.device), gradient)
    if name in BROADCAST and gradient.shape[0] != 1:  # summed over batch axes that share a value
        gradient = gradient.reshape(*problem.prefix[:-1], *gradient.shape[1:])
        gradient = gradient.sum_to_size(x.shape[-gradient.ndim :])
    return gradient.contiguous().to(x.device, x.dtype).reshape(x.shape)


def _tensor(array: Array) -> Tensor:
    return cast("Tensor", to_torch(torch, array))
