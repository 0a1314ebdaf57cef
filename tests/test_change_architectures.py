"""ch.change on many architectures: each edit equals the same edit made by hand on stored logits."""

from typing import Any

import pytest
import torch
import transformers as hf

import clearhead as ch
from changed import CUT, LOGITS_BY_HAND, OF_LOGITS, ByHand, added, assert_edited, by_hand, mean, times
from problems import of_tiers
from small_models import small, taken
from watched import FAMILY, build, greedy, inputs

EDITS = [*OF_LOGITS, ch.off(to="mean", heads=[0]), ch.scaled(1.5, heads=[3])]
HAND = ByHand(LOGITS_BY_HAND, [mean([0]), times(1.5, [3])])
QUICK = ["gpt2", "gemma2", "bert", "t5", "vit"]
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
@pytest.mark.parametrize("name", of_tiers(QUICK, [name for name in [*FAMILY, *OTHERS] if name not in QUICK]))
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
    boost = ch.boost(keys=9, by=2, heads={"decoder.1.cross": [1]})
    assert_edited(model, passed, boost, ByHand([added(2.0, None, [9], [1])], layer=lambda path: cross(path, 1)))


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.gate)])
def test_an_encoder_decoder_generates_as_full_passes_by_hand(name: str):
    model, passed = build(name), inputs(name)
    passed.pop("decoder_input_ids")
    edits = [
        ch.boost(keys=slice(2, 6), by=2, layers=["decoder.1.cross"]),
        ch.cut(queries=slice(2, None), keys=[1, 3], layers=["decoder.1.cross"]),
        ch.scaled(1.5, heads={"decoder.1.cross": [2]}),
    ]
    hand = ByHand(
        [added(2.0, None, [2, 3, 4, 5]), added(CUT, range(2, 99), [1, 3])],
        [times(1.5, [2])],
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
    kept = next(pair[0] for path, pair in hand.kept.items() if cross(path, 1))
    torch.testing.assert_close(seen.matrix("decoder.1.cross")[...], kept, rtol=0, atol=1e-5)
