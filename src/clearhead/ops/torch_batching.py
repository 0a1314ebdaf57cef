"""torch.vmap over attention: the mapped axis becomes one more batch axis, in front of all others."""

import torch
from torch import Tensor

from clearhead.ops.torch_functions import Bundle

_BATCHED = torch._C._dispatch_key_parse("Batched")  # of PyTorch's older vmap: is_grads_batched, vectorize=True

_PER_HEAD = ("alibi_slopes", "sinks", "scales")
_LENGTHS = ("kv_lengths", "query_lengths", "query_offset")  # (batch axes,)
_TOKENS = (*("query_segments", "kv_segments", "query_spans", "key_spans"), "query_groups", "key_groups")  # (…, tokens)
_SHARED = ("bias", "mask", "span_table")  # broadcast to (…, heads, queries, keys)


def folded(bundle: Bundle, mapped: dict[str, int | None], count: int) -> Bundle | None:
    """The bundle of all `count` calls at once; None where a rule with a number for each head is among them.

    mapped   the axis along which each tensor is mapped; None where it is the same for all
    """
    own = {name: name.partition(":")[2] or name for name in bundle}
    asked = {*bundle.get("asked", ())}
    if any(axis is not None and own[name] in _PER_HEAD for name, axis in mapped.items()) or "sinks" in asked:
        return None
    axes = bundle["q"].ndim - (mapped["q"] is not None)  # of one call's q
    return {
        name: _folded(own[name], x, mapped.get(name), count, axes, whole=name in asked) if isinstance(x, Tensor) else x
        for name, x in bundle.items()
    }


def _folded(name: str, x: Tensor, axis: int | None, count: int, axes: int, *, whole: bool) -> Tensor:
    """One tensor with the mapped axis in front; `whole`: one for each call, even where all are the same."""
    lead = x if axis is None else x.movedim(axis, 0)
    rank = lead.ndim - (axis is not None)
    if name in _PER_HEAD:
        return lead
    if name in _SHARED:
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
    one_head = axes == 2 and name not in (*_SHARED, *_LENGTHS, *_TOKENS)  # give it an axis for its one head
    return lead.unsqueeze(1) if one_head else lead


def unfolded(found: dict[str, Tensor], bundle: Bundle, mapped: dict[str, int | None]) -> dict[str, Tensor]:
    """The results with the mapped axis in front, and behind it the axes of one call."""
    axes = bundle["q"].ndim - (mapped["q"] is not None)
    made = {}
    for name, x in found.items():
        if name in bundle.get("asked", ()):  # a gradient, in the shape of its input
            shape = bundle[name].shape if mapped[name] is None else bundle[name].select(mapped[name], 0).shape
            made[name] = x.reshape(x.shape[0], *shape)
        else:
            made[name] = x.squeeze(1) if axes == 2 else x
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


def put_together(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results with the mapped axis in front as tensors that hold many at once."""
    level = _level()
    return {name: torch._add_batch_dim(x, 0, level) for name, x in found.items()}


def _level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level
