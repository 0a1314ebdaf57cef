"""Attention and all that is observed of it by the plain formulas, in PyTorch's operations, which have derivatives."""

from typing import Any

import numpy as np
import torch

from clearhead.core.axes import Array
from problems import Case


def labels_of(case: Case) -> list[Array]:
    """The labels of the rule `spans`, (batch, queries) and (batch, keys)."""
    problem = case.problem
    return [
        np.broadcast_to(side, (*problem.prefix[:-1], size)).reshape(problem.batch, size).copy()
        for side, size in zip(case.rules["spans"][:2], (problem.queries, problem.keys), strict=True)
    ]


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
