"""What the GPU kernels do for a block of keys or queries: the instructions of their loops, counted in compiled code.

python -m benchmarks.loops needs no GPU: Triton compiles for sm_90, and its disassembler prints the code. The unit is
8,192 pairs of a query and a key: for these each of an SM's four schedulers issues `issued` instructions, and its tensor
cores take `products` cycles (2,048 multiply-adds each in bfloat16, by the data sheet). The larger of the two is a lower
bound of the cycles, if everything else overlaps; their sum is what they take if nothing does.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
from triton import knobs

from benchmarks.compiled import Case, CaseArrays, only_compiled
from clearhead.core.effects import Terms, WantedEffects
from clearhead.core.statistics import Wanted
from clearhead.engines import triton
from clearhead.engines.base import Upstream

PAIRS, PER_CYCLE, SCHEDULERS = 8192, 2048, 4
PASSES: dict[str, Callable[[CaseArrays], Any]] = {
    "output, log-sum-exp": lambda x: triton.rows(x.inputs, Wanted(output=True, logsumexp=True)),
    "+ maximum, entropy": lambda x: triton.rows(
        x.inputs, Wanted(output=True, logsumexp=True, max_logit=True, entropy=True)
    ),
    "received": lambda x: triton.columns(x.inputs, x.per_row, Wanted(received=True)),
    "image": lambda x: triton.columns(x.inputs, x.per_row, Wanted(image=(64, 64))),
    "gradients": lambda x: triton.gradients(x.inputs, x.per_row, Upstream(x.per_row, x.g)),
    "contributions": lambda x: triton.effects(
        x.edges(Terms("contribution", x.per_row)), WantedEffects(by_key=True, by_query=True)
    ),
    "cuts": lambda x: triton.effects(
        x.edges(Terms("cut", *[x.per_row] * 3, x.strongest)), WantedEffects(by_key=True, by_query=True)
    ),
}


class Loop(NamedTuple):
    """One loop over blocks, in instructions of a warp and cycles of the tensor cores."""

    instructions: int
    spilled: int  # of these, loads and stores of registers in local memory
    products: float


def disassembled(code: Any) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(text: str) -> list[Loop]:
    """The innermost loops that have products, the shortest first: that without masks, where there is one."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
    jumps = [
        (labels.get(x[1]), end) for end, line in enumerate(lines) if (x := re.search(r"BRA.*`\((\.L_x_\d+)\)", line))
    ]
    bodies = [(start, end) for start, end in jumps if start is not None and start <= end]
    bodies = [x for x in bodies if any("HGMMA" in line for line in lines[x[0] : x[1] + 1])]
    inner = [x for x in bodies if not any(x[0] <= y[0] and y[1] <= x[1] for y in bodies if y != x)]
    return sorted(_loop(lines[start : end + 1]) for start, end in inner)


def _loop(lines: list[str]) -> Loop:
    columns = [int(x[1]) for line in lines if (x := re.search(r"HGMMA\.64x(\d+)x16", line))]
    spilled = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines)
    return Loop(len(lines), spilled, sum(64 * 16 * n for n in columns) / PER_CYCLE)


def table() -> Iterator[str]:
    yield "| | d | kernel | tile | warps | instructions without masks | with masks | issued | products |"
    yield "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, run in PASSES.items():
        for d in (64, 128):
            with only_compiled("sm_90") as made:
                run(CaseArrays(Case(torch.bfloat16, d, {"causal": True})))
            for kernel, code, options in made:
                counted = loops(disassembled(code))
                if not counted or (kernel + ", first launch" in {each for each, _, _ in made}):
                    continue
                sizes = options["sizes"]
                tile, share = (sizes.M.value, sizes.N.value), options["num_warps"] / SCHEDULERS
                unit = share * PAIRS / (tile[0] * tile[1])
                shortest, longest = counted[0], counted[-1]
                counts = f"{shortest.instructions} | {longest.instructions}"
                if shortest.spilled:
                    counts = f"{shortest.instructions} ({shortest.spilled} spilled) | {longest.instructions}"
                yield (
                    f"| {name} | {d} | {kernel.removesuffix(', first launch')} | {tile[0]} × {tile[1]} | "
                    f"{options['num_warps']} | {counts} | {unit * shortest.instructions:.0f} | "
                    f"{unit * shortest.products:.0f} |"
                )


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
