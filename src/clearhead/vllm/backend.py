"""vLLM's three classes of an attention: what it supports, what it reads of a step, and what it computes.

A page of vLLM's is (kv_heads, page, 2·d) in memory. Here each head's keys come first and then its values, so that the
rows of either lie side by side.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from clearhead.errors import EngineError
from clearhead.torch import varlen_attn
from clearhead.vllm.records import HINT, RECORDER, Step


class Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM may ask of clearhead."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """The name of vLLM's own, in whose place this is."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)


@dataclass
class Metadata:
    """One step: the queries of all requests one after the other, and where their keys lie."""

    tokens: int
    ends: Tensor  # (requests + 1,)
    lengths: Tensor  # (requests,)
    pages: Tensor  # (requests, most pages)
    slots: tuple[Tensor, Tensor]  # where the new keys go: the page and the row in it, each (tokens,)
    causal: bool
    step: Step | None


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Reads a step, once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size) != kv_cache_spec.head_size:
            raise EngineError("clearhead cannot serve this in vLLM: values of another width than keys.", HINT)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: Any = False) -> Metadata:  # noqa: ARG002
        common = common_attn_metadata
        where = common.query_start_loc, common.seq_lens, common.block_table_tensor
        tokens, page = int(common.query_start_loc[-1]), self.kv_cache_spec.block_size
        slots = common.slot_mapping[:tokens]
        slots = slots // page, slots % page
        return Metadata(tokens, *where, slots, bool(common.causal), RECORDER.step(page, where))


class Impl(AttentionImpl):  # type: ignore[misc]
    """Attends in one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise EngineError(f"clearhead serves decoders: a layer of this model is of type {attn_type}.", HINT)
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, sliding_window
        self.writes, self.sinks = kv_sharing_target_layer_name is None, sinks
        self.rules: dict[str, Any] = {
            "scale": float(scale),
            "softcap": logits_soft_cap or None,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes),
            "enable_gqa": True,
        }
        self.left = -1 if sliding_window is None else sliding_window - 1
        self.cache: tuple[Any, ...] = (None,)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:  # noqa: ARG002
        if self.sinks is not None:
            self.rules["sinks"] = self.sinks.detach().float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,  # noqa: ARG002
        output_block_scale: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Write the new keys and values to their pages and attend: query and output are (tokens, heads, d)."""
        of = attn_metadata
        if of is None:  # vLLM measures its memory
            return output
        keys, values = self.paged(kv_cache)
        if self.writes and key is not None and value is not None:
            keys[of.slots], values[of.slots] = key[: of.tokens], value[: of.tokens]
        query, window = query[: of.tokens], (self.left, 0 if of.causal else -1)
        layer_index = int(next(iter(re.findall(r"\.(\d+)\.", layer.layer_name)), 0))  # of model.layers.3.self_attn
        step = of.step if of.step is not None and of.step.asks(layer_index) else None
        if step is None or not step.all:
            output[: of.tokens] = self.attend(query, keys, values, of, window)
        if step is not None:
            some = query if step.all else query[step.queries]
            seen = self.attend(some, keys, values, step, window, **step.named)
            shares = self.shares(step, some, keys, seen.logsumexp)
            RECORDER.kept[layer_index] = seen, shares
            if step.all:
                output[: of.tokens] = seen.output
        return output

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, where: Any, window: tuple[int, int], **asked: Any
    ) -> Any:
        pages = {"seqused_k": where.lengths, "block_table": where.pages, "window_size": window}
        return varlen_attn(query, keys, values, where.ends, **pages, **self.rules, **asked)

    def shares(self, step: Step, query: Tensor, keys: Tensor, logsumexp: Tensor | None) -> Tensor | None:
        """The share of each query on each of its spans, (spans, heads): by the log-sum-exp of ranges of keys."""
        if logsumexp is None:
            return None
        parts = step.parts(self.left)
        rules: dict[str, Any] = {name: value for name, value in self.rules.items() if name != "sinks"}
        rules |= {"seqused_k": parts.lengths, "block_table": parts.pages, "logsumexp": True}
        # The output is of no use: one column of the keys, which are read anyway, stands for the values.
        sums = varlen_attn(query[parts.rows], keys, keys[..., :1], parts.ends, **rules).logsumexp
        if rules["alibi_slopes"] is not None:
            sums = sums - parts.gaps * rules["alibi_slopes"]
        return parts.signs @ (sums - logsumexp[parts.rows]).exp()

    def paged(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of keys and those of values, (blocks, page, kv_heads, d)."""
        if self.cache[0] is not kv_cache:
            blocks, heads, page, width = kv_cache.shape
            pages = kv_cache.view(blocks, heads, 2, page, width // 2)
            self.cache = kv_cache, pages[:, :, 0].swapaxes(1, 2), pages[:, :, 1].swapaxes(1, 2)
        return self.cache[1], self.cache[2]
