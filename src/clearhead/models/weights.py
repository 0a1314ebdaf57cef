"""A model's weights as they are stored, memory-mapped and packed. They become float32 when a layer runs.

BLAS computes products with one thread, and threads of ours share the rows or columns: BLAS's threads wait for each
other by spinning, which beside other programs took four times as long as one thread, and takes processors from
attention's.

Names are those of GGUF files: `token_embd.weight`, `blk.3.attn_q.weight`, … Linear weights are (d_out, d_in).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from mmap import mmap
from threading import Lock
from typing import Any

import numpy as np

from clearhead.core.array_files import DTYPES
from clearhead.core.axes import Array
from clearhead.core.room import free_bytes
from clearhead.engines.threads import get_num_threads
from clearhead.errors import FileError, MissingExtraError

_UNPACKED = 2**17  # numbers that are unpacked at a time where they are kept, which a processor's cache holds
_ROWS = 2**22  # numbers that are unpacked at a time where a whole matrix would take too much
_SHARED = 2**21  # multiplications of a product that threads share
_lock = Lock()
_inside = [0]  # products that are computed at this moment
_before: list[int] = []  # the threads of each BLAS before the first of them


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """One tensor: its numbers, or the bytes of its blocks where it is packed.

    kind         the dtype as safetensors writes it (F32, BF16, …), or GGUF's name of the packing (Q4_K, …)
    data         (rows, …) numbers, or (rows, bytes of a row) as uint8
    transposed   is it stored as (d_in, d_out)?
    order        which rows make the tensor, in this order; None: all as they are
    plus         what is added to each number: 1 where a norm keeps its weight less 1
    scales       of data in gpt-oss's form of MXFP4, (rows, blocks, 16) bytes: each block's exponent and 127
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    transposed: bool = False
    order: Array | None = None
    plus: float = 0.0
    scales: Array | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def rows(self, chosen: Any = slice(None), dtype: type[np.floating[Any]] = np.float32) -> Array:
        """These rows of the tensor in a dtype; a view of the file where it is that already."""
        self._check_whole()
        if self.order is not None:
            chosen = self.order[chosen]
        part = self.data.T[chosen] if self.transposed else self.data[chosen]
        if self.scales is not None:
            numbers = _of_fours(part, self.scales[chosen])
        elif self.kind == "BF16":  # the upper half of a float32
            numbers = (part.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif self.kind in DTYPES:
            numbers = part
        else:  # as one row: of many, gguf takes 16 at a time, which is slow
            quants, kinds = packings()
            row = quants.dequantize(np.ascontiguousarray(part).reshape(1, -1), kinds[self.kind])
            numbers = row.reshape(quants.quant_shape_from_byte_shape(part.shape, kinds[self.kind]))
        numbers = np.require(numbers, dtype, "A")  # a file may store numbers at odd places
        return numbers + dtype(self.plus) if self.plus else numbers

    def _check_whole(self) -> None:
        """Raise FileError where the mapped file became shorter: reading beyond its end would kill the process."""
        base: Any = self.data
        while isinstance(base, np.ndarray):
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if isinstance(base, mmap) and base.size() < len(base):
            raise FileError("the model's file became shorter while the model was loaded.", "load it again.")

    def part(self, start: int, stop: int) -> "Stored":
        """Some of its rows as a tensor of its own, such as the queries of a fused projection."""
        order = np.arange(start, stop) if self.order is None else self.order[start:stop]
        return replace(self, shape=(stop - start, *self.shape[1:]), order=order)

    def expert(self, number: int) -> "Stored":
        """One expert's matrix or bias of the tensor of all."""
        turned = self.data.ndim == 3 and self.transposed
        shape = self.shape[:0:-1] if turned else self.shape[1:]
        scales = None if self.scales is None else self.scales[number]
        return replace(self, shape=shape, data=self.data[number], transposed=turned, scales=scales)


def _of_fours(data: Array, exponents: Array) -> Array:
    """The numbers of blocks in gpt-oss's form of MXFP4: two of four bits in a byte, the first below."""
    signed = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    fours = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 32)
    made = np.ldexp(signed[fours], exponents.astype(np.int32)[..., None] - 127)
    return np.asarray(made.reshape(len(data), -1))


def packings() -> tuple[Any, Any]:
    """The module that unpacks GGUF's types, and the types by name. Raises MissingExtraError where gguf is missing."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise MissingExtraError(
            "GGUF files need the package gguf, which is not installed.", 'pip install "clearhead[gguf]"'
        ) from error
    return quants, GGMLQuantizationType


@cache
def unpacks(kind: int) -> bool:
    """Does the package gguf know this type of blocks, and unpack it?"""
    quants, kinds = packings()
    try:
        size = quants.quant_shape_to_byte_shape((2**10,), kinds(kind))[0]
        quants.dequantize(np.zeros((1, size), np.uint8), kinds(kind))
    except (NotImplementedError, KeyError, ValueError):
        return False
    return True


@dataclass(eq=False, slots=True)
class Weights:
    """The tensors of a model by name, in the dtype in which it runs. What was unpacked stays up to `budget` bytes.

    budget   half of the memory that is free when the model is loaded
    Layers run in the same order in every pass: what no longer fits is unpacked anew in each pass, and what came first
    stays, since dropping the oldest would drop each layer just before it is needed.
    """

    stored: Mapping[str, Stored]
    dtype: type[np.floating[Any]] = np.float32
    budget: int = field(default_factory=lambda: free_bytes() // 2)
    kept: dict[str, Array] = field(default_factory=dict)
    used: int = 0

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Array:
        """A tensor, (d_out, d_in) or (d,)."""
        if name in self.kept:
            return self.kept[name]
        tensor = self.stored[name]
        if len(tensor.shape) == 2 and (tensor.kind != "F32" or tensor.order is not None):
            columns = np.empty(tensor.shape[::-1], self.dtype)  # contiguous: BLAS multiplies one token faster so
            step = max(1, _UNPACKED // tensor.shape[-1])
            for start in range(0, tensor.shape[0], step):
                columns[:, start : start + step] = tensor.rows(slice(start, start + step), self.dtype).T
            array = columns.T
        else:
            array = tensor.rows(dtype=self.dtype)
        size = 0 if np.may_share_memory(array, tensor.data) else array.nbytes
        if self.used + size <= self.budget:
            self.kept[name] = array
            self.used += size
        return array

    def get(self, name: str) -> Array | None:
        """The tensor, or None where the model has none of that name."""
        return self[name] if name in self.stored else None

    def linear(self, x: Array, name: str) -> Array:
        """x·Wᵀ + b, with b where the model has one."""
        made = product(x, self[f"{name}.weight"].T)
        bias = self.get(f"{name}.bias")
        return made if bias is None else made + bias

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


def product(x: Array, w: Array) -> Array:
    """x·W for x (…, tokens, d_in) and W (d_in, d_out), as one product of matrices."""
    rows = x.reshape(-1, x.shape[-1])
    made = np.empty((len(rows), w.shape[-1]), np.result_type(x, w))
    with _one_thread():
        count = get_num_threads()
        if count == 1 or rows.size * w.shape[-1] < _SHARED:
            np.matmul(rows, w, out=made)
        else:
            by_rows, size = len(rows) >= 8 * count, len(rows) if len(rows) >= 8 * count else w.shape[-1]
            parts = [slice(size * i // count, size * (i + 1) // count) for i in range(count)]

            def part(some: slice) -> None:
                if by_rows:
                    np.matmul(rows[some], w, out=made[some])
                else:
                    made[:, some] = rows @ w[:, some]

            waiting = [_threads(count - 1).submit(part, some) for some in parts[1:]]
            part(parts[0])
            for one in waiting:
                one.result()
    return made.reshape(*x.shape[:-1], -1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, BLAS computes with one thread; it has those of before when no product is computed any more."""
    blas = _blas()
    with _lock:
        if not _inside[0]:
            _before[:] = [one.num_threads for one in blas]
            for one in blas:
                one.set_num_threads(1)
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                for one, count in zip(blas, _before, strict=True):
                    one.set_num_threads(count)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that wait without spinning; a forked process makes its own."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_threads.cache_clear)
    return ThreadPoolExecutor(count, "clearhead product")


@cache
def _blas() -> list[Any]:
    """What sets the number of threads of the BLAS that NumPy computes with."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers
