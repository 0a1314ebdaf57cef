"""How a function with its own backward is given to PyTorch: plain autograd, torch.func, or a registered operator.

Gradients cannot be differentiated again: each is a node of the graph that raises when backward reaches it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
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


def _listed(found: tuple[tuple[Any, ...], tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    return list(found[0]), list(found[1])


def called_plainly(q: Tensor) -> bool:
    """Does a call with this tensor use plain autograd, and not the registered operator?"""
    plain = type(q) in (Tensor, torch.nn.Parameter) and q.device.type != "meta"
    return plain and not torch.compiler.is_compiling()


def operator(
    name: str,
    schema: str,
    backward_schema: str,
    functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    derivative: tuple[Callable[..., Any], Callable[..., Any]],
) -> Callable[..., Sequence[Tensor]]:
    """Register a PyTorch operator; returns a function that calls it while compiling, and plain autograd otherwise.

    functions   the function, its shapes for tracing, its backward, and the backward's shapes
    derivative  how the inputs are saved for the backward, and how the backward is called

    Plain autograd is used because PyTorch's dispatcher adds about 0.2 ms to each operator call.
    """
    forward, shapes, backward, backward_shapes = functions
    saves, by_inputs = derivative
    whole = torch.library.custom_op(f"clearhead::{name}", forward, mutates_args=(), schema=schema)
    whole.register_fake(shapes)
    back = torch.library.custom_op(f"clearhead::{name}_backward", backward, mutates_args=(), schema=backward_schema)
    back.register_fake(backward_shapes)
    back.register_autograd(refuse_second)

    def operator_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.backward = back
        saves(ctx, inputs, output)

    whole.register_autograd(by_inputs, setup_context=operator_saves)
    whole.register_vmap(lambda info, dims, *inputs: _listed(one_by_one(whole, info.batch_size, dims, inputs)))

    def plain_backward(*inputs: Any) -> Sequence[Tensor]:
        return once(backward, *inputs)

    def plain_saves(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        ctx.backward = plain_backward
        saves(ctx, inputs, output)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            found = tuple(forward(*inputs))
            plain_saves(ctx, inputs, found)
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return by_inputs(ctx, grads)

        jvp = staticmethod(refuse_forward)

    class Transformed(Plain):
        """The same function for torch.func's transforms, which need this slower form."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return tuple(forward(*inputs))

        setup_context = staticmethod(plain_saves)

        @staticmethod
        def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
            return one_by_one(call, info.batch_size, dims, inputs)

    def call(*inputs: Any) -> Sequence[Tensor]:
        if not called_plainly(inputs[0]):
            return whole(*inputs)
        function: Any = Transformed if torch._C._are_functorch_transforms_active() else Plain
        found: Sequence[Tensor] = function.apply(*inputs)
        return found

    return call
