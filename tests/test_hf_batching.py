"""Continuous batching with attn_implementation="clearhead": the tokens of sdpa, and of each request generated alone."""

import math
import random
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.generation.continuous_batching.cache_allocators import full_attention

import clearhead as ch
from clearhead.errors import RuleError
from clearhead.layers.attending import attend
from clearhead.layers.packed import PAGED, attend_packed
from test_hf import quick_or_slow, set_to
from watched import build, greedy

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


@pytest.mark.gate
def test_the_tokens_of_sdpa():
    model, requests = build("llama"), ragged(5)
    assert batched(set_to(model, "clearhead"), requests) == batched(set_to(model, "sdpa"), requests)


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


def test_a_block_refuses_to_watch_packed_requests():
    model = set_to(build("llama"), "clearhead")
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with ch.watch(model):
        model.config._attn_implementation = PAGED
        with pytest.raises(RuleError, match="packs many requests"):
            attend(attention, x, x, x, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_is_each_requests_own(*, causal: bool, window: int | None):
    queries, keys = [4, 1, 0, 3, 1], [9, 6, 0, 3, 1]
    q = torch.randn(1, 6, sum(queries) + 2, 8)
    k, v = (torch.randn(1, 2, sum(keys), 8) for _ in "kv")
    scores = {"scale": 0.3, "softcap": 2.0}
    ends = {
        name: torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        for name, lengths in (("cu_seq_lens_q", queries), ("cu_seq_lens_k", keys))
    }
    result = attend_packed(torch.nn.Module(), q, k, v, scores, {**ends, "sliding_window": window}, causal=causal)
    assert torch.equal(result[:, :, sum(queries) :], torch.zeros(1, 6, 2, 8))
    row = col = 0
    for n, m in zip(queries, keys, strict=True):
        for i in range(n):
            place = m - n + i
            last = place + 1 if causal else m
            first = 0 if window is None else max(0, place - window + 1)
            for head in range(6):
                s = 0.3 * k[0, head // 3, col + first : col + last].double() @ q[0, head, row + i].double()
                a = torch.softmax(2.0 * torch.tanh(s / 2.0), 0)
                expected = a @ v[0, head // 3, col + first : col + last].double()
                torch.testing.assert_close(result[0, head, row + i].double(), expected, atol=1e-5, rtol=1e-5)
        row, col = row + n, col + m


def test_numbers_of_other_requests_never_arrive():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in "qkv")
    ends = torch.tensor([0, 5, 9], dtype=torch.int32)

    def run() -> torch.Tensor:
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        return attend_packed(torch.nn.Module(), q, k, v, {}, lengths, causal=True)

    before = run()
    for x in (q, k, v):
        x[:, :, 5:] = math.nan
    assert torch.equal(run()[:, :, :5], before[:, :, :5])
