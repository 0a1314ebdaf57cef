"""The families of decoders, as data: how their numbers are named in config.json and in GGUF files, and what they do.

Sources: each family's class in Transformers (models/*/modeling_*.py), llama.cpp's conversion scripts and its table of
rope types.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Windows = Literal["none", "all", "every second", "five of six"]

# The names of a Llama in safetensors, layer by layer, beside those of GGUF; `{}` is a layer's number in both.
_LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
_NORMS_BEHIND = {  # Gemma 2 and 3, OLMo 2: what attention and the MLP give is normalised before it is added
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}
_FUSED = {"model.layers.{}.self_attn.qkv_proj": "blk.{}.attn_qkv", "model.layers.{}.mlp.gate_up_proj": "blk.{}.ffn_up"}
_PLAIN_MLP = {"model.layers.{}.mlp.c_fc": "blk.{}.ffn_up", "model.layers.{}.mlp.c_proj": "blk.{}.ffn_down"}
_GPT2 = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "h.{}.ln_1": "blk.{}.attn_norm",
    "h.{}.attn.c_attn": "blk.{}.attn_qkv",
    "h.{}.attn.c_proj": "blk.{}.attn_output",
    "h.{}.ln_2": "blk.{}.ffn_norm",
    "h.{}.mlp.c_fc": "blk.{}.ffn_up",
    "h.{}.mlp.c_proj": "blk.{}.ffn_down",
}


class Family(NamedTuple):
    """One family.

    names        of tensors in safetensors, without .weight or .bias, and in GGUF
    centred      layer norms instead of root-mean-square norms
    gated        MLPs with a gate
    activation   where config.json names none, and in GGUF, which names none at all
    neighbours   in GGUF, the rows of W^Q and W^K are permuted so that rotated pairs are neighbours
    less_one     safetensors keep a norm's weight less 1
    by_width     embeddings are multiplied by √d_model
    transposed   safetensors keep linear weights as (d_in, d_out)
    windows      which layers have the window, where config.json does not list them by `layer_types`
    epsilon      the key of the norms' ε in config.json
    keys         of config.json where they are not Llama's
    defaults     of keys of config.json that may be missing
    """

    names: Mapping[str, str] = _LLAMA
    centred: bool = False
    gated: bool = True
    activation: str = "silu"
    neighbours: bool = False
    less_one: bool = False
    by_width: bool = False
    transposed: bool = False
    windows: Windows = "none"
    epsilon: str = "rms_norm_eps"
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}


_GEMMA = Family(activation="gelu_pytorch_tanh", less_one=True, by_width=True)
_TIED = {"head_dim": 256, "tie_word_embeddings": True}
_WIDE = {**_TIED, "query_pre_attn_scalar": 256}

FAMILIES: dict[str, Family] = {  # by model_type of config.json, which is general.architecture of GGUF as well
    "gpt2": Family(
        _GPT2,
        centred=True,
        gated=False,
        activation="gelu_new",
        transposed=True,
        epsilon="layer_norm_epsilon",
        keys={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        defaults={"tie_word_embeddings": True},
    ),
    "llama": Family(neighbours=True),
    "mistral": Family(neighbours=True, windows="all"),
    "granite": Family(neighbours=True),
    "qwen2": Family(windows="none"),
    "qwen3": Family(windows="none"),
    "gemma": _GEMMA._replace(defaults=_TIED),
    "gemma2": _GEMMA._replace(names=_LLAMA | _NORMS_BEHIND, windows="every second", defaults=_WIDE),
    "gemma3": _GEMMA._replace(names=_LLAMA | _NORMS_BEHIND, windows="five of six", defaults=_WIDE),
    "phi3": Family(_LLAMA | _FUSED, windows="all"),
    "olmo2": Family(_LLAMA | _NORMS_BEHIND),
    "stablelm": Family(centred=True, epsilon="layer_norm_eps", defaults={"partial_rotary_factor": 0.25}),
    "starcoder2": Family(
        _LLAMA | _PLAIN_MLP,
        centred=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        windows="all",
        epsilon="norm_epsilon",
    ),
}
OTHER_NAMES = {"gemma3_text": "gemma3"}  # of the same families in config.json


def windows_of(kind: Windows, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Which layers have the window, where nothing lists them."""
    chosen = {
        "none": [False] * layers,
        "all": [True] * layers,
        "every second": [layer % 2 == 0 for layer in range(layers)],
        "five of six": [layer % 6 != 5 for layer in range(layers)],
    }
    return tuple(window if has else None for has in chosen[kind])
