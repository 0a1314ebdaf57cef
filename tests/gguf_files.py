"""Writes Transformers' models as GGUF files, with llama.cpp's names of tensors and keys, which the package gguf has."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

NEIGHBOURS = ("llama", "mistral", "granite")  # whose rotated pairs are neighbours in GGUF
NAMES = {"mistral": "llama", "gemma3_text": "gemma3"}  # of the architecture, where it is not the model_type


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W^Q or W^K with the two halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(place: Path, model: Any, kind: str = "F32", more: Any = None) -> Path:
    """The model in one file; matrices as `kind`. `more` is given the writer, for what a test adds."""
    config, name = model.config, model.config.model_type
    architecture = NAMES.get(name, name)
    writer = gguf.GGUFWriter(place, architecture)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    d_k = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    writer.add_feed_forward_length(inner or 4 * config.hidden_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(d_k)
    writer.add_value_length(d_k)
    keys = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    epsilon = next(getattr(config, key) for key in keys if hasattr(config, key))
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_layer_norm_eps(epsilon)
    _positions(writer, config, architecture, d_k)
    for key, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "sliding_window": writer.add_sliding_window,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "attention_multiplier": writer.add_attention_scale,
    }.items():
        if getattr(config, key, None):
            add(getattr(config, key))
    if getattr(config, "query_pre_attn_scalar", None):  # real Gemmas need no key, since their head's width says it
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    tokens = ["t", "0", "t0", *(f"w{number}" for number in range(config.vocab_size - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t 0"])
    if more is not None:
        more(writer)
    for key, array in _tensors(model, architecture, layers):
        array = permuted(array, heads) if name in NEIGHBOURS and "attn_q." in key else array
        array = permuted(array, kv_heads) if name in NEIGHBOURS and "attn_k." in key else array
        packed = array.ndim == 2 and array.shape[-1] % 32 == 0
        label = gguf.GGMLQuantizationType[kind if packed else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(array), label), raw_dtype=label)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def _positions(writer: Any, config: Any, architecture: str, d_k: int) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return
    whole = parameters.get("full_attention", parameters)
    dims = int(d_k * whole.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_dimension_count(dims)
    kind = whole.get("rope_type", "default")
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = 1 / whole["rope_theta"] ** (np.arange(0, dims, 2) / dims)
        rates = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        writer.add_tensor("rope_freqs.weight", (plain / rates).astype(np.float32))
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(whole[f"{length}_factor"], np.float32))


def _tensors(model: Any, architecture: str, layers: int) -> Any:
    label = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(label, layers)
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        array = parameter.to(torch.float32).numpy()
        if architecture == "gpt2" and array.ndim == 2 and ("attn.c" in key or "mlp.c" in key):
            array = array.T
        yield name, array + 1 if architecture.startswith("gemma") and "norm" in key else array
