"""The derivative of a number by each head's output, as backward passes bring it to the layers of a watched model."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from clearhead.errors import RuleError

BACKWARD = "loss.backward() inside the `with` block, or after it; where layers are checkpointed, inside."


# What the backward passes of one block have done so far: "some" layer has got its derivative; one went to "chosen"
# tensors only, so that it may have passed layers by.
Arrivals = set[str]


@dataclass(eq=False)
class CallDerivative:
    """g of one call, (batch, heads, queries, d_v): the derivative by its output, added up over backward passes."""

    arrivals: Arrivals
    heads: list[int] | None  # those that are kept; None is all
    zeros: Tensor  # (batch, heads, queries, d_v), one number in memory
    graphless: bool  # ran without a graph: a checkpoint computes it again, with one, or no derivative comes
    g: Tensor | None = None

    def follow(self, output: Tensor) -> Tensor:
        """The same output, (batch, heads, queries, d_v), as a node of PyTorch's graph that hands its derivative here.

        The node holds no tensor, and this object by a weak reference: what is kept is not the graph's, and the graph is
        not kept. It has an input of its own, so that there is a graph where the model's parameters are frozen.
        """
        followed: Tensor = _Followed.apply(output, output.new_empty(0).requires_grad_(), ref(self))  # type: ignore[no-untyped-call]
        return followed

    def add(self, g: Tensor, *, chosen: bool) -> None:
        """Add what a backward pass brought."""
        g = g.detach() if self.heads is None else g.detach()[:, self.heads]
        self.g = g if self.g is None else self.g + g
        self.arrivals |= {"some", "chosen"} if chosen else {"some"}


@dataclass(eq=False)
class LayerDerivative:
    """g of one layer: that of its calls, one after the other along the queries. Calling it gives the tensor."""

    name: str
    arrivals: Arrivals
    calls: list[CallDerivative] = field(default_factory=list)

    def follow(self, output: Tensor, heads: Iterable[int] | None) -> Tensor:
        """The output of the layer's next call, in PyTorch's graph; as it is where no graph is recorded."""
        kept = None if heads is None else list(heads)
        batch, count, *rest = output.shape
        zeros = output.detach().new_zeros(()).expand(batch, count if kept is None else len(kept), *rest)
        call = CallDerivative(self.arrivals, kept, zeros, not torch.is_grad_enabled())
        self.calls.append(call)
        return output if call.graphless else call.follow(output)

    def __call__(self) -> Tensor:
        """(batch, heads, queries, d_v); 0 where the number does not depend on an output.

        Raises RuleError where no backward pass ran, and where one ran that did not reach the layer for another reason.
        """
        if "some" not in self.arrivals:
            raise RuleError("no backward pass has run: there is no derivative by what the heads put out.", BACKWARD)
        for call in self.calls:
            if call.g is None and call.graphless:
                raise RuleError(
                    f"layer {self.name} ran without a graph, and no backward pass computed it again: it is "
                    "checkpointed and the backward pass ran after the block, or the model runs it under torch.no_grad.",
                    "loss.backward() inside the `with` block; ch.watch(…, layers=[…]) without this layer.",
                )
            if call.g is None and "chosen" in self.arrivals:
                raise RuleError(
                    f"no derivative came to layer {self.name}, and a backward pass went to chosen tensors only "
                    "(torch.autograd.grad, inputs=…): whether the number depends on this layer is not known.",
                    "loss.backward(), which goes everywhere.",
                )
        parts = [call.zeros if call.g is None else call.g for call in self.calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def computed_again(waiting: list[tuple[Tensor, CallDerivative]], q: Tensor) -> CallDerivative:
    """Which of a module's calls a checkpoint computes again: the only one, or the last one with these queries.

    Raises RuleError where none has them.
    """
    if len(waiting) == 1:
        return waiting[0][1]
    for known, call in reversed(waiting):  # as backward passes go
        same = q if call.heads is None else q[:, call.heads]
        if torch.equal(known, same.detach()):
            return call
    raise RuleError(
        "a checkpointed layer that attends several times is computed again, and which of its calls this is, is not "
        "known.",
        'model.activation_checkpointing_enable({"use_reentrant": False})',
    )


class _Followed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, local: Tensor, call: "ref[CallDerivative]") -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.output, ctx.call = local, call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,), call = grads, ctx.call()
        if grad is not None and call is not None:
            leaf = torch.autograd.graph.get_gradient_edge(ctx.output).node  # which only a pass to every leaf comes to
            call.add(grad, chosen=not torch._C._will_engine_execute_node(leaf))
        return grad, None, None
