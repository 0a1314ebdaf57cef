"""A key-value cache for decoding, with a length for each sequence, and rotary positions."""

from collections.abc import Iterable
from contextlib import suppress
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.arrays import as_rule_array, check_tensor
from clearhead.core.call import describe
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.core.torch_state import plain
from clearhead.engines import native
from clearhead.errors import ClearheadError, DtypeError, RuleError, ShapeError, shown

_NUMBERS = (int, float, bool, NoneType)  # types of rules that need no tensor
_CAPACITY = 64  # positions, by default
_BLOCK = 64  # positions whose rotations decoding computes at a time
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_placed(what: str, shapes: Iterable[tuple[int, ...]], dtype: Any, device: Any) -> None:
    """Raise DtypeError or RuleError for an impossible dtype or device, SizeError if such tensors do not fit."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _FLOATS):
        raise DtypeError(f"dtype is {shown(dtype)}: expected torch.float64, float32, bfloat16 or float16.")
    try:
        if not isinstance(device, (str, int, torch.device, NoneType)) or isinstance(device, bool):
            raise TypeError
        empty = torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError):  # depends on the kind of device
        hint = 'device="cpu", or leave it out.'
        raise RuleError(f"device is {shown(device)}: PyTorch has no such device here.", hint) from None
    size = sum(array_bytes(shape, empty.element_size()) for shape in shapes)
    check_room(what, size, "give smaller sizes.", str(empty.device))


class Turns:
    """Rotary positions as in Llama: x_i becomes x_i·cos - x_{i + d/2}·sin of the angle position·base^(-2i/d_k)."""

    def __init__(self, d_k: int, base: float) -> None:
        self._half, self._base = d_k // 2, base
        self._block: tuple[int, torch.dtype | None, Tensor] = -1, None, torch.empty(0)

    def of(self, start: Any, x: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the cosines and signed sines of the angles, which broadcast to x (batch, heads, length, d_k).

        start     the first position, a number or one for each sequence, (batch,)
        length    how many positions; default as many as x has
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32  # as Llama computes them
        rates = 1 / self._base ** (torch.arange(self._half, dtype=dtype, device="cpu") / self._half)
        rates = torch.cat([-rates, rates]).to(x.device)
        if not isinstance(start, int):
            start = torch.as_tensor(start, device=x.device).reshape(-1, 1, 1, 1)
        angles = (start + torch.arange(length or x.shape[-2], device=x.device)[:, None]) * rates
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def of_one(self, position: int, x: Tensor) -> Tensor:
        """The same for one position, (2, d_k): computed in blocks, since decoding asks for consecutive positions."""
        first = position // _BLOCK * _BLOCK
        known, dtype, block = self._block
        if known != first or dtype != x.dtype or block.device != x.device:
            block = torch.stack(self.of(first, x, _BLOCK), dim=1)
            self._block = first, x.dtype, block
        return block[position - first]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, heads, length, d_k) by the angles from `Turns.of`, bit for bit as Llama does."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class KVCache:
    """The keys and values of earlier positions, for decoding; each sequence of a batch has its own length.

    batch, kv_heads   how many sequences and key heads
    d_k, d_v          widths of a key and a value
    capacity          positions that are allocated at the start; they double when full
    dtype, device     PyTorch's; float64, float32, bfloat16 or float16

    `append` adds positions and returns all keys and values, copying O(new) numbers on average; memory is O(length).
    `len(cache)` is the length of the longest sequence. Keys and values are stored detached, without derivatives.

    Attention over the cache equals the full pass bit for bit. A layer that decodes may still differ from its full pass
    by about 1.4e-6 in float32, since PyTorch's projections round one position differently from many.

    Raises RuleError for a size that is not a whole number from 1 up or a device that does not exist, DtypeError for
    another dtype, SizeError if the cache does not fit in memory.

    >>> import torch, clearhead.nn
    >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=2, d_k=4, d_v=4)
    >>> k, v, rules = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k.shape, rules["query_offset"], len(cache)
    (torch.Size([1, 2, 3, 4]), 0, 3)
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        d_k: int,
        d_v: int,
        *,
        capacity: int = _CAPACITY,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        sizes = {"batch": batch, "kv_heads": kv_heads, "d_k": d_k, "d_v": d_v, "capacity": capacity}
        batch, kv_heads, d_k, d_v, capacity = (whole_number(name, size) for name, size in sizes.items())
        shapes = [(batch, kv_heads, capacity, d) for d in (d_k, d_v)]
        check_placed("the cache", shapes, dtype, device)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self._lengths = [0] * batch  # positions of each sequence so far

    @property
    def lengths(self) -> Tensor:
        """How many positions each sequence has so far, (batch,), int64; a copy.

        >>> import clearhead.nn
        >>> clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4).lengths
        tensor([0, 0])
        """
        return torch.tensor(self._lengths)

    def __len__(self) -> int:
        """The length of the longest sequence."""
        return max(self._lengths)

    def next_position(self) -> int | Tensor:
        """The position that the next key will have: one number, or (batch,) if sequences have different lengths.

        >>> import clearhead.nn
        >>> clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4).next_position()
        0
        """
        return self._lengths[0] if min(self._lengths) == max(self._lengths) else self.lengths

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Add k (batch, kv_heads, new, d_k) and v (batch, kv_heads, new, d_v) at the end of each sequence.

        counts (batch,): how many of the new positions are real, the rest being padding at the end; None: all.
        Returns all keys (batch, kv_heads, keys, d_k) and values (batch, kv_heads, keys, d_v), as views, and the rules
        `query_offset` and `kv_lengths` with which the new positions attend to them. Raises ShapeError and DtypeError
        for k and v that do not fit, RuleError for counts that do not, before anything is changed.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4)
        >>> _, _, rules = cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), counts=torch.tensor([3, 1]))
        >>> rules["kv_lengths"]
        tensor([3, 1])
        """
        new = self._check(k, v)
        before = self._lengths
        added = [new] * len(before) if counts is None else self._numbers("counts", counts, new)
        size = self.keys.shape[2]
        while size < max(before) + new:
            size *= 2
        if size > self.keys.shape[2]:
            more = (0, 0, 0, size - self.keys.shape[2])
            self.keys, self.values = (torch.nn.functional.pad(x, more) for x in (self.keys, self.values))
        for room, fresh in ((self.keys, k.detach()), (self.values, v.detach())):
            if min(before) == max(before):  # equally long sequences: one copy
                room.narrow(2, before[0], new).copy_(fresh)
                continue
            for b, place in enumerate(before):
                room[b].narrow(1, place, new).copy_(fresh[b])
        rules: dict[str, Any] = {"query_offset": self.next_position()}
        self._lengths = [length + count for length, count in zip(before, added, strict=True)]
        if min(self._lengths) < max(self._lengths):
            rules["kv_lengths"] = self.lengths
        return self.keys.narrow(2, 0, len(self)), self.values.narrow(2, 0, len(self)), rules

    def step(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any], turns: Turns | None = None) -> Tensor | None:
        """Append one position to each sequence and attend to all, in one call of the kernel if possible.

        q (batch, heads, 1, d_k), k (batch, kv_heads, 1, d_k), v (batch, kv_heads, 1, d_v); `rules` as in `attention`;
        turns: the rotary positions by which q and k are rotated first.
        Returns what `attention` would, (batch, heads, 1, d_v), bit for bit. Returns None and changes nothing where you
        must call `append` and `attention`: for several positions, with a gradient, off the CPU, for sequences of
        different lengths, a full cache, rules that need tensors, a query_offset or a window that forbids keys.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=1, d_k=4, d_v=4)
        >>> q = k = v = torch.ones(1, 1, 1, 4, requires_grad=True)
        >>> cache.step(q, k, v, {}) is None
        True
        """
        if q.shape[2] != 1 or rules.get("query_offset") is not None:  # left to the caller, who takes or refuses it
            return None
        output, place = None, self._lengths[0]
        if place >= self.keys.shape[2] or min(self._lengths) < max(self._lengths):
            return None
        window, causal = rules.get("window"), rules.get("causal", False)
        sees_all = window is None or (type(window) is tuple and (window[0] is None or window[0] >= place))
        sees_all = sees_all and type(causal) is bool and rules.get("alibi_slopes") is None
        rest: Any = {name: value for name, value in rules.items() if name not in ("causal", "window")}
        if sees_all and plain(q, k, v) and all(type(x) in _NUMBERS for x in rest.values()):
            try:
                problem = describe(q, self.keys[:, :, :1], self.values[:, :, :1], rest).problem
            except ClearheadError:
                return None
            if native.usable(problem):
                by = None if turns is None else turns.of_one(place, q)
                output = native.step(problem, q, k, v, (self.keys, self.values), place, by)
        if output is not None:
            torch.autograd.graph.increment_version((self.keys, self.values))  # as PyTorch's own writes do
            self._lengths = [place + 1] * len(self._lengths)
        return output

    def crop(self, length: int | Tensor) -> None:
        """Shorten sequences that are longer than `length` positions, one number or (batch,). Raises RuleError.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=1, d_k=4, d_v=4)
        >>> _ = cache.append(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
        >>> cache.crop(2)
        >>> len(cache)
        2
        """
        most = self._numbers("length", length, None)
        self._lengths = [min(pair) for pair in zip(self._lengths, most, strict=True)]

    def _numbers(self, name: str, value: Any, most: int | None) -> list[int]:
        """Read a whole number from 0 to `most`, one for all sequences or (batch,). Raises RuleError."""
        batch, numbers = len(self._lengths), []
        with suppress(DtypeError):
            array = as_rule_array(value, name)
            if array.shape in ((), (batch,)):
                numbers = np.broadcast_to(array, batch).tolist()
        if not numbers or any(not is_whole(one) or one < 0 or (most is not None and one > most) for one in numbers):
            span = "from 0 up" if most is None else f"between 0 and {most}"
            hint = f"one for all, or one for each of {batch} sequences."
            raise RuleError(f"{name} is {shown(numbers or value)}: expected whole numbers {span}.", hint)
        return numbers

    def _check(self, k: Tensor, v: Tensor) -> int:
        for name, x in (("k", k), ("v", v)):
            check_tensor(x, name)
        new = k.shape[-2] if k.ndim == 4 else -1
        for name, x, room in (("k", k, self.keys), ("v", v, self.values)):
            expected = (room.shape[0], room.shape[1], new, room.shape[3])
            if tuple(x.shape) != expected:
                count = f"new {new} as in k" if name == "v" else "new"
                axes = f"(batch {room.shape[0]}, kv_heads {room.shape[1]}, {count}, d {room.shape[3]})"
                raise ShapeError(f"{name} has shape {tuple(x.shape)}: the cache was made for {axes}.")
            if x.dtype != room.dtype:
                raise DtypeError(
                    f"{name} is {x.dtype} but the cache holds {room.dtype}.", f"KVCache(…, dtype={x.dtype})"
                )
            if x.device != room.device:
                held = f"{name} is on device {x.device} but the cache is on device {room.device}."
                raise DtypeError(held, f"KVCache(…, device={str(x.device)!r})")
        return new
