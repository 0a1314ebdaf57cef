"""Layers for PyTorch: multi-head attention with the field's options, on clearhead's engines."""

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.arrays import autocast, check_tensor
from clearhead.core.rule_values import (
    check_probability,
    read_flag,
    read_number,
    read_softcap,
    read_window,
    whole_number,
)
from clearhead.core.rules import POSITIONAL, RULES, along, turned_on
from clearhead.errors import DtypeError, RuleError, ShapeError, UnknownNameError
from clearhead.nn.cache import KVCache, check_dtype, check_placed
from clearhead.nn.rotary import Turns, turned
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix
from clearhead.torch import dropped

_MOVED = {"bias", "mask", "causal", "query_offset"}  # what _with_extra_keys can move; it refuses others
_THEIRS = {  # nn.MultiheadAttention's names for options, and what to write here
    "attn_mask": "mask=~attn_mask: True = may attend here, and may not there; one of floats is bias=attn_mask.",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None]: True = may attend here, and may not there.",
    "is_causal": "causal=True, when the layer is made or in the call.",
    "average_attn_weights": "average_weights=True.",
}


class MultiHeadAttention(nn.Module):
    """Multi-head attention: X → Q, K, V → attention in every head → concatenation → W^O.

    d_model            width of the queries' input x
    num_heads          query heads
    num_kv_heads       key and value heads, which query heads share in groups; default num_heads
    d_k, d_v           widths of a head's keys and values; default d_model / num_heads, d_k
    d_context, d_value_context   widths of the keys' and the values' inputs; default d_model, d_context
    bias               biases in the projections
    output_projection  W^O: (num_heads·d_v → d_model); without, the heads' outputs stand side by side
    causal, window, softcap   score rules of every call
    rotary             base of rotary positions, e.g. 10000.0 (Su et al. 2021; in halves, as Llama has them); None: none
    sinks              a learned extra logit per head in each row's denominator
    qk_norm            root-mean-square normalisation of each query and key over d_k, before rotary positions
    dropout            probability with which weights are zeroed in training mode
    extra_key          one learned key and value that every query sees besides the others
    zero_key           one key and value of zeros that every query sees besides the others
    batch_first        inputs (batch, length, d), or (length, batch, d); without a batch (length, d)

    Its state_dict, each name only where its option is on:

    q_proj.weight (num_heads·d_k, d_model), k_proj.weight (num_kv_heads·d_k, d_context),
    v_proj.weight (num_kv_heads·d_v, d_value_context), out_proj.weight (d_model, num_heads·d_v), each with its .bias,
    q_norm.weight and k_norm.weight (d_k,), sinks (num_heads,), extra_key (num_kv_heads, 1, d_k),
    extra_value (num_kv_heads, 1, d_v).

    Initialised: projections Xavier uniform (Glorot & Bengio 2010), biases and sinks 0, norms 1, extra key and value
    normal with deviation d_model^-0.5.

    `forward` takes x (batch, queries, d_model) and returns (batch, queries, d_model), in O(queries·keys) time for each
    head and O(queries + keys) memory; `from_torch` makes one of PyTorch's layer.
    Raises RuleError for a size, rule or option that makes no sense or a device that does not exist, DtypeError for a
    dtype other than float64, float32, bfloat16 and float16, SizeError where the weights do not fit in memory.
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
        d_v: int | None = None,
        d_context: int | None = None,
        d_value_context: int | None = None,
        bias: bool = True,
        output_projection: bool = True,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        rotary: float | None = None,
        sinks: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        extra_key: bool = False,
        zero_key: bool = False,
        batch_first: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, num_heads = whole_number("d_model", d_model), whole_number("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
        d_context = d_model if d_context is None else whole_number("d_context", d_context)
        d_value_context = d_context if d_value_context is None else whole_number("d_value_context", d_value_context)
        d_k, d_v = (None if d is None else whole_number(name, d) for name, d in (("d_k", d_k), ("d_v", d_v)))
        flags = {"bias": bias, "output_projection": output_projection, "causal": causal, "sinks": sinks}
        flags |= {"qk_norm": qk_norm, "extra_key": extra_key, "zero_key": zero_key, "batch_first": batch_first}
        for name, flag in flags.items():
            read_flag(name, flag)
        check_probability("dropout", dropout)
        check_dtype(dtype)
        if num_heads % num_kv_heads:
            raise RuleError(f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}: expected a multiple of it.")
        if d_k is None and d_model % num_heads:
            raise RuleError(
                f"d_model {d_model} is no multiple of num_heads {num_heads}: the heads' width is not whole.",
                "give d_k (and d_v), or another num_heads.",
            )
        self.num_heads, self.num_kv_heads, self.d_model = num_heads, num_kv_heads, d_model
        self.d_k = d_model // num_heads if d_k is None else d_k
        self.d_v = self.d_k if d_v is None else d_v
        rotary = None if rotary is None else read_number("rotary", rotary, 0.0)
        if rotary is not None and rotary < 1:
            raise RuleError(f"rotary is {rotary}: expected a base from 1 up.", "rotary=10000.0")
        if rotary is not None and self.d_k % 2:
            raise RuleError(f"rotary positions turn pairs of numbers, and d_k is {self.d_k}: expected an even d_k.")
        self.causal, self.rotary = causal, rotary
        self.turns = None if rotary is None else Turns(self.d_k, rotary)
        self.window, self.softcap = None if window is None else read_window(window), read_softcap(softcap)
        self.dropout, self.zero_key, self.batch_first = dropout, zero_key, batch_first
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = [(num_heads * self.d_k, d_model), (num_kv_heads * self.d_k, d_context)]
        widths += [(num_kv_heads * self.d_v, d_value_context)]
        widths += [(num_heads * self.d_v, d_model)] if output_projection else []
        check_placed("the layer", widths, dtype, device)
        self.q_proj = nn.Linear(d_model, num_heads * self.d_k, bias=bias, **made)
        self.k_proj = nn.Linear(d_context, num_kv_heads * self.d_k, bias=bias, **made)
        self.v_proj = nn.Linear(d_value_context, num_kv_heads * self.d_v, bias=bias, **made)
        self.out_proj = nn.Linear(num_heads * self.d_v, d_model, bias=bias, **made) if output_projection else None
        self.q_norm = nn.RMSNorm(self.d_k, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.d_k, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(num_heads, **made)) if sinks else None
        self.extra_key = nn.Parameter(torch.empty(num_kv_heads, 1, self.d_k, **made)) if extra_key else None
        self.extra_value = nn.Parameter(torch.empty(num_kv_heads, 1, self.d_v, **made)) if extra_key else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters again, as when the layer was made."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.extra_key is not None and self.extra_value is not None:
            nn.init.normal_(self.extra_key, std=self.d_model**-0.5)
            nn.init.normal_(self.extra_value, std=self.d_model**-0.5)

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
        cache: keys and values of earlier positions; x's own are added to it, and x's positions follow on. counts
        (batch,): how many of x's positions are real in each sequence, the rest being padding; default all.

        Returns (batch, queries, d_model), or with need_weights that and the weights, averaged over heads
        (batch, queries, keys) or each (batch, num_heads, queries, keys): the exact weights by which the output came to
        be (before dropout), which costs their memory and changes no bit of the output; in float32, or float64 for
        float64, and without a gradient.

        Raises ShapeError and DtypeError for inputs that do not fit the layer, RuleError for rules that do not go
        together, UnknownNameError for unknown ones; for names of nn.MultiheadAttention's it says what to write here.

        >>> import torch, clearhead.nn
        >>> output, weights = clearhead.nn.MultiHeadAttention(8, 2)(torch.ones(1, 5, 8), need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 5, 5]))
        """
        for name in rules:
            if name in _THEIRS:
                raise UnknownNameError(f"{name} is nn.MultiheadAttention's, and not taken here.", _THEIRS[name])
        if cache is not None and not isinstance(cache, KVCache):
            raise DtypeError(f"cache is a {type(cache).__name__}: expected a clearhead.nn.KVCache.")
        need_weights = read_flag("need_weights", need_weights)
        average_weights = read_flag("average_weights", average_weights)
        inputs = self._inputs(x, context, value_context)
        q = self._heads(self.q_proj(inputs[0]), self.num_heads, self.q_norm)
        k = self._heads(self.k_proj(inputs[1]), self.num_kv_heads, self.k_norm)
        v = self._heads(self.v_proj(inputs[2]), self.num_kv_heads, None)
        rules = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "sinks": self.sinks, **rules}
        heads = None if need_weights or counts is not None else self._step(q, k, v, cache, rules)
        if heads is None:
            q, k, heads, extras = self._attend(q, k, v, cache, counts, rules)
        output = heads.transpose(1, 2).flatten(2)
        output = output if self.out_proj is None else self.out_proj(output)
        output = output[0] if x.ndim == 2 else output if self.batch_first else output.transpose(0, 1)
        if not need_weights:
            return output
        with torch.no_grad():
            weights = AttentionMatrix(q, k, **rules)[...].roll(-extras, -1)
        weights = weights.mean(1) if average_weights else weights
        return output, weights[0] if x.ndim == 2 else weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, counts: Tensor | None, rules: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """The queries and keys as they are compared, the heads' outputs, and how many of the keys are extra ones."""
        before = None if cache is None else cache.lengths
        try:
            q, k, v = self._with_positions(q, k, v, cache, counts, rules)
            k, v, extras = self._with_extra_keys(k, v, rules)
            if self.training and self.dropout:
                return q, k, dropped(q, k, v, self.dropout, rules), extras
            return q, k, attention(q, k, v, **rules), extras
        except Exception:
            if cache is not None and before is not None:
                cache.lengths = before  # undo the append
            raise

    def _step(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Tensor | None:
        """The heads' outputs of one more position in the cache, in one call of the kernel; None: not done."""
        if cache is None or q.shape[2] != 1 or torch.compiler.is_compiling():
            return None
        if self.extra_key is not None or self.zero_key or (self.training and self.dropout):
            return None
        position = cache.next_position()
        if self.turns is None:
            return cache.step(q, k, v, rules)
        if not isinstance(position, int):
            return None
        return cache.step(q, k, v, rules, self.turns.of_one(position, q))

    def _inputs(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> list[Tensor]:
        """The inputs of queries, keys and values, each (batch, length, d)."""
        context = x if context is None else context
        inputs = x, context, context if value_context is None else value_context
        names = ("x", self.q_proj), ("context", self.k_proj), ("value_context", self.v_proj)
        for tensor, (name, linear) in zip(inputs, names, strict=True):
            check_tensor(tensor, name)
            alike = type(linear) is not nn.Linear or tensor.dtype == linear.weight.dtype
            if not alike and autocast(tensor).dtype != autocast(linear.weight).dtype:
                raise DtypeError(
                    f"{name} is {tensor.dtype} but the layer is {linear.weight.dtype}: they must have one dtype.",
                    f"layer({name}.to({linear.weight.dtype})), or layer.to({tensor.dtype}).",
                )
            if tensor.ndim != x.ndim or x.ndim not in (2, 3) or tensor.shape[-1] != linear.in_features:
                axes = "batch, length" if self.batch_first else "length, batch"
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}: expected ({axes}, {linear.in_features}), "
                    f"or without a batch (length, {linear.in_features})."
                )
        if x.ndim == 2:
            return [tensor[None] for tensor in inputs]
        return [tensor if self.batch_first else tensor.transpose(0, 1) for tensor in inputs]

    def _heads(self, x: Tensor, heads: int, norm: nn.RMSNorm | None) -> Tensor:
        """(batch, length, heads·d) as (batch, heads, length, d), normalised where asked."""
        split = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        if norm is not None:  # in the norm's dtype, also where autocast gave x another
            split = norm(split.to(norm.weight.dtype)).to(split.dtype)
        return split.transpose(1, 2)

    def _with_positions(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, counts: Tensor | None, rules: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated by their positions, k and v behind those of the cache; adds the queries' positions to `rules`."""
        if cache is not None and (rules.get("query_offset") is not None or rules.get("kv_lengths") is not None):
            raise RuleError("query_offset and kv_lengths are the cache's to say.", "leave them out, or the cache.")
        if cache is None and counts is not None:
            raise RuleError("counts is given without a cache.", "kv_lengths and query_lengths say what is padding.")
        if self.turns is not None:
            start = rules.get("query_offset") if cache is None else cache.next_position()
            by = self.turns.of(0 if start is None else start, q)
            together = cache is not None or (start is None and q.shape[-2] == k.shape[-2])
            q, k = turned(q, *by), turned(k, *(by if together else self.turns.of(0, k)))
        if cache is not None:
            k, v, cache_rules = cache.append(k, v, counts)
            window, cache_window = rules.get("window"), cache_rules.get("window")
            rules.update(cache_rules)
            if window is not None and cache_window is not None:  # the narrower of the two
                left, right = window
                rules["window"] = (cache_window[0] if left is None else min(left, cache_window[0]), right)
        return q, k, v

    def _with_extra_keys(self, k: Tensor, v: Tensor, rules: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        """Put the extra keys first, where every causal query sees them, and move the rules that count keys."""
        extra: list[tuple[Tensor, Tensor]] = []
        if self.extra_key is not None and self.extra_value is not None:
            extra.append((self.extra_key, self.extra_value))
        if self.zero_key:
            extra.append((k.new_zeros(k.shape[1], 1, k.shape[3]), v.new_zeros(v.shape[1], 1, v.shape[3])))
        if not extra:
            return k, v, 0
        for name in turned_on(rules):
            if name in (POSITIONAL | along("keys")) - _MOVED:
                raise RuleError(f"{name} with an extra key has no meaning here: which place would the key have?")
        count, keys = len(extra), k.shape[-2]
        k, v = (
            torch.cat([*(pair[side].expand(len(x), -1, -1, -1) for pair in extra), x], dim=2)
            for side, x in enumerate((k, v))
        )
        for name, start in (("query_offset", 0 if rules["causal"] else None), ("kv_lengths", None)):
            value = start if rules.get(name) is None else rules[name]
            rules[name] = None if value is None else torch.as_tensor(value) + count
        for name in ("mask", "bias"):
            if rules.get(name) is not None:
                rule = torch.as_tensor(rules[name])
                per_key = rule.expand(*rule.shape[:-1], keys) if rule.ndim else rule.expand(keys)
                rules[name] = nn.functional.pad(per_key, (count, 0), value=RULES[name].neutral)
        return k, v, count

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention) -> "MultiHeadAttention":
        """The same layer as a `torch.nn.MultiheadAttention`, with a copy of its weights, mode and layout.

        Its outputs and weights are the same. A mask is True here where a query may attend, so theirs becomes
        `mask=~attn_mask` and `mask=~key_padding_mask[:, None, None]`. Raises DtypeError for anything else.

        >>> import torch, clearhead.nn
        >>> clearhead.nn.MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(8, 2)).num_heads
        2
        """
        if not isinstance(theirs, nn.MultiheadAttention):
            raise DtypeError(f"theirs is a {type(theirs).__name__}: expected a torch.nn.MultiheadAttention.")
        d_model, heads = theirs.embed_dim, theirs.num_heads
        ours = cls(
            d_model,
            heads,
            d_context=theirs.kdim,
            d_value_context=theirs.vdim,
            bias=theirs.in_proj_bias is not None,
            dropout=theirs.dropout,
            extra_key=theirs.bias_k is not None,
            zero_key=theirs.add_zero_attn,
            batch_first=theirs.batch_first,
            device=theirs.out_proj.weight.device,
            dtype=theirs.out_proj.weight.dtype,
        )
        apart = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
        weights = apart if theirs.in_proj_weight is None else theirs.in_proj_weight.chunk(3)
        biases = (None,) * 3 if theirs.in_proj_bias is None else theirs.in_proj_bias.chunk(3)
        state = {f"out_proj.{name}": x for name, x in theirs.out_proj.state_dict().items()}
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            state |= {f"{name}_proj.weight": weight, f"{name}_proj.bias": bias}
        for name, learned in (("extra_key", theirs.bias_k), ("extra_value", theirs.bias_v)):
            state[name] = None if learned is None else learned.view(heads, 1, -1)
        ours.load_state_dict({name: x for name, x in state.items() if x is not None})
        return ours.train(theirs.training)
