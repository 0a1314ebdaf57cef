"""Connects what is computed over shards to PyTorch's graph: nodes as in ops/torch_nodes.py, for all ranks together.

Derivatives are one linear map, which all ranks compute together:

    asked = H·along + Jᵀ·changing       gradients of inputs, or their tangents
    moved = J·along                     tangents of answers

J is the derivative of the answers by the inputs, H the second derivative of Σ by·answers. H is symmetric, so that the
map's transpose is the same map: a gradient is Jᵀ, forward mode J, a second derivative all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.rule_values import spread
from clearhead.core.rules import Rules, flat, joined
from clearhead.core.statistics import STATISTICS, Wanted, arrays_of
from clearhead.distributed import passes
from clearhead.distributed.low_rank import Product, gradients
from clearhead.distributed.ranks import must_equal
from clearhead.distributed.sharded_problem import Shards, array_of
from clearhead.distributed.tangents import Moving
from clearhead.errors import DerivativeError
from clearhead.ops.tangents import ROWS, SMOOTH, check_smooth
from clearhead.ops.torch_derivatives import map_backward, map_of, no_third
from clearhead.ops.torch_duals import Tensors, unpack
from clearhead.ops.torch_nodes import Kind, compute
from clearhead.ops.torch_passes import Bundle, part

_SHARED = ("bias", "spans")  # rules whose gradient some ranks may ask for and others not
_RULES = {"bias": "bias", "sinks": "sinks", "spans": "spans[2]"}  # as `flat` names them


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
        tensors: Any = {name: x for name, rule in _RULES.items() if isinstance(x := values.get(rule), Tensor)}
        return Leaves(q, k, **tensors).with_values(v)

    def into(self, rules: Rules) -> Rules:
        """The rules with the leaves in the places of the tensors that were given."""
        tensors = {rule: x for name, rule in _RULES.items() if (x := getattr(self, name)) is not None}
        return joined({**flat(rules)} | tensors)

    def still(self) -> "Leaves":
        """The same without the tangents that they carry."""
        return Leaves(*map(still, self))

    def moving(self) -> list[str]:
        """The names of those that carry a tangent."""
        return [name for name, x in self._asdict().items() if still(x) is not x]

    def with_values(self, v: Any) -> "Leaves":
        """The same with v replaced; None where v is no tensor."""
        return self._replace(v=v if isinstance(v, Tensor) else None)

    def take(self, queries: slice | Array) -> "Leaves":
        """The same for some of this rank's queries, given by their indices in the shard."""
        bias = self.bias
        if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
            bias = bias[..., queries, :]
        return self._replace(q=self.q[..., queries, :], bias=bias)


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
    answers: dict[str, Array]  # (batch, heads, …), by name
    logsumexp: Array | None  # of own queries
    products: Mapping[str, Product] = field(default_factory=dict)  # image and groups, where they were answered


def output_of(what: str, shards: Shards, method: str) -> Call:
    """The call that answers the output of own queries. All ranks must call it."""
    with shards.ranks.together(what):
        results = passes.rows(method, shards, Wanted(output=True, logsumexp=True))
    logsumexp = results.pop("logsumexp")
    return Call(what, shards, method, results, logsumexp)


def answers(names: Sequence[str], run: Callable[[Leaves], Call], leaves: Leaves) -> dict[str, Tensor]:
    """The answers as tensors (…, heads, …), by name, with a graph or tangents where the leaves have them.

    names    of the answers
    run      computes the call from plain tensors; all ranks call it
    """
    made: list[Call] = []  # the call, once it is computed
    return compute(_VALUES, {**leaves._asdict(), "names": names, "run": run, "made": made})


def _values(bundle: Bundle) -> Tensors:
    if bundle["made"]:
        raise DerivativeError("attention over ranks cannot be mapped (torch.vmap).", "give q, k and v a batch axis.")
    call = bundle["run"](Leaves(*(bundle[name] for name in Leaves._fields)))
    bundle["made"].append(call)
    return {name: call.shards.shaped(x) for name, x in call.answers.items()}


def _map(bundle: Bundle) -> Tensors:
    """The map, computed by all ranks together."""
    (call,), asked = bundle["made"], bundle["asked"]
    shards, what = call.shards, f"{call.what}, {'backward' if asked else 'forward mode'}"
    by, along, changing = (part(bundle, role) for role in ("by", "along", "changing"))
    compared = {"tangents": sorted(along), "by": [*by], "changing": [*changing], "moved": bundle["moved"]}
    everybody = shards.ranks.agree(what, {**compared, **{name: name in asked for name in _SHARED}})
    must_equal(shards.ranks, what, everybody, ["tangents"])
    names = frozenset(name for name in _SHARED if any(one[name] for one in everybody))
    wanted, slopes, changes = _filled(call, everybody, by, changing)
    by_inputs: Mapping[str, Array] = {}
    shifts: Mapping[str, Array] = {}
    with shards.ranks.together(what):
        if not along:
            smooth = [name for name in call.answers if name in SMOOTH]
            loss = {name: changes.get(name, np.zeros_like(call.answers[name])) for name in smooth}
            known = call.answers if call.logsumexp is None else {**call.answers, "logsumexp": call.logsumexp}
            by_inputs = gradients(call.method, shards, known, loss, call.products, names)
        elif asked:
            by_inputs, shifts = _moving(call, along).gradient_tangents(call.answers, slopes, changes, names, wanted)
        else:
            shifts = _moving(call, along).tangents(wanted)
    made = {name: _like(bundle[name], shards, by_inputs[name], name) for name in asked}
    for name in bundle["moved"]:
        made[f"moved:{name}"] = shards.shaped(shifts[f"{name}_tangent"].astype(call.answers[name].dtype))
    return made


def _like(leaf: Tensor, shards: Shards, gradient: Array, name: str) -> Tensor:
    """The gradient of a leaf in its shape and dtype, summed over the axes along which it is broadcast."""
    tensor = torch.as_tensor(np.ascontiguousarray(gradient)).to(leaf.device, leaf.dtype)
    if name in _SHARED:
        batch = shards.prefix[:-1] if len(gradient) > 1 else (1,) * (len(shards.prefix) - 1)
        return tensor.reshape(*batch, *gradient.shape[1:]).sum_to_size(leaf.shape)
    return tensor.reshape(leaf.shape)


def _filled(
    call: Call, everybody: Sequence[Mapping[str, Any]], *sides: Tensors
) -> tuple[set[str], dict[str, Array], dict[str, Array]]:
    """The answers whose tangents some rank asks for; and both sides, with zeros where only other ranks' losses have it.

    These are the answers of which ranks send each other parts.
    """
    named = [{name for one in everybody for name in one[role]} for role in ("by", "changing", "moved")]
    linked = set.union(*named) - {"output", "logsumexp", *ROWS}
    by, changing = (
        {name: np.zeros_like(call.answers[name]) for name in sorted(linked | ({"output"} & names))}
        | {name: array_of(x, "gradient").reshape(call.answers[name].shape) for name, x in side.items()}
        for side, names in zip(sides, named, strict=False)
    )
    return named[2], by, changing


def _moving(call: Call, along: Tensors) -> Moving:
    """The shards along a direction, whose tensors have the inputs' shapes."""
    shards = call.shards
    arrays = {name: array_of(x, name) for name, x in along.items()}
    directions: dict[str, Any] = {}
    for name, x in arrays.items():
        if name in "qkv":
            directions[name] = x.reshape(getattr(shards, name).shape)
        elif name == "sinks":
            directions[name] = x.reshape(-1).astype(np.float64)
        else:
            tail = (shards.lengths[0], shards.whole.keys) if name == "bias" else x.shape[-2:]
            directions[name] = spread(x, (*shards.prefix, *tail))
    assert call.logsumexp is not None
    return Moving(call.method, shards, call.logsumexp, Directions(**directions), call.products)


def _values_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    asked = [name for name in Leaves._fields if name in needed]
    return map_of(bundle, changing=grads, asked=asked, kind=_MAP)


def _values_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    check_smooth(bundle["names"], "forward-mode derivative")
    values = compute(_VALUES, bundle) if results is None else results
    moved = map_of(bundle, along=tangents, moved=bundle["names"], kind=_MAP)
    return values, part(moved, "moved")


def _map_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    if "spans" in grads and bundle["made"][0].method == "merge" and not part(bundle, "by"):
        # a rank's part is not that of its own queries
        raise DerivativeError("the gradient by spans has no derivative by method='merge'.", 'method="ring"')
    inputs = [name for name in Leaves._fields if name in needed]
    return map_backward(bundle, grads, inputs, needed, _MAP)


def _map_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    by, along, changing = (part(bundle, role) for role in ("by", "along", "changing"))
    inputs = {name: x for name, x in tangents.items() if ":" not in name}
    by_moved, along_moved, changing_moved = (part(tangents, role) for role in ("by", "along", "changing"))
    if by_moved or (inputs and along):
        no_third()
    answers = compute(_MAP, bundle) if results is None else results
    sides: Any = {"by": changing, "along": inputs} if inputs else {"by": by, "along": along_moved}
    sides |= {"changing": changing_moved, "asked": bundle["asked"], "moved": bundle["moved"]}
    return answers, map_of(bundle, **sides, kind=_MAP)


_INERT = tuple(array for name in STATISTICS if name not in SMOOTH for array in arrays_of(name))
_VALUES = Kind(lambda bundle: bundle["names"], _values, _values_backward, _values_along, _INERT, folds=False)
_MAP = Kind(
    lambda bundle: (*bundle["asked"], *(f"moved:{name}" for name in bundle["moved"])),
    _map,
    _map_backward,
    _map_along,
    folds=False,
)
