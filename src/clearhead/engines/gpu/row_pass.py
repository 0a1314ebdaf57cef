"""Launches the row pass: over packed heads where rows are few, over splits of the keys where these are many.

Along a direction it is a pass of its own; the other passes along one are in column_pass.py and backward.py.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from triton import next_power_of_2

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Inputs, Problem
from clearhead.core.statistics import Wanted, smooth
from clearhead.engines.base import row_kinds
from clearhead.engines.gpu import library, row_tangents, rows
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.passes import Pass, constant
from clearhead.engines.gpu.rows import Rows, State

FEW_ROWS = 64  # up to so many rows, the heads that share a key head are packed into one tile (decoding)
LONG = 4096  # with few rows, more keys than this are split among at most SPLITS programs
SPLITS, SPLIT = 64, 256


def in_slices(
    run: Callable[..., dict[str, torch.Tensor]], want: Wanted, most: int, v: Array | None, *others: Array | None
) -> dict[str, torch.Tensor]:
    """What run(want, v, *others) answers, the output in slices of at most `most` columns of v and of the other arrays.

    All else that is wanted is answered with the first slice.
    """
    if v is None or v.shape[-1] <= most:
        return run(want, v, *others)
    results: dict[str, torch.Tensor] = {}
    outputs = []
    for start in range(0, v.shape[-1], most):
        part = run(want, *(None if x is None else x[..., start : start + most] for x in (v, *others)))
        outputs.append(part.pop("output"))
        results = results or part
        want = Wanted(output=True, keep_float32=want.keep_float32)
    return {**results, "output": torch.cat(outputs, -1)}


def answers(inputs: Inputs, want: Wanted, v: Array | None) -> dict[str, torch.Tensor]:
    """The output and the row statistics; by PyTorch's kernels where the output alone is wanted and they can."""
    problem, q, k, _ = inputs = inputs._replace(v=v)
    if v is not None and not library.reasons_not(problem, q, k, v, want):
        output = library.output(problem, q, k, v)
        if output is not None:
            if problem.causal:
                launch(inputs, 0, {"output": output}, repair=True)
            return {"output": output}
    device = gpu.device_of(q)
    room = {
        name: torch.empty(shape, dtype=gpu.torch_dtype(dtype), device=device)
        for name, (shape, dtype) in row_kinds(problem, v, want, rows.STATISTICS).items()
    }
    if problem.batch * problem.heads * problem.queries:
        launch(inputs if want.output else inputs._replace(v=None), want.top or 0, room)
    return room


def launch(inputs: Inputs, top: int, results: dict[str, Any], *, repair: bool = False) -> None:
    """Compute these results, tensors by name; with `repair`, only the tiles of the output that are not finite."""
    run, problem = Pass(inputs), inputs.problem
    sizes = gpu.sizes(problem, "rows", run.d_v)
    shared = gcd(*(x.share for x in (run.inputs.k, run.inputs.v) if x is not None))
    pack = shared if shared * problem.queries <= FEW_ROWS else 1
    rows_at_once = min(sizes.M, max(FEW_ROWS, gpu.padded(pack * problem.queries)))
    sizes = sizes._replace(M=rows_at_once, WARPS=8 if top else sizes.WARPS)  # lists take many registers
    split = None if repair else split_of(problem, pack)
    splits = 1 if split is None else -(-problem.keys // split)
    slots = max(2, next_power_of_2(top)) if top else 2
    lines = run.heads * problem.queries

    def kept(of: str | None, *tail: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Where the states of the splits are kept, as far as the results need them."""
        return run.room(splits, lines, *tail, dtype=dtype) if split and (of is None or of in results) else None

    part = State(
        maximum=kept(None), total=kept(None), centred=kept("entropy"), far=kept("distance"), diagonal=kept("diagonal"),
        top=kept("top_weights", slots), places=kept("top_weights", slots, dtype=torch.int32),
        output=kept("output", run.d_v),
    )  # fmt: skip
    common = {"want": Rows(**results), "part": part, "count": top, "TOP": slots}
    once = repair or split is not None or results.keys().isdisjoint(("output", "entropy"))
    run.launch_twice(
        rows.rows, pack * problem.queries, sizes, heads=run.heads // pack, splits=splits, **common, pack=pack,
        split=split, once=once, REPAIR=repair,
    )  # fmt: skip
    if split:
        rows.merge[(-(-lines // 16),)](
            rules=run.rules, **common, lines=lines, splits=splits, sizes=constant(sizes), M=16
        )


def tangents(
    inputs: Inputs, along: Directions, want: Wanted, logsumexp: Array, output: Array | None
) -> dict[str, torch.Tensor]:
    """The tangents of the row statistics asked for and of the log-sum-exp, by the statistics' names."""
    run, problem, v = Pass(inputs, along=along), inputs.problem, inputs.v
    results = run.rooms(row_kinds(problem, v, replace(want, logsumexp=True), frozenset(smooth(computed="rows"))))
    if not run.empty:
        run.launch(
            row_tangents.rows, problem.queries, gpu.sizes(problem, "row tangents", run.d_v), along=run.direction,
            logsumexp=run.contiguous(logsumexp), known=None if v is None else run.contiguous(output),
            to=Rows(**results),
        )  # fmt: skip
    return results


def split_of(problem: Problem, pack: int) -> int | None:
    """Keys per program if queries are few and keys many, else None; it depends on lengths only, not on the batch."""
    if pack * problem.queries > FEW_ROWS or problem.keys <= LONG:
        return None
    return -(-problem.keys // (SPLITS * SPLIT)) * SPLIT
