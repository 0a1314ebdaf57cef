"""A stand-in for those parts of vLLM that clearhead uses, made from their documented names and fields."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class CpuPlatform:
    device_type = "cpu"

    @classmethod
    def is_cpu(cls) -> bool:
        return cls.device_type == "cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        pass


@dataclass
class CPUWorker:
    """Its model runs one step of a given layer or layers; the runner knows the batch's order and its requests."""

    model_config: Any
    parallel_config: Any = None
    model_runner: Any = field(default_factory=lambda: SimpleNamespace(requests={}, input_batch=None))

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output.run()


def a_config(**changed: Any) -> Any:
    """A model that clearhead serves, but for what is changed: model__use_mla=True."""
    text = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False, is_encoder_decoder=False, is_mm_prefix_lm=False, rswa_window=None, hf_text_config=text,
            get_num_attention_heads=lambda parallel: 4, max_model_len=64,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        attention_config=SimpleNamespace(use_non_causal=False),
        speculative_config=None, kv_transfer_config=None, use_v2_model_runner=False,
    )  # fmt: skip
    for name, value in changed.items():
        part, _, of = name.rpartition("__")
        setattr(getattr(config, f"{part}_config") if part else config, of, value)
    return config


def modules() -> dict[str, ModuleType]:
    """The modules by name, fresh."""
    registered: dict[Any, str] = {}
    platform = type("CpuPlatform", (), dict(vars(CpuPlatform)))
    attention = {name: type(name, (), {}) for name in ("AttentionBackend", "AttentionImpl")}
    attention |= {"AttentionMetadataBuilder": AttentionMetadataBuilder, "MultipleOf": MultipleOf}
    kinds = {"DECODER": "decoder", "ENCODER_ONLY": "encoder_only"}
    contents: dict[str, dict[str, Any]] = {
        "v1.attention.backend": attention | {"AttentionType": SimpleNamespace(**kinds)},
        "v1.attention.backends.registry": {
            "AttentionBackendEnum": Enum("AttentionBackendEnum", ["CPU_ATTN"]),
            "register_backend": registered.__setitem__, "registered": registered,
        },
        "v1.kv_cache_interface": {"KVCacheLayout": Enum("KVCacheLayout", ["LBHNC"])},
        "v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
        "distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "platforms": {"current_platform": platform()},
        "exceptions": {"VLLMValidationError": type("VLLMValidationError", (Exception,), {})},
    }  # fmt: skip
    made = {"vllm": ModuleType("vllm")}
    made["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    for name, members in contents.items():
        parts = name.split(".")
        for i in range(len(parts)):
            made.setdefault(".".join(["vllm", *parts[: i + 1]]), ModuleType(parts[i]))
        vars(made[f"vllm.{name}"]).update(members)
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The stand-in, and clearhead's modules on it, for one test."""
    made = modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("backend", "platform", "worker"):
        monkeypatch.delitem(sys.modules, f"clearhead.vllm.{name}", raising=False)
    return made
