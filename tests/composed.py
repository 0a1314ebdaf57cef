"""torch.func's transforms, alone and composed, of a function of tensors: those of PyTorch's own tests of operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., Tensor]
Tensors = Sequence[Tensor]


def by_math(*tensors: Any, **options: Any) -> Tensor:
    """PyTorch's attention by the plain formula, which has every derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def drawn(tensors: Tensors, count: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    """Random numbers in the shapes of these tensors, or `count` times as many; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    lead = () if count is None else (count,)
    return tuple(torch.randn(*lead, *x.shape, dtype=x.dtype, generator=generator) for x in tensors)


def forward(f: Function, n: int) -> Callable[..., Any]:
    """jvp as a function of n inputs and their tangents."""
    return lambda *x: jvp(f, x[:n], x[n:])


def backward(f: Function, n: int) -> Callable[..., Any]:
    """vjp as a function of n inputs and the cotangent."""
    return lambda *x: vjp(f, *x[:n])[1](x[n])


def loss(f: Function) -> Function:
    return lambda *x: f(*x).square().sum()


def each(x: Tensors) -> tuple[int, ...]:
    return tuple(range(len(x)))


def all_of(f: Function, x: Tensors) -> Tensor:
    """A number that depends on the gradient by every input."""
    return torch.stack([g.sin().sum() for g in grad(loss(f), each(x))(*x)]).sum()


def _many(f: Function, x: Tensors) -> tuple[Tensor, ...]:
    """Three of each input, and of the output."""
    return (*drawn(x, 3, 1), *drawn([f(*x)], 3, 2))


def _one(f: Function, x: Tensors) -> tuple[Tensor, ...]:
    """The inputs, and a cotangent."""
    return (*x, *drawn([f(*x)], None, 2))


COMPOSED: dict[str, Callable[[Function, Tensors], Any]] = {
    "jvp": lambda f, x: jvp(f, tuple(x), drawn(x)),
    "vjp": lambda f, x: backward(f, len(x))(*_one(f, x)),
    "vjp of vjp": lambda f, x: vjp(backward(f, len(x)), *_one(f, x))[1](drawn(x)),
    "jvp of vjp": lambda f, x: jvp(backward(f, len(x)), _one(f, x), drawn(_one(f, x))),
    "vjp of jvp": lambda f, x: vjp(forward(f, len(x)), *x, *drawn(x))[1](tuple(drawn([f(*x)]) * 2)),
    "vmap": lambda f, x: vmap(f)(*drawn(x, 3)),
    "vmap of vjp": lambda f, x: vmap(backward(f, len(x)))(*_many(f, x)),
    "vmap of vjp over cotangents": lambda f, x: vmap(backward(f, len(x)), (*[None] * len(x), 0))(
        *x, *drawn([f(*x)], 3)
    ),
    "vmap of jvp": lambda f, x: vmap(forward(f, len(x)))(*drawn(x, 3), *drawn(x, 3, 1)),
    "vmap of jvp over tangents": lambda f, x: vmap(forward(f, len(x)), (*[None] * len(x), *[0] * len(x)))(
        *x, *drawn(x, 3)
    ),
    "vmap of jvp of vjp": lambda f, x: vmap(lambda *y: jvp(backward(f, len(x)), y[: len(x) + 1], y[len(x) + 1 :]))(
        *_many(f, x), *drawn(_many(f, x))
    ),
    "vjp of vmap": lambda f, x: backward(vmap(f), len(x))(*_many(f, x)),
    "jvp of vmap": lambda f, x: jvp(vmap(f), drawn(x, 3), drawn(x, 3, 1)),
    "hessian": lambda f, x: hessian(loss(f), each(x))(*x),
    "jacfwd": lambda f, x: jacfwd(f, each(x))(*x),
    "jacrev": lambda f, x: jacrev(f, each(x))(*x),
    "grad of grad": lambda f, x: grad(lambda *y: all_of(f, y), each(x))(*x),
}
