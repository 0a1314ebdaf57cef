"""Connects what is computed over shards to PyTorch's graph: nodes as in ops/torch_nodes.py, for all ranks together.

Derivatives are one linear map, which all ranks compute together:

    asked = H·along + Jᵀ·changing       gradients of inputs, or their tangents
    moved = J·along                     tangents of answers

J is the derivative of the answers by the inputs, H the second derivative of Σ by·answers. H is symmetric, so that the
map's transpose is the same map: a gradient is Jᵀ, forward mode J, a second derivative all of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.rule_values import spread
from clearhead.core.statistics import STATISTICS, Wanted, arrays_of
from clearhead.distributed import methods
from clearhead.distributed.along import Moving
from clearhead.distributed.graph import Call, Leaves, gradients, shaped
from clearhead.distributed.ranks import Ranks, must_equal
from clearhead.distributed.shards import Shards, array_of
from clearhead.errors import DerivativeError, DistributedError
from clearhead.ops.tangents import ROWS, SMOOTH, check_smooth
from clearhead.ops.torch_duals import Tensors
from clearhead.ops.torch_functions import Bundle, part, parts
from clearhead.ops.torch_nodes import Kind, compute, no_third

_SHARED = ("bias", "spans")  # rules whose gradient some ranks may ask for and others not


@dataclass(eq=False, slots=True)
class Pending:
    """A call as PyTorch's graph holds it.

    names    of its answers
    run      computes it from plain tensors; all ranks call it
    call     what came of it
    """

    names: Sequence[str]
    run: Callable[[Leaves], Call]
    call: Call | None = None


def answers(names: Sequence[str], run: Callable[[Leaves], Call], leaves: Leaves) -> dict[str, Tensor]:
    """The answers as tensors (…, heads, …), by name, with a graph or tangents where the leaves have them."""
    return compute(_VALUES, {**leaves._asdict(), "pending": Pending(names, run)})


def _of(bundle: Bundle) -> Call:
    call: Call = bundle["pending"].call
    return call


def _values(bundle: Bundle) -> Tensors:
    pending: Pending = bundle["pending"]
    if pending.call is not None:
        raise DerivativeError("attention over ranks cannot be mapped (torch.vmap).", "give q, k and v a batch axis.")
    call = pending.call = pending.run(Leaves(*(bundle[name] for name in Leaves._fields)))
    return {name: _given(call.shards, x) for name, x in call.found.items()}


def _given(shards: Shards, x: Array) -> Tensor:
    return shards.give(x.reshape(shards.prefix + x.shape[2:]))


def _map_of(
    bundle: Bundle, *, by: Tensors, along: Tensors, changing: Tensors, asked: Sequence[str], moved: Sequence[str]
) -> Tensors:
    """The map's answers; what is missing is zero."""
    asked = tuple(asked) if (by and along) or changing else ()
    moved = tuple(moved) if along else ()
    if not asked and not moved:
        return {}
    sides = {"by": by if asked and along else {}, "along": along, "changing": changing if asked else {}}
    plain = {name: x for name, x in bundle.items() if ":" not in name}
    for role, side in sides.items():
        plain |= parts(role, side)
    return compute(_MAP, {**plain, "asked": asked, "moved": moved})


def _map(bundle: Bundle) -> Tensors:
    """The map, computed by all ranks together."""
    call, asked = _of(bundle), bundle["asked"]
    shards, what = call.shards, f"{call.what}, {'backward' if asked else 'forward mode'}"
    by, along, changing = (part(bundle, role) for role in ("by", "along", "changing"))
    told = {"tangents": sorted(along), "by": [*by], "changing": [*changing], "moved": bundle["moved"]}
    everybody = _agreed(shards.ranks, what, {**told, **{name: name in asked for name in _SHARED}})
    names = frozenset(name for name in _SHARED if any(one[name] for one in everybody))
    wanted, slopes, changes = _filled(call, everybody, by, changing)
    moved: Mapping[str, Array] = {}
    with shards.ranks.together(what):
        if not along:
            smooth = [name for name in call.found if name in SMOOTH]
            every = {name: changes.get(name, np.zeros_like(call.found[name])) for name in smooth}
            found = gradients(call, every, asked=names)
        else:
            moving = _moving(call, along)
            if asked:
                found, moved = moving.gradient_tangents(call.found, slopes, changes, names, wanted)
            else:
                found, moved = {}, moving.tangents(wanted)
    made = {name: shaped(shards, found[name], bundle[name], name) for name in asked}
    for name in bundle["moved"]:
        made[f"moved:{name}"] = _given(shards, moved[f"{name}_tangent"].astype(call.found[name].dtype))
    return made


def _filled(
    call: Call, everybody: Sequence[Mapping[str, Any]], *sides: Tensors
) -> tuple[set[str], dict[str, Array], dict[str, Array]]:
    """The answers whose tangents some rank asks for; and both sides, with zeros where only other ranks' losses have it.

    These are the answers of which ranks send each other parts.
    """
    named = [{name for one in everybody for name in one[role]} for role in ("by", "changing", "moved")]
    linked = set.union(*named) - {"output", "logsumexp", *ROWS}
    by, changing = (
        {name: np.zeros_like(call.found[name]) for name in sorted(linked | ({"output"} & names))}
        | {name: array_of(x, "gradient").reshape(call.found[name].shape) for name, x in side.items()}
        for side, names in zip(sides, named, strict=False)
    )
    return named[2], by, changing


def _agreed(ranks: Ranks, what: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank asks for, by rank. Raises DistributedError where their directions differ."""
    everybody = ranks.agree(what, told)
    try:
        must_equal(what, everybody, ["tangents"])
    except DistributedError:
        ranks.part(range(ranks.world))
        raise
    return everybody


def _moving(call: Call, along: Tensors) -> Moving:
    """The shards along a direction, whose tensors have the inputs' shapes."""
    shards = call.shards
    given = {name: array_of(x, name) for name, x in along.items()}
    own = {name: given[name].reshape(getattr(shards, name).shape) for name in given.keys() & {*"qkv"}}
    for name in given.keys() & {"bias", "spans"}:
        tail = (shards.q.shape[2], shards.whole.keys) if name == "bias" else given[name].shape[-2:]
        own[name] = spread(given[name], (*shards.prefix, *tail))
    if "sinks" in given:
        own["sinks"] = given["sinks"].reshape(-1).astype(np.float64)
    logsumexp = call.logsumexp
    if logsumexp is None:
        logsumexp = methods.rows(call.method, shards, Wanted(logsumexp=True))["logsumexp"]
    return Moving(call.method, shards, logsumexp, Directions(**own), call.pooled)


def _values_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    asked = [name for name in Leaves._fields if name in needed]
    return _map_of(bundle, by={}, along={}, changing=grads, asked=asked, moved=())


def _values_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    names = bundle["pending"].names
    check_smooth(names, "forward-mode derivative")
    found = compute(_VALUES, bundle) if results is None else results
    moved = _map_of(bundle, by={}, along=tangents, changing={}, asked=(), moved=names)
    return found, {name.removeprefix("moved:"): x for name, x in moved.items()}


def _map_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    by, along, changing = (part(bundle, role) for role in ("by", "along", "changing"))
    own, moved = {name: x for name, x in grads.items() if ":" not in name}, part(grads, "moved")
    inputs = [name for name in Leaves._fields if name in needed]
    if by and (inputs or any(name.startswith("by:") for name in needed)):
        no_third()
    asked, changed = (
        [name.partition(":")[2] for name in bundle if name.startswith(role) and name in needed]
        for role in ("along:", "changing:")
    )
    if own and not by:  # a gradient's: H of its upstream gradient
        _check_parts(_of(bundle).method, own)
        found = _map_of(bundle, by=changing, along=own, changing={}, asked=inputs, moved=changed)
        return {f"changing:{x.partition(':')[2]}" if ":" in x else x: y for x, y in found.items()}
    found = _map_of(bundle, by=by, along=own, changing=moved, asked=asked, moved=changed)
    made = {f"changing:{x.partition(':')[2]}" if ":" in x else f"along:{x}": y for x, y in found.items()}
    return made | _map_of(bundle, by=moved, along=along, changing={}, asked=inputs, moved=())


def _map_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    by, along, changing = (part(bundle, role) for role in ("by", "along", "changing"))
    inputs = {name: x for name, x in tangents.items() if ":" not in name}
    by_moved, along_moved, changing_moved = (part(tangents, role) for role in ("by", "along", "changing"))
    if by_moved or (inputs and along):
        no_third()
    found = compute(_MAP, bundle) if results is None else results
    sides = {"by": changing, "along": inputs} if inputs else {"by": by, "along": along_moved}
    moved = _map_of(bundle, **sides, changing=changing_moved, asked=bundle["asked"], moved=bundle["moved"])
    return found, moved


def _check_parts(method: str, along: Iterable[str]) -> None:
    """Raise DerivativeError where the ranks' parts of a gradient are not those of their own queries."""
    others = sorted({*along} & {"ulysses": {"sinks", "spans"}, "merge": {"spans"}}.get(method, set()))
    if others:
        raise DerivativeError(
            f"the gradient by {' and '.join(others)} has no derivative by method={method!r}.", 'method="ring"'
        )


_INERT = tuple(array for name in STATISTICS if name not in SMOOTH for array in arrays_of(name))
_VALUES = Kind(lambda bundle: bundle["pending"].names, _values, _values_backward, _values_along, _INERT, folds=False)
_MAP = Kind(
    lambda bundle: (*bundle["asked"], *(f"moved:{name}" for name in bundle["moved"])),
    _map,
    _map_backward,
    _map_along,
    folds=False,
)
