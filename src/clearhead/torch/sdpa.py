"""scaled_dot_product_attention with PyTorch's signature and meaning, and dropout without stored weights."""

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import autocast, check_tensor
from clearhead.core.axes import group_size
from clearhead.core.call import known
from clearhead.core.rule_values import check_probability
from clearhead.core.rules import Rules
from clearhead.core.state import share
from clearhead.core.torch_state import transforms
from clearhead.engines import native
from clearhead.errors import DtypeError, RuleError, ShapeError, shown
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix

_CAUSAL: Rules = {"causal": True, "query_offset": 0}  # aligned at the top left corner


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001  PyTorch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the same signature and meaning: softmax(scale·Q·Kᵀ)·V.

    query       (…, heads, queries, d_k), of float64, float32, bfloat16 or float16; leading axes broadcast
    key         (…, heads, keys, d_k), with query's dtype
    value       (…, heads, keys, d_v), with query's dtype
    attn_mask   bool, True = may attend, or float, added to the scores, broadcast to (…, heads, queries, keys);
                or torch.nn.attention.bias.causal_lower_right(…)
    dropout_p   weights are zeroed with this probability and the others divided by 1 - dropout_p, always: pass 0.0 when
                evaluating
    is_causal   query i attends to keys j ≤ i, aligned at the top left corner even if queries ≠ keys; adds to attn_mask
    scale       default 1/√d_k
    enable_gqa  key heads may be fewer; query head h reads key head h // group

    Returns (…, heads, queries, d_v) in query's dtype; a query that sees no key gives 0, as in PyTorch.
    O(queries·keys·(d_k + d_v)) time for each head and O(queries + keys) memory; with dropout, one byte for each weight.
    Raises ShapeError for shapes that do not fit or broadcast, DtypeError for other dtypes, RuleError for a dropout_p
    outside 0 to 1, a flag that is not a bool, or a causal bias together with is_causal. Unlike in PyTorch, a forbidden
    NaN never reaches an output, attn_mask and is_causal can be combined on every device (in PyTorch on the CPU only),
    and a causal_upper_left or causal_lower_right made for other lengths than query's and key's is always refused.
    Has derivatives of any order and in forward mode, also through torch.func.

    >>> import torch
    >>> x = torch.eye(2)[None, None]
    >>> scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    tensor([1., 0.])
    """
    plain = attn_mask is None and type(dropout_p) is float and dropout_p == 0.0
    if plain and type(is_causal) is bool and type(enable_gqa) is bool:
        plainly: Rules = {**_CAUSAL} if is_causal else {}
        if scale is not None:
            plainly["scale"] = scale
        problem = None if value is None else known(query, key, value, plainly)
        # enable_gqa must allow grouped heads, and is an error without a heads axis: the checks below see to it
        shares = problem is None or problem.heads != problem.kv_heads or (enable_gqa and query.ndim == 2)
        if problem is not None and not shares and native.usable(problem):
            output: Tensor | None = native.output(problem, query, key, value)
            if output is not None:
                return output
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise RuleError(f"{name} is {shown(flag)}: expected True or False.")
    check_probability("dropout_p", dropout_p)
    query, key, value = _broadcast(query, key, value, enable_gqa=enable_gqa)
    rules = _mask_rules(query, key, attn_mask)
    if is_causal and "causal" in rules:
        raise RuleError("attn_mask is a causal bias and is_causal is True.", "leave out one of them.")
    rules |= {**(_CAUSAL if is_causal else {}), **({} if scale is None else {"scale": scale})}
    if dropout_p == 0.0:
        return attention(query, key, value, **rules)
    return dropped(query, key, value, dropout_p, rules)


def dropped(query: Tensor, key: Tensor, value: Tensor, p: float, rules: dict[str, Any]) -> Tensor:
    """Zero weights with probability p and divide the others by 1 - p, without storing the weights.

    Σ_kept a_ij·v_j = exp(L_kept - L)·(attention over the kept keys alone). Only the mask of kept weights is stored, one
    byte each.
    """
    if p == 1.0:
        return attention(query, key, value, **rules) * 0.0
    weights_shape = (*query.shape[:-1], key.shape[-2])
    if torch.compiler.is_compiling() or transforms():  # vmap: only a new tensor can hold each call's own draws
        kept = torch.rand(weights_shape, device=query.device) >= p
    else:
        kept = torch.empty(weights_shape, dtype=torch.bool, device=query.device).bernoulli_(1 - p)
    mask = kept if rules.get("mask") is None else kept & torch.as_tensor(rules["mask"])
    over_kept = AttentionMatrix(query, key, **{**rules, "mask": mask}).observe(value, logsumexp=True)
    over_all = AttentionMatrix(query, key, **rules).observe(logsumexp=True)
    assert over_kept.state is not None
    assert over_all.state is not None
    left = share(torch, over_kept.state, over_all.state)
    output: Tensor = over_kept.output * (left / (1 - p)).to(over_kept.output.dtype)[..., None]
    return output


def _mask_rules(query: Tensor, key: Tensor, attn_mask: Any) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    if hasattr(attn_mask, "variant"):  # a CausalBias: to import its class takes as long as PyTorch itself
        made, sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
        if made != sizes:
            raise ShapeError(
                f"attn_mask is a causal bias for {made[0]} queries and {made[1]} keys, but query has {sizes[0]} and "
                f"key {sizes[1]}.",
                f"causal_lower_right{sizes}",
            )
        lower_right = attn_mask.variant.name == "LOWER_RIGHT"
        return {"causal": True, "query_offset": key.shape[-2] - query.shape[-2] if lower_right else 0}
    check_tensor(attn_mask, "attn_mask")
    if attn_mask.ndim < 2:
        raise ShapeError(f"attn_mask has shape {tuple(attn_mask.shape)}: expected (…, queries, keys).")
    weights = (*query.shape[:-1], key.shape[-2])
    shape = (1,) * (len(weights) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(shape) != len(weights) or any(size not in (1, n) for size, n in zip(shape, weights, strict=True)):
        raise ShapeError(f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {weights}.")
    if attn_mask.dtype == torch.bool:
        return {"mask": attn_mask}
    if autocast(attn_mask).dtype not in (torch.float32, query.dtype):
        raise DtypeError(f"attn_mask is {attn_mask.dtype}: expected bool, True = may attend, float32 or query's own.")
    return {"bias": attn_mask}


def _broadcast(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the leading axes, as PyTorch's matrix product does; the heads axis only where heads are not grouped."""
    fixed = 3 if enable_gqa else 2
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_tensor(x, name)
    query, key, value = map(autocast, named.values())
    for name, x in zip(named, (query, key, value), strict=True):
        if x.dtype != query.dtype:
            raise DtypeError(f"{name} is {x.dtype} but query is {query.dtype}: they must have one dtype.")
        if x.ndim < fixed:
            axes = "(…, heads, length, d)" if enable_gqa else "(…, length, d)"
            raise ShapeError(f"{name} has shape {tuple(x.shape)}: expected {axes}.")
    leads = [x.shape[:-fixed] for x in (query, key, value)]
    q, k, v = query, key, value
    if not leads[0] == leads[1] == leads[2]:
        try:
            lead = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
        except RuntimeError:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            hint = "" if enable_gqa else "fewer key heads than query heads need enable_gqa=True."
            raise ShapeError(f"the leading axes of {shapes} do not broadcast.", hint) from None
        q, k, v = (x.expand(*lead, *x.shape[-fixed:]) for x in (query, key, value))
    if enable_gqa and k.shape[-3] != v.shape[-3]:  # keys and values have groups of different sizes
        heads = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x.repeat_interleave(group_size(heads, x.shape[-3]), -3) for x in (k, v))
    return q, k, v
