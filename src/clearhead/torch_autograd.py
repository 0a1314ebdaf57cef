"""How a function with a derivative of its own enters PyTorch: under plain autograd, in torch.func, as an operator.

A derivative cannot be differentiated again, and says so every time: it is a node of the graph that raises.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as trees

from clearhead.arrays import no_forward_mode
from clearhead.errors import DerivativeError


def refuse_second(ctx: Any, *_: Any) -> NoReturn:
    """The derivative of a derivative, wherever one is asked for."""
    del ctx
    raise DerivativeError(
        "attention has no second derivative here, and its gradient was differentiated again "
        "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
        "PyTorch's own attention has one: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` "
        "torch.nn.functional.scaled_dot_product_attention(q, k, v).",
    )


def refuse_forward(ctx: Any, *_: Any) -> NoReturn:
    """The derivative in forward mode, wherever one is asked for."""
    del ctx
    raise no_forward_mode("an argument")


class _Once(torch.autograd.Function):
    """A derivative, computed; its results hang in the graph on everything it was computed from, and go no further."""

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
    """function(*inputs), a derivative that is called in backward(); inputs are tensors, lists of them and others."""
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return function(*inputs)
    flat, spec = trees.tree_flatten(inputs)
    found: Sequence[Any] = _Once.apply(function, spec, *flat)  # type: ignore[no-untyped-call]
    return found


def one_by_one(function: Callable[..., Sequence[Any]], count: int, dims: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """The rule of torch.vmap: a call for each place of the axis that is mapped over, and the results stacked."""

    def at(x: Any, dim: int | None, place: int) -> Any:
        return x if dim is None else x.select(dim, place)

    calls = [function(*(at(x, dim, place) for x, dim in zip(inputs, dims, strict=True))) for place in range(count)]
    stacked = tuple(None if each[0] is None else torch.stack(each) for each in zip(*calls, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _listed(found: tuple[tuple[Any, ...], tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    return list(found[0]), list(found[1])


def operator(
    name: str,
    schema: str,
    backward_schema: str,
    functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    derivative: tuple[Callable[..., Any], Callable[..., Any]],
) -> Callable[..., Sequence[Tensor]]:
    """A call that is an operator while a compiler looks on, and otherwise the same function under plain autograd.

    functions   the function, its shapes, its derivative, the derivative's shapes
    derivative  what is saved for it, and how it is called

    The operator's own way through PyTorch's dispatcher costs a fifth of a millisecond, which a short call would feel.
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
        """The same for torch.func; by itself this form is slower."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return tuple(forward(*inputs))

        setup_context = staticmethod(plain_saves)

        @staticmethod
        def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
            return one_by_one(call, info.batch_size, dims, inputs)

    def call(*inputs: Any) -> Sequence[Tensor]:
        q = inputs[0]
        plain = type(q) in (Tensor, torch.nn.Parameter) and q.device.type != "meta"
        if torch.compiler.is_compiling() or not plain:
            return whole(*inputs)
        function: Any = Transformed if torch._C._are_functorch_transforms_active() else Plain
        found: Sequence[Tensor] = function.apply(*inputs)
        return found

    return call
