"""Reads one call of attention that a model makes: its arrays, their positions in the sequence, its mask as rules."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.changing.applying import EditedCall
from clearhead.core.axes import WEIGHTS, named
from clearhead.core.rules import flat
from clearhead.core.torch_state import graphed
from clearhead.errors import DtypeError, ShapeError
from clearhead.hf.masks import MaskPattern, RuleDict, RuledMask, from_tensor
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation
from clearhead.torch import dropped


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall(EditedCall):
    """One call that a model makes: an EditedCall, with the mask's pattern and the positions in the sequence.

    In merged attention the last `pattern.others` keys are an encoder's.
    """

    pattern: MaskPattern
    queries: range  # positions in the sequence
    keys: range
    edits: tuple[Any, ...] = ()  # those of ch.change that act in this layer

    @property
    def scores(self) -> RuleDict:
        """The model's rules apart from its mask: scale, softcap, sinks."""
        return {name: self.rules[name] for name in ("scale", "softcap", "sinks") if name in self.rules}

    def moved(self, start: int) -> "AttentionCall":
        """The same call with its first query at another position, which masks of cross-attention do not tell."""
        if start == self.queries.start:
            return self
        queries = range(start, start + len(self.queries))
        return replace(self, queries=queries, rules=self.rules | {"query_offset": start - self.keys.start})

    def attended(self, dropout: float = 0.0) -> Tensor:
        """Compute the output, (batch, heads, queries, d_v), before `finish`."""
        return output(self.q, self.k, self.v, dropout, self.whole_rules())

    def observed(self, asked: dict[str, Any], dropout: float = 0.0) -> tuple[Tensor, Observation]:
        """Compute the output and the requested statistics; separately if there is a graph or dropout.

        With a graph, only the log-sum-exp comes from the same pass, since the graph needs it. Dropout acts on the
        output as in the model; weights are observed before dropout.
        """
        rules = self.whole_rules()
        only_logsumexp = all(wanted is None or wanted is False for name, wanted in asked.items() if name != "logsumexp")
        if dropout or (graphed(self.q, self.k, self.v, *flat(rules).values()) and not only_logsumexp):
            with torch.no_grad():
                seen = AttentionMatrix(self.q, self.k, **rules).observe(**asked)
            return self.attended(dropout), seen
        seen = AttentionMatrix(self.q, self.k, **rules).observe(self.v, **asked)
        state = {"largest": seen.largest.detach(), "log_sum": seen.log_sum.detach()}
        return seen.output, replace(seen, output=None, **state)


def output(q: Tensor, k: Tensor, v: Tensor, dropout: float, rules: RuleDict) -> Tensor:
    """Compute the output, with dropout of weights by PyTorch's random numbers."""
    return dropped(q, k, v, dropout, rules) if dropout else attention(q, k, v, **rules)


def read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, *, causal: bool,
    scores: RuleDict,
) -> AttentionCall:  # fmt: skip
    """Read a call: find the positions of its queries and keys in the sequence, and its mask's pattern."""
    n, m = query.shape[2], key.shape[2]
    check_mask(mask, (*query.shape[:3], m))
    if isinstance(mask, RuledMask):
        pattern, (row, col) = mask.meaning(), mask.start
    else:
        pattern = from_tensor(mask, causal=causal and n > 1)
        row, col = (m - n if mask is not None or (causal and n == 1) else 0), 0
    if pattern.causal and col + m > row + n:  # a static cache: positions after the queries are not used yet
        used = row + n - col
        key, value = (_without(x, used, m, 2) for x in (key, value))
        bias, m = None if bias is None else _without(bias, used, m, -1), used
    if bias is not None:
        bias = bias[..., :m]
        pattern = replace(pattern, bias=bias if pattern.bias is None else pattern.bias + bias)
    queries, keys = range(row, row + n), range(col, col + m)
    rules = scores | pattern.rules(queries, keys)
    return AttentionCall(query, key, value, rules, (), pattern=pattern, queries=queries, keys=keys)


def _without(x: Tensor, start: int, stop: int, axis: int) -> Tensor:
    """Remove the places from `start` up to `stop`; a view if they are the last, or if the axis has size 1."""
    if x.shape[axis] == 1:
        return x
    before, behind = x.narrow(axis, 0, start), x.narrow(axis, stop, x.shape[axis] - stop)
    return torch.cat([before, behind], axis) if behind.shape[axis] else before


def check_mask(mask: Tensor | None, expected: tuple[int, ...]) -> None:
    """Raise unless the mask broadcasts to (batch, heads, queries, keys); a RuledMask must have all keys."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(f"the attention mask is {mask.dtype}: expected bool (True = may attend), or floats to add.")
    shape = tuple(mask.shape)
    ones = () if isinstance(mask, RuledMask) else (1,)
    broadcasts = all(size in (1, full) for size, full in zip(shape[-4:-1][::-1], expected[:-1][::-1], strict=False))
    if len(shape) > 4 or not shape or not broadcasts or shape[-1] not in (expected[-1], *ones):
        raise ShapeError(
            f"the attention mask is {named(shape, WEIGHTS)}, and the weights are {named(expected, WEIGHTS)}.",
            "an attention mask has one number for each key.",
        )
