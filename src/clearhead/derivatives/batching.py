"""Many calls at once: torch.vmap, and PyTorch's older vmap, which is_grads_batched=True and vectorize=True use."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from clearhead.core.rules import BROADCAST, FIELDS
from clearhead.core.torch_state import holds_many
from clearhead.derivatives.arguments import LABELS, Task
from clearhead.derivatives.recomputed import Tensors
from clearhead.errors import DerivativeError

_AXES = {**FIELDS, **dict(zip(LABELS, (("batch", "queries"), ("batch", "keys")), strict=True))}  # of what is no operand
Compute = Callable[[Task, Tensors], Tensors]


def mapped(compute: Compute, task: Task, x: Tensors, axes: dict[str, int | None], count: int) -> Tensors:
    """The answers of `count` calls with the calls' axis in front; `axes` has that of each tensor, None: it is shared.

    They are one call whose first batch axis is that of the calls, to the same bits; or, where numbers of heads or of
    batch entries differ between calls, one call after the other.
    """
    together = _folded(task, x, axes, count)
    if together is None:
        one = [
            compute(task, {name: _at(y, axes[name], place) for name, y in x.items()}) for place in range(max(1, count))
        ]
        return {name: torch.stack([each[name] for each in one])[:count] for name in task.answers}
    answers = compute(task, together)
    if task.is_gradient:
        return {name: y.reshape(count, *_at(x[name], axes[name], 0).shape) for name, y in answers.items()}
    flat = _rank(x["q"], axes["q"]) == 2
    return {name: y.squeeze(1) if flat else y for name, y in answers.items()}


def _rank(x: Tensor, axis: int | None) -> int:
    return x.ndim - (axis is not None)


def _at(x: Tensor, axis: int | None, place: int) -> Tensor:
    """A tensor of one call; zeros where there is no call."""
    if axis is None:
        return x
    return x.select(axis, place) if x.shape[axis] else x.new_zeros((*x.shape[:axis], *x.shape[axis + 1 :]))


def _folded(task: Task, x: Tensors, axes: dict[str, int | None], count: int) -> Tensors | None:
    """The tensors of all calls as those of one; None where one call cannot hold them."""
    rank, result = _rank(x["q"], axes["q"]), {}
    for name, y in x.items():
        axis, kind = axes[name], _AXES.get(name)
        each = axis is not None or (task.is_gradient and name in task.answers)
        if kind is None or (each and name in BROADCAST):
            y = y.expand(count, *y.shape) if axis is None else y.movedim(axis, 0)
        if kind is None:  # q, k, v, g, results and what is upstream of them, whose batch axes are those of q
            result[name] = y.unsqueeze(1) if rank == 2 else y  # an axis for the one head
        elif name in BROADCAST:
            result[name] = y.reshape(count, *(1,) * (max(rank, 3) - y.ndim + 1), *y.shape[1:]) if each else y
        elif each or (kind[0] == "batch" and y.ndim >= len(kind)):
            return None
        else:
            result[name] = y.reshape(-1) if rank == 2 and kind == ("heads",) else y
    return result


def one_call(function: Callable[[Tensors], Tensors], x: Tensors, still: Iterable[Tensor]) -> Tensors:
    """The function of tensors, of which some may hold many at once by PyTorch's older vmap: torch.func.vmap of it.

    What comes of it has no derivative in PyTorch's graph; where one of `still` requires grad, taking one is refused.
    """
    many = {name: y for name, y in x.items() if holds_many(y)}
    if not many:
        return function(x)
    apart = x | {name: _taken_apart(y) for name, y in many.items()}
    results = torch.func.vmap(function, ({name: 0 if name in many else None for name in x},))(apart)
    like, changing = next(iter(many.values())), next((y for y in still if y.requires_grad), None)
    return {name: _put_together(y, like, changing) for name, y in results.items()}


_slices: dict[int, Callable[[Tensor], Tensor]] = {}  # what the operator below does, by a number


def _each(x: Tensor, changing: Tensor | None, key: int) -> Tensor:
    del changing  # PyTorch records the operator where it requires grad
    return _slices[key](x).clone()


def _refuse(ctx: Any, *_: Any) -> None:
    del ctx
    raise DerivativeError(
        "many derivatives at once (is_grads_batched=True, vectorize=True) have no further derivative.",
        "torch.func.vmap of torch.func.vjp or jvp has one.",
    )


_operator = torch.library.custom_op(
    "clearhead::each", _each, mutates_args=(), schema="(Tensor x, Tensor? changing, int key) -> Tensor"
)
_operator.register_autograd(_refuse)


def _one_by_one(what: Callable[[Tensor], Tensor], like: Tensor, changing: Tensor | None = None) -> Tensor:
    """Hand each slice of a tensor that holds many to a function: PyTorch's older vmap calls an operator for each."""
    _slices[id(what)] = what
    try:
        result: Tensor = _operator(like, changing, id(what))
    finally:
        del _slices[id(what)]
    return result


def _taken_apart(x: Tensor) -> Tensor:
    """A tensor that holds many, with their axis in front."""
    slices: list[Tensor] = []
    _one_by_one(lambda one: slices.append(one) or one, x)  # type: ignore[func-returns-value]
    return torch.stack(slices)


def _put_together(x: Tensor, like: Tensor, changing: Tensor | None) -> Tensor:
    """A tensor that holds many as `like` does, from one with their axis in front."""
    slices = iter(x)
    return _one_by_one(lambda _: next(slices), like, changing)
