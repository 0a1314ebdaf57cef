"""`generate` with attn_implementation="clearhead": the tokens of eager attention, whatever cache and search."""

from typing import Any

import pytest
import torch
import transformers as hf

from test_hf import FAMILY, both, set_to
from watched import build, inputs

EIGHT = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
CACHED = ["gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt-oss", "t5", "whisper"]
TEXTS = ["gpt2", "llama", "gemma3", "gpt-oss", "t5"]


def generated(models: tuple[Any, Any], passed: dict[str, torch.Tensor], **options: Any) -> list[list[list[int]]]:
    passed = {name: x for name, x in passed.items() if name != "decoder_input_ids"}
    return [model.generate(**passed, **{**EIGHT, **options}).tolist() for model in models]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CACHED)
def test_tokens_with_any_cache(name: str, cache: str):
    padding = "" if name == "whisper" else "left"
    ours, theirs = generated(both(FAMILY[name]), inputs(FAMILY[name], padding), cache_implementation=cache)
    assert ours == theirs


@pytest.mark.parametrize("name", TEXTS)
def test_tokens_without_a_cache(name: str):
    ours, theirs = generated(both(FAMILY[name]), inputs(FAMILY[name], "left"), use_cache=False)
    assert ours == theirs


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_beam_search(name: str, cache: str):
    options = {"num_beams": 3, "cache_implementation": cache}
    ours, theirs = generated(both(FAMILY[name]), inputs(FAMILY[name], "left"), **options)
    assert ours == theirs


def test_sampling_follows_the_seed():
    models, result = both(FAMILY["llama"]), []
    for model in models:
        torch.manual_seed(3)
        result += generated((model,), inputs(FAMILY["llama"]), do_sample=True)  # type: ignore[arg-type]
    assert result[0] == result[1]


def test_assisted_generation():
    models, passed = both(FAMILY["llama"]), inputs(FAMILY["llama"])
    one = {"input_ids": passed["input_ids"][:1]}
    draft = set_to(build(FAMILY["llama"], num_hidden_layers=1), "clearhead")
    ours, theirs = generated(models, one, assistant_model=draft)
    assert ours == theirs == generated(models, one)[1]
    assert generated(models, one, prompt_lookup_num_tokens=2)[0] == theirs


def test_a_cache_that_is_continued_by_several_tokens():
    ours, theirs = both(FAMILY["gemma3"])
    passed = inputs(FAMILY["gemma3"])["input_ids"]
    results = []
    for model in (ours, theirs):
        cache = hf.DynamicCache(config=model.config)
        with torch.no_grad():
            steps = [
                model(passed[:, part], past_key_values=cache).logits for part in (slice(6), slice(6, 10), slice(10, 11))
            ]
        results.append(torch.cat(steps, 1))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
