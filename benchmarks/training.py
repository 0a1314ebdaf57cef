"""Trains a small model for 200 steps with attention from clearhead.nn and from PyTorch, and compares time and loss.

python benchmarks/training.py [steps]

Both models start from the same weights and read the same batches of the project's rhymes as bytes. Their steps
alternate, so that noise hits both; the ratio is the median over steps of PyTorch's time divided by clearhead's.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 4, 4, 512, 4
TEXT = Path(__file__).parent.parent / "training" / "rhymes.txt"


class Theirs(nn.Module):
    """torch.nn.MultiheadAttention under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False)[0]
        return result


class Model(nn.Module):
    """A decoder over bytes: embeddings, pre-norm blocks, and an output layer."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(WIDTH),
                    attention(),
                    nn.LayerNorm(WIDTH),
                    nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
                ]
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for norm, attention, second, mlp in self.blocks:
            x = x + attention(norm(x))
            x = x + mlp(second(x))
        logits: Tensor = self.head(x)
        return logits


def models() -> dict[str, Model]:
    """Two models with the same weights."""
    torch.manual_seed(0)
    theirs = Model(Theirs)
    ours = Model(lambda: MultiHeadAttention(WIDTH, HEADS, causal=True))
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        a[1] = MultiHeadAttention.from_torch(b[1].inner)
        a[1].causal = True
    rest = {name: value for name, value in theirs.state_dict().items() if ".inner." not in name}
    ours.load_state_dict(rest, strict=False)
    return {"clearhead": ours, "torch": theirs}


def main(steps: int) -> None:
    torch.set_num_threads(2)
    ch.set_num_threads(2)
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.int64)
    both = models()
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=3e-4) for name, model in both.items()}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    losses: dict[str, list[float]] = {name: [] for name in both}
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        place = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw)
        batch = torch.stack([text[i : i + LENGTH + 1] for i in place.tolist()])
        for name in (list(both), list(reversed(both)))[step % 2]:
            start = time.perf_counter()
            loss = F.cross_entropy(both[name](batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            shown = "  ".join(f"{name} loss {losses[name][-1]:.6f}" for name in both)
            print(f"step {step:4}  {shown}", flush=True)
    ratio = median(b / a for a, b in zip(seconds["clearhead"][2:], seconds["torch"][2:], strict=True))
    apart = max(abs(a - b) for a, b in zip(losses["clearhead"], losses["torch"], strict=True))
    print(f"{WIDTH} wide, {HEADS} heads, {LAYERS} layers, {BATCH} × {LENGTH} bytes, {steps} steps, 2 threads")
    print(f"times as fast as PyTorch: {ratio:.2f}; largest difference of the loss curves: {apart:.2g}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
