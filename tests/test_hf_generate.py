"""`generate` with attn_implementation="clearhead": the tokens of eager attention, whatever cache and search."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf

from test_hf import both, set_to
from watched import build, greedy, inputs

CACHES = [{"cache_implementation": "dynamic"}, {"cache_implementation": "static"}]
CASES = [
    *product(("gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt-oss", "t5", "whisper"), CACHES),
    *product(("gpt2", "llama", "gemma3", "gpt-oss", "t5"), [{"use_cache": False}]),
    *product(("llama", "gemma3", "t5"), [{"num_beams": 3, **cache} for cache in CACHES]),
]


def generated(models: tuple[Any, Any], passed: dict[str, torch.Tensor], **options: Any) -> list[list[list[int]]]:
    passed = {name: x for name, x in passed.items() if name != "decoder_input_ids"}
    return [model.generate(**passed, **{**greedy(8), **options}).tolist() for model in models]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_tokens_with_and_without_caches_and_with_beams(name: str, options: dict[str, Any]):
    ours, theirs = generated(both(name), inputs(name, "" if name == "whisper" else "left"), **options)
    assert ours == theirs


def test_sampling_follows_the_seed():
    models, result = both("llama"), []
    for model in models:
        torch.manual_seed(3)
        result += generated((model,), inputs("llama"), do_sample=True)  # type: ignore[arg-type]
    assert result[0] == result[1]


def test_assisted_generation():
    models, passed = both("llama"), inputs("llama")
    one = {"input_ids": passed["input_ids"][:1]}
    draft = set_to(build("llama", num_hidden_layers=1), "clearhead")
    ours, theirs = generated(models, one, assistant_model=draft)
    assert ours == theirs == generated(models, one)[1]
    assert generated(models, one, prompt_lookup_num_tokens=2)[0] == theirs


def test_a_cache_that_is_continued_by_several_tokens():
    ours, theirs = both("gemma3")
    passed = inputs("gemma3")["input_ids"]
    results = []
    for model in (ours, theirs):
        cache = hf.DynamicCache(config=model.config)
        with torch.no_grad():
            steps = [
                model(passed[:, part], past_key_values=cache).logits for part in (slice(6), slice(6, 10), slice(10, 11))
            ]
        results.append(torch.cat(steps, 1))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
