"""One layer while its model runs: the pieces that each call brings, joined along the queries when asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import RuleError, SelectionError
from clearhead.matrix import AttentionMatrix
from clearhead.observations import Observation
from clearhead.watching.layers import Layer
from clearhead.watching.masks import Pattern, Rules

AGAIN = "watch one sequence in a block, with its cache: open another `with ch.watch(…)` for another one."


@dataclass(frozen=True, eq=False)
class Call:
    """One call: q (batch, heads, queries, d_k), k and v (batch, kv_heads, keys, d_k or d_v), and where they stand."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    pattern: Pattern
    queries: range  # positions in the sequence
    keys: range
    scores: Rules  # scale, softcap, sinks

    def rules(self) -> Rules:
        return self.scores | self.pattern.rules(self.queries, self.keys)


@dataclass(eq=False)
class Recording:
    """What is seen of one layer."""

    name: str
    path: str
    call: int  # which call of its module in one forward pass, from 1 up
    cross: bool
    heads: Sequence[int] | None
    keep: bool
    values: bool
    image: tuple[int, int] | None
    calls: list[Call] = field(default_factory=list)
    parts: list[Observation] = field(default_factory=list)
    last_key: Tensor | None = None
    first_sums: Tensor | None = None  # (batch, kv_heads, keys): each key's sum, while no keys were added

    @property
    def length(self) -> int:
        """How many queries were seen."""
        return sum(len(call.queries) for call in self.calls)

    def check(self, call: Call) -> None:
        """Does this call continue the sequence that was seen so far? Raises RuleError where it does not."""
        if not self.calls:
            if self.heads is not None and max(self.heads, default=0) >= call.q.shape[1]:
                raise SelectionError(
                    f"heads: there is no head {max(self.heads)} in layer {self.name}, which has {call.q.shape[1]}."
                )
            return
        before = self.calls[-1]
        place = before.keys.stop - 1 - call.keys.start
        follows = call.queries.start == before.queries.stop
        same_batch = call.q.shape[0] == before.q.shape[0] and call.keys.stop >= before.keys.stop
        if not (follows and same_batch):
            raise RuleError(
                f"layer {self.name}: a second sequence began, or the first was run again without its cache, or its "
                "cache holds other things than keys one after the other.",
                AGAIN,
            )
        if self.cross and call.keys != before.keys:
            raise RuleError(f"layer {self.name}: the keys of cross-attention changed.", AGAIN)
        if not self.cross and call.keys.stop == before.keys.stop and not self._same_keys(call.k):
            raise RuleError(
                f"layer {self.name}: queries were added and no keys: the cache has room to spare, and the mask does "
                "not say which of it is used.",
                "generate without cache_implementation='static'.",
            )
        if place >= 0 and self.last_key is not None and not torch.equal(call.k[:, :, place], self.last_key):
            raise RuleError(
                f"layer {self.name}: keys that were seen are other keys now: the cache was reordered, as beam search "
                "does, or written over, or the model puts other keys behind those of its cache.",
                "generate with num_beams=1; watch one sequence in a block.",
            )

    def _same_keys(self, k: Tensor) -> bool:
        """Are these the keys of the first call, as in cross-attention?"""
        first = self.first_sums
        return first is not None and first.shape == k.shape[:3] and torch.allclose(k.detach().sum(-1), first)

    def add(self, call: Call, seen: Observation) -> None:
        """Keep what this call brings: its observation, its queries, and the keys that were not there before."""
        known = self.calls[-1].keys.stop if self.calls else call.keys.start
        if self.image is not None and len(self.calls) == 1:
            if not self.keep:
                raise RuleError("a picture of several steps needs their queries and keys.", "keep=True, or no image.")
            self.parts[0] = replace(self.parts[0], image=None)
        new = slice(max(known - call.keys.start, 0), None)
        q, k, v = call.q, call.k[:, :, new], call.v[:, :, new] if self.values and call.v is not None else None
        if k.shape[2]:
            self.first_sums = None if self.calls else k.detach().sum(-1)
            self.last_key = k[:, :, -1].detach().clone()
        if not self.keep:
            q, k = q[:, :, :0], k[:, :, :0]
        elif self.heads is not None:
            shared = [head // (q.shape[1] // k.shape[1]) for head in self.heads]
            q, k, v = q[:, list(self.heads)], k[:, shared], None if v is None else v[:, shared]
        scores = {name: x.detach() if isinstance(x, Tensor) else x for name, x in call.scores.items()}
        bias = None if call.pattern.bias is None else call.pattern.bias.detach()
        pattern = replace(call.pattern, bias=bias)
        kept = replace(call, q=_own(q), k=_own(k), v=None if v is None else _own(v), pattern=pattern, scores=scores)
        self.calls.append(kept)
        self.parts.append(seen if self.heads is None else seen.heads(list(self.heads)))

    def finished(self) -> Layer:
        """Everything seen so far, as one layer."""
        first, last = self.calls[0], self.calls[-1]
        queries, keys = range(first.queries.start, last.queries.stop), range(first.keys.start, last.keys.stop)
        pattern = self._pattern(queries, keys)
        rules = self._rules(pattern, queries, keys)
        seen = _joined([
            part.among(len(keys), call.keys.start - keys.start)
            for part, call in zip(self.parts, self.calls, strict=True)
        ])  # fmt: skip
        q: Tensor | None = first.q
        k: Tensor | None = first.k
        v = first.v
        if len(self.calls) > 1:
            q, k = (torch.cat([getattr(call, side) for call in self.calls], 2) for side in ("q", "k"))
            v = None if v is None else torch.cat([call.v for call in self.calls if call.v is not None], 2)
            if self.image is not None:
                seen = replace(seen, image=AttentionMatrix(q, k, **rules).observe(image=self.image).image)
        if not self.keep:
            q = k = None
        real = last.pattern.padding
        if real is not None and not self.cross:
            real = real[:, queries.start : queries.stop]
        padding = None if real is None or self.cross or bool(real.all()) else ~real
        heads = range(first.q.shape[1]) if self.heads is None else self.heads
        return Layer(
            self.name, self.path, self.call, self.cross, tuple(heads), seen, q, k, v, rules, padding, pattern.note
        )  # fmt: skip

    def _rules(self, pattern: Pattern, queries: range, keys: range) -> Rules:
        rules = self.calls[-1].scores | pattern.rules(queries, keys)
        if self.heads is not None:
            chosen = list(self.heads)
            for name in ("mask", "bias"):
                if name in rules and rules[name].shape[1] > 1:
                    rules[name] = rules[name][:, chosen]
            if "sinks" in rules:
                rules["sinks"] = rules["sinks"][chosen]
        return rules

    def _pattern(self, queries: range, keys: range) -> Pattern:
        """The calls' patterns as one; a mask in full, where any of them has one, is in full for all."""
        patterns = [call.pattern for call in self.calls]
        if len(patterns) == 1:
            return patterns[0]
        bias = None
        if any(p.bias is not None for p in patterns):
            bias = self._whole([p.bias for p in patterns], queries, keys, 0.0, -torch.inf)
        let_go = any(
            call.keys.start > call.pattern.first_visible(call.queries.start, keys.start) for call in self.calls
        )
        if all(p.dense is None for p in patterns) and not let_go:
            return replace(patterns[-1], bias=bias)
        blocks = [call.pattern.full(call.queries, call.keys) for call in self.calls]
        dense = self._whole(blocks, queries, keys, True, False)
        note = next((p.note for p in patterns if p.note), "the cache let go of keys that the model's mask allows.")
        return Pattern(dense=dense, bias=bias, padding=patterns[-1].padding, note=note)

    def _whole(self, blocks: list[Tensor | None], queries: range, keys: range, without: Any, rest: Any) -> Tensor:
        """Blocks of each call's queries and keys, (batch or 1, heads or 1, queries, keys), as one tensor.

        A call without a block has `without` everywhere; keys that were not there in a call have `rest`.
        """
        there = [block for block in blocks if block is not None]
        lead = [max(block.shape[axis] for block in there) for axis in (0, 1)]
        whole = torch.full((*lead, len(queries), len(keys)), rest, dtype=there[0].dtype)
        for block, call in zip(blocks, self.calls, strict=True):
            row, col = call.queries.start - queries.start, call.keys.start - keys.start
            place = np.s_[:, :, row : row + len(call.queries), col : col + len(call.keys)]
            whole[place] = without if block is None else block
        return whole


def _own(x: Tensor) -> Tensor:
    """`x` itself, or a copy where keeping `x` would keep much more, or where somebody may write into it."""
    x = x.detach()
    written = x.is_inference() or x._version > 0
    return x.clone() if written or x.untyped_storage().nbytes() > 1.5 * x.nbytes else x


def _joined(parts: list[Observation]) -> Observation:
    """Halves of halves: each number is copied log(parts) times."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _joined(parts[:half]).merge_queries(_joined(parts[half:]))
