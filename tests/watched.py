"""Small random models of Transformers' classes, and the weights that eager attention returns for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers as hf

import clearhead as ch
from clearhead.watching.seen import Seen

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4}
BOTH_KINDS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A model class, its small configuration, and the kind of its inputs."""

    name: str
    model: Any
    config: Any
    kind: str = "decoder"  # decoder, encoder, both (encoder and decoder), image, pair (text and image)
    more: dict[str, Any] = field(default_factory=dict)  # arguments of the configuration


FAMILIES = [
    Family("gpt2", hf.GPT2LMHeadModel, hf.GPT2Config, more={
        "vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None,
    }),
    Family("llama", hf.LlamaForCausalLM, hf.LlamaConfig, more=GROUPED),
    Family("qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config, more={**GROUPED, "head_dim": 8}),
    Family("mistral", hf.MistralForCausalLM, hf.MistralConfig, more=WINDOWED),
    Family("gemma2", hf.Gemma2ForCausalLM, hf.Gemma2Config, more={
        **WINDOWED, "layer_types": BOTH_KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8,
    }),
    Family("gemma3", hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, more={**WINDOWED, "layer_types": BOTH_KINDS}),
    Family("gpt-oss", hf.GptOssForCausalLM, hf.GptOssConfig, more={
        **WINDOWED, "layer_types": BOTH_KINDS, "num_local_experts": 2, "num_experts_per_tok": 1,
    }),
    Family("phi3", hf.Phi3ForCausalLM, hf.Phi3Config, more=GROUPED),
    Family("bert", hf.BertModel, hf.BertConfig, "encoder", SMALL),
    Family("roberta", hf.RobertaModel, hf.RobertaConfig, "encoder", SMALL),
    Family("distilbert", hf.DistilBertModel, hf.DistilBertConfig, "encoder", {
        "vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
    }),
    Family("t5", hf.T5ForConditionalGeneration, hf.T5Config, "both", {
        "vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "eos_token_id": None,
        "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    }),
    Family("whisper", hf.WhisperForConditionalGeneration, hf.WhisperConfig, "both", {
        "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
        "max_source_positions": 15, "max_target_positions": 40, "decoder_start_token_id": 1, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 59, "suppress_tokens": None, "begin_suppress_tokens": None,
    }),
    Family("vit", hf.ViTModel, hf.ViTConfig, "image", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
        "patch_size": 4,
    }),
    Family("clip", hf.CLIPModel, hf.CLIPConfig, "pair", {
        "text_config": {**SMALL, "eos_token_id": 59, "bos_token_id": 1},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                          "image_size": 16, "patch_size": 4},
        "projection_dim": 16,
    }),
]  # fmt: skip
FAMILY = {family.name: family for family in FAMILIES}


def build(family: Family | str, **changes: Any) -> Any:
    """A model whose weights are far enough from zero for attention to prefer something."""
    family = FAMILY[family] if isinstance(family, str) else family
    torch.manual_seed(len(family.name))
    return shaken(family.model(family.config(**{**family.more, **changes})))


def shaken(model: Any) -> Any:
    """The same model, its weights far enough from zero for attention to prefer something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def choosing_keys() -> Any:
    """The configuration of a model that chooses by itself which keys each query attends to."""
    return hf.DeepseekV32Config(
        **{**GROUPED, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_group=1, topk_group=1, first_k_dense_replace=2, index_topk=4, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip


def inputs(family: Family | str, padding: str = "") -> dict[str, torch.Tensor]:
    """A batch of two; the first row is shorter where `padding` says on which side."""
    family = FAMILY[family] if isinstance(family, str) else family
    torch.manual_seed(1)
    ids = torch.randint(2, 59, (2, 11))
    mask = torch.ones_like(ids)
    if padding:
        hidden = slice(0, 3) if padding == "left" else slice(-6, None)
        mask[0, hidden], ids[0, hidden] = 0, 0
    passed = {"input_ids": ids}
    if padding:
        passed["attention_mask"] = mask
    image = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if family.kind == "image":
        return image
    if family.kind == "pair":
        passed["input_ids"][:, -1] = 59
        return passed | image
    if family.kind == "both":
        target = torch.randint(2, 59, (2, 7))
        if family.name == "whisper":
            return {"input_features": torch.randn(2, 8, 30), "decoder_input_ids": target}
        passed["decoder_input_ids"] = target
    return passed


def greedy(steps: int, **more: Any) -> dict[str, Any]:
    """Options of `generate`: so many tokens, each time the likeliest one."""
    return {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, **more}


def run_watched(model: Any, passed: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Seen]:
    """The output of a forward pass without gradients, and what `ch.watch` saw of it."""
    with torch.no_grad(), ch.watch(model, **options) as seen:
        out = model(**passed)
    return out, seen


def seen_of(model: Any, passed: dict[str, torch.Tensor], **options: Any) -> Seen:
    """What `ch.watch` saw of a forward pass without gradients."""
    return run_watched(model, passed, **options)[1]


def in_pieces(
    model: Any, ids: torch.Tensor, sizes: Sequence[int], mask: torch.Tensor | None = None, masked: int = 99
) -> list[Any]:
    """The outputs of a text that is run in pieces of these sizes, each with the cache of those before.

    mask   (batch, 1, length, length), of which the first `masked` pieces get their part
    """
    outs: list[Any] = []
    for number, piece in enumerate(ids.split(list(sizes), 1)):
        start = sum(sizes[:number])
        stop = start + piece.shape[1]
        part = {} if mask is None or number >= masked else {"attention_mask": mask[:, :, start:stop, :stop]}
        cache = outs[-1].past_key_values if outs else None
        outs.append(model(piece, past_key_values=cache, use_cache=True, **part))
    return outs


def assert_same_runs(one: Seen, other: Seen, *statistics: str) -> None:
    """The weights of all layers, and these statistics, are equal but for rounding."""
    assert one.layers == other.layers
    for name in one.layers:
        np.testing.assert_allclose(one.matrix(name)[...], other.matrix(name)[...], atol=2e-5, err_msg=name)
        for what in statistics:
            np.testing.assert_allclose(getattr(one[name], what), getattr(other[name], what), atol=1e-4, err_msg=what)


def eager(model: Any, passed: dict[str, torch.Tensor]) -> tuple[Any, dict[str, np.ndarray]]:
    """The model's output, and every layer's weights by the name that watch gives the layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**passed, output_attentions=True)
    model.set_attn_implementation(before)
    return out, by_layer(out)


def by_layer(out: Any) -> dict[str, np.ndarray]:
    """Weights by the name that watch gives the layer."""
    prefixes = {"attentions": "{}", "encoder_attentions": "encoder.{}.self", "decoder_attentions": "decoder.{}.self"}
    prefixes["cross_attentions"] = "decoder.{}.cross"
    results = {}
    for key, name in prefixes.items():
        for number, weights in enumerate(getattr(out, key, None) or ()):
            results[name.format(number)] = weights.float().numpy()
    for side in ("text", "vision"):
        part = getattr(out, f"{side}_model_output", None)
        for number, weights in enumerate(part.attentions if part is not None else ()):
            results[f"{side}_model.{number}"] = weights.float().numpy()
    return results


def eager_steps(model: Any, passed: dict[str, torch.Tensor], **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The output of `generate`, and every layer's weights over all steps, with 0 for keys that a window has dropped."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model.generate(**passed, **options, output_attentions=True, return_dict_in_generate=True)
    model.set_attn_implementation(before)
    if hasattr(out, "decoder_attentions"):
        results = {f"encoder.{i}.self": weights.numpy() for i, weights in enumerate(out.encoder_attentions)}
        stacks = {"decoder.{}.self": out.decoder_attentions, "decoder.{}.cross": out.cross_attentions}
    else:
        results, stacks = {}, {"{}": out.attentions}
    for name, steps in stacks.items():
        for number in range(len(steps[0])):
            results[name.format(number)] = joined([step[number].numpy() for step in steps], cross="cross" in name)
    return out, results


def joined(steps: list[np.ndarray], *, cross: bool = False) -> np.ndarray:
    """The weights of all steps, with 0 for keys that a window has dropped."""
    batch, heads = steps[0].shape[:2]
    queries = sum(step.shape[2] for step in steps)
    keys = steps[0].shape[3] if cross else queries
    whole, row = np.zeros((batch, heads, queries, keys), steps[0].dtype), 0
    for step in steps:
        last = keys if cross else row + step.shape[2]
        part = step if cross else step[..., :last]  # a static cache has unused capacity
        whole[:, :, row : row + step.shape[2], last - part.shape[3] : last] = part
        row += step.shape[2]
    return whole


def logits(out: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state", "logits_per_text"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    raise AssertionError(out)
