"""MultiHeadAttention: PyTorch's layer on clearhead's engines."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.core.arrays import autocast, check_tensor
from clearhead.core.rule_values import check_probability, read_flag, read_number, whole_number
from clearhead.core.rules import Rules, check_names
from clearhead.errors import DtypeError, RuleError, ShapeError, UnknownNameError
from clearhead.nn.cache import KVCache, Turns, check_placed, turned
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix
from clearhead.torch import dropped

_THEIRS = {  # nn.MultiheadAttention's names for options, and what to write here
    "attn_mask": "mask=~attn_mask, since True means may attend here and may not there; a float mask is bias=attn_mask.",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None], since True means may attend here and may not there.",
    "is_causal": "causal=True, when you make the layer or in the call.",
    "average_attn_weights": "average_weights=True.",
}


class MultiHeadAttention(nn.Module):
    """Multi-head attention: X → Q, K, V → attention in every head → concatenation → W^O.

    d_model        width of the queries' input x
    num_heads      query heads
    num_kv_heads   key and value heads, which query heads share in groups; default num_heads
    d_k            width of a head's queries, keys and values; default d_model / num_heads
    bias           whether the projections have biases
    rotary         base of rotary positions, e.g. 10000.0 (Su et al. 2021; in halves, as in Llama); None for none
    dropout        probability with which weights are zeroed in training mode
    rules          score rules of every call, as in `attention`: causal=True, window=(63, 0), softcap=50.0

    Parameters: q_proj.weight (num_heads·d_k, d_model), k_proj.weight and v_proj.weight (num_kv_heads·d_k, d_model),
    out_proj.weight (d_model, num_heads·d_k), each with its .bias; initialised as in nn.Linear.

    You may replace a projection by any module with `in_features`: `layer.out_proj = nn.Identity()` returns the heads'
    outputs concatenated, a k_proj and v_proj with other in_features take another context, v_proj and out_proj may give
    values another width than keys, and a projection may end in a norm.

    `forward` takes x (batch, queries, d_model) and returns (batch, queries, d_model), in O(queries·keys) time for each
    head and O(queries + keys) memory; `from_torch` converts PyTorch's layer.
    Raises RuleError for a size or option that makes no sense or a device that does not exist, UnknownNameError for an
    unknown rule, DtypeError for a dtype other than float64, float32, bfloat16 and float16, SizeError if the weights do
    not fit in memory.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> import torch, clearhead.nn
    >>> clearhead.nn.MultiHeadAttention(8, 2, causal=True)(torch.ones(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        d_k: int | None = None,
        bias: bool = True,
        rotary: float | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **rules: Any,
    ) -> None:
        super().__init__()
        d_model, num_heads = whole_number("d_model", d_model), whole_number("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
        read_flag("bias", bias)
        check_probability("dropout", dropout)
        check_names(cast("Rules", rules))
        if num_heads % num_kv_heads:
            raise RuleError(f"num_heads is {num_heads}: expected a multiple of num_kv_heads, {num_kv_heads}.")
        if d_k is None and d_model % num_heads:
            raise RuleError(
                f"d_model is {d_model}: expected a multiple of num_heads, {num_heads}.",
                "give d_k, or another num_heads.",
            )
        d_k = d_model // num_heads if d_k is None else whole_number("d_k", d_k)
        rotary = None if rotary is None else read_number("rotary", rotary, 0.0)
        if rotary is not None and (rotary < 1 or d_k % 2):
            raise RuleError(f"rotary is {rotary} and d_k {d_k}: expected a base from 1 up, and an even d_k.")
        self.d_model, self.num_heads, self.num_kv_heads, self.d_k = d_model, num_heads, num_kv_heads, d_k
        self.dropout, self.rules, self.batch_first = dropout, rules, True
        self.turns = None if rotary is None else Turns(d_k, rotary)
        wide, narrow = num_heads * d_k, num_kv_heads * d_k
        check_placed("the layer", 2 * [(wide, d_model), (narrow, d_model)], dtype, device)
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj, self.k_proj = nn.Linear(d_model, wide, **made), nn.Linear(d_model, narrow, **made)
        self.v_proj, self.out_proj = nn.Linear(d_model, narrow, **made), nn.Linear(wide, d_model, **made)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value_context: Tensor | None = None,
        *,
        need_weights: bool = False,
        average_weights: bool = True,
        cache: KVCache | None = None,
        counts: Tensor | None = None,
        **rules: Any,
    ) -> Any:
        """Attend from x (batch, queries, d_model) to context (batch, keys, d_context), or to x itself.

        value_context (batch, keys, d_value_context) gives the values; default context. `rules` are further score rules
        of this call (mask, bias, kv_lengths, query_segments, query_offset, …), as in `attention`.
        cache: a KVCache of earlier positions, to which x's keys and values are appended; x's positions follow on.
        counts (batch,): how many of x's positions are real in each sequence, the rest being padding; default all.

        Returns (batch, queries, d_model). With need_weights, returns also the exact weights behind this output (before
        dropout), averaged over heads, (batch, queries, keys), or per head with average_weights=False, (batch,
        num_heads, queries, keys): float32, or float64 for float64, without a gradient. This takes their memory and
        changes no bit of the output.

        Raises ShapeError and DtypeError for inputs that do not fit the layer, RuleError for rules that contradict each
        other, UnknownNameError for an unknown rule; for nn.MultiheadAttention's names it says what to write here.

        >>> import torch, clearhead.nn
        >>> output, weights = clearhead.nn.MultiHeadAttention(8, 2)(torch.ones(1, 5, 8), need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 5, 5]))
        """
        for name in rules:
            if name in _THEIRS:
                raise UnknownNameError(f"{name} is an option of nn.MultiheadAttention, not of ours.", _THEIRS[name])
        if cache is not None and not isinstance(cache, KVCache):
            raise DtypeError(f"cache is a {type(cache).__name__}: expected a clearhead.nn.KVCache.")
        need_weights = read_flag("need_weights", need_weights)
        average_weights = read_flag("average_weights", average_weights)
        inputs = self._inputs(x, context, value_context)
        q = _split(self.q_proj(inputs[0]), self.num_heads)
        k = _split(self.k_proj(inputs[1]), self.num_kv_heads)
        v = _split(self.v_proj(inputs[2]), self.num_kv_heads)
        rules = {**self.rules, **rules}
        long = need_weights or counts is not None or torch.compiler.is_compiling() or (self.training and self.dropout)
        heads = None if cache is None or long else cache.step(q, k, v, rules, self.turns)
        if heads is None:
            q, k, heads = self._attend(q, k, v, cache, counts, rules)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        output = output[0] if x.ndim == 2 else output if self.batch_first else output.transpose(0, 1)
        if not need_weights:
            return output
        with torch.no_grad():
            weights = AttentionMatrix(q, k, **rules)[...]
        weights = weights.mean(1) if average_weights else weights
        return output, weights[0] if x.ndim == 2 else weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, counts: Tensor | None, rules: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated queries and keys, and the heads' outputs; adds the cache's rules to `rules`."""
        if cache is not None and (rules.get("query_offset") is not None or rules.get("kv_lengths") is not None):
            raise RuleError("the cache sets query_offset and kv_lengths, and they were given too.", "leave them out.")
        if cache is None and counts is not None:
            raise RuleError("counts is given without a cache.", "give kv_lengths and query_lengths for padding.")
        before = None if cache is None else cache.lengths
        if self.turns is not None:
            start = rules.get("query_offset") if cache is None else cache.next_position()
            by = self.turns.of(0 if start is None else start, q)
            q, k = turned(q, *by), turned(k, *(self.turns.of(0, k) if cache is None else by))
        try:
            if cache is not None:
                k, v, of_cache = cache.append(k, v, counts)
                rules.update(of_cache)
            if self.training and self.dropout:
                return q, k, dropped(q, k, v, self.dropout, rules)
            return q, k, attention(q, k, v, **rules)
        except Exception:
            if cache is not None and before is not None:
                cache.crop(before)  # undo the append
            raise

    def _inputs(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> list[Tensor]:
        """The inputs of queries, keys and values, each (batch, length, d)."""
        context = x if context is None else context
        inputs = [x, context, context if value_context is None else value_context]
        names = ("x", self.q_proj), ("context", self.k_proj), ("value_context", self.v_proj)
        for tensor, (name, linear) in zip(inputs, names, strict=True):
            check_tensor(tensor, name)
            alike = type(linear) is not nn.Linear or tensor.dtype == linear.weight.dtype
            if not alike and autocast(tensor).dtype != autocast(linear.weight).dtype:
                raise DtypeError(
                    f"{name} is {tensor.dtype} but the layer is {linear.weight.dtype}: they must have one dtype.",
                    f"layer({name}.to({linear.weight.dtype})), or layer.to({tensor.dtype}).",
                )
            wide = linear.in_features
            if tensor.ndim != x.ndim or x.ndim not in (2, 3) or tensor.shape[-1] != wide:
                axes = f"({'batch, length' if self.batch_first else 'length, batch'}, {wide}) or (length, {wide})"
                raise ShapeError(f"{name} has shape {tuple(tensor.shape)}: expected {axes}.")
        if x.ndim == 2:
            return [tensor[None] for tensor in inputs]
        return [tensor if self.batch_first else tensor.transpose(0, 1) for tensor in inputs]

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Convert a `torch.nn.MultiheadAttention`: copies its weights, training mode and batch_first.

        Outputs and weights are the same. Here a mask is True where a query may attend, so write `mask=~attn_mask` and
        `mask=~key_padding_mask[:, None, None]`. Raises DtypeError for anything but a torch.nn.MultiheadAttention,
        RuleError for one with add_bias_kv or add_zero_attn.

        >>> import torch, clearhead.nn
        >>> clearhead.nn.MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(8, 2)).num_heads
        2
        """
        if not isinstance(theirs, nn.MultiheadAttention):
            raise DtypeError(f"theirs is a {type(theirs).__name__}: expected a torch.nn.MultiheadAttention.")
        if theirs.bias_k is not None or theirs.add_zero_attn:
            raise RuleError("theirs has add_bias_kv or add_zero_attn: this layer has no extra keys.")
        weight, bias = theirs.out_proj.weight, theirs.in_proj_bias
        made: dict[str, Any] = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
        ours = cls(theirs.embed_dim, theirs.num_heads, dropout=theirs.dropout, **made)
        ours.k_proj = nn.Linear(theirs.kdim, theirs.embed_dim, **made)
        ours.v_proj = nn.Linear(theirs.vdim, theirs.embed_dim, **made)
        apart = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
        weights = apart if theirs.in_proj_weight is None else theirs.in_proj_weight.chunk(3)
        state = {f"{name}_proj.weight": x for name, x in zip("qkv", weights, strict=True)}
        state |= {f"{name}_proj.bias": x for name, x in zip("qkv", () if bias is None else bias.chunk(3), strict=False)}
        state |= {f"out_proj.{name}": x for name, x in theirs.out_proj.state_dict().items()}
        ours.load_state_dict(state)
        ours.batch_first = theirs.batch_first
        return ours.train(theirs.training)


def _split(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads·d) as (batch, heads, length, d)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)
