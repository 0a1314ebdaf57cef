"""Derivatives of somebody's function by q, k and v, against those of plain attention in float64."""

from typing import Any, cast

import numpy as np
import torch

from clearhead.core import definition
from clearhead.core.arrays import statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.block import block_of, everything
from clearhead.core.call import describe
from clearhead.core.problem import Problem
from clearhead.core.rules import Rules
from clearhead.core.spans import added
from clearhead.core.visibility import dense
from clearhead.diagnosing.fitting import FACTOR, differences, largest
from clearhead.diagnosing.softmaxes import eps
from clearhead.testing.drawing import Drawn, Draws, Plan, drawn
from clearhead.testing.judging import Caller, Failure, clean, described

_RUNS = 4  # plain runs, each with the keys in another order: one alone may have been lucky


def gradients_judged(caller: Caller, draws: Draws, plan: Plan) -> Failure | None:
    """Call the function and differentiate Σ g·output, g random; None where the derivatives are right."""
    problem = drawn(draws, plan)
    rng = np.random.default_rng([plan.seed, 2])
    upstream = rng.standard_normal((*problem.q.shape[:3], problem.v.shape[3]))
    upstream = np.where(problem.empty & (plan.kind != "empty rows"), 0.0, upstream).astype(problem.q.dtype)
    try:
        result = _theirs(caller, problem, upstream, swapped=plan.kind == "strides")
    except Exception as error:  # anything that somebody's function may raise
        words = f"its backward pass raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Failure(plan, problem, type(error).__name__, (words,), None, error)
    arrays = [clean(x) for x in problem[:3]]
    q, k, v = arrays
    stated = describe(q, k, v, cast("Rules", problem.rules)).problem
    narrow = getattr(torch, str(problem.q.dtype))
    orders = [np.arange(stated.keys), *(rng.permutation(stated.keys) for _ in range(_RUNS - 1))]
    truth = _plain(stated, arrays, upstream, torch.float64, orders[0])
    runs = [_plain(stated, arrays, upstream, narrow, order) for order in orders]
    rounding = _rounding(stated, arrays, upstream)
    for place, name in enumerate(("dq", "dk", "dv")):
        right, theirs = truth[place], result[place]
        errors = [np.abs(run[place] - right) for run in runs]
        worst = max(float(error[np.isfinite(error)].max(initial=0.0)) for error in errors)
        allowed = FACTOR * (worst + eps(problem.q.dtype) * largest(right) + rounding[place])
        lines = described(
            differences(theirs.astype(np.float64), right), np.asarray(allowed), theirs, right, problem.q.dtype, name
        )
        if lines:
            return Failure(plan, problem, f"{name} {lines[0]}", lines[1:], None)
    return None


def _theirs(caller: Caller, problem: Drawn, upstream: Array, *, swapped: bool) -> list[Array]:
    inputs, rules = caller.inputs(problem, swapped=swapped)
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = caller.fn(*leaves, **rules)
    g = caller.converted(upstream, swapped=swapped).to(output.dtype)
    result = torch.autograd.grad(output, leaves, g)
    return [
        caller.read(x, problem, name, like)
        for x, name, like in zip(result, ("dq", "dk", "dv"), problem[:3], strict=True)
    ]


@np.errstate(all="ignore")
def _rounding(problem: Problem, arrays: list[Array], upstream: Array) -> list[float]:
    """How far dq, dk and dv may be off because a kernel computes the weights again as exp(s - L).

    Each weight is off by the rounding of its logit's terms and of L. dq and dk are sums of a_ij·(g_i·v_j - g_i·o_i),
    of which much cancels.
    """
    q, k, v = (np.abs(x.astype(np.float64)) for x in arrays)
    k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    book, g = definition.attend(problem, *arrays[:2]), np.abs(upstream.astype(np.float64))
    size = np.abs(problem.scale)[:, None, None] * (q @ k.swapaxes(-1, -2)) + np.abs(book.biased - book.capped)
    size = np.where(np.isneginf(book.masked), 0.0, size).max(axis=-1, initial=0.0)
    row = np.maximum(size, np.where(np.isneginf(book.logsumexp), 0.0, np.abs(book.logsumexp)))
    off = (eps(problem.dtype) + eps(statistics_dtype(problem.dtype)) * row)[..., None] * book.weights
    moved = np.abs(problem.scale)[:, None, None] * off * (g @ v.swapaxes(-1, -2))
    of_keys = (moved.swapaxes(-1, -2) @ q, off.swapaxes(-1, -2) @ g)
    grouped = (x.reshape(len(q), -1, problem.group, *x.shape[2:]).sum(2) for x in of_keys)
    return [largest(moved @ k), *map(largest, grouped)]


def _plain(problem: Problem, arrays: list[Array], upstream: Array, dtype: Any, order: Array) -> list[Array]:
    """The derivatives of attention as its formulas are written, with the keys in an order."""
    leaves = [to_torch(torch, np.ascontiguousarray(x)).to(dtype).requires_grad_() for x in arrays]
    with torch.enable_grad():
        output = _attend(problem, leaves, dtype, order)
        g = to_torch(torch, np.ascontiguousarray(upstream)).to(dtype)
        result = torch.autograd.grad(output, leaves, g)
    return [x.double().numpy() for x in result]


def _attend(problem: Problem, leaves: list[Any], dtype: Any, order: Array) -> Any:
    q, k, v = leaves
    block = block_of(problem, everything(problem))
    k, v = (x[:, :, torch.from_numpy(order)].repeat_interleave(problem.group, 1) for x in (k, v))

    def constant(x: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)).to(dtype)

    s = q @ k.mT * constant(problem.scale)[:, None, None]
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if problem.bias is not None:
        s = s + constant(problem.bias.astype(np.float64)[..., order])
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes[:, None, None] * abs(block.ahead)
        s = s - constant(np.broadcast_to(slopes, problem.shape)[..., order])
    if problem.span_table is not None:
        s = s + constant(added(block.query_spans, block.key_spans, block.span_table)[..., order])
    seen = torch.from_numpy(np.ascontiguousarray(dense(problem)[..., order]))
    s = s.masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    s = torch.where(some, s, 0.0)  # a softmax of nothing would have NaN as its derivative
    if problem.sinks is not None:
        sink = constant(problem.sinks)[:, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    weights = torch.softmax(s, -1)[..., : len(order)]
    return torch.where(some, weights, 0.0) @ v
