"""PyTorch's multi-head attention layers in other people's modules, computed by clearhead; and back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.core.rule_values import read_flag
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.nn.layers import MultiHeadAttention


def convert(module: nn.Module, *, back: bool = False) -> nn.Module:
    """Let clearhead compute every torch.nn.MultiheadAttention in a module, the module itself included; returns it.

    module   changed in place: each layer becomes a clearhead.nn.MultiHeadAttention that is called as before, with
             query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights and is_causal, and
             returns (output, weights). It keeps its parameters, hooks and names in state_dict(), so that optimisers and
             checkpoints stay valid; it is still a torch.nn.MultiheadAttention too.
    back     the reverse: converted layers become torch.nn.MultiheadAttention again

    Outputs, weights and gradients are equal up to rounding, but a query that sees no key gives 0 where PyTorch's gives
    NaN. Three kinds of calls are still computed by PyTorch: need_weights=True where a graph is recorded, since weights
    have no derivative here, or where weights are dropped in training; nested tensors; torch.jit.trace.
    nn.TransformerEncoderLayer calls its converted layer, never the fast path that would go around it. Subclasses of
    torch.nn.MultiheadAttention, which have a forward of their own, stay as they are.

    Raises DtypeError where module is no torch.nn.Module, RuleError where it has no such layer. O(modules) time; no
    parameter is copied.

    >>> import torch, clearhead as ch
    >>> encoder = ch.convert(torch.nn.TransformerEncoderLayer(8, 2))
    >>> isinstance(encoder.self_attn, ch.nn.MultiHeadAttention), encoder(torch.ones(5, 1, 8)).shape
    (True, torch.Size([5, 1, 8]))
    >>> type(ch.convert(encoder, back=True).self_attn)
    <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    if not isinstance(module, nn.Module):
        raise DtypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module.")
    kinds = (nn.MultiheadAttention, ConvertedAttention)
    before, after = reversed(kinds) if read_flag("back", back) else kinds
    layers = [part for part in module.modules() if type(part) in kinds]
    if not layers:
        raise RuleError(
            f"module is a {type(module).__name__} without a torch.nn.MultiheadAttention: there is nothing to convert.",
            "clearhead.torch.activate() serves every caller of torch.nn.functional.scaled_dot_product_attention.",
        )
    for layer in layers:
        if type(layer) is before:
            layer.__class__ = after
    return module


class _Projection(NamedTuple):
    """One of the three projections whose weights nn.MultiheadAttention keeps together."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class ConvertedAttention(MultiHeadAttention, nn.MultiheadAttention):  # type: ignore[misc]  # out_proj is never None
    """A torch.nn.MultiheadAttention with its parameters and signature, computed by MultiHeadAttention; see `convert`.

    It is made by changing a layer's class: the layer's attributes stay, and what MultiHeadAttention needs besides is
    here.
    """

    num_kv_heads = property(lambda self: self.num_heads)
    d_model = property(lambda self: self.embed_dim)
    d_k = d_v = property(lambda self: self.head_dim)
    zero_key = property(lambda self: self.add_zero_attn)
    extra_key = property(lambda self: self._extra(self.bias_k))
    extra_value = property(lambda self: self._extra(self.bias_v))
    q_proj = property(lambda self: self._projection(0, self.q_proj_weight))
    k_proj = property(lambda self: self._projection(1, self.k_proj_weight))
    v_proj = property(lambda self: self._projection(2, self.v_proj_weight))
    causal, window, softcap, rotary, turns, sinks, q_norm, k_norm = False, *[None] * 7

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that nn.TransformerEncoderLayer calls this layer and not its own fast path."""
        return False

    def _projection(self, place: int, apart: Tensor | None) -> _Projection:
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[place]
        return _Projection(self.in_proj_weight.chunk(3)[place] if apart is None else apart, bias)

    def _extra(self, learned: Tensor | None) -> Tensor | None:
        return None if learned is None else learned.view(self.num_heads, 1, -1)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001  PyTorch's signature
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001
        is_causal: bool = False,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor | None]:
        """As torch.nn.MultiheadAttention's. Raises ShapeError and DtypeError for inputs that do not fit the layer."""
        if self._pytorch_computes(query, key, value, need_weights=need_weights):
            layer = nn.MultiheadAttention.__new__(nn.MultiheadAttention)  # the same, of PyTorch's class
            layer.__dict__ = self.__dict__
            return layer.forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuleError(
                "is_causal is True without attn_mask: it says that attn_mask is the causal mask.",
                "attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(length)",
            )
        if is_causal and key_padding_mask is None and not need_weights:  # PyTorch believes it under the same condition
            rules: dict[str, Any] = {"causal": True, "query_offset": 0}
        else:
            rules = self._mask_rules(query, key, key_padding_mask, attn_mask)
        result = super().forward(
            query, key, value, need_weights=need_weights, average_weights=average_attn_weights, **rules
        )
        return (result[0], result[1].to(result[0].dtype)) if need_weights else (result, None)

    def _pytorch_computes(self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool) -> bool:
        """Is this one of the calls that clearhead's layer does not take?"""
        if query.is_nested or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return True
        if not need_weights:
            return False
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *self.parameters()))
        return recorded or (self.training and self.dropout > 0)

    def _mask_rules(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        """The masks as rules: True, may not attend, becomes mask=False; floats are a bias."""
        lengths = -2 if self.batch_first or query.ndim == 2 else 0
        queries, keys = query.shape[lengths], key.shape[lengths]
        batch = 1 if query.ndim == 2 else query.shape[0 if self.batch_first else 1]
        parts: list[Tensor] = []
        if key_padding_mask is not None:
            expected = (keys,) if query.ndim == 2 else (batch, keys)
            if tuple(key_padding_mask.shape) != expected:
                axes = "(keys,)" if query.ndim == 2 else "(batch, keys)"
                raise ShapeError(
                    f"key_padding_mask has shape {tuple(key_padding_mask.shape)}: expected {axes}, {expected}."
                )
            parts.append(key_padding_mask.view(batch, 1, 1, keys))
        if attn_mask is not None:
            each = (batch * self.num_heads, queries, keys)
            if tuple(attn_mask.shape) not in (each, each[1:]):
                raise ShapeError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}: expected (queries, keys), {each[1:]}, or "
                    f"(batch·heads, queries, keys), {each}."
                )
            parts.append(attn_mask if attn_mask.ndim == 2 else attn_mask.view(batch, -1, queries, keys))
        forbidden = [part for part in parts if part.dtype == torch.bool]
        added = [part for part in parts if part.dtype != torch.bool]
        rules: dict[str, Any] = {}
        if forbidden:
            rules["mask"] = ~(forbidden[0] | forbidden[-1])
        if added:
            rules["bias"] = added[0] if len(added) == 1 else added[0] + added[1]
        return rules
