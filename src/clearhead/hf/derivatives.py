"""Collects the gradient at each head's output that backward passes bring to the layers of a watched model."""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from clearhead.errors import RuleError

BACKWARD = "loss.backward() inside the `with` block, or after it; where layers are checkpointed, inside."


# What the backward passes of one block have done so far: "some" if a gradient reached any layer, "chosen" if a pass
# went to chosen tensors only (torch.autograd.grad), so that it may have missed layers.
Arrivals = set[str]


@dataclass(eq=False)
class LayerDerivative:
    """The gradient g of one layer, its calls concatenated along the queries; calling the object returns the tensor."""

    name: str
    arrivals: Arrivals
    zeros: list[Tensor] = field(default_factory=list)  # of each call (batch, heads, queries, d_v), one number in memory
    brought: dict[int, Tensor] = field(default_factory=dict)  # by call: the sum of the gradients at its output
    graphless: bool = False  # a call ran without a graph: no gradient will come

    def follow(self, output: Tensor) -> Tensor:
        """Attach the output of the layer's next call, (batch, heads, queries, d_v), to a node that brings its gradient.

        The node holds no tensor, and this object only by a weak reference, so neither keeps the other alive. It has an
        extra leaf as input, so that a graph exists even if the model's parameters are frozen. If no graph is recorded,
        the output is returned unchanged.
        """
        self.zeros.append(output.detach().new_zeros(()).expand(output.shape))
        if not torch.is_grad_enabled():
            self.graphless = True
            return output
        leaf = output.new_empty(0).requires_grad_()
        followed: Tensor = _Followed.apply(output, leaf, ref(self), len(self.zeros) - 1)  # type: ignore[no-untyped-call]
        return followed

    def add(self, call: int, g: Tensor, *, chosen: bool) -> None:
        """Add a gradient that a backward pass brought."""
        self.brought[call] = self.brought[call] + g.detach() if call in self.brought else g.detach()
        self.arrivals |= {"some", "chosen"} if chosen else {"some"}

    def __call__(self) -> Tensor:
        """Return g, (batch, heads, queries, d_v); 0 where the number does not depend on an output.

        Raises RuleError if no backward pass ran, or if none could reach the layer.
        """
        missing = len(self.brought) < len(self.zeros)
        if missing and self.graphless:
            raise RuleError(
                f"layer {self.name} ran without a graph: it is checkpointed with use_reentrant=True, or the model runs "
                "it under torch.no_grad.",
                'model.activation_checkpointing_enable({"use_reentrant": False}), or watch layers=[…] without it.',
            )
        if "some" not in self.arrivals:
            raise RuleError("no backward pass has run, so no gradient has reached the heads' outputs.", BACKWARD)
        if missing and "chosen" in self.arrivals:
            raise RuleError(
                f"no gradient reached layer {self.name}, and a backward pass went to chosen tensors only "
                "(torch.autograd.grad, inputs=…): whether the number depends on this layer is not known.",
                "call loss.backward(), which reaches every layer.",
            )
        parts = [self.brought.get(call, zeros) for call, zeros in enumerate(self.zeros)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class _Followed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, leaf: Tensor, layer: "ref[LayerDerivative]", call: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.leaf, ctx.layer, ctx.call = leaf, layer, call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,), layer = grads, ctx.layer()
        if grad is not None and layer is not None:
            leaf = torch.autograd.graph.get_gradient_edge(ctx.leaf).node  # reached only by a pass to every leaf
            layer.add(ctx.call, grad, chosen=not torch._C._will_engine_execute_node(leaf))
        return grad, None, None, None
