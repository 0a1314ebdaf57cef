"""A loss of some results of attention: its gradients by autograd in float64, and the allowed error of an engine."""

from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch

from clearhead.core import visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from problems import Case
from slack import Slack, assert_close, rounding

ANSWERS = ("output", "logsumexp", "entropy", "received")


class Losses:
    """A linear loss of some results for a case, its gradients by autograd, and the allowed error of an engine."""

    def __init__(self, case: Case, answers: list[str]) -> None:
        self.case, self.problem = case, case.problem
        shape = self.problem.batch, self.problem.heads, self.problem.queries
        dtype = statistics_dtype(self.problem.dtype)
        shapes = {
            "output": ((*shape, case.given.v.shape[-1]), self.problem.dtype),
            "logsumexp": (shape, dtype),
            "entropy": (shape, dtype),
            "received": ((*shape[:2], self.problem.keys), dtype),
        }
        rng = case.rng
        self.by = {name: rng.standard_normal(shapes[name][0]).astype(shapes[name][1]) for name in answers}

    def wide(self, name: str) -> Array | float:
        return self.by[name].astype(np.float64) if name in self.by else 0.0

    @cached_property
    def visible(self) -> Array:
        return visibility.dense(self.problem)

    @cached_property
    def truth(self) -> dict[str, Array]:
        """The derivatives by q, k, v, bias, sinks and the table of spans, each in the caller's own shape."""
        case, inputs = self.case, self.case.given
        four = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        leaves = {name: _leaf(x) for name, x in (case.leaves | four).items()}
        answers = formula(case, torch.from_numpy(self.visible), **leaves)
        parts = [answers[name] * torch.from_numpy(x.astype(np.float64)) for name, x in self.by.items()]
        sum(part.sum() for part in parts).backward()
        result = {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in leaves.items()}
        return result | {name: result[name].reshape(getattr(case, name).shape) for name in "qkv"}

    @cached_property
    def slack(self) -> dict[str, Array]:
        """The allowed error of each weight and of each logit's gradient, relative to the magnitudes that it sums."""
        case, problem, slack, book = self.case, self.problem, Slack(self.case), self.case.book
        mags = {name: np.abs(self.wide(name)) for name in ANSWERS}
        eps = slack.eps * np.sqrt(problem.queries + problem.keys + problem.d_k)
        unit = (3 * slack.logit + eps + 2 * float(rounding(np.ones(()), problem.dtype)))[..., None]
        values, keys, queries = (np.abs(x.astype(np.float64)) for x in (case.given.v, case.given.k, case.given.q))
        values, keys = (np.repeat(x, problem.heads // max(1, x.shape[1]), axis=1) for x in (values, keys))
        by_weight = np.zeros_like(book.weights)
        if "output" in self.by:
            by_weight += mags["output"] @ values.swapaxes(-1, -2)
        if "received" in self.by:
            by_weight += mags["received"][:, :, None]
        if "entropy" in self.by:
            logs = np.where(self.visible, book.masked - np.where(self.sees, book.logsumexp, 0)[..., None], 0.0)
            by_weight += mags["entropy"][..., None] * (np.abs(logs) + 1)
        row = (book.weights * by_weight).sum(-1) + mags["logsumexp"] + mags["entropy"]
        lost = np.zeros_like(row)  # what an output near zero loses in its dtype
        if "output" in self.by:
            lost = mags["output"].sum(-1) * float(rounding(np.zeros(()), problem.dtype))
        logit = unit * (book.weights * (by_weight + row[..., None]) + slack.tiny * (1 + by_weight))
        logit = logit + book.weights * lost[..., None]
        capped = logit if problem.softcap is None else logit * (1 + 1 / problem.softcap)
        # multiplying pairs of bfloat16, a processor takes what lies below the normal range for zero, also a sum
        flushed = slack.tiny * (1 + problem.queries + problem.keys) if problem.dtype == ml_dtypes.bfloat16 else 0.0
        if problem.dtype == np.float16:  # an engine may round its operands to it, and little lies below its range
            flushed = float(ml_dtypes.finfo(np.float16).smallest_subnormal)
        score = abs(problem.scale)[:, None, None] * capped + flushed
        output = mags["output"] if "output" in self.by else np.zeros((*row.shape, values.shape[-1]))
        result = {
            "q": score @ keys + flushed,
            "k": grouped(score.swapaxes(-1, -2) @ queries + flushed, case.given.k),
            "v": grouped(
                (unit * book.weights + slack.tiny + flushed).swapaxes(-1, -2) @ output + flushed, case.given.v
            ),
            "logit": logit,
        }
        if problem.sinks is not None:
            sink = problem.sinks[:, None] - np.where(self.sees, book.logsumexp, np.inf)
            result["sinks"] = (np.exp(sink) * (unit[..., 0] * row + lost)).sum((0, 2))
        return result

    @cached_property
    def sees(self) -> Array:
        return ~np.isneginf(self.case.book.logsumexp)

    def check(self, result: dict[str, Array]) -> None:
        """What a user gets, against the truth."""
        for name, truth in self.truth.items():
            if name == "bias":
                allowed = summed(self.problem.restore(self.slack["logit"]), truth.shape)
            elif name == "spans":
                allowed = summed(self.problem.restore(by_pair(self.case, self.slack["logit"])), truth.shape)
            else:
                allowed = self.slack[name].reshape(truth.shape)
            assert_close(result[name], truth, allowed + rounding(truth, self.case.leaves[name].dtype), name)


def grouped(x: Array, like: Array) -> Array:
    """Summed over the query heads that share a head of `like`."""
    return x.reshape(*like.shape[:2], -1, *like.shape[2:]).sum(2) if x.size else np.zeros(like.shape)


def _leaf(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float64).copy()).requires_grad_()


def summed(x: Array, shape: tuple[int, ...]) -> Array:
    """x summed over the axes along which `shape` is broadcast to it."""
    local = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(local) if size == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def labels_of(case: Case) -> list[Array]:
    """The labels of the rule `spans`, (batch, queries) and (batch, keys)."""
    problem = case.problem
    return [
        np.broadcast_to(side, (*problem.prefix[:-1], size)).reshape(problem.batch, size).copy()
        for side, size in zip(case.rules["spans"][:2], (problem.queries, problem.keys), strict=True)
    ]


def by_pair(case: Case, x: Array) -> Array:
    """x (batch, heads, queries, keys) summed over each pair of labels, one entry at a time."""
    sides = labels_of(case)
    result = np.zeros((*x.shape[:2], *case.rules["spans"][2].shape[-2:]))
    for batch, i, j in np.ndindex(x.shape[0], *x.shape[2:]):
        ours, theirs = sides[0][batch, i], sides[1][batch, j]
        if ours >= 0 and theirs >= 0:
            result[batch, :, ours, theirs] += x[batch, :, i, j]
    return result


def added_by_spans(case: Case, table: torch.Tensor) -> torch.Tensor:
    """table[query_spans[i], key_spans[j]], 0 where a label is below 0, (batch, heads, queries, keys)."""
    problem = case.problem
    sides = [torch.from_numpy(side) for side in labels_of(case)]
    full = table.expand(*problem.prefix, *table.shape[-2:]).reshape(problem.batch, problem.heads, *table.shape[-2:])
    one_hot = [(x[:, :, None] == torch.arange(n)).to(table.dtype) for x, n in zip(sides, table.shape[-2:], strict=True)]
    return torch.einsum("bnx,bhxy,bmy->bhnm", one_hot[0], full, one_hot[1])


def formula(case: Case, visible: torch.Tensor, noise: Any = 0.0, **leaves: Any) -> dict[str, torch.Tensor]:
    """Attention and its observations by the plain formulas, with masked scores at -inf.

    leaves  q, k, v, bias, sinks and the table of spans
    noise   by how much of itself each logit is off, in the weights but not in the log-sum-exp
    """
    problem = case.problem
    q, k, v, bias, sinks, spans = (leaves.get(name) for name in ("q", "k", "v", "bias", "sinks", "spans"))
    k, v = (x.repeat_interleave(problem.heads // max(1, x.shape[1]), 1) for x in (k, v))
    scores = torch.from_numpy(problem.scale).to(q.dtype)[:, None, None] * (q @ k.transpose(-1, -2))
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if bias is not None:
        scores = scores + torch.where(bias == -torch.inf, 0.0, bias).expand(problem.shape).reshape(scores.shape)
    if problem.alibi_slopes is not None:
        rows = torch.arange(problem.queries)[:, None] + torch.from_numpy(problem.query_offset)[:, None, None, None]
        slopes = torch.from_numpy(problem.alibi_slopes).to(q.dtype)[:, None, None]
        scores = scores - slopes * (rows - torch.arange(problem.keys)).abs().to(q.dtype)
    if spans is not None:
        scores = scores + added_by_spans(case, torch.where(spans == -torch.inf, 0.0, spans))
    empty = ~visible.any(-1, keepdim=True)
    masked = torch.where(visible | empty, scores, -torch.inf)  # empty rows are set at the end
    extra = [] if sinks is None else [torch.where(empty, 0.0, sinks.reshape(-1, 1, 1))]
    lse = torch.logsumexp(torch.cat([masked, *extra], -1), -1, keepdim=True)
    logs = torch.where(visible, masked * (1 + noise) - lse, 0.0)
    weights = torch.where(visible, torch.exp(logs), 0.0)
    far = torch.from_numpy(np.broadcast_to(abs(case.book.block.ahead), weights.shape).copy()).to(weights.dtype)
    largest = torch.nn.functional.pad(masked, (0, 1), value=-torch.inf).amax(-1)
    return {
        "weights": weights,
        "output": weights @ v,
        "logsumexp": torch.where(empty, 0.0, lse)[..., 0],
        "max_logit": torch.where(empty[..., 0], 0.0, largest),
        "entropy": -(weights * logs).sum(-1),
        "distance": (weights * far).sum(-1),
        "diagonal": torch.where(far == 0, weights, 0.0).sum(-1),
        "top": torch.nn.functional.pad(weights, (0, 2)).topk(2).values,
        "received": weights.sum(-2),
        "peak": torch.nn.functional.pad(weights, (0, 0, 0, 1)).amax(-2),
    }
