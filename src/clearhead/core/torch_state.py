"""Finds out whether PyTorch records, transforms or traces a call; the one place that reads PyTorch's private names."""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from clearhead.errors import DerivativeError

_TRACED = (
    "a compiler traces attention inside torch.func.grad, vjp or jvp, or with a tangent, where its operator has no "
    "derivative; torch.compile without fullgraph=True runs that part uncompiled."
)


def graphed(q: Any, *others: Any) -> bool:
    """Must PyTorch see this call? True if it traces or transforms the call, or records a graph for one of the tensors.

    True if in doubt: a call that turns out to need no graph is then computed without one.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or _is_traced(torch, q) or transforms() or has_dual_level():
        return True
    return bool(torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, *others)))


def plain(*tensors: Any) -> bool:
    """Are these plain tensors: not recorded, autocast, transformed, traced or watched by a mode?"""
    if "torch" not in sys.modules or ("torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_compiling()):
        return False
    autocast, transformed, watching, traced, forward_ad, recording, types = _looked_up()
    if autocast() or transformed() or watching() or traced() or forward_ad._current_level >= 0:
        return False
    recorded = recording()
    for x in tensors:  # noqa: SIM110  any(…) takes as long as a short call does when the caches are cold
        if type(x) not in types or (recorded and x.requires_grad) or x.is_neg():
            return False
    return True


@cache
def _looked_up() -> tuple[Any, ...]:
    """The functions that `plain` calls, cached: looking them up takes as long as calling them."""
    torch = sys.modules["torch"]
    inside = torch._C  # public names are missing (func's transforms, modes that see operators) or slow (autocast)
    private = inside._is_any_autocast_enabled, inside._functorch.get_interpreter_stack, inside._len_torch_dispatch_stack
    types = torch.Tensor, torch.nn.Parameter
    return *private, torch.jit.is_tracing, torch.autograd.forward_ad, torch.is_grad_enabled, types


def watched() -> bool:
    """Does a mode see the operators that PyTorch runs?"""
    return bool(_looked_up()[2]())


def ungraphed() -> AbstractContextManager[Any]:
    """Return torch.no_grad() where PyTorch is loaded: for reading tensors that require grad."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def traced(q: Any) -> bool:
    """Must a call with this tensor be the operator that compilers see?

    Raises DerivativeError inside torch.func's grad or jvp: the operator has no derivative there.
    """
    torch = sys.modules["torch"]
    compiling = torch.compiler.is_compiling()  # asked here: PyTorch may compile a function that this one calls, alone
    if not compiling and not _is_traced(torch, q):
        return False
    if _is_differentiated():
        if compiling:  # PyTorch knows built-in errors, and then runs this part uncompiled
            raise RuntimeError(_TRACED)
        raise DerivativeError(_TRACED, "outside of make_fx and fake tensors, attention has every derivative.")
    return True


def _is_traced(torch: Any, q: Any) -> bool:
    """Is this a fake or meta tensor, or does make_fx trace the call? Without an operator it would record a constant."""
    if type(q) not in (torch.Tensor, torch.nn.Parameter) or q.is_meta:
        return True
    make_fx = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return make_fx is not None and make_fx.get_proxy_mode() is not None


def _is_differentiated() -> bool:
    """Is this inside torch.func's grad or jvp, or may tensors carry tangents?"""
    return has_dual_level() or not {"Grad", "Jvp"}.isdisjoint(transforms())


# what torch.compiler.assume_constant_result sets, which would load the compiler
_is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transforms() -> list[str]:
    """The transforms of torch.func around this call, from the outermost: "Grad", "Jvp", "Vmap", "Functionalize"."""
    return [level.key().name for level in _looked_up()[1]() or ()]


def has_dual_level() -> bool:
    """May tensors carry tangents? Under torch.vmap PyTorch's public `unpack_dual` cannot say it."""
    return bool(_looked_up()[4]._current_level >= 0)


def carries_tangent(x: Any) -> bool:
    """Does a tensor carry a tangent of forward-mode differentiation?"""
    return sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None
