"""Gradients of everything that is computed over shards; those of max_logit, peak and top carry no graph here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core.axes import Array
from clearhead.core.rules import Rules, flat, joined
from clearhead.distributed import low_rank, methods
from clearhead.distributed.pooled import Pooled
from clearhead.distributed.shards import Names, Shards
from clearhead.ops.tangents import ROWS
from clearhead.ops.torch_duals import unpack

_ROWS = ("output", "logsumexp", *ROWS)


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

    def into(self, rules: Rules) -> Rules:
        """The rules with the leaves in the places of the tensors that were given."""
        values = {**flat(rules)}
        own = {"bias": self.bias, "sinks": self.sinks, "spans[2]": self.spans}
        return joined(values | {name: x for name, x in own.items() if x is not None})

    def still(self) -> "Leaves":
        """The same without the tangents that they carry."""
        return Leaves(*map(still, self))

    def moving(self) -> list[str]:
        """The names of those that carry a tangent."""
        return [name for name, x in self._asdict().items() if still(x) is not x]

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


def still(x: Any) -> Any:
    """A tensor without the tangent that it carries in forward mode."""
    if not isinstance(x, Tensor) or forward_ad._current_level < 0 or torch._C._are_functorch_transforms_active():
        return x
    primal, tangent = unpack(x)
    return x if tangent is None else primal


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call with its answers: what the backward pass needs to know."""

    what: str
    shards: Shards
    method: str
    found: dict[str, Array]  # (batch, heads, …), by name
    logsumexp: Array | None  # of own queries; None where the method itself keeps it (ulysses)
    pooled: Mapping[str, Pooled] = field(default_factory=dict)


def gradients(call: Call, by: dict[str, Array], *, asked: Names) -> dict[str, Array]:
    """The gradients of this rank's q, k, v (and bias, sinks and spans), from `by`, those of the answers by name."""
    shards = call.shards
    known = {name: call.found[name] for name in _ROWS if name in call.found}
    if call.logsumexp is not None:
        known["logsumexp"] = call.logsumexp
    loss = {name: by[name] for name in _ROWS if name in by}
    products = low_rank.factors(shards, call.pooled, by)
    if not products:
        return methods.gradients(call.method, shards, known, loss, asked=asked)
    slopes, values = ([pair[side] for pair in products.values()] for side in (0, 1))
    mixed = [call.pooled[name].mixed for name in products if name in call.pooled]
    if "received" in by:
        mixed.append(methods.mixed(call.method, shards, by["received"][..., None])[0])
    if shards.v is not None:
        slopes.insert(0, loss["output"])
        values.insert(0, low_rank.over_heads(shards, shards.v))
        mixed.insert(0, known["output"])
    slope, value, output = (low_rank.joined(shards, side) for side in (slopes, values, mixed))
    wide = methods.widened(shards, value)
    found = methods.gradients(call.method, wide, {**known, "output": output}, {**loss, "output": slope}, asked=asked)
    by_values = found.pop("v")
    if shards.v is not None:
        found["v"] = low_rank.of_own_values(shards, by_values)
    return found


def shaped(shards: Shards, found: Array, like: Tensor, name: str) -> Tensor:
    """A gradient of the leaf `name` in its shape, summed over the axes along which it is broadcast."""
    tensor = torch.as_tensor(np.ascontiguousarray(found)).to(like.device, like.dtype)
    if name in ("bias", "spans"):
        batch = shards.prefix[:-1] if found.shape[0] > 1 else (1,) * (len(shards.prefix) - 1)
        return tensor.reshape(*batch, *found.shape[1:]).sum_to_size(like.shape)
    return tensor.reshape(like.shape)
