"""A model's weights as they are stored, memory-mapped and packed; they become float32 when a layer runs.

Names are those of GGUF files: `token_embd.weight`, `blk.3.attn_q.weight`, … Linear weights are (d_out, d_in).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from clearhead.core.array_files import DTYPES
from clearhead.core.axes import Array
from clearhead.core.room import free_bytes
from clearhead.errors import MissingExtraError
from clearhead.models.products import product

_UNPACKED = 2**17  # numbers that are unpacked at a time where they are kept, which a processor's cache holds
_ROWS = 2**22  # numbers that are unpacked at a time where a whole matrix would take too much


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """One tensor: its numbers, or the bytes of its blocks where it is packed.

    kind         the dtype as safetensors writes it (F32, BF16, …), or GGUF's name of the packing (Q4_K, …)
    data         (rows, …) numbers, or (rows, bytes of a row) as uint8
    transposed   is it stored as (d_in, d_out)?
    order        which rows make the tensor, in this order; None: all as they are
    plus         what is added to each number: 1 where a norm keeps its weight less 1
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    transposed: bool = False
    order: Array | None = None
    plus: float = 0.0

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def rows(self, chosen: Any = slice(None), dtype: type[np.floating[Any]] = np.float32) -> Array:
        """These rows of the tensor in a dtype; a view of the file where it is that already."""
        if self.order is not None:
            chosen = self.order[chosen]
        part = self.data.T[chosen] if self.transposed else self.data[chosen]
        if self.kind == "BF16":  # the upper half of a float32
            numbers = (part.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif self.kind in DTYPES:
            numbers = part
        else:  # as one row: of many, gguf takes 16 at a time, which is slow
            quants, kinds = packings()
            row = quants.dequantize(np.ascontiguousarray(part).reshape(1, -1), kinds[self.kind])
            numbers = row.reshape(quants.quant_shape_from_byte_shape(part.shape, kinds[self.kind]))
        numbers = np.require(numbers, dtype, "A")  # a file may store numbers at odd places
        return numbers + dtype(self.plus) if self.plus else numbers

    def columns(self, dtype: type[np.floating[Any]]) -> Array:
        """The matrix, (d_out, d_in), with its columns contiguous: BLAS multiplies one token by it faster so."""
        made = np.empty(self.shape[::-1], dtype)
        step = max(1, _UNPACKED // self.shape[-1])
        for start in range(0, self.shape[0], step):
            made[:, start : start + step] = self.rows(slice(start, start + step), dtype).T
        return made.T

    def part(self, start: int, stop: int) -> "Stored":
        """Some of its rows as a tensor of its own, such as the queries of a fused projection."""
        order = np.arange(start, stop) if self.order is None else self.order[start:stop]
        return Stored(self.kind, (stop - start, *self.shape[1:]), self.data, self.transposed, order, self.plus)


def packings() -> tuple[Any, Any]:
    """The module that unpacks GGUF's types, and the types by name. Raises MissingExtraError where gguf is missing."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise MissingExtraError(
            "GGUF files need the package gguf, which is not installed.", 'pip install "clearhead[gguf]"'
        ) from error
    return quants, GGMLQuantizationType


@dataclass(eq=False, slots=True)
class Weights:
    """The tensors of a model by name, in the dtype in which it runs. What was unpacked stays up to `budget` bytes.

    Layers run in the same order in every pass: what no longer fits is unpacked anew in each pass, and what came first
    stays, since dropping the oldest would drop each layer just before it is needed.
    """

    stored: Mapping[str, Stored]
    budget: int
    dtype: type[np.floating[Any]] = np.float32
    kept: dict[str, Array] = field(default_factory=dict)
    used: int = 0

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Array:
        """A tensor, (d_out, d_in) or (d,)."""
        if name in self.kept:
            return self.kept[name]
        tensor = self.stored[name]
        copied = len(tensor.shape) == 2 and (tensor.kind != "F32" or tensor.order is not None)
        array = tensor.columns(self.dtype) if copied else tensor.rows(dtype=self.dtype)
        size = 0 if np.may_share_memory(array, tensor.data) else array.nbytes
        if self.used + size <= self.budget:
            self.kept[name] = array
            self.used += size
        return array

    def get(self, name: str) -> Array | None:
        """The tensor, or None where the model has none of that name."""
        return self[name] if name in self.stored else None

    def rows(self, name: str, chosen: Sequence[int] | Array) -> Array:
        """Some rows of a matrix; only they are unpacked."""
        return self.stored[name].rows(np.asarray(chosen, np.intp), self.dtype)

    def product(self, x: Array, name: str) -> Array:
        """x·Wᵀ for x (…, d_in); a matrix that the budget cannot hold is unpacked some rows at a time."""
        tensor = self.stored[name]
        if name in self.kept or self.used + 4 * tensor.size <= self.budget:
            return product(x, self[name].T)
        step = max(1, _ROWS // tensor.shape[-1])
        starts = range(0, tensor.shape[0], step)
        parts = (tensor.rows(slice(start, start + step), self.dtype).T for start in starts)
        return np.concatenate([product(x, part) for part in parts], axis=-1)


def half_of_free_memory() -> int:
    """The budget where none is asked for, in bytes."""
    return free_bytes() // 2
