"""Merged attention: a decoder's keys and an encoder's in one softmax; and caches that do not only grow."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from clearhead.errors import RuleError, ShapeError
from watched import BOTH_KINDS, WINDOWED, build, eager, greedy, inputs, logits, run_watched, shaken

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


def sources() -> dict[str, torch.Tensor]:
    return inputs("bert", "right")


def prompt() -> dict[str, torch.Tensor]:
    passed = {"decoder_input_ids": torch.randint(2, 55, (2, 7), generator=torch.manual_seed(3))}
    passed["decoder_attention_mask"] = torch.ones(2, 7, dtype=torch.long)
    passed["decoder_attention_mask"][0, :2] = 0
    return passed


@pytest.mark.filterwarnings("ignore:.*begin with padding:UserWarning")
def test_merged_layers_have_the_keys_of_both():
    model, passed = merged_model(), sources() | prompt() | {"use_cache": False}
    out, truth = eager(model, passed)
    watched, seen = run_watched(model, passed, received=True, entropy=True)
    real = prompt()["decoder_attention_mask"].bool()
    np.testing.assert_allclose(logits(watched)[real], logits(out)[real], atol=2e-5 * float(logits(out).abs().max()))
    for number, name in enumerate(DECODERS):
        matrix, layer = seen.matrix(name), seen.layer(name)
        weights = np.concatenate([truth[f"decoder.{number}.{kind}"] for kind in ("self", "cross")], -1)
        rows = real[:, None, :, None].numpy()
        np.testing.assert_allclose(np.where(rows, matrix[...], 0), np.where(rows, weights, 0), atol=2e-5)
        np.testing.assert_allclose(seen[name].received, matrix[...].sum(-2), atol=1e-4)
        assert (layer.other_keys, layer.cross, int(layer.padding.sum())) == (SOURCE, False, 2)
        assert "merged attention: the last 11 keys" in layer.note
    lines = [line for line in seen.summary() if line.layer in DECODERS]
    assert all(np.isnan(line.distance) and line.diagonal > 0 and line.previous > 0 for line in lines)
    with pytest.raises(ShapeError, match="rollout needs the same tokens"):
        ch.rollout([seen.matrix(layer) for layer in DECODERS], query=2)
    with pytest.raises(RuleError, match="merged attention has an encoder's keys"), ch.change(model, ch.cut(keys=1)):
        model(**passed)


def test_the_steps_of_merged_attention_are_refused():
    model = merged_model()
    tokens = model.generate(**sources(), **EIGHT)
    with pytest.raises(RuleError, match="puts an encoder's keys after"), ch.watch(model, layers=DECODERS):
        model.generate(**sources(), **EIGHT)
    model.set_attn_implementation("clearhead")
    assert model.generate(**sources(), **EIGHT).tolist() == tokens.tolist()
    assert model.generate(**sources(), **EIGHT, **STATIC).tolist() == tokens.tolist()


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
    with pytest.raises(RuleError, match="puts an encoder's keys after"), ch.watch(model):
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
