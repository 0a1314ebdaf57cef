"""Merged attention: a decoder's keys and an encoder's in one softmax; and caches that do not only grow."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from clearhead.errors import RuleError, ShapeError
from watched import BOTH_KINDS, WINDOWED, build, eager, eager_steps, greedy, inputs, logits, run_watched, shaken

PICTURE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
PICTURE |= {"image_size": 32, "patch_size": 8}
DECODERS = ["decoder.0", "decoder.1"]
SOURCE = 11  # tokens of the encoder
EIGHT = greedy(8)
STATIC = {"cache_implementation": "static"}


def merged_model() -> Any:
    text = {**WINDOWED, "layer_types": BOTH_KINDS, "query_pre_attn_scalar": 8}
    encoder = {"text_config": text, "vision_config": PICTURE, "mm_tokens_per_image": 4, "image_token_index": 57,
               "boi_token_index": 55, "eoi_token_index": 56}  # fmt: skip
    config = hf.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=57)
    return shaken(hf.T5Gemma2ForConditionalGeneration(config))


@pytest.fixture(scope="module")
def model() -> Any:
    return merged_model()


def sources() -> dict[str, torch.Tensor]:
    return inputs("bert", "right")


def prompt(*, padded: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    passed = {"decoder_input_ids": torch.randint(2, 55, (2, 7))}
    if padded:
        passed["decoder_attention_mask"] = torch.ones(2, 7, dtype=torch.long)
        passed["decoder_attention_mask"][0, :2] = 0
    return passed


def eager_rows(model: Any, passed: dict[str, Any]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """The tokens of generate, and each decoder layer's weights over all steps, (…, queries, decoder + encoder keys)."""
    out, parts = eager_steps(model, passed, **EIGHT)
    return out.sequences, [
        np.concatenate([parts[f"{name}.{kind}"] for kind in ("self", "cross")], -1) for name in DECODERS
    ]


def real_rows(passed: dict[str, Any], queries: int) -> np.ndarray:
    real = np.ones((2, 1, queries, 1), bool)
    if "decoder_attention_mask" in passed:
        real[:, 0, :7, 0] = passed["decoder_attention_mask"].numpy() > 0
    return real


@pytest.mark.parametrize("more", [{}, STATIC], ids=["growing", "static"])
@pytest.mark.parametrize("start", [{}, prompt(), prompt(padded=True)], ids=["", "prompt", "padded"])
def test_the_steps_of_generate_are_joined(model: Any, start: dict[str, Any], more: dict[str, Any]):
    passed = sources() | start | more
    tokens, truth = eager_rows(model, passed)
    with ch.watch(model, received=True, peak=True, entropy=True, distance=True, top=3) as seen:
        watched = model.generate(**passed, **EIGHT)
    assert watched.tolist() == tokens.tolist()
    for name, weights in zip(DECODERS, truth, strict=True):
        matrix, layer = seen.matrix(name), seen.layer(name)
        real = real_rows(passed, weights.shape[2])
        np.testing.assert_allclose(np.where(real, matrix[...], 0), np.where(real, weights, 0), atol=2e-5)
        assert (layer.other_keys, layer.cross) == (SOURCE, False)
        assert "merged attention: the last 11 keys" in layer.note
        result, again = seen[name], matrix.observe(received=True, peak=True, entropy=True, distance=True, top=3)
        for one in ("received", "peak", "entropy", "distance"):
            np.testing.assert_allclose(getattr(result, one), getattr(again, one), atol=1e-4, err_msg=one)
        np.testing.assert_allclose(result.top.weights, again.top.weights, atol=1e-5)
        picked = np.take_along_axis(matrix[...].numpy(), np.maximum(result.top.indices.numpy(), 0), -1)
        np.testing.assert_allclose(np.where(result.top.indices >= 0, picked, 0), result.top.weights, atol=1e-5)
    if "decoder_attention_mask" in start:
        assert seen.layer(DECODERS[0]).padding.sum() == 2


@pytest.mark.parametrize("kind", ["inference", "bfloat16"])
def test_merged_attention_in_inference_mode_and_bfloat16(kind: str):
    model = merged_model().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    truth = model.generate(**sources(), **EIGHT)
    with torch.inference_mode(kind == "inference"), ch.watch(model, received=True) as seen:
        tokens = model.generate(**sources(), **EIGHT)
    if kind != "bfloat16":
        assert tokens.tolist() == truth.tolist()
    for name in DECODERS:
        assert (seen[name].queries, seen[name].keys) == (8, 8 + SOURCE)
        np.testing.assert_allclose(seen[name].received.sum(-1), 8, atol=1e-3)


def test_merged_layers_refuse_what_they_lack(model: Any):
    with ch.watch(model) as seen:
        model.generate(**sources(), **EIGHT)
    assert [seen.layer(name).other_keys for name in seen.layers] == [0, 0, SOURCE, SOURCE]
    lines = [line for line in seen.summary() if line.layer in DECODERS]
    assert all(np.isnan(line.distance) and line.diagonal > 0 and line.previous > 0 for line in lines)
    local = seen.matrix(DECODERS[1])[...].numpy()[:, 0].diagonal(axis1=1, axis2=2).mean()
    np.testing.assert_allclose(next(line.diagonal for line in lines if line.layer == DECODERS[1]), local, atol=1e-5)
    with pytest.raises(ShapeError, match="rollout needs the same tokens"):
        ch.rollout([seen.matrix(layer) for layer in DECODERS], query=2)


def test_a_second_sequence_of_merged_attention_is_refused(model: Any):
    with pytest.raises(RuleError, match="beam"), ch.watch(model):
        model.generate(**sources(), **EIGHT, num_beams=3)
    with pytest.raises(RuleError, match="second sequence"), ch.watch(model, layers=DECODERS):
        [model.generate(**sources(), **EIGHT) for _ in range(2)]

    def with_another_encoder() -> None:
        first = model(**sources(), decoder_input_ids=torch.tensor([[3, 4]] * 2), use_cache=True)
        cache = hf.EncoderDecoderCache(first.past_key_values.self_attention_cache, hf.DynamicCache())
        other = {**sources(), "input_ids": sources()["input_ids"].flip(1)}
        model(**other, decoder_input_ids=torch.tensor([[5]] * 2), past_key_values=cache)

    said = pytest.raises(RuleError, match="merged attention has behind")
    with torch.no_grad(), said, ch.watch(model, layers=DECODERS):
        with_another_encoder()


def test_compressed_keys_behind_the_sequence_are_merged_too():
    """Compressed keys are appended as the sequence grows: a forward pass is recorded, a second step is refused."""
    base = {**WINDOWED, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2}
    config = hf.DeepseekV4Config(
        **base, layer_types=["compressed_sparse_attention"] * 2, index_n_heads=2, index_head_dim=8, index_topk=4,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    model, ids = shaken(hf.DeepseekV4ForCausalLM(config)), torch.randint(2, 59, (2, 16))
    out, _ = eager(model, {"input_ids": ids})
    watched, seen = run_watched(model, {"input_ids": ids})
    np.testing.assert_allclose(watched.logits, out.logits, atol=2e-5 * float(out.logits.abs().max()))
    for layer, weights in enumerate(out.attentions):
        matrix = seen.matrix(layer)
        np.testing.assert_allclose(matrix[...], weights[..., : matrix.shape[-1]], atol=2e-5)
        assert seen.layer(layer).other_keys == matrix.shape[-1] - 16 > 0
    with pytest.raises(RuleError, match="merged attention has behind"), ch.watch(model):
        model.generate(ids, **EIGHT)


@pytest.mark.parametrize("steps", [[11], [8, 1, 2]])
def test_keys_cached_before_watching_are_included(steps: list[int]):
    """As in prefix tuning, where the cache holds keys of tokens that never were queries."""
    model, ids = build("llama"), inputs("llama")["input_ids"]
    torch.manual_seed(4)
    prefix = torch.randn(2, 2, 2, 2, 3, 8)

    def run(**more: Any) -> list[Any]:
        cache = hf.DynamicCache(config=model.config)
        [cache.update(k, v, layer) for layer, (k, v) in enumerate(prefix)]
        with torch.no_grad():
            return [model(piece, past_key_values=cache, **more) for piece in ids.split(steps, 1)]

    model.set_attn_implementation("eager")
    truth = run(output_attentions=True)
    model.set_attn_implementation("sdpa")
    with ch.watch(model, distance=True) as seen:
        watched = run()
    for one, other in zip(watched, truth, strict=True):
        np.testing.assert_allclose(logits(one), logits(other), atol=2e-5 * float(logits(other).abs().max()))
    for layer in (0, 1):
        matrix, row = seen.matrix(layer), 0
        assert matrix.shape == (2, 4, 11, 14)
        for step in truth:
            weights = step.attentions[layer]
            stop = row + weights.shape[2]
            np.testing.assert_allclose(matrix[:, :, row:stop, : weights.shape[3]], weights, atol=2e-5)
            row = stop
        np.testing.assert_allclose(seen[layer].distance, matrix.distance(), atol=1e-4)
