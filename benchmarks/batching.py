"""Times continuous batching of ragged requests with clearhead's attention and with PyTorch's (sdpa), taking turns.

python benchmarks/batching.py [requests] [longest prompt] [new tokens]

A Llama of 4 layers, 8 heads, 2 key heads and width 512 with random weights answers requests whose prompts have from 16
to the longest prompt's number of tokens, all greedily. The ratio is the median over rounds of sdpa's time divided by
clearhead's; before that, the tokens are compared. Each round's time has the prompts and the generated tokens in it.
"""

import random
import sys
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import clearhead.hf  # noqa: F401  registers
from clearhead.bench.measure import interleaved, ratio

WAYS = ("clearhead", "sdpa")
REQUESTS, LONGEST, NEW, ROUNDS = 32, 1024, 32, 6
PAGE = 64


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1024, max_position_embeddings=8192, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def answers(model: Any, way: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The tokens that the model adds to each prompt, with this attention."""
    model.set_attn_implementation(way)
    pages = sum((len(prompt) + new) // PAGE + 2 for prompt in prompts)
    result = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_batch_tokens=2048),
    )
    return [one.generated_tokens for one in result.values()]


def main(count: int = REQUESTS, longest: int = LONGEST, new: int = NEW) -> None:
    draws, made = random.Random(0), model()
    prompts = [[draws.randrange(1000) for _ in range(draws.randrange(16, longest + 1))] for _ in range(count)]
    calls = {way: lambda way=way: answers(made, way, prompts, new) for way in WAYS}  # type: ignore[misc]
    ours, theirs = (calls[way]() for way in WAYS)
    alike = sum(a == b for a, b in zip(ours, theirs, strict=True))
    timings = interleaved(calls, rounds=ROUNDS, slice_seconds=0.0)
    total = sum(map(len, prompts))
    print(f"{count} requests, {total:,} tokens in prompts, {count * new:,} generated")
    print(f"{alike} of {count} have the same tokens as with sdpa")
    for way in WAYS:
        print(f"{way:>10}: {median(timings[way].seconds):7.2f} s")
    print(f"clearhead is {ratio(timings['sdpa'], timings['clearhead']):.2f} times as fast as sdpa")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
