"""Launches the column kernel for one problem: statistics, all weights, Aᵀ·g, and their tangents along a direction."""

from typing import Any

import numpy as np
import torch

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import kinds
from clearhead.engines.gpu import columns
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.columns import Columns
from clearhead.engines.gpu.directions import direction
from clearhead.engines.gpu.labels import ordered

NOTHING = Columns(None, None, None, None)
_BAND = 64  # pixel rows or query groups per launch


class ColumnPass:
    """The column pass over one problem, or its tangents; `launch` runs it for the results requested."""

    def __init__(
        self, problem: Problem, q: Array, k: Array, logsumexp: Array, along: Directions | None = None,
        tangent: Array | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.device = problem, gpu.device_of(q)
        self.q, self.k = gpu.as_tensor(q), gpu.as_tensor(k)
        self.logsumexp = gpu.contiguous(logsumexp, gpu.statistics(problem))
        self.per_key = problem.group
        self.rules = gpu.rules(problem, self.device)
        self.along, self.steps = direction(problem, along, self.device)
        self.tangent = None if tangent is None else gpu.contiguous(tangent, gpu.statistics(problem))

    def answers(self, want: Wanted, like: Array) -> dict[str, Array]:
        """The statistics asked for, by name; images are computed in bands of queries."""
        found = {
            name: torch.zeros(shape, dtype=gpu.torch_dtype(dtype), device=self.device)
            for name, (shape, dtype) in kinds(self.problem, want, want.columns(), columns.STATISTICS).items()
        }
        per_key = {name: tensor for name, tensor in found.items() if name in Columns._fields}
        if per_key:  # apart, so that no bit of them depends on what else is asked for
            self.launch(NOTHING._replace(**per_key))
        if "image" in found:
            _image(self, found["image"])
        if want.groups is not None:
            _groups(self, want.groups, found["groups"])
        return {name: gpu.from_tensor(tensor, like) for name, tensor in found.items()}

    def launch(
        self,
        to: Columns,
        g: Array | None = None,
        labels: Any = None,
        band: tuple[int, int, int] = (0, 1, 0),  # first pixel row or group, image height, count
        span: tuple[int, int] | None = None,
    ) -> None:
        problem = self.problem
        count = band[2] if g is None else g.shape[-1]
        what = "columns" if to.product is None else "column products"
        width = 0 if to.product is None else count
        tiles = gpu.tiles(problem, width, what if self.tangent is None else "column tangents")
        if not problem.batch * problem.heads * problem.keys * problem.queries:
            return
        if span is not None:
            span = span[0] // tiles.passed * tiles.passed, -(-span[1] // tiles.passed) * tiles.passed
        given = None if g is None else gpu.as_tensor(g)
        if g is not None and given is not None and g.shape[1] == 1:
            given = given._replace(strides=(given.strides[0], 0, *given.strides[2:]))
        columns.columns[(-(-problem.keys // tiles.owned) * problem.batch * problem.heads,)](
            **gpu.by_name(q=self.q, k=self.k, g=given), lse=self.logsumexp, labels=labels, d_k=problem.d_k,
            rules=self.rules, to=to, per_key=self.per_key, first=band[0], size=band[1], columns=count, span=span,
            along=self.along, steps=self.steps, tangent=self.tangent, M=tiles.owned, N=tiles.passed,
            DK=gpu.padded(problem.d_k), D=gpu.padded(count), FLOAT=tiles.number, CHUNK=tiles.chunk,
            PRECISION=tiles.precision, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _image(look: ColumnPass, image: Any) -> None:
    """Image in bands of pixel rows: each launch covers the band's queries, then keys are pooled into pixel columns."""
    height, n = image.shape[-2], look.problem.queries
    for first in range(0, height, _BAND):
        count = min(_BAND, height - first)
        span = first * n // height, -(-(first + count) * n // height)
        product = torch.zeros((*image.shape[:2], look.problem.keys, count), dtype=image.dtype, device=look.device)
        look.launch(NOTHING._replace(product=product), band=(first, height, count), span=span)
        _pool(look, product, image, first)


def _groups(look: ColumnPass, groups: Groups, found: Any) -> None:
    """Sums between groups in bands of query groups: each launch covers the queries from the band's first to last."""
    if not found.numel():
        return
    labels = gpu.to_device(groups.queries, np.int32, look.device)
    table = tuple(gpu.to_device(x, np.int32, look.device) for x in ordered(groups.keys, groups.counts[1]))
    for first in range(0, groups.counts[0], _BAND):
        count = min(_BAND, groups.counts[0] - first)
        inside = np.flatnonzero(((groups.queries >= first) & (groups.queries < first + count)).any(axis=0))
        if len(inside):
            product = torch.zeros((*found.shape[:2], look.problem.keys, count), dtype=found.dtype, device=look.device)
            span = int(inside[0]), int(inside[-1]) + 1
            look.launch(NOTHING._replace(product=product), labels=labels, band=(first, 1, count), span=span)
            _pool(look, product, found, first, table)


def _pool(look: ColumnPass, product: Any, found: Any, first: int, table: tuple[Any, ...] = (None, None)) -> None:
    """Sum the product over the keys of each pixel column or key group, into found[:, :, first:, :]."""
    batch, heads, height, parts = found.shape
    if found.numel() and product.numel():
        number = gpu.tiles(look.problem, 0, "columns").number
        count = product.shape[-1]
        columns.pool[(parts * batch * heads,)](
            product, found, *table, look.problem.keys, parts, heads, count, first, height,
            D=gpu.padded(count), FLOAT=number, N=32,
        )  # fmt: skip
