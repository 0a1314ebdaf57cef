"""A critic with attention and a gradient penalty, as in WGAN-GP (Gulrajani et al. 2017): (‖∂critic/∂x‖ - 1)².

python examples/derivatives/gradient_penalty.py [--steps 30]
"""

import argparse

import torch
from torch import Tensor, nn

import clearhead as ch


class Critic(nn.Module):
    """One number for each sequence x (batch, tokens, 2)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2, width), nn.Linear(width, 1)
        self.attend = ch.nn.MultiHeadAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        """(batch,)."""
        y = self.into(x).tanh()
        return self.out((y + self.attend(y)).tanh()).mean((1, 2))


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    """The mean over the batch of (‖∂critic/∂x‖ - 1)²; it can be differentiated again, by the critic's weights."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def main() -> None:
    """Train the critic for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    angle = 2 * torch.pi * torch.rand(64, 16)
    real, critic = torch.stack([angle.cos(), angle.sin()], -1), Critic()
    optimizer = torch.optim.Adam(critic.parameters(), 3e-3)
    for step in range(steps + 1):
        false = torch.randn_like(real)
        share = torch.rand(len(real), 1, 1)
        apart, rough = critic(real).mean() - critic(false).mean(), penalty(critic, share * real + (1 - share) * false)
        if step % 10 == 0:
            print(f"step {step}: apart by {apart.item():.3f}, penalty {rough.item():.3f}")
        optimizer.zero_grad()
        (10 * rough - apart).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
