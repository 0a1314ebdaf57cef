"""Gradients that cannot be differentiated again: nodes of PyTorch's graph that raise when backward reaches them.

Attention over ranks has only these; torch_nodes.py has what one process computes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as trees

from clearhead.core.arrays import no_forward_mode
from clearhead.errors import DerivativeError


def refuse_second(ctx: Any, *_: Any) -> NoReturn:
    """The backward of a gradient: raises DerivativeError."""
    del ctx
    raise DerivativeError(
        "attention has no second derivative here, and its gradient was differentiated again "
        "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
        "PyTorch's own attention has one: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` "
        "torch.nn.functional.scaled_dot_product_attention(q, k, v).",
    )


def refuse_forward(ctx: Any, *_: Any) -> NoReturn:
    """The forward-mode derivative: raises DerivativeError."""
    del ctx
    raise no_forward_mode("an argument")


class _Once(torch.autograd.Function):
    """Computes a gradient as a node of the graph whose own backward and forward-mode derivative raise."""

    @staticmethod
    def forward(function: Callable[..., Sequence[Any]], spec: Any, *flat: Any) -> tuple[Any, ...]:
        return tuple(function(*trees.tree_unflatten(flat, spec)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, function: Any, spec: Any, *flat: Any) -> Any:
        def one(*each: Any) -> Sequence[Any]:
            return once(function, *trees.tree_unflatten(each, spec))

        return one_by_one(one, info.batch_size, dims[2:], flat)

    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_forward)


def once(function: Callable[..., Sequence[Any]], *inputs: Any) -> Sequence[Any]:
    """Call `function`, which computes a gradient, so that differentiating its result raises DerivativeError.

    inputs are tensors, lists of tensors, and other values; returns what `function` returns.
    """
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return function(*inputs)
    flat, spec = trees.tree_flatten(inputs)
    found: Sequence[Any] = _Once.apply(function, spec, *flat)  # type: ignore[no-untyped-call]
    return found


def one_by_one(function: Callable[..., Sequence[Any]], count: int, dims: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """torch.vmap's rule for a function without batching: one call per element of the mapped axis, results stacked."""

    def at(x: Any, dim: int | None, place: int) -> Any:
        return x if dim is None else x.select(dim, place)

    calls = [function(*(at(x, dim, place) for x, dim in zip(inputs, dims, strict=True))) for place in range(count)]
    stacked = tuple(None if each[0] is None else torch.stack(each) for each in zip(*calls, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)
