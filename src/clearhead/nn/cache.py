"""A key-value cache for decoding: memory allocated in advance, a length for each sequence."""

from collections.abc import Iterable
from operator import gt
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
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: Any) -> None:
    """Raise DtypeError unless this is a float dtype of PyTorch's that attention takes, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _FLOATS):
        raise DtypeError(f"dtype is {shown(dtype)}: expected torch.float64, float32, bfloat16 or float16.")


def check_placed(what: str, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype | None, device: Any) -> None:
    """Raise RuleError for a device that PyTorch does not have here, SizeError where these tensors do not fit on it."""
    try:
        if not isinstance(device, (str, int, torch.device, NoneType)) or isinstance(device, bool):
            raise TypeError
        empty = torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError):  # each kind of device raises another
        hint = 'device="cpu", or leave it out.'
        raise RuleError(f"device is {shown(device)}: PyTorch has no such device here.", hint) from None
    size = sum(array_bytes(shape, empty.element_size()) for shape in shapes)
    check_room(what, size, "give smaller sizes.", str(empty.device))


def _sees_all(rules: dict[str, Any], position: int) -> bool:
    """May one query at this position, the last one, attend to all keys?"""
    window = rules.get("window")
    within = window is None or (type(window) is tuple and (window[0] is None or window[0] >= position))
    return within and type(rules.get("causal", False)) is bool and rules.get("alibi_slopes") is None


class KVCache:
    """The keys and values of earlier positions, for decoding; each sequence of a batch has a length of its own.

    batch, kv_heads   how many sequences and key heads
    d_k, d_v          widths of a key and a value
    capacity          positions that are allocated at the start; they double when full
    window            attend to the last `window` positions only; memory is then for twice as many (more where
                      sequences differ in length), and positions that no sequence needs any more are overwritten
    dtype, device     PyTorch's; float64, float32, bfloat16 or float16

    `append` adds positions and returns what attention reads, in O(new) copies on average; memory is O(length), or
    O(window). Positions count from the start of each sequence, also when the first ones are overwritten. `len` is the
    length of the longest sequence. Keys and values are stored detached: nothing is differentiable.

    Attention over the cache has the bits of the full pass. A layer that decodes may still differ from its full pass, by
    about 1.4e-6 in float32: PyTorch's projections of one position round otherwise than those of many.

    Raises RuleError for a size that is not a whole number from 1 up or a device that does not exist, DtypeError for
    another dtype, SizeError where the cache does not fit in memory.

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
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        sizes = {"batch": batch, "kv_heads": kv_heads, "d_k": d_k, "d_v": d_v, "capacity": capacity}
        batch, kv_heads, d_k, d_v, capacity = (whole_number(name, size) for name, size in sizes.items())
        window = None if window is None else whole_number("window", window)
        check_dtype(dtype)
        room = capacity if window is None else max(capacity, 2 * window)
        shapes = [(batch, kv_heads, room, d) for d in (d_k, d_v)]
        check_placed("the cache", shapes, dtype, device)
        self.window = window
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self._lengths = [0] * batch  # positions of each sequence so far
        self.start = 0  # the position that is stored first

    @property
    def lengths(self) -> Tensor:
        """How many positions each sequence has so far, (batch,): a copy. May be set, to forget the last, as by `crop`.

        Raises RuleError for more positions than a sequence has.

        >>> import clearhead.nn
        >>> clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4).lengths
        tensor([0, 0])
        """
        return torch.tensor(self._lengths)

    @lengths.setter
    def lengths(self, value: Tensor) -> None:
        lengths = self._numbers("lengths", value, None)
        if any(map(gt, lengths, self._lengths)):
            raise RuleError(
                f"lengths is {shown(lengths)}: the sequences have {shown(self._lengths)} positions.",
                "append(k, v) adds positions.",
            )
        self._shorten("lengths", lengths)

    def __len__(self) -> int:
        """The length of the longest sequence."""
        return max(self._lengths)

    def next_position(self) -> int | Tensor:
        """The position that `append` gives to the first new key: one number, or (batch,) where sequences differ.

        >>> import clearhead.nn
        >>> clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4).next_position()
        0
        """
        return self._lengths[0] if min(self._lengths) == max(self._lengths) else self.lengths

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Add k (batch, kv_heads, new, d_k) and v (batch, kv_heads, new, d_v) at the end of each sequence.

        counts (batch,): how many of the new positions are real, the rest being padding at the end; None: all.
        Returns the keys (batch, kv_heads, keys, d_k) and values (batch, kv_heads, keys, d_v) that the new positions may
        see, all without a window, as views, and the rules `query_offset`, `kv_lengths` and `window` with which the new
        positions attend to them. Raises ShapeError and DtypeError for k and v that do not fit, RuleError for counts
        that do not, before anything is changed.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4)
        >>> _, _, rules = cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), counts=torch.tensor([3, 1]))
        >>> rules["kv_lengths"]
        tensor([3, 1])
        """
        new = self._check(k, v)
        before = self._lengths
        added = [new] * len(before) if counts is None else self._numbers("counts", counts, new)
        self._make_room(max(before) + new, min(before))
        places = [length - self.start for length in before]
        first = 0 if self.window is None else max(0, min(places) - self.window + 1)  # the first place that is seen
        for room, fresh in ((self.keys, k.detach()), (self.values, v.detach())):
            if min(places) == max(places):  # equally long sequences: one copy
                room.narrow(2, places[0], new).copy_(fresh)
                continue
            for b, place in enumerate(places):
                room[b].narrow(1, place, new).copy_(fresh[b])
        self._lengths = [length + count for length, count in zip(before, added, strict=True)]
        seen = first, len(self) - self.start - first
        offsets = [place - first for place in places]
        rules: dict[str, Any] = {"query_offset": offsets[0] if min(offsets) == max(offsets) else torch.tensor(offsets)}
        if min(self._lengths) < max(self._lengths):
            rules["kv_lengths"] = torch.tensor([length - self.start - first for length in self._lengths])
        if self.window is not None:
            rules["window"] = (self.window - 1, None)
        return self.keys.narrow(2, *seen), self.values.narrow(2, *seen), rules

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any], turns: Tensor | None = None
    ) -> Tensor | None:
        """Append one position to each sequence and attend to it, with one call of the kernel, where that can be.

        q (batch, heads, 1, d_k), k (batch, kv_heads, 1, d_k), v (batch, kv_heads, 1, d_v); `rules` as in `attention`.
        turns (2, d_k): cosine and signed sine by which q and k are turned before (`nn/rotary.py`), or None.

        Returns what `attention` would, (batch, heads, 1, d_v), to the same bits; None, with nothing changed, where it
        must be called: at the first step, with a gradient, off the CPU, with sequences of several lengths or a full
        cache, with rules that need tensors, a query_offset of their own or a window that forbids keys.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=1, d_k=4, d_v=4)
        >>> q = k = v = torch.ones(1, 1, 1, 4, requires_grad=True)
        >>> cache.step(q, k, v, {}) is None
        True
        """
        if rules.get("query_offset") is not None:  # the cache's to say: the long way refuses it or takes it
            return None
        length = self._lengths[0]
        within = self.window is None or length - self.start < self.window
        if not within or length - self.start >= self.keys.shape[2] or min(self._lengths) < max(self._lengths):
            return None
        output, place = None, length - self.start
        rest: Any = {name: value for name, value in rules.items() if name not in ("causal", "window")}
        if _sees_all(rules, place) and plain(q, k, v) and all(type(x) in _NUMBERS for x in rest.values()):
            try:
                problem = describe(q, self.keys[:, :, :1], self.values[:, :, :1], rest).problem
            except ClearheadError:
                return None
            if native.usable(problem):
                output = native.step(problem, q, k, v, (self.keys, self.values), place, turns)
        if output is not None:
            torch.autograd.graph.increment_version((self.keys, self.values))  # as PyTorch does where it writes
            self._lengths = [length + 1] * len(self._lengths)
        return output

    def reorder(self, order: Tensor) -> None:
        """Replace sequence i by sequence order[i], as beam search does; order (batch,). Raises RuleError.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=2, kv_heads=1, d_k=4, d_v=4)
        >>> _ = cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), counts=torch.tensor([3, 1]))
        >>> cache.reorder(torch.tensor([1, 1]))
        >>> cache.lengths
        tensor([1, 1])
        """
        places = self._numbers("order", order, len(self._lengths) - 1)
        used = slice(0, len(self) - self.start)
        for room in (self.keys, self.values):
            room[:, :, used] = room[:, :, used][places]
        self._lengths = [self._lengths[place] for place in places]

    def crop(self, length: int | Tensor) -> None:
        """Shorten sequences that are longer than `length` positions, one number or (batch,).

        Raises RuleError for what is not a whole number from 0 up, and where a window has overwritten positions that
        the shorter sequence needs.

        >>> import torch, clearhead.nn
        >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=1, d_k=4, d_v=4)
        >>> _ = cache.append(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
        >>> cache.crop(2)
        >>> len(cache)
        2
        """
        most = self._numbers("length", length, None, one_for_all=True)
        self._shorten("length", [min(pair) for pair in zip(self._lengths, most, strict=True)])

    def _shorten(self, name: str, lengths: list[int]) -> None:
        """Forget what is behind these lengths. Raises RuleError where the window has let go of what they need."""
        if not any(lengths):
            self.start = 0
        elif self.start and min(lengths) - (self.window or 0) + 1 < self.start:
            raise RuleError(
                f"{name} is {min(lengths)}: the window has let go of positions before {self.start}, which it would "
                "need.",
                "crop at most `window` positions back, or make the cache without a window.",
            )
        self._lengths = lengths

    def _numbers(self, name: str, value: Any, most: int | None, *, one_for_all: bool = False) -> list[int]:
        """Read one whole number from 0 to `most` for each sequence, (batch,). Raises RuleError."""
        batch, numbers, came = len(self._lengths), [], value
        try:
            array = as_rule_array(list(value[: batch + 1]) if isinstance(value, range) else value, name)
            came = array.tolist() if array.size <= 64 else value
            if array.shape == (batch,) or (one_for_all and not array.ndim):
                numbers = np.broadcast_to(array, batch).tolist()
        except DtypeError:
            pass
        if not numbers or any(not is_whole(one) or one < 0 or (most is not None and one > most) for one in numbers):
            span = "from 0 up" if most is None else f"between 0 and {most}"
            raise RuleError(
                f"{name} is {shown(came)}: expected a whole number {span} for each sequence, (batch {batch},)."
            )
        return numbers

    def _check(self, k: Tensor, v: Tensor) -> int:
        for name, x in (("k", k), ("v", v)):
            check_tensor(x, name)
        new = k.shape[-2] if k.ndim == 4 else -1
        for name, x, room in (("k", k, self.keys), ("v", v, self.values)):
            expected = (room.shape[0], room.shape[1], new, room.shape[3])
            if tuple(x.shape) != expected:
                axes = f"(batch {room.shape[0]}, kv_heads {room.shape[1]}, new, d {room.shape[3]})"
                raise ShapeError(f"{name} has shape {tuple(x.shape)}: expected {axes}, as the cache was made.")
            if x.dtype != room.dtype:
                raise DtypeError(
                    f"{name} is {x.dtype} but the cache holds {room.dtype}.", f"KVCache(…, dtype={x.dtype})"
                )
        return new

    def _make_room(self, last: int, shortest: int) -> None:
        """Make room for positions up to `last`: overwrite what the window no longer needs, else double the memory."""
        room = self.keys.shape[2]
        if last - self.start <= room:
            return
        needed = self.start if self.window is None else max(self.start, shortest - self.window + 1)
        size = room
        while last - needed > size:
            size *= 2
        for name in ("keys", "values"):
            old = getattr(self, name)
            kept, fresh = old[:, :, needed - self.start :], old
            if size > room:
                fresh = old.new_zeros(*old.shape[:2], size, old.shape[3])
            fresh[:, :, : kept.shape[2]] = kept.clone() if fresh is old else kept  # source and target overlap there
            setattr(self, name, fresh)
        self.start = needed
