"""One softcap for each head: engines have one for a call, so heads whose softcaps differ are calls of their own."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clearhead.core.axes import group_size
from clearhead.core.rules import RULES, take

Rules = dict[str, Any]


def by_softcap(compute: Callable[[Any, Any, Any, Rules], Any], q: Any, k: Any, v: Any, rules: Mapping[str, Any]) -> Any:
    """compute(q, k, v, rules), whose result has its heads on axis 1; `softcap` may be a tuple of one number per head.

    q (batch, heads, queries, d_k), k and v (batch, kv_heads, keys, d_k or d_v); v may be None
    """
    caps = rules.get("softcap")
    if not isinstance(caps, tuple):
        return compute(q, k, v, dict(rules))
    group, parts, order = group_size(q.shape[1], k.shape[1]), [], []
    for cap in dict.fromkeys(caps):
        heads = [head for head, one in enumerate(caps) if one == cap]
        kv_heads = [head // group for head in heads]
        values = None if v is None else v[:, kv_heads]
        parts.append(compute(q[:, heads], k[:, kv_heads], values, for_heads(rules, heads) | {"softcap": cap}))
        order += heads
    is_array = isinstance(parts[0], np.ndarray)
    whole = np.concatenate(parts, axis=1) if is_array else sys.modules["torch"].cat(parts, 1)
    return whole[:, np.argsort(order).tolist()]


def for_heads(rules: Mapping[str, Any], heads: Sequence[int]) -> Rules:
    """The rules of some heads: bias, mask, scale, slopes, sinks and the table of spans are sliced along their heads."""
    plain = {name: x for name, x in rules.items() if name != "spans" and len(RULES[name].fields) == 1}
    result: Rules = dict(rules) | take(plain, {"heads": list(heads)})
    if isinstance(result.get("softcap"), tuple):
        result["softcap"] = tuple(result["softcap"][head] for head in heads)
    if result.get("spans") is not None:
        queries, keys, table = result["spans"]
        per_head = table.ndim > 2 and table.shape[-3] > 1
        result["spans"] = queries, keys, table[..., list(heads), :, :] if per_head else table
    return result
