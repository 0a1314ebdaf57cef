"""`generate` with attn_implementation="clearhead": the tokens of eager attention, whatever cache and search."""

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from clearhead.errors import ShapeError
from clearhead.layers import attending, masks
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


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_cache_is_continued_under_a_mask_that_means_what_it_meant_when_the_pass_began(hidden: int):
    tokens, results = inputs("gemma3")["input_ids"], []
    for model in both("gemma3"):
        real, cache = torch.ones(2, 11, dtype=torch.bool), hf.DynamicCache(config=model.config)
        hide = lambda *_, real=real: real[0].__setitem__(slice(hidden * (1 + int((~real).sum()))), False)  # noqa: E731
        model.model.layers[0].register_forward_hook(hide)  # so many keys more in each pass
        for stop in (6, 7, 10, 11):
            passed = {"attention_mask": real[:, :stop], "past_key_values": cache}
            with torch.no_grad():
                results.append(model(tokens[:, cache.get_seq_length() : stop], **passed).logits)
    torch.testing.assert_close(results[:4], results[4:], atol=1e-4, rtol=1e-4)


@given(data=st.data())
@settings(max_examples=50)
def test_later_layers_get_the_same_bits_from_what_their_mask_has_kept(data: Any):
    size, pick = (lambda most: data.draw(st.integers(1, most))), (lambda *some: data.draw(st.sampled_from(some)))
    batch, n, heads, group, dtype = size(2), pick(1, 1, 1, 5), size(2), size(3), pick(torch.float32, torch.bfloat16)
    m, none = n + size(9), torch.nn.Identity()
    q, k, v = (torch.randn(batch, *x, dtype=dtype) for x in ((heads * group, n, 8), (heads, m, 8), (heads, m, size(9))))
    real, left = torch.arange(m).expand(batch, m) >= pick(0, 0, 3), pick(99, size(12))
    rule = sliding_window_causal_mask_function(left)
    mask = masks.keep_rules(batch, n, m, m - n, mask_function=rule, attention_mask=real, dtype=dtype)
    scores = {"softcap": pick(None, 2.0), "s_aux": pick(None, torch.randn(heads * group))}
    calls = (mask, 0.1), (mask + 0, 0.3), (mask, 0.3)
    _, in_full, expected = (attending.attend(none, q, k, v, x, 0, scale, **scores)[0] for x, scale in calls)
    for only_way in (patch.object(attending, "_known", return_value=None), patch.object(attending, "_attend")):
        with only_way:
            assert torch.equal(attending.attend(none, q, k, v, mask, 0, 0.3, **scores)[0], expected)
    with pytest.raises(ShapeError, match="attention mask"):
        attending.attend(none, q, k[:, :, 1:], v[:, :, 1:], mask, 0, 0.3, **scores)
    torch.testing.assert_close(expected, in_full, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0)
