"""The PyTorch operator through which torch.compile, torch.export and make_fx see attention.

`clearhead::observe` takes the tensors of a node, their names, and the fields of its Task, from which its schema comes.
A function tells tracing its shapes, and its gradient is the same operator again. Outside of compilers, function.py is
used instead, since PyTorch's dispatcher adds about 0.2 ms to each call of an operator.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, get_type_hints

import torch
from torch import Tensor

from clearhead.core.rules import EVERYWHERE, check_supported, turned_on
from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.derivatives import function
from clearhead.derivatives.arguments import Task, part
from clearhead.derivatives.recomputed import Tensors
from clearhead.errors import DerivativeError, RuleError

# the names of Python's types in an operator's schema
_KINDS = {bool: "bool", str: "str", str | None: "str?", int: "SymInt", int | None: "SymInt?", float | None: "float?"}
_SCHEMA = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(Task).items())


def observe(task: Task, x: Tensors) -> Tensors:
    """Answer a task by the operator. Raises RuleError for a rule that the operator does not have."""
    check_supported("PyTorch's graph", EVERYWHERE, turned_on(task.rules(x)))
    return dict(zip(task.answers.split(), operator([*x.values()], " ".join(x), *task), strict=True))


def _read(tensors: Sequence[Tensor], names: str, *fields: Any) -> tuple[Task, Tensors]:
    return Task(*fields), dict(zip(names.split(), tensors, strict=True))


def _answer(*inputs: Any) -> list[Tensor]:
    """Compute the arrays that the task names: statistics, or gradients of inputs."""
    with torch.no_grad():
        return [*function.answer(*_read(*inputs)).values()]


def _shapes(*inputs: Any) -> list[Tensor]:
    task, x = _read(*inputs)
    names, q, v = task.answers.split(), x["q"], x.get("v", x.get("g"))
    if part(x, "by"):
        return [torch.empty_like(x[name], memory_format=torch.contiguous_format) for name in names]
    queries = q.shape[-2] if task.queries == slice(None) else len(range(int(q.shape[-2]))[task.queries])
    sizes: dict[str, Any] = {"queries": queries, "keys": x["k"].shape[-2], "k": task.top}
    sizes |= {"d_v": 0 if v is None else v.shape[-1], "height": task.height, "width": task.width}
    if "groups" in names:
        if q.device.type == "meta":
            raise RuleError("labels say how many groups there are, and tensors on the meta device have no numbers.")
        context = torch.library.get_ctx()
        sizes |= {"query groups": context.new_dynamic_size(), "key groups": context.new_dynamic_size()}
    axes = {array: one.axes[1:] for name, one in STATISTICS.items() for array in arrays_of(name)}  # heads lead
    axes["product"] = "keys", "d_v"
    dtypes = {"output": q.dtype, "top_indices": torch.int64}
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [
        q.new_empty((*q.shape[:-2], *(sizes[axis] for axis in axes[name])), dtype=dtypes.get(name, usual))
        for name in names
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, names, *fields = inputs
    function.keep(ctx, Task(*fields), names.split(), tensors, output)


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients in the order of the operator's arguments, None for those that need none."""
    task, x, results = function.kept(ctx)
    if part(x, "by"):
        raise DerivativeError(
            "attention has no second derivative in a compiled or exported graph: its gradient was differentiated again "
            "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
            "compute this derivative outside of torch.compile.",
        )
    needed, by = list(compress(x, ctx.needs_input_grad[0])), function.upstream(task, grads)
    function.check_differentiable(needed)
    found = function.gradients(observe, task, x, results, by, needed) if by else {}
    return [*map(found.get, x)], None, *(None for _ in task)


def _mapped(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[list[Tensor], list[int]]:
    results = function.mapped(observe, *_read(*inputs), dims[0], info.batch_size)
    return [*results.values()], [0] * len(results)


operator = torch.library.custom_op(
    "clearhead::observe", _answer, mutates_args=(), schema=f"(Tensor[] x, str names, {_SCHEMA}) -> Tensor[]"
)
operator.register_fake(_shapes)
operator.register_autograd(_derivative, setup_context=_keep)
operator.register_vmap(_mapped)
