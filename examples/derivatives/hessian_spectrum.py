"""The largest and smallest curvature of a small language model's loss, by Lanczos: only Hessian-vector products.

python examples/derivatives/hessian_spectrum.py [--steps 12]
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

import clearhead as ch

TEXT = "humpty dumpty sat on a wall humpty dumpty had a great fall " * 4


class Model(nn.Module):
    """A decoder of letters with one layer."""

    def __init__(self, letters: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(letters, width), nn.Linear(width, letters)
        self.attend = ch.nn.MultiHeadAttention(width, heads, causal=True, rotary=100.0)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, tokens, letters)."""
        x = self.embed(ids)
        x = x + self.attend(x)
        return self.out(x + self.mlp(x))


def hessian_product(model: nn.Module, ids: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """V to H·v, for the Hessian of the loss by all weights; and how many weights there are."""
    weights = {name: x.detach() for name, x in model.named_parameters()}
    sizes = [x.numel() for x in weights.values()]

    def loss(weights: dict[str, Tensor]) -> Tensor:
        logits = functional_call(model, weights, (ids[:, :-1],))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def product(v: Tensor) -> Tensor:
        parts = zip(weights.items(), v.split(sizes), strict=True)
        moved = {name: part.reshape(x.shape) for (name, x), part in parts}
        return torch.cat([x.flatten() for x in jvp(grad(loss), (weights,), (moved,))[1].values()])

    return product, sum(sizes)


def lanczos(product: Callable[[Tensor], Tensor], size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Ritz values of a symmetric matrix, ascending; the ends come first to the true ones (Golub & Welsch 1969)."""
    v = torch.randn(size, generator=generator)
    basis, tridiagonal = [v / v.norm()], torch.zeros(steps, steps)
    for step in range(steps):
        w = product(basis[-1])
        tridiagonal[step, step] = w @ basis[-1]
        for each in basis:  # all of them, since rounding would bring the first ones back
            w = w - (w @ each) * each
        if step + 1 < steps:
            tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = w.norm()
            basis.append(w / w.norm())
    return torch.linalg.eigvalsh(tridiagonal)


def main() -> None:
    """Print the spectrum's ends, before and after some training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="products with the Hessian (default: 12)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([[letters.index(letter) for letter in TEXT]])
    model = Model(len(letters))
    for trained in (False, True):
        if trained:
            optimizer = torch.optim.Adam(model.parameters(), 3e-3)
            for _ in range(30):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()
        product, size = hessian_product(model, ids)
        result = lanczos(product, size, steps, torch.Generator().manual_seed(1))
        print(f"{'after' if trained else 'before'} training: curvature from {result[0]:.3f} to {result[-1]:.3f}")


if __name__ == "__main__":
    main()
