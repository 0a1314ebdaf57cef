#!/usr/bin/env python3
"""Train the small nursery-rhyme model that ships with Clearhead.

The script reads training/rhymes.txt, trains a byte-level BPE tokenizer and a
two-layer decoder of the GPT-2 architecture on it, and writes config.json,
model.safetensors and tokenizer.json in the layout of a Hugging Face GPT-2
checkpoint. Nothing is written unless the finished model, rounded as it is stored,
completes a handful of well-known lines. record.py trains a much smaller model
with the same code and keeps the weights of many steps.

It needs torch, tokenizers, safetensors, numpy and tqdm.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save as to_safetensors
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
END = "<|endoftext|>"
SPELLING_WEIGHTS = (0.4, 0.3, 0.15, 0.15)
PUNCTUATION = str.maketrans("", "", ',;:.!?"')
Spellings = list[list[list[int]]]  # token ids, by rhyme and by spelling
CONTEXT = 256
CROP_LENGTHS = (32, 64, 128, CONTEXT)
TOKENS_PER_STEP = 2048

EXAMPLES = """\
examples:
  python training/train.py
      train with the default settings into src/clearhead/models/rhymes
  python training/train.py --output /tmp/rhymes --threads 1
      use one core, and leave the shipped model as it is
  python training/train.py --steps 20 --output /tmp/try
      see that everything runs; so short a training fails its checks (status 1)
"""

# What must follow each prompt. People type these with and without commas.
EXPECTED = {
    "humpty dumpty sat on": " a",
    "humpty dumpty sat on a": " wall",
    "Humpty Dumpty sat on a": " wall",
    "twinkle twinkle little": " star",
    "twinkle, twinkle, little": " star",
    "mary had a little": " lamb",
    "jack and jill went up the": " hill",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the nursery-rhyme model that ships with Clearhead.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT / "training" / "rhymes.txt",
        help="rhymes, separated by blank lines (default: training/rhymes.txt)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "src/clearhead/models/rhymes",
        help="folder to write (default: src/clearhead/models/rhymes)",
    )
    parser.add_argument("--steps", type=int, default=1200, help="training steps (default: 1200)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak rate (default: 0.001)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout (default: 0.1)")
    parser.add_argument("--vocabulary", type=int, default=2400, help="largest vocabulary (default: 2400)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    return parser.parse_args()


def read_rhymes(path: Path) -> list[str]:
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    return [block.strip() for block in blocks if block.strip()]


def spellings(rhyme: str) -> list[str]:
    """The ways a reader may type a rhyme: with or without punctuation, in lines or on one."""
    plain = rhyme.translate(PUNCTUATION)
    return [rhyme, plain, rhyme.replace("\n", " "), plain.replace("\n", " ")]


def train_tokenizer(rhymes: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so any text tokenizes
    )
    tokenizer.train_from_iterator((text for rhyme in rhymes for text in spellings(rhyme)), trainer)
    return tokenizer


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (inputs, outputs), as GPT-2 checkpoints do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["n_embd"]
        self.heads = config["n_head"]
        self.dropout = config["attn_pdrop"]
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["n_embd"], config["n_inner"]
        self.ln_1 = nn.LayerNorm(width, eps=config["layer_norm_epsilon"])
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(width, eps=config["layer_norm_epsilon"])
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(width, inner), "c_proj": Conv1D(inner, width)})
        self.dropout = nn.Dropout(config["resid_pdrop"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.mlp["c_proj"](hidden))


class Decoder(nn.Module):
    """Parameter names follow the GPT-2 checkpoint, so the state dict is saved as it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config["vocab_size"], width),
                "wpe": nn.Embedding(config["n_positions"], width),
                "h": nn.ModuleList(Block(config) for _ in range(config["n_layer"])),
                "ln_f": nn.LayerNorm(width, eps=config["layer_norm_epsilon"]),
            }
        )
        self.dropout = nn.Dropout(config["embd_pdrop"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Both layers of a block add to the residual stream; this keeps its size steady.
                shrink = math.sqrt(2 * config["n_layer"]) if "c_proj" in name else 1.0
                nn.init.normal_(parameter, std=config["initializer_range"] / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        part = self.transformer
        x = self.dropout(part["wte"](tokens) + part["wpe"](torch.arange(tokens.shape[1])))
        for block in cast("nn.ModuleList", part["h"]):
            x = block(x)
        return part["ln_f"](x) @ part["wte"].weight.T


def make_config(tokenizer: Tokenizer, dropout: float) -> dict[str, Any]:
    end = tokenizer.token_to_id(END)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout),
        "bos_token_id": end,
        "eos_token_id": end,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_layer": 2,
        "n_head": 8,
        "n_embd": 512,
        "n_inner": 256,
        "n_ctx": CONTEXT,
        "n_positions": CONTEXT,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vocab_size": tokenizer.get_vocab_size(),
    }


def make_row(encoded: Spellings, length: int, rng: random.Random) -> list[int]:
    """One crop: half begin with a rhyme's first word, half somewhere inside one."""
    row: list[int] = []
    while len(row) < length:
        tokens = rng.choices(rng.choice(encoded), SPELLING_WEIGHTS)[0]
        inside = not row and rng.random() < 0.5
        row += tokens[rng.randrange(len(tokens)) if inside else 0 :]
    return row[:length]


def rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a hundredth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: Decoder,
    encoded: Spellings,
    steps: int,
    peak: float,
    seed: int,
    before: Callable[[int], None] = lambda _: None,
) -> float:
    """Train in place, calling `before` with each step's number; return the mean loss of the last fifty steps."""
    positions = cast("nn.Embedding", model.transformer["wpe"]).num_embeddings
    crops = [length for length in CROP_LENGTHS if length <= positions]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    losses: list[float] = []
    model.train()
    bar = tqdm(range(steps), desc="training", unit="step")
    for step in bar:
        before(step)
        length = rng.choice(crops)
        batch = torch.tensor([make_row(encoded, length + 1, rng) for _ in range(TOKENS_PER_STEP // length)])
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, peak)
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return statistics.fmean(losses[-50:])


@torch.no_grad()
def passes_checks(model: Decoder, tokenizer: Tokenizer) -> bool:
    """Print the five likeliest next tokens of each prompt; say whether every first one is right."""
    model.eval()
    passed = True
    for prompt, expected in EXPECTED.items():
        logits = model(torch.tensor([tokenizer.encode(prompt).ids]))[0, -1]
        top = logits.softmax(dim=-1).topk(5)
        words = [tokenizer.decode([token]) for token in top.indices.tolist()]
        listed = ", ".join(f"{word!r} {share:.3f}" for word, share in zip(words, top.values.tolist(), strict=True))
        right = words[0] == expected
        passed = passed and right
        print(f"{'ok   ' if right else 'WRONG'} {prompt!r} -> {listed}")
    return passed


def rounded(weight: Tensor) -> Tensor:
    """The weight in float16; of matrices five significant bits, so that all of them fit into a page."""
    if weight.dim() == 2:
        part, power = torch.frexp(weight.float())
        weight = torch.ldexp((part * 32).round() / 32, power)
    return weight.half().contiguous()


def write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    rhymes = read_rhymes(arguments.text)
    tokenizer = train_tokenizer(rhymes, arguments.vocabulary)
    encoded = [[tokenizer.encode(text + END).ids for text in spellings(rhyme)] for rhyme in rhymes]
    config = make_config(tokenizer, arguments.dropout)
    model = Decoder(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(rhymes)} rhymes, {config['vocab_size']} tokens in the vocabulary, {size:,} parameters")

    loss = train(model, encoded, arguments.steps, arguments.learning_rate, arguments.seed)
    print(f"final loss {loss:.4f}")

    weights = {name: rounded(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)  # copies the rounded values into the float32 model
    if not passes_checks(model, tokenizer):
        print("The model does not complete its check lines; nothing was written.", file=sys.stderr)
        return 1

    arguments.output.mkdir(parents=True, exist_ok=True)
    config_text = json.dumps(config, indent=2) + "\n"
    write_atomically(arguments.output / "config.json", config_text.encode())
    write_atomically(arguments.output / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_atomically(arguments.output / "model.safetensors", to_safetensors(weights, {"format": "pt"}))
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
