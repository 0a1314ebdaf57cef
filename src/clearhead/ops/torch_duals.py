"""Tensors that carry tangents, taken apart and put together again: torch.autograd.forward_ad, and torch.func.jvp.

Inside torch.func.jvp a tensor is a wrapper of one outside. PyTorch's own way for a node of its graph goes through
torch.func's Python, and asks for results first and for their tangents then; here both come of one pass, outside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

Tensors = dict[str, Tensor]
_functions = torch._C._functorch
make: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual
unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual


def top_transform() -> str:
    """The innermost of torch.func's transforms that are under way, such as "Jvp" or "Vmap"; "" where none is."""
    top = _functions.peek_interpreter_stack()
    return "" if top is None else str(top.key().name)


def may_carry(top: str) -> bool:
    """May tensors carry tangents that `apart` finds, where this is the innermost transform?"""
    return top == "Jvp" or (not top and forward_ad._current_level >= 0)


@contextmanager
def apart(tensors: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    """The tensors without the tangents that they carry, and these, by name; inside of it the innermost jvp is not."""
    if top_transform() != "Jvp":
        yield _unpacked(tensors)
        return
    transform = retrieve_current_functorch_interpreter()
    level = transform.level()
    sides = _unpacked({name: _functions.unwrap_if_dead(x) for name, x in tensors.items()})
    still, moving = ({name: _functions._unwrap_for_grad(x, level) for name, x in side.items()} for side in sides)
    with transform.lower():
        yield still, moving


def together(results: Tensors, tangents: Tensors) -> Tensors:
    """What came of tensors that are `apart`, each result with its tangent."""
    if top_transform() == "Jvp":
        level = _functions.peek_interpreter_stack().level()
        results, tangents = (
            {name: _functions._wrap_for_grad(x, level) for name, x in side.items()} for side in (results, tangents)
        )
    return {name: make(x, tangents[name]) if name in tangents else x for name, x in results.items()}


def _unpacked(tensors: Tensors) -> tuple[Tensors, Tensors]:
    duals = {name: unpack(x) for name, x in tensors.items() if x.is_floating_point()}
    moving = {name: dual.tangent for name, dual in duals.items() if dual.tangent is not None}
    return {**tensors, **{name: duals[name].primal for name in moving}}, moving
