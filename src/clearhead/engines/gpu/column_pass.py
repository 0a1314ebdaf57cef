"""The column pass over one problem: statistics, all weights and Aᵀ·g; or of tangents, or of effects, in their place."""

from typing import Any

import torch

from clearhead.core.axes import Array
from clearhead.core.problem import Inputs
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Kept, kinds
from clearhead.engines.gpu import columns, passes
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.arguments import Sizes
from clearhead.engines.gpu.columns import Columns, Factor
from clearhead.engines.gpu.passes import Pass
from clearhead.engines.gpu.tiles import RowTerms

WIDTH = 128  # columns of g per launch, and of values in a tile of effects


class ColumnPass(Pass):
    """The column pass over a problem; `answers` has the statistics."""

    kind, of_products = "columns", "column products"  # rows in the table of sizes

    def __init__(self, inputs: Inputs, logsumexp: Array | None = None, kept: Kept | None = None, **more: Any) -> None:
        """`more` as Pass takes it; with `kept`, the tangents along its direction. v is read only where g is given."""
        super().__init__(inputs if "g" in more else inputs._replace(v=None), **more)
        tangent = None
        if kept is not None:
            logsumexp, tangent = kept
            self.kind = self.of_products = "column tangents"
        self.terms = RowTerms(self.contiguous(logsumexp), self.contiguous(tangent))

    def answers(self, want: Wanted) -> dict[str, torch.Tensor]:
        """The statistics asked for, by name."""
        results = self.rooms(kinds(self.problem, want, want.columns(), columns.STATISTICS))
        per_key = {name: tensor for name, tensor in results.items() if name in Columns._fields}
        if per_key:  # apart, so that no bit of them depends on what else is asked for
            self.columns(Columns(**per_key))
        if "image" in results:
            self.image(results["image"])
        if want.groups is not None:
            self.groups(want.groups, results["groups"])
        return results

    def tile(self) -> torch.Tensor:
        """Every element of this (small) problem, (batch, heads, queries, keys)."""
        problem = self.problem
        elements = self.zeros(problem.batch, problem.heads, problem.queries, problem.keys)
        self.columns(Columns(weights=elements))
        return elements

    def transposed(self, g: Array) -> torch.Tensor:
        """The transposed matrix times g, (batch, heads, keys, columns), in slices of columns."""
        product = self.zeros(self.problem.batch, self.problem.heads, self.problem.keys, g.shape[-1])
        for start in range(0, g.shape[-1], WIDTH):
            part = g[..., start : start + WIDTH]
            product[..., start : start + WIDTH] = self._product(Factor(part.shape[-1], gpu.strided(part, self.problem)))
        return product

    def groups(self, groups: Groups, sums: torch.Tensor) -> None:
        """Sums between groups, in bands of query groups: each launch covers the queries from a band's first to last."""
        labels = gpu.to_device(groups.queries, "int32", self.device)
        order = passes.in_order(groups.keys, groups.counts[1], self.device)
        for first, count, span in passes.bands(groups.queries, groups.counts[0]):
            passes.pool(self._product(Factor(count, labels=labels, first=first), span), sums, first, order)

    def sizes(self, width: int) -> Sizes:
        """The sizes of this pass with `width` columns of a product."""
        return gpu.sizes(self.problem, self.of_products if width else self.kind, 0, width)

    def columns(self, to: Columns, factor: Factor = Factor(), span: tuple[int, int] | None = None) -> None:  # noqa: B008
        """Run the kernel; with `span`, over these queries only."""
        sizes = self.sizes(factor.columns)
        if not self.empty:
            self.launch(
                columns.columns, self.problem.keys, sizes, along=self.direction, terms=self.terms, to=to,
                factor=factor, D=gpu.padded(factor.columns),
                span=None if span is None else passes.rounded(span, sizes.N),
            )  # fmt: skip

    def _product(self, factor: Factor, span: tuple[int, int] | None = None) -> torch.Tensor:
        product = self.zeros(self.problem.batch, self.problem.heads, self.problem.keys, factor.columns)
        self.columns(Columns(product=product), factor, span)
        return product

    def image(self, mean: torch.Tensor, largest: torch.Tensor | None = None) -> None:
        """The mean under each pixel of (batch, heads, height, width), and the largest: bands of pixel rows by turns."""
        problem, (height, width), sizes = self.problem, mean.shape[-2:], self.sizes(0)
        for first in range(0, 0 if self.empty else height, passes.BAND):
            count = min(passes.BAND, height - first)
            shape = problem.batch, problem.heads, problem.keys, count
            means, most = self.room(*shape), None if largest is None else self.room(*shape)
            self.launch(
                columns.pixels, problem.keys, sizes, heads=count * self.heads, along=self.direction, terms=self.terms,
                mean=means, largest=most, first=first, count=count, height=height,
            )  # fmt: skip
            passes.pool(means, mean, first, (None, None))
            if most is not None:
                columns.pool_largest[(width * self.heads,)](
                    most, largest, problem.keys, width, count, first, height, D=gpu.padded(count), FLOAT=sizes.FLOAT,
                    N=32,
                )  # fmt: skip
