"""A MeanFlow loss on a small diffusion transformer: a loss that holds a derivative in forward mode.

MeanFlow (Geng et al. 2025, arXiv 2505.13447) trains u(z, r, t), the mean velocity of a flow between times r and t, by

    ‖u - stop(v - (t - r)·du/dt)‖²,    du/dt along (v, 0, 1): one jvp through the whole network.

python examples/derivatives/meanflow.py [--steps 30]
"""

import argparse

import torch
from torch import Tensor, nn

import clearhead as ch


class Block(nn.Module):
    """Attention and an MLP, each shifted and scaled by what is known of the times."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.shifts = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """X (batch, tokens, width), times (batch, width)."""
        shift, scale, shift_mlp, scale_mlp = self.shifts(times)[:, None].chunk(4, -1)
        y = nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        x = x + self.out(ch.attention(q, k, v).transpose(1, 2).flatten(2))
        y = nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale_mlp) + shift_mlp
        return x + self.mlp(y)


class DiT(nn.Module):
    """u(z, r, t) for points z (batch, tokens, 2)."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2, width), nn.Linear(width, 2)
        self.times = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """R and t (batch,)."""
        x, times = self.into(z), self.times(torch.stack([r, t], -1))
        for block in self.blocks:
            x = block(x, times)
        return self.out(x)


def loss(model: nn.Module, data: Tensor, generator: torch.Generator) -> Tensor:
    """The loss for data (batch, tokens, 2)."""
    noise = torch.randn(data.shape, generator=generator)
    r, t = torch.rand(2, len(data), generator=generator).sort(dim=0).values
    z = (1 - t[:, None, None]) * data + t[:, None, None] * noise
    v = noise - data
    u, slope = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    return (u - (v - (t - r)[:, None, None] * slope).detach()).square().mean()


def main() -> None:
    """Train for some steps and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), DiT()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    angle = 2 * torch.pi * torch.rand(16, 32, generator=generator)
    data = torch.stack([angle.cos(), angle.sin()], -1)  # 16 sets of 32 points on a circle
    for step in range(steps + 1):
        now = loss(model, data, generator)
        if step % 10 == 0:
            print(f"step {step}: loss {now.item():.3f}")
        optimizer.zero_grad()
        now.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
