"""Whether PyTorch records, traces or transforms a call, so that it must go through PyTorch's operators."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from clearhead.core.arrays import carries_tangent


def graphed(q: Any, *others: Any) -> bool:
    """Must a call go through PyTorch's operators? Yes where PyTorch traces it, or keeps a graph for gradients."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or type(q) not in (torch.Tensor, torch.nn.Parameter) or q.is_meta:
        return True
    if traced_by_fx():
        return True
    if torch._C._are_functorch_transforms_active():
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if any(isinstance(x, torch.Tensor) and wrapped(x) for x in (q, *others)):
            return True
        if torch.autograd.forward_ad._current_level >= 0:
            return True  # torch.vmap cannot say whether a tensor carries a tangent
    elif torch.autograd.forward_ad._current_level >= 0 and any(carries_tangent(torch, x) for x in (q, *others)):
        return True
    return bool(torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, *others)))


def traced_by_fx() -> bool:
    """Does PyTorch's make_fx write down which operators run now? What is computed without one would be a constant."""
    c = sys.modules["torch"]._C
    return bool(c._len_torch_dispatch_stack() and c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None)


def ungraphed() -> AbstractContextManager[Any]:
    """torch.no_grad() where PyTorch is loaded: for reading tensors that require grad when nothing is computed."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()
