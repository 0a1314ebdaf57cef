"""Hybrids, wrappers and models of unusual attention, small and random: explained through Transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from clearhead.models import hub
from clearhead.models.protocol import Variant
from page_files import header_of
from problems import in_the_gate, of_tiers
from small_models import save, tokenizer
from watched import shaken

TEXT = "humpty dumpty sat on the wall and had a great fall"
WORDS = sorted({*TEXT.split(), "all", "kings", "horses", "men"}) + [f"word{i}" for i in range(44)]
HIDDEN = 3  # the place of the token that is hidden

TWO = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FOUR = TWO | {"num_hidden_layers": 4}
WIDE = FOUR | {"head_dim": 8}
SIXTEEN = TWO | {"head_dim": 8}
DELTA = FOUR | {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
QWEN = DELTA | {"head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
NEMOTRON = {key: x for key, x in TWO.items() if key != "num_hidden_layers"} | {
    "head_dim": 8, "layers_block_type": ["mamba", "moe", "attention", "mamba", "attention"], "ssm_state_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = TWO | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
EYE = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 8}
BOTH = ["sliding_attention", "full_attention"]
GEMMA4 = WIDE | {
    "sliding_window": 8, "layer_types": BOTH * 2, "vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
}  # fmt: skip

# class, configuration, its arguments, the numbers of the layers with attention
KINDS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN, (1, 3)),
    "qwen3.5 whole": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", {
        "text_config": QWEN, "vision_config": EYE, "image_token_id": 57, "video_token_id": 58,
        "vision_start_token_id": 55, "vision_end_token_id": 56,
    }, (1, 3)),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", QWEN | EXPERTS, (1, 3)),
    "olmo hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", DELTA, (1, 3)),
    "granite 4": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", {
        **FOUR, **MAMBA, **LOCAL, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 2,
    }, (1, 3)),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", FOUR | {"layer_types": ["conv", "full_attention"] * 2}, (1, 3)),
    "jamba": ("JambaForCausalLM", "JambaConfig", {
        **FOUR, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    }, (1, 3)),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", SIXTEEN | MAMBA | {"mamba_d_ssm": 64}, (0, 1)),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON, (2, 4)),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {
        **WIDE, **LOCAL, "block_size": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    }, (1, 3)),
    "gemma 3 whole": ("Gemma3ForConditionalGeneration", "Gemma3Config", {
        "text_config": SIXTEEN | {"sliding_window": 8, "layer_types": BOTH}, "vision_config": VISION,
        "image_token_index": 57, "boi_token_index": 55, "eoi_token_index": 56, "mm_tokens_per_image": 4,
    }, (0, 1)),
    "mistral 3": ("Mistral3ForConditionalGeneration", "Mistral3Config", {
        "text_config": SIXTEEN | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral"}, "image_token_index": 57,
    }, (0, 1)),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", {
        "text_config": TWO | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": 57,
    }, (0, 1)),
    "gemma 4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4, (0, 1, 2, 3)),
    "llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", {
        **SIXTEEN, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 4,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    }, (0, 1)),
    "deepseek v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT | ROUTED, (0, 1)),
    "deepseek v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | ROUTED, (0, 1)),
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT, (0, 1)),
    "laguna": ("LagunaForCausalLM", "LagunaConfig", {
        **SIXTEEN, "num_attention_heads_per_layer": [2, 6], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }, (0, 1)),
}  # fmt: skip
QUICK = ["gemma 4", "llama 4"]
GATE = ["qwen3.5 whole", "granite 4", "deepseek v3"]
# their own masks leave out more of a recurrent layer than what it reads of a token, or are not taken
OTHERWISE = {"granite 4", "jamba", "falcon-h1", "nemotron-h", "minimax"}


def made(kind: str, config: str, more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return shaken(getattr(hf, kind)(getattr(hf, config)(**more))).eval()


@pytest.mark.filterwarnings("ignore")  # of kernels that are not installed, by Transformers
@pytest.mark.parametrize(
    "name", [*in_the_gate([*QUICK, *GATE], *GATE), *of_tiers((), [name for name in KINDS if name not in QUICK + GATE])]
)
def test_each_kind_of_model_is_explained(tmp_path: Path, name: str):
    *how, numbers = KINDS[name]
    loaded = hub.of_loaded(hub.load(save(tmp_path, made(*how), WORDS)).inner, tokenizer(WORDS))
    model, run = loaded.inner, loaded.run(TEXT)
    assert tuple(loaded.numbers) == numbers
    with torch.no_grad(), ch.watch(model) as seen:
        out = model(torch.tensor([run.ids]), use_cache=False)
    np.testing.assert_allclose(run.logits, out.logits[0], atol=1e-4)
    with torch.no_grad(), ch.watch(model) as late:
        last = model(torch.tensor([run.ids]), use_cache=False, logits_to_keep=1).logits
    np.testing.assert_allclose(last[0, 0], out.logits[0, -1], atol=1e-4)
    assert late.layers == seen.layers
    assert [int(layer.rpartition(".")[2]) for layer in seen.layers] == list(numbers)
    for layer, number in zip(run.layers, seen.layers, strict=True):
        np.testing.assert_array_equal(layer.q, seen.layer(number).q[0])
    hiding_holds(name, loaded, run)
    derivatives_are_slopes(loaded, run)
    found = ch.explain(TEXT, loaded, answer=0)
    assert found.leak is None
    assert {head.layer for head in found.heads} <= set(numbers)
    assert {edge.layer for edge in found.edges} <= set(numbers)
    part = next(part for part in found.parts if part.tokens == (HIDDEN,))
    hidden = hidden_logits(loaded, run, HIDDEN)[0, -1].astype(np.float64)
    odds = hidden[0] - np.log(np.exp(hidden[1:]).sum())
    assert part.hidden == pytest.approx(odds - found.value, abs=1e-3)
    steps = found.steps(layer=numbers[-1])
    assert (steps.layer, *steps.trace.q.shape) == (numbers[-1], len(run.ids), run.layers[-1].q.shape[-1])
    absent = [number for number in range(numbers[-1]) if number not in numbers]
    for number in absent:
        with pytest.raises(ch.errors.SelectionError, match=f"layer {number} has no attention: layers "):
            found.steps(layer=number)
    assert ("with attention (" in str(found)) == bool(absent)
    chain = list(run.ids)
    for _ in range(3):
        with torch.no_grad():
            chain.append(int(model(torch.tensor([chain]), use_cache=False).logits[0, -1].argmax()))
    assert loaded.generate(list(run.ids), 3) == chain[-3:]
    assert found.next[0].id == chain[-3]


def hidden_logits(loaded: Any, run: Any, *places: int, **ids: Any) -> Any:
    gates = np.zeros(len(run.ids))
    gates[list(places)] = -np.inf
    return np.stack(list(loaded.again(run, [Variant(gates, **ids)], range(len(run.ids)))))


def hiding_holds(name: str, loaded: Any, run: Any) -> None:
    """Two tokens at a hidden place give the same logits behind it, those of Transformers with the place masked."""
    one = hidden_logits(loaded, run, HIDDEN)[0, HIDDEN + 1 :]
    other = hidden_logits(loaded, run, HIDDEN, ids={HIDDEN: 40})[0, HIDDEN + 1 :]
    seen = next(loaded.again(run, [Variant(ids={HIDDEN: 40})], range(HIDDEN + 1, len(run.ids))))
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(seen - run.logits[HIDDEN + 1 :]).max() > 1e-2
    if name in OTHERWISE:
        return
    mask = torch.ones(2, len(run.ids), dtype=torch.long)
    mask[:, HIDDEN] = 0
    places = torch.arange(len(run.ids)).expand(2, -1)
    with torch.no_grad():
        ids = torch.tensor([run.ids] * 2)
        masked = loaded.inner(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[0, HIDDEN + 1 :]
    np.testing.assert_allclose(one, masked, atol=1e-4)


def derivatives_are_slopes(loaded: Any, run: Any) -> None:
    """What the gates' derivatives, through attention and beside it, say of the last logits, is their slope."""
    last, weights = range(len(run.ids) - 1, len(run.ids)), np.linspace(-1, 1, 60)[None]
    gates = np.full(len(run.ids), -0.5)
    back = loaded.differentiated(run.ids, [Variant(gates)], last, lambda _: weights)
    by = sum(part.by_gates.sum(0) + (part.beside if part.beside.size else 0) for _, _, part in back)
    step = np.eye(len(gates))[HIDDEN] * 0.002
    high, low = loaded.again(run, [Variant(gates + step), Variant(gates - step)], last)
    slope = float(((high - low) * weights).sum()) / 0.004
    assert by[HIDDEN] == pytest.approx(slope, rel=0.02, abs=5e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "config", "more", "words"),
    [
        ("Mamba2ForCausalLM", "Mamba2Config", {
            "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
            "state_size": 8, "n_groups": 1,
        }, "no attention was seen"),
        ("BloomForCausalLM", "BloomConfig", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4},
         "BloomAttention"),
        ("MptForCausalLM", "MptConfig", {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4}, "MptAttention"),
    ],
)  # fmt: skip
def test_models_without_attention_to_see_are_refused(kind: str, config: str, more: dict[str, Any], words: str):
    with pytest.raises(ch.errors.RuleError, match=words):
        ch.load_model((made(kind, config, more), tokenizer(WORDS)))


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore")
def test_the_first_line_says_where_hiding_does_not_hold():
    """Zaya's keys and values are mixed with those of the tokens before, inside its attention."""
    found = ch.explain(TEXT, (made("ZayaForCausalLM", "ZayaConfig", FOUR), tokenizer(WORDS)), answer=0)
    assert found.leak is not None
    first = " ".join(str(found).split("\n")[:2])
    assert first.startswith("Hiding leaks in this model: other tokens in the hidden places still")
    assert all(f"{number:.2f}" in first for number in found.leak)
    assert "Hiding leaks" in json.dumps(header_of(found.to_html()))
    assert found.to_json()["leak"] == found.leak
