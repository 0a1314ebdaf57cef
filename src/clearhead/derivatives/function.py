"""Attention in PyTorch's graph: a node whose first derivative is fused and whose others are recomputed.

A node computes a Task with the engines, in one fused pass: results, Aᵀ·g, or gradients of inputs from upstream
gradients. Its gradients are such a node again; torch_recomputed.py computes forward mode and second derivatives. Nodes
are made only if PyTorch may differentiate or map them.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.call import Call, describe, known
from clearhead.core.observations import operand, values_of, wanted
from clearhead.core.problem import Problem
from clearhead.core.rules import BROADCAST, FIELDS
from clearhead.core.statistics import listed
from clearhead.core.torch_state import has_dual_level, transforms
from clearhead.derivatives import backward, torch_recomputed
from clearhead.derivatives.arguments import LABELS, Task, part
from clearhead.derivatives.recomputed import INPUTS, Tensors, still_of
from clearhead.engines import native
from clearhead.errors import RuleError

Compute = Callable[[Task, Tensors], Tensors]
_uncompiled: list[Compute] = []  # `_compute`, hidden from compilers
_USUAL = "output largest log_sum"  # the compiled kernel computes these straight from the tensors, as in `attention`
_FUSED = frozenset({*listed(derivative="row"), *listed(derivative="key"), "log_sum"})
_AXES = {**FIELDS, **dict(zip(LABELS, (("batch", "queries"), ("batch", "keys")), strict=True))}  # of rules and labels


def compute(task: Task, x: Tensors) -> Tensors:
    """Compute a task's answers by name, with a node if PyTorch records one and tangents if inputs carry them."""
    if "torch._dynamo" in sys.modules:  # even where it runs this part uncompiled, it would compile inner functions
        if not _uncompiled:
            _uncompiled.append(torch.compiler.disable(_compute))  # type: ignore[no-untyped-call]
        return _uncompiled[0](task, x)
    return _compute(task, x)


def _compute(task: Task, x: Tensors) -> Tensors:
    recorded = torch.is_grad_enabled() and any(one.requires_grad for one in x.values())
    if not recorded and not has_dual_level() and not transforms():
        return answer(task, x)
    answers = _Node.apply(task, tuple(x), *x.values())  # type: ignore[no-untyped-call]
    return dict(zip(task.answers.split(), answers, strict=True))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        task, names, *tensors = inputs
        return tuple(answer(task, dict(zip(names, tensors, strict=True))).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        task, names, *tensors = inputs
        keep(ctx, task, names, tensors, output)
        results = zip(task.answers.split(), output, strict=True)
        ctx.mark_non_differentiable(*(x for name, x in results if not x.is_floating_point() or name == "largest"))
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        task, x, results = kept(ctx)
        needed, by = list(compress(x, ctx.needs_input_grad[2:])), upstream(task, grads)
        check_differentiable(needed)
        if part(x, "by"):
            found = torch_recomputed.gradients_gradients(task, x, by, needed) if by else {}
        else:
            found = gradients(compute, task, x, results, by, needed) if by else {}
        return None, None, *map(found.get, x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        task, *sides = kept(ctx)
        x, results = ({name: still_of(one) for name, one in side.items()} for side in sides)
        moving = {name: x for name, x in zip(x, tangents[2:], strict=True) if x is not None}
        check_differentiable(moving)
        return tuple(map(torch_recomputed.tangents(task, x, results, moving).get, results))

    @staticmethod
    def vmap(info: Any, dims: Any, task: Task, names: tuple[str, ...], *tensors: Tensor) -> Any:
        results = mapped(compute, task, dict(zip(names, tensors, strict=True)), dims[2:], info.batch_size)
        return tuple(results.values()), (0,) * len(results)


_Node.forward.__signature__ = signature(_Node.forward)  # type: ignore[attr-defined]  # PyTorch reads it at each call


def keep(ctx: Any, task: Task, names: Iterable[str], tensors: Iterable[Tensor], output: Iterable[Tensor]) -> None:
    """Keep a node's task, tensors and results for its derivatives."""
    ctx.task, ctx.names = task, names
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def kept(ctx: Any) -> tuple[Task, Tensors, Tensors]:
    """A node's task, tensors and results."""
    tensors, count = ctx.saved_tensors, len(ctx.names)  # read once: torch.utils.checkpoint allows no second time
    x, results = dict(zip(ctx.names, tensors, strict=False)), tensors[count:]
    return ctx.task, x, dict(zip(ctx.task.answers.split(), results, strict=True))


def upstream(task: Task, grads: Iterable[Tensor | None]) -> Tensors:
    """The upstream gradients by result; none for the largest logit, since log_sum carries the log-sum-exp's."""
    named = zip(task.answers.split(), grads, strict=True)
    return {name: grad for name, grad in named if grad is not None and name != "largest"}


def check_differentiable(needed: Iterable[str]) -> None:
    """Raise RuleError for an input without a derivative."""
    if "alibi_slopes" in needed:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )


def gradients(run: Compute, task: Task, x: Tensors, results: Tensors, by: Tensors, needed: Iterable[str]) -> Tensors:
    """Let `run` compute the needed gradients from the rows' states in `results` and the upstream gradients `by`."""
    backward.check_derivatives({*by} - {"product"})
    parts = {f"known:{name}": one for name, one in results.items() if name in backward.READS}
    parts |= {f"by:{name}": one for name, one in by.items()}
    answers = " ".join(name for name in (*INPUTS, "g") if name in needed)
    return run(task._replace(answers=answers), {**x, **parts}) if answers else {}


def answer(task: Task, x: Tensors) -> Tensors:
    """Compute a task with an engine, outside of PyTorch's graph."""
    if part(x, "by"):
        return _gradient(task, x)
    if task.answers == _USUAL and task.engine is None and task.queries == slice(None):
        inputs = x["q"], x["k"], x["v"]
        found = known(*inputs, task.rules(x))
        if found is not None and native.usable(found):
            made = native.output(found, *inputs, state=True)
            if made is not None:
                return dict(zip(task.answers.split(), made, strict=True))
    whole = _whole(task, x)
    problem = whole.problem
    engine = engines.chosen(problem, task.engine)
    if "g" in x:
        columns = operand(problem, as_array(x["g"], "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
        product = engine.transposed(whole, engines.state_of(engine, whole), columns)
        return {"product": _tensor(problem.restore(product))}
    call, rows = _chosen(task, whole)
    labels = {"groups": tuple(map(x.get, LABELS))} if LABELS[0] in x else {}
    want = wanted(problem, task.asked() | labels, output=call.v is not None).for_queries(rows)
    results = engines.answer(engines.able(engine, call.problem, want, task.engine), call, want)
    return {name: _tensor(call.problem.restore(results[name])) for name in task.answers.split()}


def _whole(task: Task, x: Tensors) -> Call:
    """The call of a task with all queries; v may have one head per key head or per query head."""
    v = x.get("v")
    usual = v is not None and v.shape[:-1] == x["k"].shape[:-1]
    call = describe(x["q"], x["k"], v if usual else None, task.rules(x))
    if v is None or usual:
        return call
    return call.with_values(values_of(call.problem, v, call.problem.kv_heads, call.problem.heads))


def _chosen(task: Task, whole: Call) -> tuple[Call, range]:
    """The call with the queries that a task chooses, and their range."""
    every = range(whole.problem.queries)
    rows = every[task.queries]
    return whole if rows == every else whole.take(queries=rows), rows


def _gradient(task: Task, x: Tensors) -> Tensors:
    """The gradients of inputs, each with the input's own shape and dtype."""
    by, whole, names = part(x, "by"), _whole(task, x), task.answers.split()
    engine = engines.get(engines.choose(whole.problem, task.engine, what="gradients").engine)
    if not (_FUSED.issuperset(by) and engine.GRADIENTS.issuperset(names)):
        return torch_recomputed.gradients(task, x)
    call, rows = _chosen(task, whole)
    sides = ({name: as_array(y, "gradient")[0] for name, y in some.items()} for some in (part(x, "known"), by))
    first, axes = (call.problem.batch, call.problem.heads), len(call.problem.prefix)
    answers, slopes = ({name: y.reshape(first + y.shape[axes:]) for name, y in some.items()} for some in sides)
    shapes: dict[str, Any] = {}  # in which gradients are requested: the inputs' own, 1 where they are broadcast
    for name in {"bias", "span_table"} & {*names}:
        *lead, heads, height, width = 1, 1, 1, *x[name].shape
        height = call.problem.queries if name == "bias" and height != 1 else height
        shapes[name] = call.problem.batch if any(n != 1 for n in lead) else 1, heads, height, width
    bias, spans = shapes.get("bias"), shapes.get("span_table")
    made = backward.gradients(engine, call, answers, slopes, bias=bias, spans=spans)
    if "spans" in made:
        made["span_table"] = made.pop("spans")
    return {name: _as_input(whole.problem, rows, name, x[name], made.get(name)) for name in names}


def _as_input(problem: Problem, rows: range, name: str, x: Tensor, array: Array | None) -> Tensor:
    """Give a gradient its input's shape and dtype; `rows` are the queries that the gradient covers."""
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


def mapped(run: Compute, task: Task, x: Tensors, dims: Sequence[int | None], count: int) -> Tensors:
    """Compute `count` calls at once; `dims` has each tensor's axis of calls, or None if all calls share the tensor.

    Answers have the axis of calls in front. The calls run as one call whose first batch axis is that of the calls, bit
    for bit the same; or one after the other if rules per head or batch entry differ between calls.
    """
    axes, names = dict(zip(x, dims, strict=True)), task.answers.split()
    gradient = bool(part(x, "by"))
    together = _folded(x, axes, count, names if gradient else ())
    if together is None:
        one = [run(task, {name: _at(y, axes[name], place) for name, y in x.items()}) for place in range(max(1, count))]
        return {name: torch.stack([each[name] for each in one])[:count] for name in names}
    answers = run(task, together)
    if gradient:
        return {name: y.reshape(count, *_at(x[name], axes[name], 0).shape) for name, y in answers.items()}
    flat = _rank(x["q"], axes["q"]) == 2
    return {name: y.squeeze(1) if flat else y for name, y in answers.items()}


def _rank(x: Tensor, axis: int | None) -> int:
    return x.ndim - (axis is not None)


def _at(x: Tensor, axis: int | None, place: int) -> Tensor:
    """One call's part of a tensor; zeros if there is no call."""
    if axis is None:
        return x
    return x.select(axis, place) if x.shape[axis] else x.new_zeros((*x.shape[:axis], *x.shape[axis + 1 :]))


def _folded(x: Tensors, axes: dict[str, int | None], count: int, wanted: Sequence[str]) -> Tensors | None:
    """Fold the tensors of all calls into one call; None if one call cannot hold them.

    wanted   the inputs whose gradients are requested, one gradient for each call
    """
    rank, result = _rank(x["q"], axes["q"]), {}
    for name, y in x.items():
        axis, kind = axes[name], _AXES.get(name)
        each = axis is not None or name in wanted
        if kind is None or (each and name in BROADCAST):
            y = y.expand(count, *y.shape) if axis is None else y.movedim(axis, 0)
        if kind is None:  # q, k, v, g, results and upstream gradients, which have q's batch axes
            result[name] = y.unsqueeze(1) if rank == 2 else y  # an axis for the one head
        elif name in BROADCAST:
            result[name] = y.reshape(count, *(1,) * (max(rank, 3) - y.ndim + 1), *y.shape[1:]) if each else y
        elif each or (kind[0] == "batch" and y.ndim >= len(kind)):
            return None
        else:
            result[name] = y.reshape(-1) if rank == 2 and kind == ("heads",) else y
    return result
