"""Small random models of any Transformers class, made from its configuration, and inputs for them."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from watched import shaken

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size", "num_mel_bins"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_source_positions": 64, "max_target_positions": 64,
    "image_size": 32, "sliding_window": 4, "attention_window": 4, "num_global_layers": 1,
    "decoder_start_token_id": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
    "vocab_size": 60, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "image_token_index": 57,
    "image_token_id": 57, "num_codebooks": 2, "n_inner": 48, "n_group": 1, "topk_group": 1, "num_random_blocks": 1,
}  # fmt: skip


def small(model: Any, **more: Any) -> Any:
    """A model of two layers, some tens of channels wide, with random weights; `more` is put into its configuration."""
    torch.manual_seed(0)
    return shaken(model(_config(model.config_class, **more)))


def tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of these words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")


def save(place: Path, model: Any, words: Sequence[str]) -> str:
    """Save a model as users have it, with a tokenizer of these words; returns the place as text."""
    model.save_pretrained(place)
    tokenizer(words).save_pretrained(place)
    return str(place)


def taken(model: Any) -> dict[str, torch.Tensor]:
    """A batch of two inputs for it: texts of which the first has padding, images or audio."""
    torch.manual_seed(1)
    config, wanted = model.config, inspect.signature(model.forward).parameters
    inputs: dict[str, torch.Tensor] = {}
    if "input_ids" in wanted:
        inputs["input_ids"] = torch.randint(3, 50, (2, 11))
        inputs["attention_mask"] = torch.ones(2, 11, dtype=torch.long)
        inputs["attention_mask"][0, -4:] = 0
    if "decoder_input_ids" in wanted:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 7))
    if "pixel_values" in wanted and (model.main_input_name == "pixel_values" or hasattr(config, "vision_config")):
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32)
    if model.main_input_name == "input_features":
        bins = config.num_mel_bins if hasattr(config, "num_mel_bins") else config.input_feat_per_channel
        inputs["input_features"] = (
            torch.randn(2, bins, 128) if "Whisper" in type(model).__name__ else torch.randn(2, 40, bins)
        )
    if model.main_input_name == "input_values":
        spectrum = hasattr(config, "num_mel_bins")
        inputs["input_values"] = torch.randn((2, config.max_length, config.num_mel_bins) if spectrum else (2, 4000))
    return inputs


def _config(kind: Any, **more: Any) -> Any:
    plain = kind()
    changes: dict[str, Any] = {
        key: _config(type(getattr(plain, key))).to_dict() for key in kind.sub_configs if getattr(plain, key, None)
    }
    for name, value in SIZES.items():
        default = plain.to_dict().get(name) if plain.is_heterogeneous else getattr(plain, name, None)
        settable = not isinstance(getattr(kind, name, None), property)
        if settable and isinstance(default, int) and not isinstance(default, bool):
            changes[name] = value
    kinds = list(dict.fromkeys(getattr(plain, "layer_types", None) or ()))
    if kinds:
        changes["layer_types"] = (kinds * 2)[:2]
    return kind(**changes | more)
