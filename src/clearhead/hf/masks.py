"""Transformers' masks as rules: the meaning of a model's mask function, without a number for each query and key.

A model gets its attention mask from the function registered with its attention (`transformers.masking_utils`). Ours
returns a tensor with the shape and dtype of eager attention's additive mask, which carries the rules. Our attention
reads the rules; any other operation on the tensor works on the additive mask itself, which is made at that moment.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import getclosurevars
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils as theirs

from clearhead.errors import RuleError

RuleDict = dict[str, Any]


@dataclass(frozen=True, eq=False)
class MaskPattern:
    """Which keys a query may see, from a model's mask functions; positions count from the start of the sequence."""

    causal: bool = False
    left: int | None = None  # a query sees this many keys before its own position
    right: int | None = None
    chunk: int | None = None  # attend within chunks of this many keys, counted after `before` (batch,) padding
    before: Tensor | None = None
    packed: Tensor | None = None  # (batch, length): sequences packed into one row
    padding: Tensor | None = None  # (batch, length), True where a key is real
    dense: Tensor | None = None  # (batch, heads or 1, queries, keys), True = may attend, where no rules express it
    bias: Tensor | None = None  # of the same shape, added to the scores
    note: str = ""  # why the mask is dense
    make: Callable[[], Tensor] | None = None  # makes the whole mask, True = may attend
    others: int = 0  # in merged attention: how many of the last keys are an encoder's

    def rules(self, queries: range, keys: range) -> RuleDict:
        """The rules of attention for queries and keys at these positions of the sequence."""
        rules: RuleDict = {}
        if self.causal:
            rules["causal"] = True
        if self.left is not None or self.right is not None:
            rules["window"] = (self.left, self.right)
        rules |= self._segments(queries, keys)
        rules |= _padding_rules(self.padding, keys)
        if self.dense is not None:
            rules["mask"] = self.dense if "mask" not in rules else rules["mask"] & self.dense
        offset = queries.start - keys.start
        if offset or "causal" in rules or "window" in rules:
            rules["query_offset"] = offset
        if self.bias is not None:
            rules["bias"] = self.bias
        return rules

    def first_visible(self, query: int, least: int) -> int:
        """The first key, at `least` or later, that windows and chunks allow queries from this position on to see."""
        if self.left is not None:
            return max(least, query - self.left)
        if self.chunk is not None and self.before is not None:
            starts = (query - self.before) // self.chunk * self.chunk + self.before
            return max(least, int(starts.min()))
        return least

    def _segments(self, queries: range, keys: range) -> RuleDict:
        sides = []
        for positions in (queries, keys) if self.segmented else ():
            if self.chunk is not None and self.before is not None:
                index = torch.arange(positions.start, positions.stop, device=self.before.device)
                sides.append((index[None, :] - self.before[:, None]) // self.chunk)
            elif self.packed is not None:
                sides.append(self.packed[:, positions.start : positions.stop])
        return {"query_segments": sides[0], "kv_segments": sides[1]} if sides else {}

    def real(self, queries: range, keys: range) -> Tensor | None:
        """(batch, queries) of self-attention, False where a query is padding; None if none is, or it is not known.

        By a stored mask, a query that may not see its own key counts as padding.
        """
        if self.padding is not None:
            real = self.padding[:, queries.start : queries.stop].bool()
        elif self.dense is not None:
            mask = self.dense[..., queries.start - keys.start : queries.stop - keys.start]
            real = (mask[:, :, 0] if mask.shape[2] == 1 else mask.diagonal(dim1=2, dim2=3)).any(1)
        else:
            return None
        return real if real.shape[1] == len(queries) and not real.all() else None

    def both(self, other: "MaskPattern") -> "MaskPattern | None":
        """The pattern of keys that both allow; None if both have segments, since rules hold only one kind of them."""
        if self.segmented and other.segmented:
            return None
        sides = ((self.left, other.left), (self.right, other.right))
        left, right = (min((x for x in side if x is not None), default=None) for side in sides)
        return replace(self if self.segmented else other, causal=self.causal or other.causal, left=left, right=right)

    def full(self, queries: range, keys: range) -> Tensor | None:
        """The mask in full, (batch, heads or 1, queries, keys); None if these queries see all of these keys."""
        if self.dense is not None:
            return self.dense
        if self.make is not None:
            return self.make()[..., : len(keys)]
        if not self.causal:
            return None
        rows, columns = (torch.arange(side.start, side.stop) for side in (queries, keys))
        return (columns <= rows[:, None])[None, None]

    @property
    def segmented(self) -> bool:
        return self.chunk is not None or self.packed is not None


class RuledMask(torch.Tensor):
    """A mask (batch, 1, queries, keys) that stores one number and carries its `pattern`.

    Other code sees eager attention's mask: 0 where a query may attend to a key, the dtype's lowest number elsewhere.
    That mask is made when it is first needed, and kept, since code may write into it.
    """

    pattern: MaskPattern
    start: tuple[int, int]  # the positions of the first query and the first key
    sizes: torch.Size  # its shape, kept here since reading it costs no __torch_function__
    whole: Tensor | None  # the additive mask, once it was made
    known: tuple[Any, Any] | None  # the latest layer's arguments and their rules: see `_known` in attending.py

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.contiguous:  # its layout in memory does not change its meaning
                return args[0]
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            read = _merged if func in _CATS else _rows if func is Tensor.__getitem__ else None
            made = None if read is None else read(*args, **(kwargs or {}))
            if made is not None:
                return made
            return func(*_additive(args), **_additive(kwargs or {}))

    def meaning(self) -> MaskPattern:
        """The pattern, or if code may have written into the additive mask, the pattern of that mask."""
        return self.pattern if self.untouched else from_tensor(cast("Tensor", self.whole), causal=False)

    @property
    def has_room(self) -> bool:
        """Are there keys after the last query, which it may not see, as in a static cache?"""
        return self.pattern.causal and self.start[1] + self.sizes[-1] > self.start[0] + self.sizes[-2]

    @property
    def untouched(self) -> bool:
        """Is it certain that no code wrote into it?"""
        return self.whole is None or not (self.whole.is_inference() or self.whole._version)


_CATS = frozenset((torch.cat, torch.concat, torch.concatenate))
_PROPERTIES = ("shape", "ndim", "device", "dtype", "layout", "requires_grad", "is_leaf", "grad_fn", "grad")
_METADATA = frozenset((  # the functions that read a tensor's metadata, not its numbers
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.stride,
    Tensor.storage_offset,
))  # fmt: skip


def _rows(mask: Any, place: Any) -> RuledMask | None:
    """The mask of some queries, for mask[:, :, start:stop, :]; None for another index or a stored mask."""
    every, known = slice(None), isinstance(mask, RuledMask) and isinstance(place, tuple) and len(place) == 4
    if not known or not isinstance(place[2], slice) or place[2].step or (*place[:2], place[3]) != (every,) * 3:
        return None
    pattern, queries = mask.pattern, range(mask.sizes[2])[place[2]]
    if not mask.untouched or not queries or (pattern.dense, pattern.bias) != (None, None):
        return None
    make = pattern.make and (lambda whole=pattern.make: whole()[:, :, place[2]])
    looks = mask.as_subclass(Tensor)[place]
    return _ruled(looks, replace(pattern, make=make), (mask.start[0] + queries.start, mask.start[1]))


def _merged(tensors: Any, dim: int = 0, *, axis: int | None = None, **more: Any) -> RuledMask | None:
    """The mask of merged attention: a causal mask over the sequence's own keys, then one over an encoder's keys.

    None if the concatenated tensors are not these two, or the axis is not the keys.
    """
    if more or (dim if axis is None else axis) not in (-1, 3) or len(tensors) != 2:
        return None
    first, other = tensors
    if not isinstance(first, RuledMask) or not first.pattern.causal:
        return None
    if first.shape[:3] != other.shape[:3] or first.dtype != other.dtype:
        return None
    whole, m = torch.cat([_additive(first), _additive(other)], -1), other.shape[3]
    pattern = from_tensor(whole, causal=False)
    note = f"merged attention: the last {m} keys are not the sequence's own, and the mask is kept in full."
    looks = torch.zeros(1, dtype=first.dtype, device=first.device).expand(whole.shape)
    return _ruled(looks, replace(pattern, others=m, note=note, make=lambda: whole == 0), first.start)


def _ruled(looks: Tensor, pattern: MaskPattern, start: tuple[int, int]) -> RuledMask:
    """Make a mask with the shape and dtype of `looks` and this pattern."""
    mask = looks.as_subclass(RuledMask)
    mask.pattern, mask.start, mask.sizes, mask.whole, mask.known = pattern, start, looks.shape, None, None
    return mask


def _additive(value: Any) -> Any:
    """Replace each RuledMask in arguments by its additive mask."""
    if isinstance(value, RuledMask):
        if value.whole is None:
            (row, col), (n, m) = value.start, value.shape[2:]
            allowed = value.pattern.full(range(row, row + n), range(col, col + m))
            assert allowed is not None
            least, zero = torch.finfo(value.dtype).min, torch.zeros((), dtype=value.dtype, device=value.device)
            value.whole = torch.where(allowed.to(zero.device), zero, least)
        return value.whole
    if isinstance(value, (list, tuple)):
        return type(value)(map(_additive, value))
    return {name: _additive(x) for name, x in value.items()} if isinstance(value, dict) else value


def keep_rules(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> RuledMask:
    """Make a RuledMask from the arguments of Transformers' `eager_mask`."""
    start = int(q_offset), int(kv_offset)
    attention_mask = None if attention_mask is None else attention_mask.clone()  # the caller may write into it

    def make() -> Tensor:
        settings = {**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        where = {"q_offset": start[0], "kv_offset": start[1], "device": device}
        made = theirs.sdpa_mask(
            batch_size, q_length, kv_length, mask_function=mask_function, attention_mask=attention_mask,
            **where, **settings,
        )  # fmt: skip
        if made is None:
            raise RuleError("Transformers made no mask where one was asked for.")
        return made

    read = _read(mask_function)
    if read is None:
        why = "no rule here can express the model's mask function: its mask is kept in full, queries × keys."
        pattern = MaskPattern(dense=make(), note=why, make=make)
    else:
        pattern = replace(read, padding=attention_mask, make=make)
    looks = torch.zeros(1, dtype=dtype, device=device).expand(batch_size, 1, q_length, kv_length)
    return _ruled(looks, pattern, start)


@cache
def _meanings() -> dict[Any, Callable[[Mapping[str, Any]], MaskPattern | None]]:
    """Readers of patterns, by the code of the mask functions that Transformers' factories make."""
    some = torch.zeros(1, dtype=torch.int64)
    return {
        theirs.and_masks().__code__: lambda held: _joined(map(_read, held["mask_functions"])),
        theirs.sliding_window_overlay(1).__code__: lambda held: MaskPattern(left=held["sliding_window"] - 1),
        theirs.sliding_window_bidirectional_overlay(1).__code__: lambda held: MaskPattern(
            left=held["sliding_window"], right=held["sliding_window"]
        ),
        theirs.chunked_overlay(1, some).__code__: lambda held: MaskPattern(
            chunk=held["chunk_size"], before=held["left_padding"]
        ),
        theirs.packed_sequence_mask_function(some).__code__: lambda held: MaskPattern(
            packed=held["packed_sequence_mask"]
        ),
        # positions within a packed sequence: the same distances, the same order
        theirs.remap_positions_for_packed_sequence(theirs.causal_mask_function, some).__code__: lambda held: (
            None if (inner := _read(held["mask_function"])) is None or inner.segmented else inner
        ),
    }


def _read(function: Callable[..., Any]) -> MaskPattern | None:
    """A mask function as a pattern; None for one that Transformers' factories did not make."""
    if function is theirs.causal_mask_function:
        return MaskPattern(causal=True)
    if function is theirs.bidirectional_mask_function:
        return MaskPattern()
    meaning = _meanings().get(getattr(function, "__code__", None))
    return None if meaning is None else meaning(getclosurevars(function).nonlocals)


def _joined(parts: Iterable[MaskPattern | None]) -> MaskPattern | None:
    """The pattern of keys that all allow; None if one is unknown, or rules cannot express them together."""
    joined: MaskPattern | None = MaskPattern()
    for part in parts:
        joined = None if part is None or joined is None else joined.both(part)
    return joined


def from_tensor(mask: Tensor | None, *, causal: bool) -> MaskPattern:
    """The pattern of a stored mask, bool (True = may attend) or added to the scores, or of no mask (None)."""
    if mask is None:
        return MaskPattern(causal=causal)
    mask = mask[(None,) * (4 - mask.ndim)]
    note = "the user or the model gave the mask in full."
    if mask.dtype == torch.bool:
        return MaskPattern(dense=mask, note=note)
    least = torch.finfo(mask.dtype).min
    if bool(((mask == 0) | (mask <= least)).all()):
        return MaskPattern(dense=mask > least, note=note)
    return MaskPattern(bias=mask, note=note)


def _padding_rules(padding: Tensor | None, keys: range) -> RuleDict:
    """Read padding as `kv_lengths` if it is on the right, else as a mask (batch, 1, 1, keys)."""
    if padding is None:
        return {}
    real = padding[:, keys.start : keys.stop].to(device="cpu", dtype=torch.bool)
    if real.shape[1] < len(keys):  # a static cache has more positions
        real = pad(real, (0, len(keys) - real.shape[1]))
    if bool(real.all()):
        return {}
    lengths = real.sum(-1)
    last = np.where(real.numpy(), np.arange(1, len(keys) + 1), 0).max(-1, initial=0)
    if bool((lengths.numpy() == last).all()):
        return {"kv_lengths": lengths}
    return {"mask": real[:, None, None, :].to(padding.device)}
