"""Holds a model's weights as they are stored, memory-mapped and packed, and multiplies by them.

The compiled kernel multiplies by the bytes in the file. For types that it lacks, NumPy unpacks some rows at a time to
float32, so nothing stays unpacked after a product.

Names are those of GGUF files: `token_embd.weight`, `blk.3.attn_q.weight`, … Linear weights are (d_out, d_in).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from mmap import mmap
from typing import Any

import numpy as np

from clearhead.core.array_files import DTYPES
from clearhead.core.axes import Array
from clearhead.engines import native
from clearhead.errors import FileError, needing

_ROWS = 2**22  # numbers that NumPy unpacks at a time


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """One tensor: its numbers, or the bytes of its packed blocks.

    kind         the dtype as safetensors writes it (F32, BF16, …), or GGUF's name of the packing (Q4_K, …)
    data         (rows, …) numbers, or (rows, bytes of a row) as uint8
    order        the stored rows that make the tensor, in its order; None: all as they are
    scales       in gpt-oss's form of MXFP4, whose data is (rows, blocks, 16) bytes: each block's exponent plus 127
    mapped       the mapped file that holds it, if any
    packed       as the compiled kernel multiplies by it; None if it cannot
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    order: Array | None = None
    scales: Array | None = None
    mapped: mmap | None = field(init=False)
    packed: native.Packed | None = field(init=False)

    def __post_init__(self) -> None:
        base: Any = self.data
        while isinstance(base, np.ndarray):
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        object.__setattr__(self, "mapped", base if isinstance(base, mmap) else None)
        turned = self.data.strides[-1:] != (self.data.itemsize,)  # a file with (d_in, d_out) stores the transpose
        rows, packed = self.data.T if turned else self.data, None
        packs = self.kind in native.PACKINGS and self.scales is None and (self.order is None or not turned)
        if packs and rows.ndim == 2 and rows.strides[1] == rows.itemsize and not native.missing():
            order = None if self.order is None else np.ascontiguousarray(self.order, np.int64)
            columns = self.shape[0 if turned else 1]
            packed = native.PACKINGS[self.kind], rows.view(np.uint8), order, columns, turned
        object.__setattr__(self, "packed", packed)

    def rows(self, chosen: Any = slice(None), dtype: type[np.floating[Any]] = np.float32) -> Array:
        """Return rows of the tensor in a dtype; a view of the file if it has that dtype."""
        self._check_whole()
        if self.order is not None:
            chosen = self.order[chosen]
        part = self.data[chosen]
        if self.scales is not None:  # two numbers of four bits in a byte, the first in the lower half
            signed = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
            fours = signed[np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:-1], 32)]
            numbers = np.ldexp(fours, self.scales[chosen].astype(np.int32)[..., None] - 127).reshape(len(part), -1)
        elif self.kind == "BF16":  # the upper half of a float32
            numbers = (part.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif self.kind in DTYPES:
            numbers = part
        else:  # as one row: gguf unpacks many rows 16 at a time, which is slow
            quants, kinds = packings()
            row = quants.dequantize(np.ascontiguousarray(part).reshape(1, -1), kinds[self.kind])
            numbers = row.reshape(quants.quant_shape_from_byte_shape(part.shape, kinds[self.kind]))
        return np.require(numbers, dtype, "A")  # a file may store numbers at odd places

    def _check_whole(self) -> None:
        """Raise FileError if the mapped file became shorter: reading beyond its end would kill the process."""
        if self.mapped is not None and self.mapped.size() < len(self.mapped):
            raise FileError("the model's file became shorter while the model was loaded.", "load it again.")

    def part(self, start: int, stop: int) -> "Stored":
        """Return some rows as a tensor, such as the queries of a fused projection."""
        some = slice(start, stop)
        if self.order is not None:
            return replace(self, shape=(stop - start, *self.shape[1:]), order=self.order[some])
        scales = None if self.scales is None else self.scales[some]
        return replace(self, shape=(stop - start, *self.shape[1:]), data=self.data[some], scales=scales)

    def expert(self, number: int) -> "Stored":
        """Return one expert's matrix or bias from a tensor of all experts."""
        scales = None if self.scales is None else self.scales[number]
        return replace(self, shape=self.shape[1:], data=self.data[number], scales=scales)

    def product(self, x: Array, *, back: bool = False) -> Array:
        """Return x·Wᵀ, (…, d_out), for x (…, d_in); with `back`, x·W for x (…, d_out). W is (d_out, d_in)."""
        self._check_whole()
        if self.packed is not None and x.dtype == np.float32:
            return native.multiply(x, self.packed, back=back)
        rows = x.reshape(-1, x.shape[-1])
        made = np.zeros((len(rows), self.shape[1 if back else 0]), x.dtype)
        step = max(1, _ROWS // self.shape[1])
        for start in range(0, self.shape[0], step):
            some = slice(start, start + step)
            w = self.rows(some, x.dtype.type)
            if back:
                made += rows[:, some] @ w
            else:
                made[:, some] = rows @ w.T
        return made.reshape(*x.shape[:-1], -1)


def packings() -> tuple[Any, Any]:
    """Import the module that unpacks GGUF's types, and the types by name. Raises MissingExtraError without gguf."""
    with needing("the package gguf", "a GGUF file", "gguf"):
        from gguf import GGMLQuantizationType, quants
    return quants, GGMLQuantizationType


@cache
def unpacks(kind: int) -> bool:
    """Can the package gguf unpack this type?"""
    quants, kinds = packings()
    try:
        size = quants.quant_shape_to_byte_shape((2**10,), kinds(kind))[0]
        quants.dequantize(np.zeros((1, size), np.uint8), kinds(kind))
    except (NotImplementedError, KeyError, ValueError):
        return False
    return True


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """The tensors of a model by name, in the dtype in which it runs."""

    stored: Mapping[str, Stored]
    dtype: type[np.floating[Any]] = np.float32
    vectors: dict[str, Array] = field(default_factory=dict)  # of norms and biases, which every token needs

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, (d_out, d_in) or (d,), unpacked."""
        made = self.vectors.get(name)
        if made is None:
            made = self.stored[name].rows(dtype=self.dtype)
            if made.ndim == 1:
                made = self.vectors[name] = made.copy()
        return made

    def get(self, name: str) -> Array | None:
        """Return the tensor, or None if the model has none of this name."""
        return self[name] if name in self.stored else None

    def linear(self, x: Array, name: str) -> Array:
        """Return x·Wᵀ + b, or x·Wᵀ if the model has no bias of this name."""
        made = self.stored[f"{name}.weight"].product(x)
        return made + self[f"{name}.bias"] if f"{name}.bias" in self.stored else made

    def rows(self, name: str, chosen: Sequence[int] | Array) -> Array:
        """Return some rows of a matrix; only these are unpacked."""
        return self.stored[name].rows(np.asarray(chosen, np.intp), self.dtype)

    def product(self, x: Array, name: str, *, back: bool = False) -> Array:
        """Return x·Wᵀ for x (…, d_in); with `back`, x·W, which takes a derivative back through x·Wᵀ."""
        return self.stored[name].product(x, back=back)
