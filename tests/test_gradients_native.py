"""The native engine's gradients against PyTorch's automatic ones, in float64, of the plain formula."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead import visibility
from clearhead.arrays import bfloat16, statistics_dtype
from clearhead.axes import Array
from clearhead.engines import native
from clearhead.engines.base import Upstream
from clearhead.problem import describe
from clearhead.threads import get_num_threads, set_num_threads
from problems import Case, cases, draw_layout, examples
from slack import Slack, assert_close, rounding

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
PARTS = ("output", "logsumexp", "keys", "entropy")
NAMES = ("q", "k", "v", "bias")


def wide(x: Array) -> Any:
    return torch.from_numpy(np.array(x, np.float64))


class Truth:
    """A loss that is linear in what attention answers: its gradients, and what an engine is told of it."""

    def __init__(self, case: Case, parts: set[str], bias_shape: tuple[int, ...], seed: int) -> None:
        rng, p, given = np.random.default_rng(seed), case.problem, case.given
        stats = statistics_dtype(p.dtype)
        shape = (p.batch, p.heads, p.queries)
        sizes = {"output": (*shape, given.v.shape[-1]), "logsumexp": shape, "keys": (*shape[:2], p.keys), "entropy": shape}
        self.by = {
            name: rng.standard_normal(sizes[name]).astype(p.dtype if name == "output" else stats)
            for name in PARTS
            if name in parts
        }
        leaves = [wide(x).requires_grad_() for x in (given.q, given.k, given.v, np.zeros(bias_shape))]
        q, k, v, extra = leaves
        k, v = (x.repeat_interleave(p.heads // max(1, x.shape[1]), dim=1) for x in (k, v))
        seen = torch.from_numpy(visibility.dense(p))
        score = p.scale * (q @ k.mT)
        if p.softcap:
            score = p.softcap * torch.tanh(score / p.softcap)
        score = score + extra + wide(case.book.biased - case.book.capped)
        score = torch.where(seen, score, 0.0)
        top = torch.where(seen, score, -torch.inf).detach().amax(-1, keepdim=True) if p.keys else torch.zeros((*shape, 1))
        top = torch.where(top == -torch.inf, 0.0, top)
        power = torch.where(seen, torch.exp(score - top), 0.0)
        sink = 0.0 if p.sinks is None else torch.exp(wide(p.sinks)[None, :, None, None] - top)
        total = torch.where(seen.any(-1, keepdim=True), power.sum(-1, keepdim=True) + sink, 1.0)
        a, lse = power / total, top + torch.log(total)
        log_a = torch.where(seen, score - lse, 0.0)
        answers = {
            "output": a @ v,
            "logsumexp": torch.where(seen.any(-1), lse[..., 0], 0.0),
            "keys": a.sum(-2),
            "entropy": -(a * log_a).sum(-1),
        }
        loss = sum((wide(by) * answers[name]).sum() for name, by in self.by.items()) + 0.0 * extra.sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        self.gradients = {n: x.numpy() for n, x in zip(NAMES, found, strict=True)}
        self.a, self.log_a = a.detach().numpy(), log_a.detach().numpy()
        self.logsumexp = torch.where(seen.any(-1), lse[..., 0], -torch.inf).detach().numpy().astype(stats)
        get = {name: self.by.get(name, np.zeros(sizes[name])).astype(np.float64) for name in PARTS}
        rows = get["logsumexp"] - (get["output"] * answers["output"].detach().numpy()).sum(-1)
        rows -= (self.a @ get["keys"][..., None])[..., 0]
        rows += get["entropy"] * ((self.a * self.log_a).sum(-1) + self.a.sum(-1) - 1)
        more = (self.by.get(name) for name in ("output", "keys", "entropy"))
        self.upstream = Upstream(rows.astype(stats), *more, bias=bias_shape)  # type: ignore[arg-type]
        self.sizes(case, get, rows)

    def sizes(self, case: Case, get: dict[str, Array], rows: Array) -> None:
        """What each gradient adds up, in magnitude, times how wrong each of its terms may be."""
        p, given, slack = case.problem, case.given, Slack(case)
        q, k, v = (np.abs(x.astype(np.float64)) for x in (given.q, given.k, given.v))
        k, v = (np.repeat(x, p.heads // max(1, x.shape[1]), axis=1) for x in (k, v))
        inner = np.abs(get["output"]) @ v.swapaxes(-1, -2) + np.abs(rows)[..., None] + np.abs(get["keys"])[..., None, :]
        inner = inner + np.abs(get["entropy"])[..., None] * (1 + np.abs(self.log_a))
        logit = slack.logit[..., None]
        by_score = logit * self.a * inner + slack.tiny
        steep = abs(p.scale) * (1 + logit / slack.eps / p.softcap if p.softcap else 1)
        fold = lambda x, to: x.reshape(p.batch, to, p.heads // max(1, to), *x.shape[2:]).sum(2)  # noqa: E731
        shared = tuple(axis for axis in range(4) if self.upstream.bias and self.upstream.bias[axis] == 1)
        self.allowed = {
            "q": (steep * by_score) @ k,
            "k": fold((steep * by_score).swapaxes(-1, -2) @ q, given.k.shape[1]),
            "v": fold((logit * self.a + slack.tiny).swapaxes(-1, -2) @ np.abs(get["output"]), given.v.shape[1]),
            "bias": by_score.sum(axis=shared, keepdims=True),
        }
        for name in NAMES:
            self.allowed[name] = self.allowed[name] + rounding(self.gradients[name], p.dtype) + slack.tiny


def ask(case: Case, truth: Truth) -> dict[str, Array]:
    v = case.given.v if truth.upstream.output is not None else None
    return native.gradients(case.problem, case.given.q, case.given.k, v, truth.logsumexp, truth.upstream)


@st.composite
def losses(draw: st.DrawFn) -> tuple[Case, Truth]:
    case = draw(cases())
    parts = draw(st.sets(st.sampled_from(PARTS), min_size=1))
    p = case.problem
    shape = tuple(size if draw(st.booleans()) else 1 for size in (p.batch, p.heads, p.queries, p.keys))
    truth = Truth(case, parts, shape, case.seed)
    if truth.upstream.output is not None:
        truth.upstream = replace(truth.upstream, output=draw_layout(draw, truth.upstream.output))
    if draw(st.booleans()):
        truth.upstream = replace(truth.upstream, bias=None)
    return case, truth


@examples(2)
@given(losses())
def test_as_the_plain_formulas_gradients(loss: tuple[Case, Truth]) -> None:
    case, truth = loss
    found = ask(case, truth)
    assert set(found) == {"q", "k"} | ({"v"} & {"v" if "output" in truth.by else ""}) | ({"bias"} if truth.upstream.bias else set())
    for name, x in found.items():
        assert x.dtype == (statistics_dtype(case.problem.dtype) if name == "bias" else case.problem.dtype)
        assert_close(x, truth.gradients[name], truth.allowed[name], name)
