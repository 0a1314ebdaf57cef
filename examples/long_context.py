"""A small model reads a text that is too long for one process, and the attention over the whole text is observed.

    torchrun --nproc-per-node 4 examples/long_context.py [--tokens N] [--memory MIB]

Each process keeps its share of the positions, sharded in zigzag; keys and values are passed around in a ring. The text
is noise that contains one passage twice. The model has random weights, but its first layer mixes each token with the
three before it, and its second layer attends to similar tokens, so the attention over the whole text finds the passage
again. --memory limits what each process may allocate after it has started: with 400, four processes succeed where one
fails.
"""

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import clearhead as ch

PASSAGE = 512  # tokens of the passage that occurs twice: after a quarter of the text, and at its end
WIDTH, HEADS, KV_HEADS = 256, 4, 2
PLACE = {"layout": "zigzag", "method": "ring"}
SHADES = " .:-=+*#%@"


class Layer(nn.Module):
    """Attention over the positions of all ranks, then a feed-forward network over the positions of this rank."""

    def __init__(self, rules: dict[str, object]) -> None:
        super().__init__()
        self.rules, d = rules, WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.k, self.v, self.out = (
            nn.Linear(WIDTH, KV_HEADS * d),
            nn.Linear(WIDTH, KV_HEADS * d),
            nn.Linear(WIDTH, WIDTH),
        )
        for linear, size in ((self.k, 1), (self.v, 2), (self.out, 1)):
            nn.init.normal_(linear.weight, std=size * WIDTH**-0.5)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def keys(self, x: Tensor) -> Tensor:
        """(1, kv_heads, this rank's positions, d)."""
        return self.k(self.norms[0](x)).unflatten(-1, (KV_HEADS, -1)).transpose(0, 1)[None]

    def queries(self, x: Tensor) -> Tensor:
        """The keys, repeated for each head that shares them: with q = k, similar tokens attend to each other."""
        return self.keys(x).repeat_interleave(HEADS // KV_HEADS, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(self.norms[0](x)).unflatten(-1, (KV_HEADS, -1)).transpose(0, 1)[None]
        mixed = ch.distributed.attention(self.queries(x), self.keys(x), v, **PLACE, **self.rules)
        x = x + self.out(mixed[0].transpose(0, 1).flatten(1))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def text(tokens: int) -> Tensor:
    """Noise that contains one passage twice, (tokens,) of bytes."""
    ids = torch.randint(256, (tokens,), dtype=torch.uint8)
    ids[-PASSAGE:] = ids[tokens // 4 : tokens // 4 + PASSAGE]
    return ids


def limit(mebibytes: int) -> None:
    """Allow this process to allocate so much memory in addition to what it has now."""
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + mebibytes * 2**20,) * 2)


def show(picture: Tensor) -> None:
    """Print an image of weights, (height, width); a denser character is a larger square root of the weight."""
    shares = (picture / picture.max()).sqrt() * (len(SHADES) - 1)
    for row in shares.round().int().tolist():
        print("  " + "".join(SHADES[shade] for shade in row))


@torch.no_grad()
def main() -> None:
    """Run every layer, then print what the second one attends to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--memory", type=int, metavar="MIB")
    inputs = options.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and the same text everywhere
    torch.set_num_threads(1)
    ch.set_num_threads(1)
    rules: list[dict[str, object]] = [{"window": (3, 0), "scale": 0.0}, {"causal": True, "scale": 0.3}]
    embed, layers = nn.Embedding(256, WIDTH), [Layer(one) for one in rules]
    if inputs.memory:
        limit(inputs.memory)
    local = ch.distributed.positions(inputs.tokens, layout="zigzag")
    x = embed(text(inputs.tokens)[local].int())
    for layer in layers:
        last, x = x, layer(x)
    matrix = ch.distributed.ShardedAttentionMatrix(layers[1].queries(last), layers[1].keys(last), **PLACE, **rules[1])
    seen = matrix.observe(image=(16, 48))
    end = matrix.observe(top=2, queries=slice(-1, None))
    norm = torch.stack([x.square().sum(), torch.tensor(float(len(local)))])
    dist.all_reduce(norm)
    if dist.get_rank() == 0:
        print(f"{inputs.tokens} tokens on {dist.get_world_size()} processes, {len(local)} on this one; {matrix!r}")
        print(f"root mean square of the last layer's output: {(norm[0] / norm[1] / WIDTH).sqrt():.4f}")
        print("layer 1, head 0; rows: queries, columns: keys")
        show(seen.image[0, 0])
    if end.top.indices.numel():
        weights, keys = (one[0, 0, 0].tolist() for one in end.top)
        places = sorted(zip(keys, weights, strict=True))  # the two weigh the same, but for rounding
        shown = ", ".join(f"token {key} ({weight:.3f})" for key, weight in places)
        print(f"token {inputs.tokens - 1}, the last, looks at {shown}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
