"""One pass over a problem: its arrays, rules and direction as the kernels read them, and their launch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from triton import knobs, language

from clearhead.core.arrays import statistics_dtype, unrepeated
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Inputs
from clearhead.engines.base import Kind
from clearhead.engines.gpu import columns, labels
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.arguments import Direction, Operands, Sizes, There

BAND = 64  # pixel rows or labels per launch
MANY = 1 << (8 if knobs.runtime.interpret else 20)  # pairs of a query and a key from which on launch_twice does so


class Pass:
    """What the kernels of a pass share, as gpu.strided and gpu.rules describe it; g and its tangent are per query."""

    def __init__(
        self, inputs: Inputs, g: Array | None = None, along: Directions | None = None, moved_g: Array | None = None
    ) -> None:
        problem, q, k, v = inputs
        self.problem, self.device = problem, gpu.device_of(q)
        self.number, self.d_v = gpu.statistics(problem), 0 if v is None else v.shape[-1]
        self.heads = problem.batch * problem.heads
        self.empty = not self.heads * problem.queries * problem.keys
        self.rules = gpu.rules(problem, self.device)
        along = along or Directions()
        arrays = q, k, v, g, along.q, along.k, None if v is None else along.v, moved_g
        self.inputs = Operands(*(None if x is None else gpu.strided(x, problem) for x in arrays))
        number = statistics_dtype(problem.dtype)
        table, sinks = along.spans, None if problem.sinks is None else along.sinks
        self.direction = Direction(
            bias=None if along.bias is None else gpu.strided(along.bias, device=self.device),
            table=None if table is None else gpu.table(labels.with_none(unrepeated(table, 2)), number, self.device),
            sinks=None if sinks is None else gpu.to_device(sinks, number, self.device),
        )

    def launch(
        self, kernel: Any, length: int, sizes: Sizes, *, heads: int | None = None, splits: int = 1, **arguments: Any
    ) -> None:
        """Run a kernel whose programs own strips of `length` queries or keys of each head, in `splits` splits."""
        programs = -(-length // sizes.M) * (self.heads if heads is None else heads)
        x = self.inputs
        there = [[y is not None for y in side] for side in ((x.g, x.moved_q, x.moved_g), (x.v, x.moved_k, x.moved_v))]
        kernel[programs, splits](
            inputs=x, rules=self.rules, sizes=constant(sizes, *there), **arguments, num_warps=sizes.WARPS,
            num_stages=sizes.STAGES,
        )  # fmt: skip

    def launch_twice(self, kernel: Any, length: int, sizes: Sizes, *, once: bool = False, **arguments: Any) -> None:
        """Launch a kernel without the care that NaN and infinity need, then with it where a program's sums have some.

        A value that a row must not see is multiplied by 0, and 0·NaN is NaN; leaving it out of every masked tile takes
        two to three times as many instructions. The first launch notes in `doubts` which programs have a sum that is
        not finite, and the second, CAREFUL, computes these again. Few pairs are computed with care, `once`.
        """
        doubts = None
        if not once and self.problem.queries * self.problem.keys >= MANY:
            doubts = self.room(-(-length // sizes.M) * arguments.get("heads", self.heads), dtype=torch.int32)
            self.launch(kernel, length, sizes, **arguments, doubts=doubts, CAREFUL=False)
        self.launch(kernel, length, sizes, **arguments, doubts=doubts, CAREFUL=True)

    def contiguous(self, x: Array | None) -> torch.Tensor | None:
        """Numbers per query or key, in the statistics' dtype."""
        return None if x is None else gpu.contiguous(x, self.number)

    def room(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor for results, uninitialised."""
        return torch.empty(shape, dtype=dtype or self.number, device=self.device)

    def rooms(self, kinds: dict[str, Kind]) -> dict[str, torch.Tensor]:
        """Tensors for results of these shapes and dtypes, by name; 0 where nothing is written."""
        return {name: self.zeros(*shape, dtype=gpu.torch_dtype(dtype)) for name, (shape, dtype) in kinds.items()}

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor for results, 0 where nothing is written."""
        return torch.zeros(shape, dtype=dtype or self.number, device=self.device)


def constant(sizes: Sizes, *sides: Iterable[bool]) -> Sizes:
    """The sizes as a kernel takes them; `sides` tells of the queries and of the keys which arrays there are."""
    there = (There(*map(language.constexpr, side)) for side in sides)
    return Sizes(*sizes[:2], *map(language.constexpr, sizes[2:-2]), *there)


def rounded(span: tuple[int, int], size: int) -> tuple[int, int]:
    """The span, widened to whole blocks of this size."""
    return span[0] // size * size, -(-span[1] // size) * size


def bands(labelled: Array, count: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Bands of the labels below `count` that some token has: the first, their number, and the span of their tokens."""
    for first in range(0, count, BAND):
        size = min(BAND, count - first)
        inside = np.flatnonzero(((labelled >= first) & (labelled < first + size)).any(axis=0))
        if len(inside):
            yield first, size, (int(inside[0]), int(inside[-1]) + 1)


def in_order(labelled: Array, count: int, device: torch.device) -> list[torch.Tensor]:
    """The tokens in order of their labels, (batch, tokens), and where each of `count` labels starts, and the end."""
    order = np.argsort(labelled, axis=-1, kind="stable")
    ranks = np.take_along_axis(labelled, order, axis=-1)
    starts = np.array([np.searchsorted(row, np.arange(count + 1)) for row in ranks]).reshape(len(ranks), -1)
    return [gpu.to_device(x, np.int32, device) for x in (order, starts)]


def pool(product: torch.Tensor, out: torch.Tensor, first: int, order: Sequence[torch.Tensor | None]) -> None:
    """Sum a product (batch, heads, keys, columns) over the keys of each part, into out[:, :, first:, :].

    A part is a label's tokens in `order`, or a pixel column where that holds None.
    """
    batch, heads, keys, count = product.shape
    _, _, height, parts = out.shape
    if out.numel() and product.numel():
        columns.pool[(parts * batch * heads,)](
            product, out, *order, keys, parts, heads, count, first, height, D=gpu.padded(count),
            FLOAT=language.float64 if out.dtype == torch.float64 else language.float32, N=32,
        )  # fmt: skip
