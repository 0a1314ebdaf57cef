"""A key-value cache for decoding: room made in advance, each sequence at its own length."""

from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from clearhead.arrays import check_tensor
from clearhead.errors import DtypeError, RuleError, ShapeError, shown
from clearhead.room import array_bytes, check_room
from clearhead.values import whole_number

_FIRST = 64  # positions of room, when nothing is said
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: Any) -> None:
    """Raise unless attention has this dtype of PyTorch's, or it is left to PyTorch."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _FLOATS):
        raise DtypeError(f"dtype is {shown(dtype)}: expected torch.float64, float32, bfloat16 or float16.")


def check_placed(what: str, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype | None, device: Any) -> None:
    """Is there such a device for PyTorch here, and room on it for tensors of these shapes? RuleError or SizeError."""
    try:
        if not isinstance(device, (str, int, torch.device, NoneType)) or isinstance(device, bool):
            raise TypeError
        empty = torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError):  # each kind of device has its own
        hint = 'device="cpu", or leave it out.'
        raise RuleError(f"device is {shown(device)}: PyTorch has no such device here.", hint) from None
    size = sum(array_bytes(shape, empty.element_size()) for shape in shapes)
    check_room(what, size, "give smaller sizes.", str(empty.device))


class KVCache:
    """Keys and values of the positions so far, for each sequence of a batch its own number of them.

    batch, kv_heads   sizes; d_k, d_v are the widths of a key and a value
    capacity          positions of room at the start; it doubles when full, so a step costs O(1) copies on average
    window            attend to the last `window` positions only; the room is then for twice as many (more where
                      sequences differ in length), and what all sequences have left behind is let go

    `append` adds positions and gives what attention reads; positions count from the start of each sequence, also when
    the window has let the first ones go. Nothing is differentiable: values are stored detached.

    Attention over the cache has the bits of the full pass. A layer that decodes may still differ from its full pass, by
    about 1.4e-6 in float32: PyTorch's projections of one position round otherwise than those of many.

    Raises RuleError for a size that is no whole number from 1 up or a device that is not here, DtypeError for a dtype
    that attention has not, SizeError for more than memory.

    >>> import torch, clearhead.nn
    >>> cache = clearhead.nn.KVCache(batch=1, kv_heads=2, d_k=4, d_v=4)
    >>> k, v, rules = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> k.shape, rules["query_offset"], len(cache)
    (torch.Size([1, 2, 3, 4]), tensor([0]), 3)
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        d_k: int,
        d_v: int,
        *,
        capacity: int = _FIRST,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        sizes = {"batch": batch, "kv_heads": kv_heads, "d_k": d_k, "d_v": d_v, "capacity": capacity}
        for name, value in sizes.items():
            whole_number(name, value)
        window = None if window is None else whole_number("window", window)
        check_dtype(dtype)
        room = capacity if window is None else max(capacity, 2 * window)
        shapes = [(batch, kv_heads, room, d) for d in (d_k, d_v)]
        check_placed("the cache", shapes, dtype, device)
        self.window = window
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.lengths = torch.zeros(batch, dtype=torch.int64)  # positions seen, of each sequence
        self.start = 0  # the position that stands first in the room

    def __len__(self) -> int:
        """The longest sequence's positions so far."""
        return int(self.lengths.max())

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Add k (batch, kv_heads, new, d_k) and v (batch, kv_heads, new, d_v) after what each sequence has.

        counts (batch,): how many of the new positions are real, the rest being padding at the end; None: all.
        Returns all keys and values, as views, and the rules `query_offset`, `kv_lengths` and `window` under which the
        new positions attend to them. Raises ShapeError, DtypeError or RuleError before anything is changed.
        """
        new = self._check(k, v)
        added = torch.full_like(self.lengths, new if counts is None else 0)
        if counts is not None:
            added += self._numbers("counts", counts, new)
        before = self.lengths
        self._make_room(int(before.max()) + new, int(before.min()))
        places = before - self.start
        if bool((places == places[0]).all()):  # all alike: one copy
            at = slice(int(places[0]), int(places[0]) + new)
            self.keys[:, :, at] = k.detach()
            self.values[:, :, at] = v.detach()
        else:
            for b, place in enumerate(places.tolist()):
                self.keys[b, :, place : place + new] = k[b].detach()
                self.values[b, :, place : place + new] = v[b].detach()
        self.lengths = before + added
        stop = len(self) - self.start
        rules: dict[str, Any] = {"query_offset": before - self.start}
        if bool((self.lengths - self.start != stop).any()):
            rules["kv_lengths"] = self.lengths - self.start
        if self.window is not None:
            rules["window"] = (self.window - 1, None)
        return self.keys[:, :, :stop], self.values[:, :, :stop], rules

    def reorder(self, order: Tensor) -> None:
        """Sequence i becomes what sequence order[i] was: the step of beam search. order (batch,); else RuleError."""
        order = self._numbers("order", order, len(self.lengths) - 1)
        used = slice(0, len(self) - self.start)
        for room in (self.keys, self.values):
            room[:, :, used] = room[:, :, used][order.to(room.device)]
        self.lengths = self.lengths[order]

    def crop(self, length: int | Tensor) -> None:
        """Forget what lies beyond `length` positions, one number or (batch,); longer sequences only are changed."""
        most = _tensor("length", length)
        most = self._numbers("length", most.expand(len(self.lengths)) if most.ndim == 0 else most, None)
        wanted = torch.minimum(self.lengths, most)
        if not bool(wanted.any()):
            self.start = 0
        elif self.start and bool((wanted - (self.window or 0) + 1 < self.start).any()):
            raise RuleError(
                f"length is {length}: the window has let go of positions before {self.start}, which it would need.",
                "crop at most `window` positions back, or make the cache without a window.",
            )
        self.lengths = wanted

    def _numbers(self, name: str, value: Any, most: int | None) -> Tensor:
        """Validate one whole number for each sequence, between 0 and `most`."""
        numbers = _tensor(name, value).cpu()
        whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
        fits = numbers.shape == self.lengths.shape and whole and bool((numbers >= 0).all())
        if not fits or (most is not None and bool((numbers > most).any())):
            span = "from 0 up" if most is None else f"between 0 and {most}"
            raise RuleError(
                f"{name} is {numbers.tolist()}: expected a whole number {span} for each sequence, "
                f"(batch {len(self.lengths)},)."
            )
        return numbers.to(torch.int64)

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
        """Room for positions up to `last`: by letting go of what the window no longer needs, else by doubling."""
        room = self.keys.shape[2]
        if last - self.start <= room:
            return
        needed = self.start if self.window is None else max(self.start, shortest - self.window + 1)
        size = room
        while last - needed > size:
            size *= 2
        for name in ("keys", "values"):
            old = getattr(self, name)
            kept = old[:, :, needed - self.start :]
            if size == room:
                kept = kept.clone()  # the places overlap
                old[:, :, : kept.shape[2]] = kept
            else:
                fresh = old.new_zeros(*old.shape[:2], size, old.shape[3])
                fresh[:, :, : kept.shape[2]] = kept
                setattr(self, name, fresh)
        self.start = needed


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        raise RuleError(f"{name} is {shown(value)}: expected a whole number for each sequence.") from None
