"""A vision model that answers about one patch, watched: python examples/vision.py vision.html writes the page.

Pictures are 4 × 4 patches, each of one of four brightnesses, and one patch has a mark. The model is asked for the
brightness of the marked patch, so its first token, [CLS], has to find the mark. It is Transformers' ViT, trained here.
"""

import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

import clearhead as ch

SIDE, PATCH = 4, 4


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures (count, 1, 16, 16), which patch has the mark, and its brightness, 0 to 3."""
    levels = torch.randint(4, (count, SIDE * SIDE))
    marked = torch.randint(SIDE * SIDE, (count,))
    cells = (levels / 3)[..., None].repeat(1, 1, PATCH * PATCH)
    cells[torch.arange(count), marked] += 2 * torch.eye(PATCH).flatten()  # a diagonal line
    grid = cells.reshape(count, SIDE, SIDE, PATCH, PATCH).transpose(2, 3)
    return grid.reshape(count, 1, SIDE * PATCH, SIDE * PATCH), marked, levels[torch.arange(count), marked]


def trained(steps: int) -> ViTForImageClassification:
    """A ViT of two layers that can do it."""
    sizes = {"image_size": SIDE * PATCH, "patch_size": PATCH, "num_channels": 1, "num_labels": 4}
    width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(**sizes, **width, hidden_dropout_prob=0.0))
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        images, _, wanted = pictures(128)
        adam.zero_grad()
        model(images, labels=wanted).loss.backward()
        adam.step()
    return model.eval()


def main(path: str) -> None:
    """Train, watch one picture with its causes, and save the page."""
    torch.manual_seed(0)
    model = trained(300)
    images, marked, wanted = pictures(500)
    print(f"right: {(model(images).logits.argmax(-1) == wanted).float().mean():.1%} of 500 new pictures")
    with ch.watch(model, causes=True) as seen:
        first, second = model(images[:1]).logits[0].topk(2).values
        (first - second).backward()
    print(f"the mark is on token {1 + int(marked[0])}: {seen.strongest(3)}")
    seen.save(path, title="A vision model finds the marked patch")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "vision.html")
