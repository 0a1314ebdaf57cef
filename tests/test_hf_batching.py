"""`generate` and continuous batching with attn_implementation="clearhead": the tokens of eager attention, of sdpa."""

import random
from dataclasses import fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.generation.continuous_batching.cache_allocators import full_attention

import clearhead as ch
from clearhead.errors import ClearheadError, RuleError
from clearhead.hf.attending import attend
from clearhead.hf.packed import PAGED
from test_hf import both, quick_or_slow, set_to
from watched import build, greedy, inputs, seen_of

NEW = 6


def batched(model: Any, requests: list[list[int]], **more: Any) -> list[list[int]]:
    """The tokens that continuous batching adds to each request."""
    room = {"num_blocks": 40, "page_size": 16, "max_batch_tokens": 64, **more}
    result = model.generate_batch(
        inputs=requests,
        generation_config=hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=hf.ContinuousBatchingConfig(**room),
    )
    assert len(result) == len(requests)
    return [one.generated_tokens for one in result.values()]


def alone(model: Any, requests: list[list[int]]) -> list[list[int]]:
    return [model.generate(torch.tensor([one]), **greedy(NEW))[0, len(one) :].tolist() for one in requests]


def ragged(count: int, longest: int = 40) -> list[list[int]]:
    return [[random.randrange(2, 59) for _ in range(random.randrange(1, longest))] for _ in range(count)]


REQUESTS: list[Any] = [  # how many requests, and how long they may be
    ("gemma3", "clearhead", (7, 40), {}),
    ("llama", "clearhead", (7, 40), {}),
    ("gpt-oss", "clearhead", (7, 40), {}),
    ("gpt2", "clearhead", (3, 50), {"max_batch_tokens": 17}),  # so that most prompts come in chunks
    ("llama", "paged|clearhead", (3, 40), {}),  # the older name
]


@pytest.mark.filterwarnings("ignore:The `paged|` prefix:FutureWarning")
@pytest.mark.parametrize(("name", "implementation", "sizes", "room"), quick_or_slow(REQUESTS[:1], REQUESTS))
def test_ragged_requests_get_the_tokens_of_each_alone(name: str, implementation: str, sizes: Any, room: Any):
    model, requests = build(name), ragged(*sizes)
    model.set_attn_implementation(implementation)
    assert batched(model, requests, **room) == alone(set_to(model, "eager"), requests)
    assert implementation != "clearhead" or model.config._attn_implementation == "clearhead"


def test_pages_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch):
    pool, read = full_attention.FullAttentionCacheAllocator, []
    stored = pool.update
    monkeypatch.setattr(pool, "update", lambda *args: (read.append(len(args[4])), stored(*args))[1])
    assert batched(set_to(build("llama"), "clearhead"), ragged(3))
    assert read
    assert not any(read)


@pytest.mark.gate
def test_sdpa_is_left_as_transformers_serves_it():
    model = set_to(build("llama"), "sdpa")
    assert batched(model, ragged(2))
    assert model.config._attn_implementation == "sdpa"


def test_a_block_refuses_to_watch_packed_requests_without_names():
    model = set_to(build("llama"), "clearhead")
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with ch.watch(model):
        model.config._attn_implementation = PAGED
        with pytest.raises(RuleError, match="they have no names"):
            attend(attention, x, x, x, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


WATCHED: list[Any] = [
    ("gemma3", (4, 40), {}, {"entropy": True, "received": True, "top": 2, "peak": True}),
    ("gpt2", (3, 50), {"max_batch_tokens": 17}, {"entropy": True, "heads": [1], "layers": [1]}),  # in chunks
    ("gpt-oss", (4, 40), {}, {"distance": True, "keep": False}),
    ("llama", (5, 60), {"num_blocks": 10}, {"values": True, "image": (4, 4)}),  # so that some begin again
]


@pytest.mark.parametrize(("name", "sizes", "room", "asked"), quick_or_slow(WATCHED[:2], WATCHED))
def test_each_of_many_requests_is_watched_as_if_alone(name: str, sizes: Any, room: Any, asked: dict[str, Any]):
    model, requests = set_to(build(name), "eager"), ragged(*sizes)
    with ch.watch(model, tokenizer=SimpleNamespace(decode=str), **asked) as seen:
        batched(model, requests, **room)
    assert model.config._attn_implementation == "eager"
    assert (len(seen), len(seen.requests), repr(seen)) == (0, len(requests), f"Seen({len(requests)} requests)")
    for place, request in enumerate(requests):
        each = seen.requests[f"req_{place}"]
        with ch.watch(model, tokenizer=SimpleNamespace(decode=str), **asked) as one:
            alone(model, [request])
        assert (each.tokens, each.layers) == (one.tokens, one.layers)
        for layer in one.layers:
            for field in fields(one[layer]):
                ours, expected = (getattr(x[layer], field.name) for x in (each, one))
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
            if asked.get("keep", True):
                torch.testing.assert_close(each.matrix(layer)[...], one.matrix(layer)[...], rtol=1e-4, atol=1e-5)


def test_queries_that_another_request_computed_are_not_seen():
    model, start = set_to(build("llama"), "clearhead"), ragged(1)[0] + [7] * 16
    config = hf.GenerationConfig(max_new_tokens=NEW, do_sample=True, eos_token_id=-1, num_return_sequences=2)
    room = hf.ContinuousBatchingConfig(num_blocks=40, page_size=16, max_batch_tokens=64)
    with ch.watch(model) as seen:
        answers = model.generate_batch(inputs=[start], generation_config=config, continuous_batching_config=room)
    for name, one in seen.requests.items():
        text = start + answers[name].generated_tokens[:-1]
        whole = seen_of(model, {"input_ids": torch.tensor([text])})
        rows = NEW if "child" in name else len(text)
        assert (one.tokens, one.matrix(1).shape) == ([text], (1, 4, rows, len(text)))
        torch.testing.assert_close(one.matrix(1)[...], whole.matrix(1)[:, :, -rows:], rtol=1e-4, atol=1e-5)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "derivatives": (lambda model: ch.watch(model, causes=True), 1, "causes=True wants a graph"),
    "edits": (lambda model: ch.change(model, ch.cut(keys=0)), 1, "edits are of one"),
    "a head that there is not": (lambda model: ch.watch(model, heads=[9]), 1, "there is no head 9 in layer 0"),
    "requests with names that there are": (ch.watch, 2, "requests were watched already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_many_requests_cannot_have_is_refused(name: str):
    model, (block, times, message) = set_to(build("llama"), "clearhead"), REFUSED[name]
    with pytest.raises(ClearheadError, match=message), block(model):
        assert [batched(model, ragged(2)) for _ in range(times)]
    assert len(batched(model, ragged(2))) == 2


def test_generation_between_batches_keeps_its_masks():
    """A manager that is kept leaves its own name for the attention on the model."""
    model, inputs = set_to(build("llama"), "clearhead"), torch.tensor([[0, 0, 5, 9, 4], [7, 3, 8, 2, 6]])
    expected = alone(model, [[5, 9, 4], [7, 3, 8, 2, 6]])
    model.config._attn_implementation = PAGED
    assert model.generate(inputs, **greedy(NEW), attention_mask=inputs.ne(0).long())[:, 5:].tolist() == expected


def test_a_model_elsewhere_than_on_the_cpu_is_refused():
    model = set_to(build("llama"), "clearhead").to("meta")
    with pytest.raises(RuleError, match="on device meta"):
        model.init_continuous_batching(hf.GenerationConfig(eos_token_id=-1))


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
def test_a_cache_is_continued_under_the_mask_of_its_beginning(hidden: int):
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
