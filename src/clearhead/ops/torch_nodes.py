"""Nodes of PyTorch's graph for functions whose derivatives are such functions again (`Kind`).

`compute` calls one. Nodes are made only where something differentiates; torch.vmap and forward mode are served here
too. torch_derivatives.py has attention's kinds.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.derivatives.recomputed import Tensors, still_of
from clearhead.errors import DerivativeError
from clearhead.ops.graphed import traced_by_fx
from clearhead.ops.torch_batching import folded, is_batched, put_together, taken_apart, unfolded
from clearhead.ops.torch_passes import Bundle

_TRACED = (
    "a compiler traces attention inside of torch.func.grad, vjp or jvp, or with a tangent, where its operator has no "
    "derivative; torch.compile without fullgraph=True runs that part uncompiled."
)


class Kind(NamedTuple):
    """A function of a bundle, and its derivatives.

    names      of its results, from the bundle
    function   the results, by name
    backward   (bundle, results, upstream gradients, what needs one) to gradients, by the bundle's names
    along      (bundle, results, tangents of what moves) to the results' tangents
    """

    names: Callable[[Bundle], Sequence[str]]
    function: Callable[[Bundle], Tensors]
    backward: Callable[[Bundle, Tensors, Tensors, set[str]], Bundle]
    along: Callable[[Bundle, Tensors, Tensors], Tensors]


def compute(kind: Kind, bundle: Bundle) -> Tensors:
    """The results, with nodes in PyTorch's graph where it records one, and tangents where inputs carry one."""
    if "torch._dynamo" in sys.modules:  # where it runs this part uncompiled, it would still compile single functions
        return torch.compiler.disable(_compute)(kind, bundle)  # type: ignore[no-untyped-call]
    return _compute(kind, bundle)


def _compute(kind: Kind, bundle: Bundle) -> Tensors:
    names = [name for name, x in bundle.items() if isinstance(x, Tensor)]
    if any(is_batched(bundle[name]) for name in names):
        plain, mapped = taken_apart(bundle)
        count = next(plain[name].shape[0] for name, axis in mapped.items() if axis == 0)
        return put_together(_all_at_once(kind, plain, mapped, count))
    recorded = torch.is_grad_enabled() and any(bundle[name].requires_grad for name in names)
    if not recorded and forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return kind.function(bundle)
    rest = {name: x for name, x in bundle.items() if not isinstance(x, Tensor)}
    answers = _Node.apply(_Rest(kind, names, rest), *(bundle[name] for name in names))  # type: ignore[no-untyped-call]
    return dict(zip(kind.names(bundle), answers, strict=True))


def called_plainly(q: Tensor) -> bool:
    """Is a call with this tensor computed by these nodes, and not by an operator that a compiler sees?

    Raises DerivativeError where the operator would be seen inside torch.func's grad or jvp: it has no derivative there.
    """
    plain = type(q) in (Tensor, torch.nn.Parameter) and q.device.type != "meta"
    if plain and not torch.compiler.is_compiling() and not traced_by_fx():
        return True
    if _differentiated():
        if torch.compiler.is_compiling():  # which knows built-in errors, and then runs this part uncompiled
            raise RuntimeError(_TRACED)
        raise DerivativeError(_TRACED, "outside of make_fx and fake tensors every derivative is there.")
    return False


def _differentiated() -> bool:
    """Is this inside torch.func's grad or jvp, or may tensors carry tangents?"""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key().name in ("Grad", "Jvp") for level in stack)


_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, which loads much


class _Rest:
    """A kind, the names of a bundle's tensors, and what it holds besides; PyTorch looks into tuples and dicts."""

    def __init__(self, kind: Kind, names: list[str], others: Bundle) -> None:
        self.kind, self.names, self.others = kind, names, others

    def bundle(self, tensors: Sequence[Tensor]) -> Bundle:
        return {**self.others, **dict(zip(self.names, tensors, strict=True))}


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(rest: _Rest, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(rest.kind.function(rest.bundle(tensors)).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rest, *tensors = inputs
        ctx.kind, ctx.names, ctx.rest = rest.kind, rest.names, rest
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        bundle, results = _saved(ctx)
        upstream = {name: grad for name, grad in zip(results, grads, strict=True) if grad is not None}
        inputs = zip(ctx.names, ctx.needs_input_grad[1:], ctx.next_functions, strict=True)
        needed = {name for name, needs, (node, _) in inputs if needs and _reached(node)}
        gradients = ctx.kind.backward(bundle, results, upstream, needed) if upstream else {}
        return None, *(gradients.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        bundle, results = (
            {name: still_of(x) if isinstance(x, Tensor) else x for name, x in side.items()} for side in _saved(ctx)
        )
        moving = {name: x for name, x in zip(ctx.names, tangents[1:], strict=True) if x is not None}
        moved = ctx.kind.along(bundle, results, moving)
        return tuple(moved.get(name) for name in results)

    @staticmethod
    def vmap(info: Any, dims: Any, rest: _Rest, *tensors: Tensor) -> Any:
        mapped = dict(zip(rest.names, dims[1:], strict=True))
        results = _all_at_once(rest.kind, rest.bundle(tensors), mapped, info.batch_size)
        return tuple(results.values()), (0,) * len(results)


def _all_at_once(kind: Kind, bundle: Bundle, mapped: dict[str, int | None], count: int) -> Tensors:
    """The results of `count` calls, stacked; `mapped` says along which axis each tensor has one for each call."""
    together = folded(bundle, mapped, count)
    if together is not None:
        return unfolded(compute(kind, together[0]), bundle, mapped, count, heads=together[1])
    each = [compute(kind, _at(bundle, mapped, place)) for place in range(count)]  # one batch cannot hold them
    return {name: torch.stack([one[name] for one in each]) for name in kind.names(bundle)}


def _reached(node: Any) -> bool:
    """Does the backward pass under way come to this node? PyTorch cannot say so of leaves."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def _saved(ctx: Any) -> tuple[Bundle, Tensors]:
    tensors, count = ctx.saved_tensors, len(ctx.names)  # a checkpoint lets them be read once
    bundle = ctx.rest.bundle(tensors[:count])
    return bundle, dict(zip(ctx.kind.names(bundle), tensors[count:], strict=True))


def _at(bundle: Bundle, mapped: dict[str, int | None], place: int) -> Bundle:
    return {name: x if mapped.get(name) is None else x.select(mapped[name], place) for name, x in bundle.items()}
