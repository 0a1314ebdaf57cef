"""torch.vmap over attention: the mapped axis becomes one more batch axis, in front of all others.

Rules with a number for each head (sinks, ALiBi's slopes, scales) have no batch axis. Where one of these is mapped, or
each call's own gradient by the sinks is asked for, the mapped axis joins the heads instead. Results, their bits too, do
not depend on which. What has a value for each batch entry (lengths, segments, labels, offsets) cannot join the heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.core.rules import BROADCAST, fields_along
from clearhead.ops.torch_passes import Bundle

_BATCHED = torch._C._dispatch_key_parse("Batched")  # of PyTorch's older vmap: is_grads_batched, vectorize=True

_PER_HEAD = (*fields_along("heads"), "scales")
_LENGTHS = fields_along("batch")  # (batch axes,)
_TOKENS = (*fields_along("batch", "queries"), *fields_along("batch", "keys"), "query_groups", "key_groups")


def folded(bundle: Bundle, mapped: dict[str, int | None], count: int) -> tuple[Bundle, bool] | None:
    """The bundle of all `count` calls at once, and whether it has the heads of all; None where one call cannot do.

    mapped   the axis along which each tensor is mapped; None where it is the same for all
    """
    plain = {name: name.partition(":")[2] or name for name in bundle}
    asked, moving = {*bundle.get("asked", ())}, {plain[name] for name, axis in mapped.items() if axis is not None}
    heads = not moving.isdisjoint(_PER_HEAD) or "sinks" in asked
    if heads and not moving.isdisjoint((*_LENGTHS, *_TOKENS)):
        return None  # a batch entry for each call, and a head too
    q = _of_one(bundle["q"], mapped["q"])
    axes, each = len(q), (1, *q)[-3]
    if heads and each > 1 and any((1, 1, 1, *_of_one(bundle[x], mapped[x]))[-3] == 1 for x in asked & {*BROADCAST}):
        return None  # a bias or table for all heads of a call: its gradient is the sum over these alone
    result = {}
    for name, x in bundle.items():
        if not isinstance(x, Tensor):
            result[name] = x
        elif heads:
            result[name] = _among_heads(plain[name], x, mapped.get(name), count, (axes, each), whole=name in asked)
        else:
            result[name] = _among_batches(plain[name], x, mapped.get(name), count, axes, whole=name in asked)
    return result, heads


def _of_one(x: Tensor, axis: int | None) -> tuple[int, ...]:
    """The shape in one call of a tensor that is mapped along this axis."""
    return tuple(size for place, size in enumerate(x.shape) if place != axis)


def _among_batches(name: str, x: Tensor, axis: int | None, count: int, axes: int, *, whole: bool) -> Tensor:
    """One tensor with the mapped axis in front; `whole`: one for each call, even where all are the same."""
    lead = x if axis is None else x.movedim(axis, 0)
    rank = lead.ndim - (axis is not None)
    if name in _PER_HEAD:
        return lead.reshape(-1)  # one head's may have no axis
    if name in BROADCAST:
        wanted, optional = max(axes, 3), True
    elif name in _LENGTHS:
        wanted, optional = max(axes - 3, 0), rank == 0
    elif name in _TOKENS:
        wanted, optional = max(axes - 3, 0) + 1, rank == 1
    else:  # q, k, v, results and what is upstream of them
        wanted, optional = rank, False
    if axis is None:
        if optional and not whole:
            return lead
        lead = lead.expand(count, *lead.shape)
    lead = lead.reshape(count, *(1,) * (wanted - rank), *lead.shape[1:])
    one_head = axes == 2 and name not in (*BROADCAST, *_LENGTHS, *_TOKENS)  # give it an axis for its one head
    return lead.unsqueeze(1) if one_head else lead


def _among_heads(name: str, x: Tensor, axis: int | None, count: int, sizes: tuple[int, int], *, whole: bool) -> Tensor:
    """One tensor with the heads of the first call, then those of the second; sizes: q's axes and heads in one call."""
    if name in (*_LENGTHS, *_TOKENS):
        return x
    axes, heads = sizes
    lead = x.expand(count, *x.shape) if axis is None else x.movedim(axis, 0)
    if name in _PER_HEAD:
        return lead.reshape(count * heads)
    if name in BROADCAST:
        full = max(axes, 3)
        lead = lead.reshape(count, *(1,) * (full + 1 - lead.ndim), *lead.shape[1:])
        if axis is None and lead.shape[-3] == 1 and not whole:
            return x
        lead = lead.expand(*lead.shape[:-3], heads, *lead.shape[-2:])
    elif axes == 2:
        return lead
    place = max(axes, 3) - 3
    return lead.movedim(0, place).flatten(place, place + 1)


def unfolded(
    results: dict[str, Tensor], bundle: Bundle, mapped: dict[str, int | None], count: int, *, heads: bool
) -> dict[str, Tensor]:
    """The results with the mapped axis in front, and behind it the axes of one call; `heads` as `folded` said."""
    q, asked = _of_one(bundle["q"], mapped["q"]), bundle.get("asked", ())
    made = {}
    for name, x in results.items():
        place = 0 if name in _PER_HEAD else max(len(q), 3) - 3
        each = x.shape[place] // max(1, count) if name in asked else (1, *q)[-3]
        apart = x.reshape(*x.shape[:place], count, each, *x.shape[place + 1 :]).movedim(place, 0) if heads else x
        if name in asked:  # a gradient, in the shape of its input
            made[name] = apart.reshape(count, *_of_one(bundle[name], mapped[name]))
        else:
            made[name] = apart.squeeze(1) if len(q) == 2 else apart
    return made


def is_batched(x: Tensor) -> bool:
    """Does a tensor hold many at once, as is_grads_batched=True and vectorize=True make them?"""
    return bool(torch._C._dispatch_keys(x).has(_BATCHED))


def taken_apart(bundle: Bundle) -> tuple[Bundle, dict[str, int | None]]:
    """The bundle with tensors that hold many at once as usual ones, and along which axis each is mapped."""
    level = _level()
    mapped = {name: 0 if is_batched(x) else None for name, x in bundle.items() if isinstance(x, Tensor)}
    plain = {
        name: torch._remove_batch_dim(x, level, 0, 0) if mapped.get(name) == 0 else x for name, x in bundle.items()
    }
    return plain, mapped


def put_together(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results with the mapped axis in front as tensors that hold many at once; PyTorch takes no others of these."""
    level = _level()
    return {name: torch._add_batch_dim(x.contiguous(), 0, level) for name, x in results.items()}


def _level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def one_by_one(function: Callable[..., Sequence[Any]], count: int, dims: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """torch.vmap's rule for a function without batching: one call per element of the mapped axis, results stacked."""

    def element(x: Any, dim: int | None, place: int) -> Any:
        return x if dim is None else x.select(dim, place)

    calls = [function(*(element(x, dim, place) for x, dim in zip(inputs, dims, strict=True))) for place in range(count)]
    stacked = tuple(None if each[0] is None else torch.stack(each) for each in zip(*calls, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)
