"""Many architectures, made small: watching changes no output, weights and edited runs equal eager's, as do ours."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
import clearhead.hf  # registers
from changed import CUT, LOGITS_BY_HAND, OF_LOGITS, ByHand, added, assert_edited, by_hand, mean, zeroed
from clearhead.errors import RuleError
from problems import of_tiers
from small_models import small, taken
from watched import FAMILY, build, greedy, inputs

QUICK = [
    "AlbertModel", "DiffLlamaModel", "GPTBigCodeModel", "GitModel", "Llama4TextModel", "MiniMaxModel",
    "ModernBertModel", "UMT5Model",
]  # fmt: skip
SLOW = [
    "BigBirdPegasusModel", "GraniteModel", "HrmTextModel", "LongT5Model", "SiglipModel", "T5GemmaModel", "ASTModel",
    "AfmoeModel", "Aimv2Model", "ApertusModel", "ArceeModel", "BartModel", "BeitModel", "BertModel", "BioGptModel",
    "BitNetModel", "BlenderbotSmallModel", "CLIPModel", "CLIPSegModel", "Cohere2Model", "CohereModel",
    "Data2VecAudioModel", "Data2VecTextModel", "DeiTModel", "Dinov2Model", "DistilBertModel", "DogeModel",
    "ElectraModel", "ErnieModel", "EuroBertModel", "Exaone4Model", "GPTNeoXModel", "Gemma3TextModel", "Glm4Model",
    "GlmModel", "GptOssModel", "HeliumModel", "HubertModel", "JetMoeModel", "Lfm2Model", "M2M100Model",
    "MBartModel", "MarianModel", "MarkupLMModel", "MetaClip2Model", "MistralModel", "MixtralModel",
    "MoonshineModel", "NomicBertModel", "OPTModel", "Olmo2Model", "OlmoeModel", "PLBartModel", "PegasusXModel",
    "PersimmonModel", "Phi3Model", "PhiModel", "PhimoeModel", "Qwen2Model", "Qwen2MoeModel", "Qwen3Model",
    "Qwen3NextModel", "SEWModel", "SeedOssModel", "SmolLM3Model", "Speech2TextModel", "StableLmModel",
    "Starcoder2Model", "SwitchTransformersModel", "UniSpeechModel", "ViTMAEModel", "ViTModel", "Wav2Vec2Model",
    "WhisperModel", "XLMRobertaModel", "XLMRobertaXLModel",
]  # fmt: skip
ELSEWHERE = [  # their attention does not go through the interface
    "BigBirdModel", "BlipModel", "BloomModel", "DebertaV2Model", "FalconModel", "FlaubertModel", "GPTJModel",
    "MptModel", "RoFormerModel", "ViltModel", "XGLMModel", "XLNetModel",
]  # fmt: skip
RANDOM = {"SwitchTransformersModel"}  # its router draws numbers, and a compiler draws them in another order


@pytest.mark.filterwarnings("ignore:.*was not seen:UserWarning")
@pytest.mark.parametrize("name", of_tiers(QUICK, SLOW))
def test_each_architecture_keeps_outputs_and_has_eagers_weights(name: str):
    model = small(getattr(hf, name))
    inputs = taken(model)
    before = outputs(model, inputs)
    with ch.watch(model, received=True) as seen:
        watched = outputs(model, inputs)
    same(watched, before, inputs, name)
    assert len(seen)
    truth = weights_of(model, inputs)
    for layer in seen.layers:
        matrix = seen.matrix(layer)[...].float().numpy()
        np.testing.assert_allclose(seen[layer].received, matrix.sum(-2), atol=1e-3)
        known = [one for one in truth if one.shape == matrix.shape]
        if known and name != "DiffLlamaModel":  # whose eager weights are the difference of two recorded layers
            assert min(apart(matrix, one, seen.layer(layer)) for one in known) < 2e-4, f"{name} {layer}"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_attention_outside_the_interface_is_refused_by_name(name: str):
    model = small(getattr(hf, name))
    with (
        pytest.raises(RuleError, match=r"Attention.*does not go through|Attention.*do not go through"),
        ch.watch(model),
    ):
        raise AssertionError("the block was entered")


def outputs(model: Any, inputs: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        torch.manual_seed(7)
        return dict(tensors(model(**inputs, **more)))


def tensors(result: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating tensor in an output, by its path; caches are left out."""
    if isinstance(result, torch.Tensor):
        if result.is_floating_point():
            yield name, result
    elif hasattr(result, "items"):
        for key, value in result.items():
            if key != "past_key_values":
                yield from tensors(value, f"{name}.{key}")
    elif isinstance(result, (tuple, list)):
        for place, value in enumerate(result):
            yield from tensors(value, f"{name}[{place}]")


def close(result: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None, what: str) -> None:
    """Equal within rounding, except at padding, which is ignored."""
    if real is not None and result.shape[:2] == real.shape:
        result, expected = result[real.bool()], expected[real.bool()]
    reach = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    np.testing.assert_allclose(result.numpy(), expected.numpy(), atol=2e-4 * reach + 1e-7, err_msg=what)


def weights_of(model: Any, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """The weights of eager attention for all layers of all stacks; nothing where it cannot return them."""
    model.set_attn_implementation("eager")
    out = outputs(model, inputs, output_attentions=True)
    return [x.numpy() for key, x in out.items() if "attentions" in key and x.ndim == 4]


def apart(matrix: np.ndarray, weights: np.ndarray, layer: Any) -> float:
    """The largest difference over rows that see a key and are not padding."""
    counts = ~np.isneginf(layer.observation.logsumexp.numpy())[..., None]
    if layer.padding is not None:
        counts = counts & ~layer.padding.numpy()[:, None, :, None]
    return float(np.abs(np.where(counts, matrix - weights, 0)).max())


def with_eagers(name: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model with our attention, inputs for it, and what eager attention gives."""
    model = small(getattr(hf, name))
    inputs = taken(model)
    model.set_attn_implementation("eager")
    expected = outputs(model, inputs)
    model.set_attn_implementation("clearhead")
    return model, inputs, expected


def same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], inputs: dict[str, Any], name: str) -> None:
    for key, truth in expected.items():
        close(result[key], truth, inputs.get("attention_mask"), f"{name}{key}")


@pytest.mark.parametrize("name", of_tiers([], [*QUICK, *SLOW]))
def test_each_architecture_gives_eagers_outputs(name: str):
    model, inputs, expected = with_eagers(name)
    same(outputs(model, inputs), expected, inputs, name)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the models' own code breaks graphs, and the compiler says so
@pytest.mark.parametrize("name", sorted({*QUICK, *SLOW} - RANDOM)[::8])  # compiling all of them takes a quarter hour
def test_each_architecture_compiled(name: str):
    model, inputs, expected = with_eagers(name)
    torch.compiler.reset()
    result = outputs(torch.compile(copy.deepcopy(model), backend="eager"), inputs)
    torch.compiler.reset()
    same(result, expected, inputs, name)


@pytest.mark.gate
@pytest.mark.parametrize("name", sorted({*ELSEWHERE} - {"GPTJModel", "ViltModel"}))  # for which `taken` has no inputs
def test_attention_outside_the_interface_computes_as_before(name: str):
    model = small(getattr(hf, name))
    inputs = taken(model)
    model.config._attn_implementation = "eager"  # as from_pretrained sets it; set_attn_implementation only warns
    expected = outputs(model, inputs)
    model.config._attn_implementation = "clearhead"
    same(outputs(model, inputs), expected, inputs, name)


EDITS = [*OF_LOGITS, ch.off(to="mean", heads=[0]), ch.off(heads=[3])]
HAND = ByHand(LOGITS_BY_HAND, [mean([0]), zeroed([3])])
CHANGED_QUICK = ["gpt2", "gemma2", "bert", "t5", "vit"]
OTHERS = [
    "AlbertModel", "BartModel", "BioGptModel", "Cohere2Model", "Data2VecTextModel", "DeiTModel", "Dinov2Model",
    "ElectraModel", "GPTNeoXModel", "Glm4Model", "GraniteModel", "MBartModel", "MarianModel", "MixtralModel",
    "ModernBertModel", "OPTModel", "Olmo2Model", "PhiModel", "Qwen2Model", "SiglipModel", "Starcoder2Model",
    "Wav2Vec2Model",
]  # fmt: skip


def made(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A small model of a family or a class, and inputs for it."""
    if name in FAMILY:
        return build(name), inputs(name)
    model = small(getattr(hf, name))
    return model, {key: x for key, x in taken(model).items() if key != "attention_mask"}


@pytest.mark.filterwarnings("ignore:.*was not changed:UserWarning")
@pytest.mark.parametrize(
    "name", of_tiers(CHANGED_QUICK, [name for name in [*FAMILY, *OTHERS] if name not in CHANGED_QUICK])
)
def test_edits_equal_those_made_by_hand(name: str):
    model, passed = made(name)
    assert_edited(model, passed, EDITS, HAND)


def cross(path: str, layer: int) -> bool:
    """Is this the module of cross-attention in this layer of the decoder?"""
    numbers = [part for part in path.split(".") if part.isdecimal()]
    return ("EncDec" in path or "encoder_attn" in path) and numbers[0] == str(layer)


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.gate)])
def test_cross_attention_has_queries_and_keys_of_two_texts(name: str):
    model, passed = build(name), inputs(name)
    cut = ch.cut(queries=[2, -1], keys=10, layers=["decoder.0.cross"])
    assert_edited(model, passed, cut, ByHand([added(CUT, [2, 6], [10])], layer=lambda path: cross(path, 0)))
    boost = ch.boost(keys=9, by=2, layers=["decoder.1.cross"], heads=[1])
    assert_edited(model, passed, boost, ByHand([added(2.0, None, [9], [1])], layer=lambda path: cross(path, 1)))


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.gate)])
def test_an_encoder_decoder_generates_as_full_passes_by_hand(name: str):
    model, passed = build(name), inputs(name)
    passed.pop("decoder_input_ids")
    edits = [
        ch.boost(keys=slice(2, 6), by=2, layers=["decoder.1.cross"]),
        ch.cut(queries=slice(2, None), keys=[1, 3], layers=["decoder.1.cross"]),
        ch.off(layers=["decoder.1.cross"], heads=[2]),
    ]
    hand = ByHand(
        [added(2.0, None, [2, 3, 4, 5]), added(CUT, range(2, 99), [1, 3])],
        [zeroed([2])],
        layer=lambda path: cross(path, 1),
    )
    options = greedy(6, num_beams=1, output_logits=True, return_dict_in_generate=True)
    with ch.change(model, edits), ch.watch(model) as seen:
        result = model.generate(**passed, **options)
    with ch.change(model, edits):
        alone = model.generate(**passed, **options)
    ids = torch.full((2, 1), model.config.decoder_start_token_id)
    with by_hand(model, hand), torch.no_grad():
        for _ in range(6):
            out = model(**passed, decoder_input_ids=ids, use_cache=False)
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
    for run in (result, alone):
        torch.testing.assert_close(run.sequences[:, -6:], ids[:, -6:])
        close = {"rtol": 0, "atol": 1e-5 * float(out.logits.abs().max())}
        torch.testing.assert_close(run.logits[-1], out.logits[:, -1], **close)
    kept = next(weights for path, weights in hand.kept.items() if cross(path, 1))
    torch.testing.assert_close(seen.matrix("decoder.1.cross")[...], kept, rtol=0, atol=1e-5)
