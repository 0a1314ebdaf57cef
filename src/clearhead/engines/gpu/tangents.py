"""Launches the row pass along a direction; the other passes along one are column_pass.py and backward.py."""

from dataclasses import replace
from typing import Any

import torch

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted, smooth
from clearhead.engines.base import kinds
from clearhead.engines.gpu import row_tangents
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.passes import Pass
from clearhead.engines.gpu.row_tangents import RowTangents

_ROWS = frozenset(smooth(computed="rows"))


def rows(
    problem: Problem, q: Array, k: Array, v: Array | None, along: Directions, want: Wanted, logsumexp: Array,
    output: Array | None, most: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The tangents of the row statistics asked for, by name; of the output in slices of at most `most` columns."""
    if v is None or output is None or v.shape[-1] <= most:
        return _launch(problem, q, k, v, along, want, logsumexp, output)
    results: dict[str, torch.Tensor] = {}
    parts = []
    for start in range(0, v.shape[-1], most):
        columns = (..., slice(start, start + most))
        moved = along if along.v is None else replace(along, v=along.v[columns])
        asked = Wanted(output=True, keep_float32=want.keep_float32) if results else want
        part = _launch(problem, q, k, v[columns], moved, asked, logsumexp, output[columns])
        parts.append(part.pop("output"))
        results = results or part
    return {**results, "output": torch.cat(parts, -1)}


def _launch(
    problem: Problem, q: Array, k: Array, v: Array | None, along: Directions, want: Wanted, logsumexp: Array,
    output: Array | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    run = Pass(problem, q, k, v, along=along)
    names = [name for name in replace(want, logsumexp=True).rows() if name != "output" or v is not None]
    results = {
        name: run.zeros(*shape, dtype=gpu.torch_dtype(dtype))
        for name, (shape, dtype) in kinds(problem, want, names, _ROWS, run.d_v).items()
    }
    if not run.empty:
        to: Any = RowTangents(**{**dict.fromkeys(RowTangents._fields), **results})
        run.launch(
            row_tangents.rows, problem.queries, gpu.sizes(problem, "row tangents", run.d_v), along=run.direction,
            logsumexp=run.contiguous(logsumexp), known=None if v is None else run.contiguous(output), to=to,
        )  # fmt: skip
    return results
