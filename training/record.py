#!/usr/bin/env python3
"""Train a very small model with the code of train.py, and record how its weights are learned.

The model has one layer of two heads and learns four rhymes. The file holds all of its weights at some forty
steps, rounded to float16, and for each step what PyTorch computed with exactly those weights: the loss over the
four rhymes, the length of its gradient by each of W_Q, W_K and W_V, and what the last token of one text attends
to and predicts. `clearhead learn` shows it.

It needs what train.py needs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.nn import functional

from train import (
    END,
    ROOT,
    SPELLING_WEIGHTS,
    Block,
    Decoder,
    make_config,
    read_rhymes,
    spellings,
    train,
    train_tokenizer,
    write_atomically,
)

# "sat on a" is followed by "wall" or by "tuffet": to know which, the last token has to look back at the first ones.
RHYMES = ("Humpty Dumpty sat", "Little Miss Muffet", "Hickory, dickory", "Hey diddle")
TEXT = "humpty dumpty sat on a"
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_inner": 8, "n_ctx": 32, "n_positions": 32}

EXAMPLES = """\
examples:
  python training/record.py
      train for some seconds and write src/clearhead/models/learning/recording.safetensors
  python training/record.py /tmp/recording.safetensors --steps 50
      a shorter run, into another file
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Record how a very small model learns its weights.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shipped = ROOT / "src/clearhead/models/learning/recording.safetensors"
    parser.add_argument(
        "file", type=Path, nargs="?", default=shipped, help="the file to write (default: the shipped one)"
    )
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="peak rate (default: 0.01)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    return parser.parse_args()


def recorded_steps(steps: int) -> list[int]:
    """Each step at first, then farther and farther apart, and the finished model."""
    return sorted(
        {step for step in (*range(8), *(round(8 * (steps / 8) ** (part / 33)) for part in range(34))) if step <= steps}
    )


def observed(model: Decoder, texts: list[list[int]], shown: list[int]) -> dict[str, Tensor]:
    """The model's weights in float16, and what a model of exactly these weights computes."""
    rounded = copy.deepcopy(model).eval()
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    rounded.load_state_dict(weights)
    losses = [
        functional.cross_entropy(rounded(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="sum")
        for ids in texts
    ]
    loss = torch.stack(losses).sum() / sum(len(ids) - 1 for ids in texts)
    loss.backward()  # type: ignore[no-untyped-call]
    block = cast("Block", cast("Any", rounded.transformer["h"])[0])
    by_weight = cast("Tensor", block.attn.c_attn.weight.grad).chunk(3, dim=1)
    with torch.no_grad():
        inputs = torch.tensor(shown)
        x = block.ln_1(rounded.transformer["wte"](inputs) + rounded.transformer["wpe"](torch.arange(len(shown))))
        q, k, _ = (
            part.view(len(shown), block.attn.heads, -1).transpose(0, 1) for part in block.attn.c_attn(x).chunk(3, 1)
        )
        hidden = torch.ones(len(shown), len(shown), dtype=torch.bool).triu(1)
        attention = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
        following = rounded(inputs[None])[0, -1].softmax(-1)
    return {
        **{f"weights.{name}": tensor for name, tensor in weights.items()},
        "loss": loss.detach(),
        "gradient": torch.stack([part.norm() for part in by_weight]),
        "attention": attention[:, -1],
        "next": following,
    }


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the sums of such small matrices, and so the file, are then the same every time
    torch.manual_seed(arguments.seed)

    rhymes = read_rhymes(ROOT / "training" / "rhymes.txt")
    tokenizer = train_tokenizer(rhymes, 2400)
    encoded = [tokenizer.encode(spellings(rhyme)[-1] + END).ids for rhyme in rhymes if rhyme.startswith(RHYMES)]
    known = sorted({token for ids in encoded for token in ids})  # this model has no other tokens
    texts = [[known.index(token) for token in ids] for ids in encoded]
    shown = [known.index(token) for token in tokenizer.encode(TEXT).ids]
    config = {**make_config(tokenizer, 0.0), **SIZES, "vocab_size": len(known)}
    model = Decoder(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(texts)} rhymes, {len(known)} tokens in the vocabulary, {size:,} parameters")

    wanted, kept = recorded_steps(arguments.steps), []

    def keep(step: int) -> None:
        if step in wanted:
            kept.append(observed(model, texts, shown))

    spelled = [[ids] * len(SPELLING_WEIGHTS) for ids in texts]  # one spelling, whichever is drawn
    train(model, spelled, arguments.steps, arguments.learning_rate, arguments.seed, keep)
    keep(arguments.steps)

    arrays = {name: torch.stack([each[name] for each in kept]).contiguous() for name in kept[0]}
    arrays["step"] = torch.tensor(wanted, dtype=torch.int32)
    about = {
        "config": config,
        "vocabulary": [tokenizer.decode([token], skip_special_tokens=False) for token in known],
        "texts": texts,
        "shown": shown,
    }
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    data = to_safetensors(arrays, {"format": "pt", **{name: json.dumps(value) for name, value in about.items()}})
    write_atomically(arguments.file, data)
    first, last = (arrays["loss"][place].item() for place in (0, -1))
    likeliest = about["vocabulary"][int(arrays["next"][-1].argmax())]
    print(f"loss {first:.3f} to {last:.3f}; {TEXT!r} -> {likeliest!r} {arrays['next'][-1].max():.3f}")
    print(f"wrote {arguments.file}: {len(kept)} steps, {len(data):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
