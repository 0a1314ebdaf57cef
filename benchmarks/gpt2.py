"""The model that is watched and changed: a GPT-2 of 12 layers, 12 heads and width 768 with random weights."""

from typing import Any


def gpt2(tokens: int, threads: int) -> tuple[Any, Any]:
    """The model for texts of at most so many tokens, and one such text, (1, tokens); the same in every process."""
    import torch
    from transformers import GPT2Config, GPT2Model

    import clearhead as ch

    torch.set_num_threads(threads)
    ch.set_num_threads(threads)
    torch.manual_seed(0)
    fused = "gelu_pytorch_tanh"  # one call; GPT-2's default is seven, each with its own array
    config = GPT2Config(n_positions=tokens, vocab_size=1000, bos_token_id=0, eos_token_id=0, activation_function=fused)
    model = GPT2Model(config)
    model.train(mode=False)
    return model, torch.randint(1000, (1, tokens))
