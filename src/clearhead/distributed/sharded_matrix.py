"""What the matrices of a sharded sequence share: their sizes, entries by index, products, and what ranks compare."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
from torch import Tensor

from clearhead.core.axes import Array
from clearhead.core.operands import operand
from clearhead.core.problem import Inputs, Problem
from clearhead.core.statistics import Request
from clearhead.distributed.messages import total
from clearhead.distributed.ranks import Ranks, agreed
from clearhead.distributed.schedule import Meeting, Parts, Question, meet
from clearhead.distributed.sharded_problem import Shards, array_of, held_places
from clearhead.engines.base import Engine
from clearhead.ops.indexing import M_co, TransposedMatrix, check_weights, read_index
from clearhead.ops.lazy_matrix import LazyMatrix

Compute = Callable[[Engine, Inputs, Sequence[Array]], Array]
Want = TypeVar("Want", bound=Request)


class ShardedTransposedMatrix(TransposedMatrix[M_co]):
    """The transpose of a sharded matrix: products from all queries to own keys, and weights or effects by index."""

    def __getitem__(self, key: Any) -> Tensor:
        """Exact weights or effects: those of the matrix with its last two axes swapped; all ranks give the same index.

        Errors as in the matrix, which reads the index, so that a wrong one is told to all ranks.
        """
        entries: Tensor = super().__getitem__(key)
        return entries


class ShardedMatrix(LazyMatrix):
    """A matrix of a sharded sequence, never stored; each kind has `_known`, `_transposed` and `_entries`."""

    _entries = "weights"
    _method: str
    _shards: Shards
    _transposed: Callable[[Any], Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, all queries, all keys): the shape of the whole matrix."""
        return (*self._shards.prefix, self._shards.whole.queries, self._shards.whole.keys)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements: float32, or float64 where an input is."""
        return self._shards.dtype

    @property
    def T(self) -> "ShardedTransposedMatrix[Self]":  # noqa: N802  NumPy's name
        """The transpose: its product takes (…, heads, own queries, d), and gives (…, heads, own keys, d)."""
        return ShardedTransposedMatrix(self, self._by_index, self._transposed)

    mT = T  # noqa: N815

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def _ranks(self) -> Ranks:
        return self._shards.ranks

    @property
    def _on(self) -> str:
        return f"on {self._ranks.world} rank{'s' * (self._ranks.world > 1)}"

    # What computes a tile, and what it needs of own queries: arrays (batch, heads, own queries, …).
    _known: Callable[[], tuple[Compute, Sequence[Array]]]

    def _by_index(self, key: Any, *, transposed: bool = False) -> Tensor:
        """The entries at an index that all ranks give, into the matrix or its transpose; the same on every rank.

        Queries travel to the keys' ranks, whose answers come to all. Raises on every rank: SelectionError or SizeError
        on that with a wrong index, DistributedError on the others.
        """

        def read() -> tuple[tuple[list[int | range], bool], dict[str, Any]]:
            index, swap = read_index(key, self.shape, transposed=transposed)
            check_weights(_sizes(index), self.dtype, self._shards.whole.device, self._entries)
            return (index, swap), {"index": str(index)}

        called = f"{self._entries} by index"
        (index, swap), _ = agreed(self._ranks, called, read)
        tile = np.empty(_sizes(index), self.dtype)
        if tile.size:
            with self._ranks.together(called):
                chosen = [range(p, p + 1) if isinstance(p, int) else p for p in index]
                tile = _tile(self._shards, *self._known(), chosen).reshape(tile.shape)
        return self._shards.give(tile.swapaxes(-1, -2) if swap else tile)

    def _operand(
        self, what: str, name: str, x: Any, check: Callable[[Problem, Array], None], *, transposed: bool = False
    ) -> tuple[Array, bool]:
        """Read the right-hand side of a product, which ranks give alike; (batch, its heads, positions, d), a vector?"""
        local = self._shards.local()
        length, heads = (local.queries, (local.heads, 1)) if transposed else (local.keys, (local.kv_heads, local.heads))

        def read() -> tuple[tuple[Array, bool], dict[str, Any]]:
            columns, vector = operand(local, array_of(x, name), name, length, heads)
            check(local, columns)
            sizes = {"heads": columns.shape[1], "width": columns.shape[3], "dtype": str(columns.dtype)}
            return (columns, vector), {f"{name}'s {size}": value for size, value in sizes.items()}

        return agreed(self._ranks, what, read)[0]

    def _restored(self, x: Array, *, vector: bool = False) -> Tensor:
        """An answer (batch, heads, …) with the caller's axes, floats in the matrix's dtype; a vector without d."""
        whole = self._shards.shaped(x if x.dtype == np.int64 else x.astype(self.dtype))
        return whole[..., 0] if vector else whole


def compared(want: Request) -> dict[str, Any]:
    """What of a request ranks compare; of labels only whether there are any, and what may differ: how many groups."""
    flat = {name: str(getattr(want, name)) for name, one in want.table.items() if one.asked not in ("labels", "v")}
    queries, keys = (0, 0) if want.groups is None else want.groups.counts
    return flat | {"groups": want.groups is not None, "queries": queries, "keys": keys}


def with_all_groups(want: Want, everybody: list[dict[str, Any]]) -> Want:
    """The request with the numbers of groups of queries and of keys of all ranks together."""
    if want.groups is None:
        return want
    counts = max(one["queries"] for one in everybody), max(one["keys"] for one in everybody)
    return replace(want, groups=want.groups._replace(counts=counts))


def _sizes(index: Sequence[int | range]) -> tuple[int, ...]:
    return tuple(len(p) for p in index if not isinstance(p, int))


def _tile(shards: Shards, compute: Compute, known: Sequence[Array], chosen: Sequence[range]) -> Array:
    """The tile of the chosen batches, heads, queries and keys, (batch, heads, queries, keys), on every rank."""
    rows, cols = (axis if axis.step > 0 else axis[::-1] for axis in chosen[-2:])
    part, of_heads = shards.take_heads(chosen[:-2])
    part, places = part.take(rows, cols), held_places(rows, shards.query_pieces[shards.rank])
    tile = np.zeros((part.whole.batch, part.whole.heads, len(rows), len(cols)), shards.dtype)

    def find(one: Meeting, known_there: Any) -> Parts:
        high, wide = _among(rows, one.problem.rows), _among(cols, one.problem.cols)
        tile[:, :, high, wide] = compute(shards.engine, one.inputs, known_there)
        return [], []

    meet("merge", part, Question(find, [of_heads(x)[:, :, places] for x in known]))
    up, right = (1 if axis.step > 0 else -1 for axis in chosen[-2:])
    return total(shards.ranks, "weights", tile)[:, :, ::up, ::right].copy()  # without negative strides


def _among(chosen: range, part: range) -> slice:
    """Where a part of the chosen positions lies among them."""
    first = chosen.index(part[0])
    return slice(first, first + len(part))
