"""Launches the row pass: over packed heads where rows are few, over splits of the keys where these are many."""

from math import gcd
from typing import Any

import torch
from triton import next_power_of_2

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.engines.gpu import rows
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.passes import Pass, constant
from clearhead.engines.gpu.rows import Rows

FEW_ROWS = 64  # up to so many rows, the heads that share a key head are packed into one tile (decoding)
LONG = 4096  # with few rows, more keys than this are split among at most SPLITS programs
SPLITS, SPLIT = 64, 256


def launch(
    problem: Problem, q: Array, k: Array, v: Array | None, top: int, results: dict[str, Any], *, repair: bool = False
) -> None:
    """Compute these results, tensors by name; with `repair`, only the tiles of the output that are not finite."""
    run = Pass(problem, q, k, v)
    sizes = gpu.sizes(problem, "rows", run.d_v)
    shared = gcd(*(x.share for x in (run.inputs.k, run.inputs.v) if x is not None))
    pack = shared if shared * problem.queries <= FEW_ROWS else 1
    sizes = sizes._replace(M=min(sizes.M, max(FEW_ROWS, gpu.padded(pack * problem.queries))))
    split = None if repair else split_of(problem, pack)
    splits = 1 if split is None else -(-problem.keys // split)
    slots = max(2, next_power_of_2(top)) if top else 2
    lines = run.heads * problem.queries

    def make(*tail: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        return run.room(splits, lines, *tail, dtype=dtype) if split else None

    want = Rows(**{**dict.fromkeys(Rows._fields), **results})
    common = {"want": want, "part": rows.kept(make, want, slots, run.d_v), "count": top, "TOP": slots}
    run.launch(
        rows.rows, pack * problem.queries, sizes, heads=run.heads // pack, splits=splits, **common, pack=pack,
        split=split, REPAIR=repair,
    )  # fmt: skip
    if split:
        rows.merge[(-(-lines // 16),)](
            rules=run.rules, **common, lines=lines, splits=splits, sizes=constant(sizes), M=16
        )


def split_of(problem: Problem, pack: int) -> int | None:
    """Keys per program if queries are few and keys many, else None; it depends on lengths only, not on the batch."""
    if pack * problem.queries > FEW_ROWS or problem.keys <= LONG:
        return None
    return -(-problem.keys // (SPLITS * SPLIT)) * SPLIT
