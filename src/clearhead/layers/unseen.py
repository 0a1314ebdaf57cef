"""Attention of a watched model that does not go through Transformers' interface and so is not observed."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

_NAMES = re.compile(r"(Attention|Attn|Mixer|DeltaNet|Retention|RecurrentBlock|ShortConv)(V?\d+D?)?$")
_QUERIES = ("q", "query", "q_proj", "q_lin", "to_q", "wq", "query_proj", "q_a_proj")
_KEYS = ("k", "key", "k_proj", "k_lin", "to_k", "wk", "key_proj")
_VALUES = ("v", "value", "v_proj", "v_lin", "to_v", "wv", "value_proj")
_FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj_qkv", "in_proj_qkvz", "Wqkv", "key_value", "kv")


def mixes_tokens(module: nn.Module) -> bool:
    """Is this module attention, or what a hybrid model has in its place?

    It is if the name of its class says so, or if it has projections for two of queries, keys and values, or one
    projection for several of them. Modules without parameters (a kernel inside an attention) do not count.
    """
    children = {name for name, _ in module.named_children()}
    sides = sum(not children.isdisjoint(names) for names in (_QUERIES, _KEYS, _VALUES))
    called_so = _NAMES.search(type(module).__name__) is not None
    result = called_so or sides > 1 or not children.isdisjoint(_FUSED)
    return result and next(module.parameters(), None) is not None


def unseen(
    paths: Mapping[Any, str], ran: Collection[Any], went_through: Collection[Any]
) -> tuple[tuple[str, str], ...]:
    """(path, class) of each module of `ran` that did not go through the interface, in the model's order.

    A module counts as seen if it, a module inside it or a module around it went through the interface. Of modules
    inside one another the innermost is listed.
    """
    seen = [paths[module] for module in went_through]
    apart = [
        module
        for module in paths
        if module in ran and not any(_within(path, paths[module]) or _within(paths[module], path) for path in seen)
    ]
    places = [paths[module] for module in apart]
    return tuple(
        (paths[module], type(module).__name__)
        for module in apart
        if not any(other != paths[module] and _within(other, paths[module]) for other in places)
    )


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
