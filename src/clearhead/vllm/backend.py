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
from clearhead.vllm.records import HINT, RECORDER, Group, Step


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

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


@dataclass
class Metadata:
    """One step: the queries of all requests one after the other, and where their keys lie."""

    tokens: int
    starts: Tensor  # (requests + 1,)
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
        rules = {**self.rules, "window_size": (self.left, 0 if of.causal else -1)}
        query = query[: of.tokens]
        place = layer_index(layer.layer_name)
        group = None if of.step is None else of.step.group(place)
        if group is None or not group.all:
            where: dict[str, Any] = {"seqused_k": of.lengths, "block_table": of.pages}
            output[: of.tokens] = varlen_attn(query, keys, values, of.starts, **where, **rules)
        if group is not None and of.step is not None:
            if not group.all:
                query = query[group.queries]
            where = {"seqused_k": group.lengths, "block_table": group.pages}
            seen = varlen_attn(query, keys, values, group.ends, **where, **rules, **group.named)
            of.step.kept[place] = group, seen, self.shares(group, query, keys, seen.logsumexp)
            if group.all:
                output[: of.tokens] = seen.output
        return output

    def shares(self, group: Group, query: Tensor, keys: Tensor, logsumexp: Tensor | None) -> Tensor | None:
        """The share of each query on each of its spans, (spans, heads): by the log-sum-exp of ranges of keys."""
        if logsumexp is None:
            return None
        parts = group.parts(self.left)
        rules: dict[str, Any] = {name: value for name, value in self.rules.items() if name != "sinks"}
        rules |= {"seqused_k": parts.lengths, "block_table": parts.pages, "logsumexp": True}
        # The output is of no use: one column of the keys, which are read anyway, stands for the values.
        found = varlen_attn(query[parts.rows], keys, keys[..., :1], parts.ends, **rules).logsumexp
        if rules["alibi_slopes"] is not None:
            found = found - parts.gaps * rules["alibi_slopes"]
        return parts.signs @ (found - logsumexp[parts.rows]).exp()

    def paged(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of keys and those of values, (blocks, page, kv_heads, d)."""
        if self.cache[0] is not kv_cache:
            blocks, heads, page, width = kv_cache.shape
            pages = kv_cache.view(blocks, heads, 2, page, width // 2)
            self.cache = kv_cache, pages[:, :, 0].swapaxes(1, 2), pages[:, :, 1].swapaxes(1, 2)
        return self.cache[1], self.cache[2]


_PLACE = re.compile(r"\.(\d+)\.")


def layer_index(name: str) -> int:
    """3 of model.layers.3.self_attn.attn."""
    found = _PLACE.search(name)
    return int(found[1]) if found else 0
