"""Edits made by hand: an attention function of its own that stores all logits, for Transformers' AttentionInterface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import clearhead as ch
from watched import logits

Scores = tuple[Tensor, Tensor]  # logits (batch, heads, queries, keys) and sinks (heads,), which may be -inf
NAME = "by_hand"
CUT = -torch.inf


@dataclass
class ByHand:
    """What is done in each attention call; `layer` chooses layers by their module's path."""

    logits: Sequence[Callable[[Scores], Scores]] = ()
    outputs: Sequence[Callable[[Tensor], Tensor]] = ()  # of (batch, heads, queries, d_v)
    layer: Callable[[str], bool] = lambda path: True
    weights: dict[str, Tensor] = field(default_factory=dict)  # of another run, by path
    heads: Sequence[int] | None = None  # of these weights
    kept: dict[str, Tensor] = field(default_factory=dict)  # this run's weights
    made: list[Tensor] = field(default_factory=list)  # and its outputs, (batch, heads, queries, d_v), unchanged
    paths: dict[Any, str] = field(default_factory=dict)


_now = ByHand()


@contextmanager
def by_hand(model: Any, hand: ByHand) -> Iterator[ByHand]:
    """Inside, the model's attention is `attend` with these edits."""
    global _now
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    before, _now = model.config._attn_implementation, hand
    hand.paths = {module: path for path, module in model.named_modules()}
    model.set_attn_implementation(NAME)
    try:
        yield hand
    finally:
        model.set_attn_implementation(before)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        logits = torch.where(mask <= torch.finfo(mask.dtype).min, -torch.inf, logits + mask)
    sinks = torch.full((heads,), -torch.inf) if s_aux is None else s_aux
    path = _now.paths[module]
    acts = _now.layer(path)
    for change in _now.logits if acts else ():
        logits, sinks = change((logits, sinks))
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    weights = torch.softmax(torch.cat([logits, column], -1).double(), -1)[..., :-1].nan_to_num(0.0).to(query.dtype)
    chosen = slice(None) if _now.heads is None else list(_now.heads)
    if acts and path in _now.weights:
        weights = weights.clone()
        weights[:, chosen] = _now.weights[path][:, chosen]
    _now.kept[path] = weights
    output = weights @ value
    _now.made.append(output)
    for change in _now.outputs if acts else ():
        output = change(output)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def among(size: int, chosen: Sequence[int] | None) -> list[bool]:
    """True at these places."""
    return [chosen is None or place in chosen for place in range(size)]


def added(number: float, queries: Any, keys: Any, heads: Any = None) -> Callable[[Scores], Scores]:
    """The number added to the logits of these queries, keys and heads; None is all. -inf cuts."""

    def change(scores: Scores) -> Scores:
        logits, sinks = scores
        head, row, column = (
            torch.tensor(among(n, c)) for n, c in zip(logits.shape[1:], (heads, queries, keys), strict=True)
        )
        where = head[:, None, None] & row[:, None] & column
        return torch.where(where, logits + number, logits), sinks

    return change


def rested(queries: Any, keys: Any, heads: Any = None) -> Callable[[Scores], Scores]:
    """The weights of these queries, keys and heads moved to the sink, or to key 0, which keeps its own."""

    def change(scores: Scores) -> Scores:
        logits, sinks = scores
        moving = added(1.0, queries, keys, heads)((torch.zeros_like(logits), sinks))[0]
        moving = torch.cat([moving, torch.zeros_like(moving[..., :1])], -1)
        learned = bool(torch.isfinite(sinks).any())
        moving[..., 0] *= learned
        whole = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:3], 1)], -1).double()
        weights = torch.softmax(whole, -1).nan_to_num(0.0)
        moved = (moving * weights).sum(-1)
        weights = (1 - moving) * weights
        weights[..., -1 if learned else 0] += moved
        result = weights[..., :-1].log()
        return (result - weights[..., -1:].log() + sinks[:, None, None] if learned else result), sinks

    return change


def zeroed(heads: Any) -> Callable[[Tensor], Tensor]:
    """These heads' outputs are 0."""
    return lambda output: torch.where(torch.tensor(among(output.shape[1], heads))[:, None, None], 0.0, output)


def mean(heads: Any = None, real: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """These heads' outputs replaced by their mean over the real queries (batch, queries)."""

    def change(output: Tensor) -> Tensor:
        rows = torch.ones(output.shape[0], output.shape[2]) if real is None else real.to(output.dtype)
        means = (output * rows[:, None, :, None]).sum(2, keepdim=True) / rows.sum(-1)[:, None, None, None]
        return torch.where(torch.tensor(among(output.shape[1], heads))[:, None, None], means, output)

    return change


def assert_edited(model: Any, passed: dict[str, Tensor], edits: Any, hand: ByHand, rows: Any = slice(None)) -> None:
    """These rows of the logits with edits are those with edits made by hand, and the model is as it was afterwards."""

    def run() -> Tensor:
        torch.manual_seed(3)
        return logits(model(**passed))[rows]

    with torch.no_grad():
        before = run()
        with by_hand(model, hand):
            expected = run()
        with ch.change(model, edits):
            result = run()
        assert torch.equal(before, run()), "the model is not as it was"
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert float((result - before).abs().max()) > 1e-3 * float(before.abs().max()), "the edits changed nothing"


class Letters:
    """A tokenizer of one word for each id, " w7"; a text of several words is their concatenation."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)


OF_LOGITS = [  # edits of logits, one after the other; and the same by hand
    ch.boost(keys=[1, 2], by=1.5),
    ch.cut(queries=slice(4, None), keys=[0, 3], heads=[0, 1]),
    ch.boost(keys=[2, 4], by=2, heads=[1, 2]),
    ch.boost(keys=[4, 5], by=1, queries=slice(3, 9)),
]
LOGITS_BY_HAND = [
    added(1.5, None, [1, 2]),
    added(CUT, range(4, 99), [0, 3], [0, 1]),
    added(2.0, None, [2, 4], [1, 2]),
    added(1.0, range(3, 9), [4, 5]),
]
