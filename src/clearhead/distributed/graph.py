"""Connects answers to PyTorch's graph: the backward pass of everything that is computed over shards.

image, groups and received are products of A with known numbers, so their gradients are those of further columns of the
output: dA_ij = X_i·Y_j, with Y appended to the values and X to the output's gradient, as in backward.py. max_logit,
peak, top and own carry no graph here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, group_size
from clearhead.core.rules import Rules, flat
from clearhead.core.statistics import listed
from clearhead.distributed import methods
from clearhead.distributed.exchange import total
from clearhead.distributed.pooled import Pooled
from clearhead.distributed.shards import Names, Shards, array_of
from clearhead.ops.torch_autograd import once, refuse_forward

_ROWS = listed(derivative="row")
SMOOTH = (*_ROWS, "received", *listed(derivative="rank"))


class Leaves(NamedTuple):
    """The tensors whose gradients a call may be asked for, as they were given; None for one that was not given."""

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    spans: Tensor | None = None  # the table

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor | None, rules: Rules) -> "Leaves":
        """Those among a call's arguments; a bias, sinks or a table that are no tensor get no gradient."""
        values = flat(rules)
        leaves = {"bias": values.get("bias"), "sinks": values.get("sinks"), "spans": values.get("spans[2]")}
        given: Any = {name: x for name, x in leaves.items() if isinstance(x, Tensor)}
        return Leaves(q, k, **given).with_values(v)

    def with_values(self, v: Any) -> "Leaves":
        """The same with v replaced; None where v is no tensor."""
        return self._replace(v=v if isinstance(v, Tensor) else None)

    def take(self, queries: Array) -> "Leaves":
        """The same for some of this rank's queries, given by their indices in the shard."""
        places = torch.from_numpy(queries)
        found = {"q": self.q.index_select(-2, places.to(self.q.device))}
        if self.bias is not None and self.bias.ndim > 1 and self.bias.shape[-2] > 1:
            found["bias"] = self.bias.index_select(-2, places.to(self.bias.device))
        return self._replace(**found)


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call with its answers: what the backward pass needs to know."""

    what: str
    shards: Shards
    method: str
    found: dict[str, Array]  # (batch, heads, …), by name
    logsumexp: Array | None  # of own queries; None where the method itself keeps it (ulysses)
    pooled: Mapping[str, Pooled] = field(default_factory=dict)


def answers(call: Call, leaves: Leaves) -> dict[str, Tensor]:
    """The answers as tensors (…, heads, …), by name, with a graph where one of the leaves requires grad."""
    names, tensors = call.found.keys(), _Graph.apply(*leaves, call)  # type: ignore[no-untyped-call]
    return dict(zip(names, tensors, strict=True))


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Any, bias: Any, sinks: Any, spans: Any, call: Call
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(q, k, v, bias, sinks, spans)
        shape = call.shards.prefix
        given = {name: call.shards.give(x.reshape(shape + x.shape[2:])) for name, x in call.found.items()}
        ctx.mark_non_differentiable(*(x for name, x in given.items() if name not in SMOOTH))
        return tuple(given.values())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return *once(_by_leaves, ctx.call, ctx.needs_input_grad, ctx.saved_tensors, grads), None

    jvp = staticmethod(refuse_forward)


def _by_leaves(
    call: Call, needed: Sequence[bool], leaves: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of the leaves, from those of all answers; None for a leaf that needs none. All ranks call it."""
    ranks, what = call.shards.ranks, f"{call.what}, backward"
    mine = {"bias": bool(needed[3]), "spans": bool(needed[5])}
    everybody = ranks.agree(what, mine)
    asked = frozenset(name for name in mine if any(one[name] for one in everybody))
    by = {
        name: array_of(grad, "gradient").reshape(x.shape)
        for (name, x), grad in zip(call.found.items(), grads, strict=True)
        if name in SMOOTH
    }
    with ranks.together(what):
        found = gradients(call, by, asked=asked)
    each = zip(Leaves._fields, leaves, needed, strict=False)
    return [None if x is None or not asked else _shaped(call.shards, found[name], x, name) for name, x, asked in each]


def gradients(call: Call, by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
    """The gradients of this rank's q, k, v (and bias, sinks and spans), from `by`, those of the answers by name."""
    shards = call.shards
    known = {name: call.found[name] for name in _ROWS if name in call.found}
    if call.logsumexp is not None:
        known["logsumexp"] = call.logsumexp
    loss = {name: by[name] for name in _ROWS if name in by}
    columns = _columns(call, by)
    if not columns:
        return methods.gradients(call.method, shards, known, loss, asked=asked)
    dtype, lead = statistics_dtype(shards.whole.dtype), (shards.whole.batch, shards.whole.heads)
    group = group_size(lead[1], 0 if shards.v is None else shards.v.shape[1])
    if shards.v is not None:
        spread = np.repeat(shards.v, group, axis=1)
        columns.insert(0, Columns(loss["output"], spread, known["output"]))
    slopes, values, output = (
        np.concatenate([np.broadcast_to(x, lead + x.shape[2:]).astype(dtype, copy=False) for x in side], axis=-1)
        for side in zip(*columns, strict=True)
    )
    wide = methods.widened(shards, values)
    found = methods.gradients(call.method, wide, {**known, "output": output}, {**loss, "output": slopes}, asked=asked)
    by_values = found.pop("v")
    if shards.v is not None:
        own = by_values[..., : shards.v.shape[3]].reshape(lead[0], shards.v.shape[1], group, *shards.v.shape[2:])
        found["v"] = own.sum(axis=2)
    return found


class Columns(NamedTuple):
    """Further columns of the output, whose part in the gradient of A is dA_ij = X_i·Y_j."""

    slopes: Array  # X, (batch or 1, heads or 1, own queries, columns)
    values: Array  # Y, (batch or 1, heads or 1, own keys, columns)
    output: Array  # A·Y, (batch, heads, own queries, columns)


def _columns(call: Call, by: Mapping[str, Array]) -> list[Columns]:
    found = []
    for name, whole in call.pooled.items():
        slopes = total(call.shards.ranks, f"derivative by {name}", by[name].astype(np.float64))
        found.append(Columns(whole.rows[:, None] @ slopes, whole.values[:, None], whole.mixed))
    if "received" in by:
        values = by["received"][..., None]
        mixed, _ = methods.mixed(call.method, call.shards, values)
        found.append(Columns(np.ones_like(mixed), values, mixed))
    return found


def _shaped(shards: Shards, found: Array, like: Tensor, name: str) -> Tensor:
    tensor = torch.as_tensor(np.ascontiguousarray(found)).to(like.device, like.dtype)
    if name in ("bias", "spans"):
        batch = shards.prefix[:-1] if found.shape[0] > 1 else (1,) * (len(shards.prefix) - 1)
        return tensor.reshape(*batch, *found.shape[1:]).sum_to_size(like.shape)
    return tensor.reshape(like.shape)
