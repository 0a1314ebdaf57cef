"""Attention while a compiler traces the model: tensors and plain masks, so that the graph stays in one piece."""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.attention import attention
from clearhead.torch import dropped


def attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    dropout: float,
    scores: dict[str, Any],
    *,
    causal: bool,
) -> Tensor:
    """The output (batch, heads, queries, d_v) for the masks that Transformers makes itself: bool, float or None.

    Without a mask, `causal` counts from the first query on; keys behind it are a static cache's unused room. A float
    mask is added to the scores, and its lowest number forbids.
    """
    queries, rules = query.shape[2], dict(scores)
    if causal and mask is None and queries > 1:
        rules["causal"] = True
        if key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
    if mask is not None and mask.dtype != torch.bool:
        allowed = mask > torch.finfo(mask.dtype).min
        added = torch.where(allowed, mask, 0.0)
        position_bias = added if position_bias is None else position_bias + added
        mask = allowed
    rules |= {name: x for name, x in (("mask", mask), ("bias", position_bias)) if x is not None}
    return dropped(query, key, value, dropout, rules) if dropout else attention(query, key, value, **rules)
