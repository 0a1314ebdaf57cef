"""Writes Transformers' models as GGUF files, with llama.cpp's names of tensors and keys, which the package gguf has."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

NEIGHBOURS = (
    "llama",
    "mistral",
    "granite",
    "mixtral",
    "smollm3",
    "ministral3",
    "arcee",
)  # rotated pairs, in GGUF alone
NAMES = {  # of the architecture, where it is not the model_type
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "olmo3": "olmo2", "gpt_neox": "gptneox", "phi": "phi2", "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3", "cohere": "command-r", "gemma4_text": "gemma4",
}  # fmt: skip
INNER = ("ffn_hidden_size", "intermediate_size", "n_inner")


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W^Q or W^K with the two halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(place: Path, model: Any, kind: str = "F32", more: Any = None, split: int = 0, *, fused: bool = False) -> Path:
    """The model in one file, or with `split` so many tensors in each; matrices as `kind`, or q, k and v as one.

    `more` is given the writer, for what a test adds.
    """
    config, name = model.config, model.config.model_type
    architecture = NAMES.get(name, name)
    writer = gguf.GGUFWriter(place, architecture, split_max_tensors=split)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if name == "falcon" and not config.new_decoder_architecture:
        kv_heads = 1
    d_k = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(layers)
    lengths = ("max_position_embeddings", "max_seq_len", "seq_length")
    writer.add_context_length(next(getattr(config, key) for key in lengths if hasattr(config, key)))
    writer.add_embedding_length(config.hidden_size)
    inner = next((size for key in INNER if (size := getattr(config, key, None))), None)
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
        "logit_scale": writer.add_logit_scale,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
    }.items():
        if getattr(config, key, None) and not (key == "num_experts" and hasattr(config, "num_local_experts")):
            add(getattr(config, key))
    if architecture in ("olmo2", "exaone4") and getattr(config, "sliding_window", None):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma4":
        _by_layer(writer, config)
    if name == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    if name == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if getattr(config, "query_pre_attn_scalar", None):  # real Gemmas need no key, since their head's width says it
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    tokens = ["t", "0", "t0", *(f"w{number}" for number in range(config.vocab_size - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t 0"])
    if more is not None:
        more(writer)
    tensors = dict(_tensors(model, architecture, layers))
    for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)) if name in NEIGHBOURS else ():
        tensors |= {key: permuted(array, count) for key, array in tensors.items() if part in key}
    for key in [key for key in tensors if fused and "attn_q." in key]:  # as llama.cpp's --fuse-qkv
        tensors[key.replace("_q", "_qkv")] = np.concatenate([tensors.pop(key.replace("_q", f"_{x}")) for x in "qkv"])
    for key, array in tensors.items():
        packed = array.ndim > 1 and array.shape[-1] % 32 == 0
        label = gguf.GGMLQuantizationType[kind if packed else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(array), label), raw_dtype=label)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def _by_layer(writer: Any, config: Any) -> None:
    """The sizes of Gemma 4's layers, in place of those that are written already."""
    kept, near = writer.kv_data[0], [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[number] for number in range(len(near))]
    far, shared = layers[-1].head_dim, len(near) - config.num_kv_shared_layers
    sizes = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "feed_forward_length")
    for key in (*sizes, "rope.dimension_count", "final_logit_softcapping"):
        kept.pop(f"gemma4.{key}", None)
    writer.add_sliding_window_pattern(near)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    wide = 2 if config.use_double_wide_mlp else 1
    writer.add_feed_forward_length([config.intermediate_size * (wide if n >= shared else 1) for n in range(len(near))])
    writer.add_key_length(far)
    writer.add_value_length(far)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(far)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    turned = int(far * config.rope_parameters["full_attention"]["partial_rotary_factor"]) // 2
    factors = np.where(np.arange(far // 2) < turned, 1, 1e30).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _positions(writer: Any, config: Any, architecture: str, d_k: int) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return
    whole = parameters.get("full_attention", parameters)
    dims = int(d_k * whole.get("partial_rotary_factor", 1.0))
    stretch = whole["alpha"] ** (d_k / (d_k - 2)) if "alpha" in whole else 1.0
    writer.add_rope_freq_base(whole["rope_theta"] * stretch)
    writer.add_rope_dimension_count(dims)
    kind = whole.get("rope_type", "default")
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = 1 / whole["rope_theta"] ** (np.arange(0, dims, 2) / dims)
        rates = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        writer.add_tensor("rope_freqs.weight", (plain / rates).astype(np.float32))
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(whole["factor"])
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(whole["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(whole["beta_slow"])
        if "llama_4_scaling_beta" in whole:
            writer.add_rope_scaling_yarn_log_mul(whole["mscale_all_dim"])
            writer.add_attn_temperature_scale(whole["llama_4_scaling_beta"])
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(whole[f"{length}_factor"], np.float32))


def _tensors(model: Any, architecture: str, layers: int) -> Any:
    label = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(label, layers)
    for key, parameter in _parts(model):
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        known = key.removeprefix("transformer.") if architecture == "bloom" else key
        name = names.get_name(known + ".weight" * key.endswith("layer_scalar"), try_suffixes=(".weight", ".bias"))
        array = parameter.to(torch.float32).numpy()
        if architecture == "gpt2" and array.ndim == 2 and ("attn.c" in key or "mlp.c" in key):
            array = array.T
        yield name, array + 1 if architecture in ("gemma", "gemma2", "gemma3") and "norm" in key else array


def _parts(model: Any) -> Any:
    """The parameters as llama.cpp's conversion has them: experts' gates apart, fused q, k and v after each other."""
    config = model.config
    for key, parameter in model.state_dict().items():
        if ".mlp.experts." in key:
            oss, bias = config.model_type == "gpt_oss", key.endswith("_bias")
            stem, end = key.removesuffix("_bias"), ".bias" if bias else ".weight"
            rows = parameter.transpose(-1, -2) if oss and not bias else parameter
            if "gate_up" in key:
                half = rows.shape[1] // 2
                gate, up = (rows[:, ::2], rows[:, 1::2]) if oss else (rows[:, :half], rows[:, half:])
                yield stem.replace("gate_up_proj", "gate_proj") + end, gate
                yield stem.replace("gate_up_proj", "up_proj") + end, up
            else:
                yield stem + end, rows
        elif "query_key_value" in key:
            d_k = config.hidden_size // config.num_attention_heads
            groups = config.num_attention_heads
            if config.model_type == "falcon":
                groups = config.num_kv_heads if config.new_decoder_architecture else 1
            each = parameter.reshape(groups, -1, d_k, *parameter.shape[1:])
            parts = each[:, :-2], each[:, -2], each[:, -1]
            yield key, torch.cat([part.reshape(-1, *parameter.shape[1:]) for part in parts])
        else:
            yield key + ".weight" * key.endswith("sinks"), parameter
