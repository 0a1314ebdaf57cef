"""Small models of Transformers, of each family that our decoder runs in NumPy: its peers in tests, and their files."""

from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import clearhead as ch  # noqa: E402
from seeds import fresh  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
QWEN = {
    "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16,
}  # fmt: skip
OSS = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CASES = {
    "gpt2": ("GPT2", {}),
    "gpt2, exact gelu, own output": ("GPT2", {
        "activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 77
    }),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral, window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2, late windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma 2": ("Gemma2", {
        "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma 3": ("Gemma3", {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9}),
    "gemma 4": ("Gemma4", GEMMA4 | {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
    }),
    "gemma 4, keys as values": ("Gemma4", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "attention_bias": True,
    }),
    "phi-3, window": ("Phi3", {"sliding_window": 6}),
    "phi-3, long": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "attention_multiplier": 0.2
    }),
    "olmo 2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3Moe", QWEN),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss, other limit": ("GptOss", OSS | {"swiglu_limit": 2.0}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo 3": ("Olmo3", {
        "num_hidden_layers": 5, "sliding_window": 7,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    }),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox, one after the other": ("GPTNeoX", {"use_parallel_residual": False}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "phi-2": ("Phi", {}),
    "falcon 7b": ("Falcon", {"multi_query": True, "bias": True}),
    "falcon 40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "glm-4": ("Glm4", {"head_dim": 8}),
    "cohere 2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 7}),
    "exaone 4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 7}),
    "exaone 4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0
    }}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 7}),
    "ministral 3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3
    }}),
    "glm": ("Glm", {"head_dim": 8}),
    "cohere": ("Cohere", {}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 16}),
    "arcee": ("Arcee", {"head_dim": 16}),
    "bloom": ("Bloom", {}),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 1.1}}),
    "mpt, other slopes": ("Mpt", {"attn_config": {"alibi_bias_max": 12}}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}  # fmt: skip
N = 40


def peer_of(name):
    """Transformers' model of a case, with weights large enough that attention is far from uniform."""
    kind, options = CASES[name]
    inputs = SIZES | options
    if kind == "GPT2":
        keys = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        keys |= {"max_position_embeddings": "n_positions"}
        inputs = {keys.get(key, key): value for key, value in inputs.items()}
        del inputs["intermediate_size"]
    if kind in ("Bloom", "Mpt"):
        inputs["seq_length" if kind == "Bloom" else "max_seq_len"] = inputs.pop("max_position_embeddings")
        del inputs["intermediate_size"]
    if kind in ("GPT2", "GPTNeoX", "OPT", "Bloom", "Mpt"):
        del inputs["num_key_value_heads"]
    config = getattr(hf, f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4") else f"{kind}Config")(
        **inputs, attn_implementation="eager"
    )
    peer = getattr(hf, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    if kind == "Mpt":  # whose class leaves out the number
        largest = {"alibi_bias_max": config.attn_config.alibi_bias_max}
        peer.transformer.build_mpt_alibi_tensor = partial(peer.transformer.build_mpt_alibi_tensor, **largest)
    generator = torch.Generator().manual_seed(int(fresh().integers(2**31)))
    scales = [each for each in peer.named_buffers() if each[0].endswith("layer_scalar")]  # of Gemma 4
    for part, parameter in (*peer.named_parameters(), *scales):  # gpt-oss's experts reach their limit of 7
        torch.nn.init.normal_(
            parameter, std=3.0 if kind == "GptOss" and "gate_up" in part else 0.3, generator=generator
        )
    return peer


def saved(peer, place, shard="5GB"):
    peer.save_pretrained(place, max_shard_size=shard)
    shipped = Path(ch.__file__).parent / "models" / "rhymes" / "tokenizer.json"
    (place / "tokenizer.json").write_bytes(shipped.read_bytes())
    return place
