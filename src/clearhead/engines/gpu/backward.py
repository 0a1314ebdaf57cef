"""Launches the backward kernels for one problem: dK and dV, then dQ, then the gradients of the bias and of spans."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from triton import language

from clearhead.core.axes import Array, group_size
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.engines.base import Kept, Upstream
from clearhead.engines.gpu import columns, gradients, labels, span_gradients
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.directions import direction
from clearhead.engines.gpu.gradients import Loss, Places

_BAND = 64  # labels of keys per launch
_NONE = Loss(*(None,) * len(Loss._fields))


class Moving(NamedTuple):
    """A direction for a backward pass: the inputs' tangents, the log-sum-exp and the upstream gradient's tangent."""

    along: Directions
    kept: Kept
    changing: Upstream


class Derivatives:
    """One backward pass, or its tangents: the arguments that its kernels share, and their launches."""

    def __init__(
        self, problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream,
        moving: Moving | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.device, self.upstream = problem, gpu.device_of(q), upstream
        self.shapes = q.shape, k.shape, None if v is None else v.shape
        output = upstream.output if v is not None else None
        values = None if output is None else v
        self.q, self.k = gpu.as_tensor(q), gpu.as_tensor(k)
        self.v = None if values is None else gpu.as_tensor(values)
        self.output_strides = (0, 0, 0, 0) if output is None else gpu.as_tensor(output).strides
        self.d_v = 0 if values is None else values.shape[-1]
        self.per_key = problem.group
        self.per_value = self.per_key if values is None else group_size(problem.heads, values.shape[1])
        self.loss, self.change = _loss(problem, logsumexp, upstream, values), _NONE
        along, moved_output = None, None
        if moving is not None:
            along = moving.along if values is not None else replace(moving.along, v=None)
            self.change = _loss(problem, moving.kept.tangent, replace(moving.changing, output=None), values)
            moved_output = moving.changing.output if values is not None else None
        self.along, self.steps = direction(
            problem, along, self.device, None if moved_output is None else gpu.as_tensor(moved_output)
        )
        self.tiles = gpu.tiles(problem, self.d_v, "gradients" if moving is None else "gradient tangents")
        self.rules = gpu.rules(problem, self.device)

    def all(self, own: torch.dtype, *, received: bool = False) -> dict[str, Any]:
        """The gradients of q, k and v in dtype `own`, of bias and of spans; with `received`, the mass of keys too."""
        problem = self.problem
        by_q, by_k, by_v = self.shapes
        shared = self.per_key == self.per_value  # else one gradient per query head, summed below
        together = self.per_key if shared else 1
        number = own if shared else gpu.statistics(problem)
        lead = problem.batch, problem.heads // together
        found = {"q": torch.zeros(by_q, dtype=own, device=self.device)}
        found["k"] = torch.zeros((*lead, *by_k[2:]), dtype=number, device=self.device)
        if self.loss.output is not None and by_v is not None:
            found["v"] = torch.zeros((*lead, *by_v[2:]), dtype=number, device=self.device)
        if received:
            shape = problem.batch, problem.heads, problem.keys
            found["received"] = torch.zeros(shape, dtype=gpu.statistics(problem), device=self.device)
        if self.upstream.bias is not None:
            found["bias"] = torch.zeros(self.upstream.bias, dtype=gpu.statistics(problem), device=self.device)
        if self.upstream.spans is not None:
            found["spans"] = torch.zeros(self.upstream.spans, dtype=gpu.statistics(problem), device=self.device)
        if problem.batch * problem.heads * problem.queries * problem.keys:
            self._launch(found, together)
        if not shared:
            for name, size in (("k", by_k), ("v", by_v)):
                if name in found and size is not None:
                    apart = found[name].reshape(size[0], size[1], -1, *size[2:])
                    found[name] = apart.sum(dim=2).to(own)
        return found

    def _launch(self, found: dict[str, Any], together: int) -> None:
        problem, tiles = self.problem, self.tiles
        heads = problem.batch * problem.heads
        arguments = {
            **gpu.by_name(q=self.q, k=self.k, v=self.v), "o_strides": self.output_strides, "d_k": problem.d_k,
            "d_v": self.d_v, "rules": self.rules, "loss": self.loss, "change": self.change, "along": self.along,
            "steps": self.steps, "per_key": self.per_key, "per_value": self.per_value,
            "DK": gpu.padded(problem.d_k), "DV": gpu.padded(self.d_v), "FLOAT": tiles.number,
            "CHUNK": tiles.chunk, "PRECISION": tiles.precision, "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip
        high, wide = tiles.owned, tiles.passed
        to = Places(found["k"], found.get("v"), found.get("received"))
        gradients.keys[(-(-problem.keys // high) * (heads // together),)](
            **arguments, to=to, together=together, M=high, N=wide
        )
        gradients.queries[(-(-problem.queries // high) * heads,)](**arguments, out=found["q"], M=high, N=wide)
        if self.upstream.bias is not None:
            batch, own_heads, queries, keys = self.upstream.bias
            grid = (-(-queries // wide) * -(-keys // wide) * batch * own_heads,)
            gradients.bias[grid](
                **arguments, out=found["bias"], batch=problem.batch, own_batch=batch, own_heads=own_heads,
                over_queries=problem.queries // queries, over_keys=problem.keys // keys, M=wide, N=wide,
            )  # fmt: skip
        if "spans" in found and found["spans"].numel():
            self._launch_spans(found["spans"], arguments)

    def _launch_spans(self, found: torch.Tensor, arguments: dict[str, Any]) -> None:
        """The gradient of the table, in bands of its columns; sums over queries, heads and batch are in float64."""
        problem, tiles = self.problem, self.tiles
        own_batch, own_heads, height, width = found.shape
        assert problem.query_spans is not None
        assert problem.key_spans is not None
        by_label = [gpu.to_device(x, np.int32, self.device) for x in labels.ordered(problem.query_spans, height)]
        grid = -(-problem.queries // tiles.passed) * problem.batch * problem.heads
        for first in range(0, width, _BAND):
            count = min(_BAND, width - first)
            inside = np.flatnonzero(((problem.key_spans >= first) & (problem.key_spans < first + count)).any(axis=0))
            if not len(inside):
                continue
            shape = problem.batch, problem.heads, problem.queries, count
            sums = torch.zeros(shape, dtype=gpu.statistics(problem), device=self.device)
            span_gradients.spans[(grid,)](
                **arguments, out=sums, first=first, count=count, within=(int(inside[0]), int(inside[-1]) + 1),
                M=tiles.passed, N=tiles.passed, D=gpu.padded(count),
            )  # fmt: skip
            if own_heads < problem.heads:
                sums = sums.sum(1, keepdim=True, dtype=torch.float64)
            pooled = torch.zeros((problem.batch, own_heads, count, height), dtype=torch.float64, device=self.device)
            columns.pool[(height * problem.batch * own_heads,)](
                sums, pooled, *by_label, problem.queries, height, own_heads, count, 0, count,
                D=gpu.padded(count), FLOAT=language.float64, N=32,
            )  # fmt: skip
            if own_batch < problem.batch:
                pooled = pooled.sum(0, keepdim=True)
            found[..., first : first + count] = pooled.swapaxes(-1, -2)


def _loss(problem: Problem, logsumexp: Array, upstream: Upstream, values: Array | None) -> Loss:
    """Upstream gradients, or their tangents, as the kernels read them; of the output only where there are values."""

    def per_line(x: Array | None) -> Any:
        return None if x is None else gpu.contiguous(x, gpu.statistics(problem))

    output = None if values is None or upstream.output is None else gpu.as_tensor(upstream.output).tensor
    return Loss(
        logsumexp=per_line(logsumexp),
        rows=per_line(upstream.rows),
        keys=per_line(upstream.keys),
        entropy=per_line(upstream.entropy),
        distance=per_line(upstream.distance),
        own=per_line(upstream.own),
        output=output,
    )


def in_parts(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    logsumexp: Array,
    upstream: Upstream,
    moving: Moving | None,
    most: int,
) -> dict[str, torch.Tensor]:
    """For d_v above `most`: results from slices of d_v, summed in the statistics' dtype, as dS is linear in dO."""
    found: dict[str, Any] = {}
    by_v = []
    nothing = gpu.from_tensor(torch.zeros(upstream.rows.shape, device=gpu.device_of(q)), q)
    for start in range(0, v.shape[-1], most):
        at = slice(start, start + most)
        told, moved = _slice(upstream, at), moving
        if moving is not None:
            along = moving.along
            along = along if along.v is None else replace(along, v=along.v[..., at])
            moved = Moving(along, moving.kept, _slice(moving.changing, at))
        if found:
            told = Upstream(nothing, told.output, bias=told.bias, spans=told.spans)
            moved = moved and moved._replace(changing=Upstream(nothing, moved.changing.output))
        part = Derivatives(problem, q, k, v[..., at], logsumexp, told, moved).all(gpu.statistics(problem))
        by_v.append(part.pop("v"))
        found = {name: found[name] + x if found else x for name, x in part.items()}
    return {**found, "v": torch.cat(by_v, -1)}


def _slice(upstream: Upstream, at: slice) -> Upstream:
    return upstream if upstream.output is None else replace(upstream, output=upstream.output[..., at])
