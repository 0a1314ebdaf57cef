"""Launches the kernels that compute along a direction: rows here, columns and gradients as without one."""

from dataclasses import replace
from typing import Any

import torch

from clearhead.core.axes import Array, group_size
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import kinds
from clearhead.engines.gpu import row_tangents
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.directions import direction
from clearhead.engines.gpu.row_tangents import RowTangents

_ROWS = frozenset(("output", "logsumexp", "entropy", "distance", "own"))


def widened_along(wide: Problem, along: Directions) -> Directions:
    """The direction of a `widened` problem, with q, k and v in its dtype."""
    return replace(along, **{name: x.astype(wide.dtype) for name, x in along.given.items() if name in "qkv"})


def rows(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    want: Wanted,
    logsumexp: Array,
    output: Array | None,
    most: int,
) -> dict[str, torch.Tensor]:
    """The tangents of the row statistics asked for, by name; of the output in slices of at most `most` columns."""
    if v is None or output is None or v.shape[-1] <= most:
        return _launch(problem, q, k, v, along, want, logsumexp, output)
    found: dict[str, torch.Tensor] = {}
    parts = []
    for start in range(0, v.shape[-1], most):
        at = (..., slice(start, start + most))
        moved = along if along.v is None else replace(along, v=along.v[at])
        asked = Wanted(output=True, keep_float32=want.keep_float32) if found else want
        part = _launch(problem, q, k, v[at], moved, asked, logsumexp, output[at])
        parts.append(part.pop("output"))
        found = found or part
    return {**found, "output": torch.cat(parts, -1)}


def _launch(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    along: Directions,
    want: Wanted,
    logsumexp: Array,
    output: Array | None,
) -> dict[str, torch.Tensor]:
    names = [name for name in replace(want, logsumexp=True).rows() if name != "output" or v is not None]
    d_v = 0 if v is None else v.shape[-1]
    device, number = gpu.device_of(q), gpu.statistics(problem)
    found = {
        name: torch.zeros(shape, dtype=gpu.torch_dtype(dtype), device=device)
        for name, (shape, dtype) in kinds(problem, want, names, _ROWS, d_v).items()
    }
    if not problem.batch * problem.heads * problem.queries * problem.keys:
        return found
    moved, steps = direction(problem, along if v is not None else replace(along, v=None), device)
    tiles = gpu.tiles(problem, d_v, "row tangents")
    arrays = gpu.by_name(q=gpu.as_tensor(q), k=gpu.as_tensor(k), v=None if v is None else gpu.as_tensor(v))
    known = None if output is None or v is None else gpu.contiguous(output, number)
    to: Any = RowTangents(**{**dict.fromkeys(RowTangents._fields), **found})
    row_tangents.rows[(-(-problem.queries // tiles.owned) * problem.batch * problem.heads,)](
        **arrays, along=moved, steps=steps, d_k=problem.d_k, d_v=d_v, rules=gpu.rules(problem, device),
        logsumexp=gpu.contiguous(logsumexp, number), known=known, to=to, per_key=problem.group,
        per_value=problem.group if v is None else group_size(problem.heads, v.shape[1]), M=tiles.owned,
        N=tiles.passed, DK=gpu.padded(problem.d_k), DV=gpu.padded(d_v), FLOAT=tiles.number,
        CHUNK=tiles.chunk, PRECISION=tiles.precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return found
