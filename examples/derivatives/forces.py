"""A potential with attention, trained on forces: the loss holds a first derivative, its gradient a second one.

The energy of some atoms is a sum over what each attends to; nearer atoms get a bias. Forces are -∂energy/∂positions.

python examples/derivatives/forces.py [--steps 40]
"""

import argparse

import torch
from torch import Tensor, nn

import clearhead as ch


class Potential(nn.Module):
    """The energy of atoms at x (batch, atoms, 3), (batch,)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kind = heads, nn.Parameter(0.1 * torch.randn(width))
        self.qkv, self.near = nn.Linear(width, 3 * width), nn.Linear(16, heads)
        self.values = nn.Linear(16, width)
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Pairs enter by their distances, so that turning the atoms changes nothing."""
        apart = (x[:, :, None] - x[:, None]).square().sum(-1)
        shells = torch.exp(-8 * ((apart + 1e-6).sqrt()[..., None] - torch.linspace(0.5, 3, 16)) ** 2)
        tokens = self.kind + self.values(shells.sum(2))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1))
        mixed = ch.attention(q, k, v, bias=self.near(shells).movedim(-1, 1))
        return self.energy(mixed.transpose(1, 2).flatten(2)).sum((1, 2))


def forces(energy: nn.Module, x: Tensor, *, training: bool = False) -> Tensor:
    """-∂energy/∂x, (batch, atoms, 3)."""
    x = x.requires_grad_()
    return -torch.autograd.grad(energy(x).sum(), x, create_graph=training)[0]


def lennard_jones(x: Tensor) -> Tensor:
    """What is to be learned: a well-known pair potential, softened."""
    apart = (x[:, :, None] - x[:, None]).square().sum(-1) + torch.eye(x.shape[1])
    inverse = 1 / (apart + 1.0) ** 3
    return 20 * ((inverse**2 - inverse) * (1 - torch.eye(x.shape[1]))).sum((1, 2))


def main() -> None:
    """Train for some steps and print the error of the forces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    x = 1.2 * torch.randn(32, 8, 3)
    true, model = forces(lennard_jones, x), Potential()  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps + 1):
        error = (forces(model, x, training=True) - true).square().mean()
        if step % 10 == 0:
            print(f"step {step}: error of the forces {error.sqrt().item():.3f} of {true.square().mean().sqrt():.3f}")
        optimizer.zero_grad()
        error.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
