"""The three classes of a vLLM attention: Backend says what it supports, Builder reads a step, Impl computes a layer.

A page of vLLM is (kv_heads, page, 2·d) in memory. Here it holds each head's keys first and then its values, so that
rows of keys, and rows of values, are contiguous.
"""

import re
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import numpy as np
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

from clearhead.core.axes import Array
from clearhead.errors import EngineError
from clearhead.torch.varlen import Prepared, prepared, read_bits
from clearhead.vllm.records import HINT, RECORDER, WatchedStep, Where


class Backend(AttentionBackend):  # type: ignore[misc]
    """Tells vLLM what clearhead supports."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's own backend, which this one replaces."""
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


class Metadata(NamedTuple):
    """One step: the queries of all requests one after the other, and where their keys lie."""

    tokens: int
    where: Where
    slots: tuple[Array, Array]  # where the new keys go: the page and the row in it, each (tokens,)
    causal: bool
    step: WatchedStep | None


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Reads a step, once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size) != kv_cache_spec.head_size:
            raise EngineError("clearhead cannot serve this in vLLM: values of another width than keys.", HINT)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: Any = False) -> Metadata:  # noqa: ARG002
        common = common_attn_metadata
        where = common.query_start_loc.numpy(), None, common.seq_lens.numpy(), common.block_table_tensor.numpy()
        tokens, page = int(where[0][-1]), self.kv_cache_spec.block_size
        slots = np.divmod(common.slot_mapping[:tokens].numpy(), page)
        return Metadata(tokens, where, slots, bool(common.causal), RECORDER.step(where))


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
        }
        self.left = -1 if sliding_window is None else sliding_window - 1
        self.cache: tuple[Any, ...] = (None, None, None)  # with its pages of keys and of values
        self.layer = 0
        self.calls: dict[Hashable, Prepared] = {}

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
        if of is None:  # vLLM only measures memory
            return output
        if self.cache[0] is not kv_cache:
            self.read(kv_cache, layer.layer_name)
        _, keys, values = self.cache
        if self.writes and key is not None and value is not None:
            keys[of.slots], values[of.slots] = read_bits(key)[: of.tokens], read_bits(value)[: of.tokens]
        q, out = read_bits(query)[: of.tokens], read_bits(output)[: of.tokens]
        window = self.left, 0 if of.causal else -1
        step = of.step if of.step is not None and of.step.asks(self.layer) else None
        if step is None or not step.all:
            self.attend(q, of.where, out, {}, window_size=window)
        if step is not None:
            if not step.all:
                q, out = q[step.queries], np.empty_like(out[step.queries])
            seen = self.attend(q, step.where, out, step.named, window_size=window)
            if "received" in seen:  # with one query per request, these are its weights
                seen["spans"] = step.shares(seen.pop("received"))
            RECORDER.kept[self.layer] = seen
        return output

    def attend(
        self, q: Array, where: Where, out: Array | None, asked: dict[str, Any], **rules: Any
    ) -> dict[str, Array]:
        """Write the output, (tokens, heads, d), if an array is given; return the statistics, (tokens, heads, …)."""
        (_, keys, values), call = self.cache, (*asked.items(), *rules.items())
        if call not in self.calls:
            self.calls[call] = prepared((q, keys, values), self.rules | rules, asked)
        return self.calls[call]((q, keys, values), where, out)

    def read(self, kv_cache: Tensor, name: str) -> None:
        """Read once which layer this is, and its pages of keys and of values, (blocks, page, kv_heads, d)."""
        self.layer = int(next(iter(re.findall(r"\.(\d+)\.", name)), 0))  # of model.layers.3.self_attn
        blocks, heads, page, width = kv_cache.shape
        pages = kv_cache.view(blocks, heads, 2, page, width // 2)
        self.cache = kv_cache, *(read_bits(pages[:, :, side].swapaxes(1, 2)) for side in (0, 1))
        self.calls = {}
