"""Which tiles are the fastest on this GPU: each candidate for engines/gpu/sizes.toml, timed in its pass.

python -m benchmarks.tiles takes a few minutes, most of them the compiler's: bfloat16, rows of 64 and of 128 numbers,
full and causal. Put what it prints first into sizes.toml, and then run python -m benchmarks --device cuda. With
TRITON_INTERPRET=1 and --device cpu it runs without a GPU, and its times mean nothing.
"""

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.compiled import Case, CaseArrays
from benchmarks.gpu import seconds_of
from benchmarks.loops import PASSES
from clearhead.core.statistics import Wanted
from clearhead.engines import triton
from clearhead.engines.gpu import tensors

KINDS = {"+ maximum, entropy": "rows", "received": "columns", "gradients": "gradients", "cuts": "effects"}
CANDIDATES = (
    (128, 64, 4, 2, 0), (128, 64, 4, 3, 0), (128, 64, 8, 2, 0), (128, 64, 8, 3, 0), (128, 128, 8, 2, 0),
    (128, 32, 8, 3, 0), (64, 64, 4, 2, 0), (64, 64, 4, 3, 0), (64, 128, 4, 2, 0),
)  # fmt: skip
Tile = tuple[int, int, int, int, int]


def timed(name: str, d: int, tile: Tile, arrays: list[CaseArrays], device: torch.device) -> float | None:
    """Seconds of a pass with these tiles, over full and causal; None where the GPU has not the room for them."""
    entry, width = tensors._SIZES[KINDS[name]], tensors._WIDTHS.index(d)
    known = {key: list(entry[key]) for key in entry if key not in ("4", "8")}
    for rows in (entry[key] for key in known):
        rows[width] = tile
    try:
        return sum(seconds_of(lambda x=x: PASSES[name](x), device) for x in arrays)
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return None
    finally:
        entry.update(known)


def table(device: torch.device, length: int) -> Iterator[str]:
    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    yield "| | d | M, N, warps, stages | ms | to the fastest |"
    yield "| --- | ---: | --- | ---: | ---: |"
    for name in KINDS:
        for d in (64, 128):
            arrays = [
                CaseArrays(Case(torch.bfloat16, d, {"causal": causal}), length, drawn) for causal in (False, True)
            ]
            for x in arrays:
                x.per_row = triton.rows(x.inputs, Wanted(logsumexp=True))["logsumexp"]
                x.strongest = type(x.strongest)(torch.zeros_like(x.strongest.tensor))
            times = {tile: timed(name, d, tile, arrays, device) for tile in CANDIDATES}
            ranked = sorted((seconds, tile) for tile, seconds in times.items() if seconds is not None)
            for seconds, tile in ranked:
                sizes = ", ".join(map(str, tile[:4]))
                yield f"| {name} | {d} | {sizes} | {1e3 * seconds:.3f} | {seconds / ranked[0][0]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--length", type=int, default=16384, metavar="N", help="queries and keys, for 4 heads")
    values = parser.parse_args()
    for line in table(torch.device(values.device), values.length):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
