"""Records one layer while its model runs: keeps its calls, and joins them along the queries at the end."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.changing.applying import OTHER_RUN
from clearhead.errors import RuleError
from clearhead.hf.call import AttentionCall
from clearhead.hf.derivatives import LayerDerivative
from clearhead.hf.masks import MaskPattern, RuleDict
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation
from clearhead.ops.span_terms import combined, joined
from clearhead.watching.layer import Layer
from clearhead.watching.naming import LayerCall
from clearhead.watching.watch import Wish

AGAIN = "watch one sequence, with its cache, per block: open another `with ch.watch(…)` for the next."


@dataclass(eq=False)
class Recording:
    """The calls of one layer in one block. A single call is observed as it runs, several at the end as one matrix."""

    layer: LayerCall
    wish: Wish
    derivative: LayerDerivative | None = None  # with causes=True
    calls: list[AttentionCall] = field(default_factory=list)
    seen: Observation | None = None  # of the only call
    last_key: Tensor | None = None

    @property
    def path(self) -> str:
        return self.layer.path

    def attend(self, call: AttentionCall, dropout: float = 0.0) -> Tensor:
        """Compute the call's output, (batch, heads, queries, d_v), and keep its arrays and rules.

        With causes=True, the output is in a graph that brings its gradient. Raises RuleError unless the call continues
        the calls before.
        """
        if self.layer.cross:
            call = call.moved(sum(len(before.queries) for before in self.calls))
        self.check(call)
        if self.derivative is not None and dropout:
            what = f"causes=True cannot be used with dropout ({dropout:g}): edges would act with other weights."
            raise RuleError(what, "call model.eval(), which keeps gradients.")
        if self.calls:
            result, seen = call.attended(dropout), None
        else:
            result, seen = call.observed(self.wish.statistics, dropout)
        result = result if self.derivative is None else self.derivative.follow(result)
        self.add(call, seen)
        return result

    def check(self, call: AttentionCall) -> None:
        """Raise RuleError unless this call continues the sequence of the calls before."""
        if any(edit.seen is not None and edit.acts_in(self.layer.name, self.layer.choices) for edit in call.edits):
            raise RuleError(*OTHER_RUN)
        if not self.calls:
            return
        before, local = self.calls[-1], call.k
        follows = call.queries.start == before.queries.stop and call.keys.stop >= before.keys.stop
        if not follows or call.q.shape[0] != before.q.shape[0]:
            raise RuleError(
                "a second sequence began, or the first ran again without its cache, or its cache does not hold "
                "consecutive keys.",
                AGAIN,
            )
        if call.edits != before.edits:
            raise RuleError(
                "a block of ch.change began or ended within a sequence, and one matrix has the same rules throughout.",
                "run each whole sequence inside ch.change, or outside of it.",
            )
        if self.layer.cross and call.keys != before.keys:
            raise RuleError("the keys of cross-attention changed.", AGAIN)
        first = self.calls[0].k  # as in cross-attention, if the keys are the same
        added = self.layer.cross or call.keys.stop > before.keys.stop
        if not added and (first.shape != local.shape or not torch.allclose(first, local)):
            raise RuleError(
                "queries were added but no keys: the cache has unused room, and the mask does not say which keys are "
                "used.",
                "generate without cache_implementation='static'.",
            )
        place = before.keys.stop - 1 - call.keys.start
        if place >= 0 and self.last_key is not None and not torch.equal(local[:, :, place], self.last_key):
            raise RuleError(
                "keys that were seen have changed: the cache was reordered, as in beam search, or overwritten, or the "
                "model puts an encoder's keys after those of its cache.",
                "generate with num_beams=1; watch one sequence, or one forward pass with use_cache=False, in a block.",
            )

    def add(self, call: AttentionCall, seen: Observation | None) -> None:
        """Keep the call's queries, its new keys and values, and its observation."""
        known = self.calls[-1].keys.stop if self.calls else call.keys.start
        new = slice(max(known - call.keys.start, 0), len(call.keys))
        arrays = {"q": call.q, "k": call.k[:, :, new], "v": call.v[:, :, new]}
        if len(call.keys[new]):
            self.last_key = arrays["k"][:, :, -1].detach().clone()
        kept: Any = {name: _kept_copy(x) for name, x in arrays.items()}
        before = self.calls[0].terms if self.calls else [None] * len(call.terms)
        terms = tuple(term.kept(new, old) for term, old in zip(call.terms, before, strict=True))
        rules = {name: x.detach() if isinstance(x, Tensor) else x for name, x in call.scores.items()}
        bias = call.rules.get("bias")
        pattern = replace(call.pattern, bias=None if bias is None else bias.detach())
        self.calls.append(replace(call, **kept, rules=rules, terms=terms, pattern=pattern, afterwards=()))
        self.seen = seen

    def finished(self) -> Layer:
        """All calls so far, as one layer."""
        first, last = self.calls[0], self.calls[-1]
        queries, keys = range(first.queries.start, last.queries.stop), range(first.keys.start, last.keys.stop)
        pattern = self._pattern(queries, keys)
        rules = self._rules(pattern, queries, keys)
        pieces = ([getattr(call, side) for call in self.calls] for side in "qkv")
        q, k, v = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in pieces)
        seen = self.seen or AttentionMatrix(q, k, **rules).observe(**self.wish.statistics)
        real = None if self.layer.cross else pattern.real(queries, keys)
        padding = None if real is None else ~real
        return Layer(
            self.layer.name, self.layer.path, seen, rules, q, k, v, self.layer.number, self.layer.cross, padding,
            pattern.note, first.pattern.others, self.derivative,
        )  # fmt: skip

    def _rules(self, pattern: MaskPattern, queries: range, keys: range) -> RuleDict:
        rules = self.calls[-1].rules | pattern.rules(queries, keys)
        spans = combined(joined([call.terms for call in self.calls]))
        if spans is not None:
            rules["spans"] = spans
        return rules

    def _pattern(self, queries: range, keys: range) -> MaskPattern:
        """Join the calls' patterns into one; if any call stores its mask, store one mask for all."""
        patterns = [call.pattern for call in self.calls]
        if len(patterns) == 1:
            return patterns[0]
        bias = None
        if any(p.bias is not None for p in patterns):
            bias = self._whole([p.bias for p in patterns], queries, keys, 0.0, -torch.inf)
        dropped_keys = any(
            call.keys.start > call.pattern.first_visible(call.queries.start, keys.start) for call in self.calls
        )
        if all(p.dense is None for p in patterns) and not dropped_keys:
            return replace(patterns[-1], bias=bias)
        blocks = [call.pattern.full(call.queries, call.keys) for call in self.calls]
        dense = self._whole(blocks, queries, keys, True, False)
        note = next((p.note for p in patterns if p.note), "the cache dropped keys that the model's mask allows.")
        return MaskPattern(dense=dense, bias=bias, padding=patterns[-1].padding, note=note)

    def _whole(self, blocks: list[Tensor | None], queries: range, keys: range, without: Any, rest: Any) -> Tensor:
        """Assemble the blocks of all calls, (batch or 1, heads or 1, queries, keys) each, into one tensor.

        A call without a block is filled with `without`; keys that a call did not have are filled with `rest`.
        """
        there = [block for block in blocks if block is not None]
        lead = [max(block.shape[axis] for block in there) for axis in (0, 1)]
        whole = torch.full((*lead, len(queries), len(keys)), rest, dtype=there[0].dtype)
        for block, call in zip(blocks, self.calls, strict=True):
            row, col = call.queries.start - queries.start, call.keys.start - keys.start
            part = whole[:, :, row : row + len(call.queries), col : col + len(call.keys)]
            part[:] = without if block is None else block
        return whole


def _kept_copy(x: Tensor) -> Tensor:
    """Detach x, and copy it if it is a small part of a larger storage, or if other code may write into it.

    Queries, keys and values in one storage, from one projection, are kept without a copy.
    """
    x = x.detach()
    written = x.is_inference() or x._version > 0
    return x.clone() if written or x.untyped_storage().nbytes() > 4 * x.nbytes else x
