"""The backward pass over one problem: dK and dV, then dQ, then the gradients of the bias and of spans."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Inputs
from clearhead.engines.base import Kept, Upstream
from clearhead.engines.gpu import gradients, passes
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.arguments import Sizes
from clearhead.engines.gpu.gradients import Loss
from clearhead.engines.gpu.passes import Pass


class Moving(NamedTuple):
    """A direction for a backward pass: the inputs' tangents, the log-sum-exp and the upstream gradient's tangent."""

    along: Directions
    kept: Kept
    changing: Upstream


class Derivatives(Pass):
    """One backward pass, or its tangents."""

    def __init__(self, inputs: Inputs, logsumexp: Array, upstream: Upstream, moving: Moving | None = None) -> None:
        inputs = inputs._replace(v=None) if upstream.output is None else inputs
        output = None if inputs.v is None else upstream.output
        moved = None if moving is None or inputs.v is None else moving.changing.output
        super().__init__(inputs, output, None if moving is None else moving.along, moved)
        self.shapes: dict[str, Any] = {
            name: None if x is None else x.shape for name, x in zip("qkv", inputs[1:], strict=True)
        }
        self.upstream = upstream
        self.loss = self._loss(logsumexp, upstream)
        self.change = Loss() if moving is None else self._loss(moving.kept.tangent, moving.changing)
        self.sizes = gpu.sizes(self.problem, "gradients" if moving is None else "gradient tangents", self.d_v)

    def all(self, number: torch.dtype) -> dict[str, Any]:
        """The gradients of q, k and v in this dtype, of bias and of spans in the statistics'."""
        problem, upstream = self.problem, self.upstream
        group = problem.group
        shared = self.inputs.v is None or self.inputs.v.share == self.inputs.k.share
        together = group if shared else 1  # else one gradient per query head, summed below
        room = {"q": self.zeros(*self.shapes["q"], dtype=number)}
        for name in ("k", "v"):
            if (shape := self.shapes[name]) is not None:
                heads = problem.batch, problem.heads // together
                room[name] = self.zeros(*heads, *shape[2:], dtype=number if shared else self.number)
        for name, shape in (("bias", upstream.bias), ("spans", upstream.spans)):
            if shape is not None:
                room[name] = self.zeros(*shape)
        if not self.empty:
            self._launch(room, together)
        if not shared:
            for name in ("k", "v"):
                apart = room[name].reshape(*self.shapes[name][:2], -1, *self.shapes[name][2:])
                room[name] = apart.sum(dim=2).to(number)
        return room

    def _launch(self, room: dict[str, Any], together: int) -> None:
        problem, sizes = self.problem, self.sizes
        arguments: dict[str, Any] = {"loss": self.loss, "change": self.change, "along": self.direction}
        self.launch_twice(
            gradients.keys, problem.keys, sizes, heads=self.heads // together, **arguments, out_k=room["k"],
            out_v=room.get("v"), together=together,
        )  # fmt: skip
        self.launch_twice(gradients.queries, problem.queries, sizes, **arguments, out=room["q"])
        square = sizes._replace(M=sizes.N)
        if self.upstream.bias is not None:
            batch, heads, queries, keys = self.upstream.bias
            self.launch(
                gradients.bias, queries, square, heads=-(-keys // sizes.N) * batch * heads, **arguments,
                out=room["bias"], batch=problem.batch, bias_batch=batch, bias_heads=heads,
                across_queries=problem.queries // queries, across_keys=problem.keys // keys,
            )  # fmt: skip
        if "spans" in room and room["spans"].numel():
            self._launch_spans(room["spans"], square, arguments)

    def _launch_spans(self, gradient: torch.Tensor, sizes: Sizes, arguments: dict[str, Any]) -> None:
        """The gradient of the table, in bands of its columns; sums over queries, heads and batch are in float64."""
        problem = self.problem
        batch, heads, height, width = gradient.shape
        assert problem.query_spans is not None
        assert problem.key_spans is not None
        order = passes.in_order(problem.query_spans, height, self.device)
        for first, count, span in passes.bands(problem.key_spans, width):
            sums = self.zeros(problem.batch, problem.heads, problem.queries, count)
            self.launch(
                gradients.spans, problem.queries, sizes, **arguments, out=sums, first=first, count=count,
                part=passes.rounded(span, sizes.N), D=gpu.padded(count),
            )  # fmt: skip
            if heads < problem.heads:
                sums = sums.sum(1, keepdim=True, dtype=torch.float64)
            pooled = self.zeros(problem.batch, heads, count, height, dtype=torch.float64)
            passes.pool(sums, pooled, 0, order)
            if batch < problem.batch:
                pooled = pooled.sum(0, keepdim=True)
            gradient[..., first : first + count] = pooled.swapaxes(-1, -2)

    def _loss(self, logsumexp: Array, upstream: Upstream) -> Loss:
        names = (name for name in Loss._fields if name != "logsumexp")
        return Loss(self.contiguous(logsumexp), *(self.contiguous(getattr(upstream, name)) for name in names))


def in_parts(
    inputs: Inputs, logsumexp: Array, upstream: Upstream, moving: Moving | None, most: int
) -> dict[str, torch.Tensor]:
    """For d_v above `most`: results from slices of d_v, summed in the statistics' dtype, as dS is linear in dO."""
    problem, q, _, v = inputs
    assert v is not None
    sums: dict[str, Any] = {}
    by_v, number = [], gpu.statistics(problem)
    nothing = gpu.from_tensor(torch.zeros(upstream.rows.shape, device=gpu.device_of(q)), q)
    for start in range(0, v.shape[-1], most):
        columns = slice(start, start + most)
        part, moved = _slice(upstream, columns), moving
        if moving is not None:
            along = moving.along
            along = along if along.v is None else replace(along, v=along.v[..., columns])
            moved = Moving(along, moving.kept, _slice(moving.changing, columns))
        if sums:
            part = Upstream(nothing, part.output, bias=part.bias, spans=part.spans)
            moved = moved and moved._replace(changing=Upstream(nothing, moved.changing.output))
        results = Derivatives(inputs._replace(v=v[..., columns]), logsumexp, part, moved).all(number)
        by_v.append(results.pop("v"))
        sums = {name: sums[name] + x if sums else x for name, x in results.items()}
    return {**sums, "v": torch.cat(by_v, -1)}


def _slice(upstream: Upstream, columns: slice) -> Upstream:
    return upstream if upstream.output is None else replace(upstream, output=upstream.output[..., columns])
