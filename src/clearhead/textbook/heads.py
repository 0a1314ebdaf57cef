"""One head against several: the same layer with its columns split into other numbers of heads, side by side."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import read_members, whole_number
from clearhead.errors import SelectionError
from clearhead.textbook.trace import Trace, largest_difference, listed
from clearhead.textbook.trace_layer import trace_layer

MOST = 4  # as many as fit beside each other


class WithHeads(NamedTuple):
    """A layer with one number of heads."""

    num_heads: int
    parameters: int  # numbers in W^Q, W^K, W^V, W^O and the biases: the same for every number of heads
    multiply_adds: int  # of all steps
    entropy: Array  # (…, heads): the mean over the queries, in nats
    difference: float  # the largest between this output and that of the first number of heads
    trace: Trace

    def to_json(self) -> dict[str, Any]:
        """Shapes, costs, weights and output as plain numbers."""
        steps = [{"name": s.name, "shape": s.shape, "multiply_adds": s.multiply_adds} for s in self.trace.steps]
        numbers = {"parameters": self.parameters, "multiply_adds": self.multiply_adds}
        return {"num_heads": self.num_heads, **numbers, "steps": steps, "entropy": listed(self.entropy)} | {
            "largest_difference": listed(self.difference),
            "weights": listed(self.trace.weights),
            "output": listed(self.trace.output),
        }


def heads_beside(counts: Sequence[int], **layer: Any) -> tuple[WithHeads, ...]:
    """The same layer, from the same matrices, with each of several numbers of heads.

    counts   two to four numbers of heads, such as (1, 8)
    layer    x, w_q, w_k, w_v, w_o and whatever else `trace_layer` takes; its num_heads is not used

    Raises SelectionError for fewer or more, and what `trace_layer` raises, such as ShapeError where a number of heads
    does not divide the width of w_q. Costs what `trace_layer` costs, for each number.
    Source: Vaswani et al. 2017, section 3.2.2: "due to the reduced dimension of each head, the total computational cost
    is similar to that of single-head attention with full dimensionality".

    >>> x, w = np.eye(3, 4), np.eye(4)
    >>> [(each.trace.q.shape, each.parameters) for each in heads_beside((1, 2), x=x, w_q=w, w_k=w, w_v=w)]
    [((1, 3, 4), 48), ((2, 3, 2), 48)]
    """
    members = read_members("counts", counts, (int, np.integer), f"two to {MOST} numbers of heads", "counts=(1, 8)")
    if not 2 <= len(members) <= MOST:
        raise SelectionError(
            "{count} numbers of heads: expected two to {most}.", "1 and 8, for example.", count=len(members), most=MOST
        )
    layers: list[WithHeads] = []
    for count in members:
        heads = whole_number("num_heads", count, 1)
        trace = trace_layer(**{**layer, "num_heads": heads})
        first = layers[0].trace if layers else trace
        arrays = [np.asarray(getattr(trace, name)) for name in trace.parameters]
        weights = np.asarray(trace.weights)
        terms = weights * np.log(np.where(weights > 0, weights, 1.0))
        entropy = -np.sum(terms, axis=-1 if trace.convention == "rows" else -2)
        parts = {
            "parameters": sum(array.size for array in arrays),
            "multiply_adds": sum(step.multiply_adds for step in trace.steps),
            "entropy": entropy.mean(axis=-1) if entropy.shape[-1] else entropy.sum(axis=-1),
            "difference": largest_difference(np.asarray(trace.output), np.asarray(first.output)),
        }
        layers.append(WithHeads(num_heads=heads, trace=trace, **parts))
    return tuple(layers)
