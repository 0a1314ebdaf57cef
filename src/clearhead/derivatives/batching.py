"""Many calls at once: torch.vmap."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.core.rules import BROADCAST, FIELDS
from clearhead.derivatives.arguments import LABELS, Task, part
from clearhead.derivatives.recomputed import Tensors

_AXES = {**FIELDS, **dict(zip(LABELS, (("batch", "queries"), ("batch", "keys")), strict=True))}  # of what is no operand


def mapped(
    compute: Callable[[Task, Tensors], Tensors], task: Task, x: Tensors, dims: Sequence[int | None], count: int
) -> Tensors:
    """The answers of `count` calls with the calls' axis in front; `dims` has that of each tensor, None: it is shared.

    They are one call whose first batch axis is that of the calls, to the same bits; or, where numbers of heads or of
    batch entries differ between calls, one call after the other.
    """
    axes, names = dict(zip(x, dims, strict=True)), task.answers.split()
    gradient = bool(part(x, "by"))
    together = _folded(x, axes, count, names if gradient else ())
    if together is None:
        one = [
            compute(task, {name: _at(y, axes[name], place) for name, y in x.items()}) for place in range(max(1, count))
        ]
        return {name: torch.stack([each[name] for each in one])[:count] for name in names}
    answers = compute(task, together)
    if gradient:
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


def _folded(x: Tensors, axes: dict[str, int | None], count: int, wanted: Sequence[str]) -> Tensors | None:
    """The tensors of all calls as those of one; None where one call cannot hold them.

    wanted   the inputs whose gradients are wanted, which are one for each call
    """
    rank, result = _rank(x["q"], axes["q"]), {}
    for name, y in x.items():
        axis, kind = axes[name], _AXES.get(name)
        each = axis is not None or name in wanted
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
