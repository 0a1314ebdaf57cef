"""Gradients of every result by every input: each engine that has gradients against autograd in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import reference
from clearhead.core.arrays import FLOATS, statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.state import State
from clearhead.engines.base import Upstream
from clearhead.errors import EngineError
from clearhead.ops import backward
from losses import ANSWERS, Losses, by_pair, grouped, summed
from problems import Case, each_engine, every_rule, on_every_engine, refused
from seeds import fresh, normal
from slack import assert_close, rounding

ENGINES = [name for name in engines.NAMES if hasattr(engines.get(name), "gradients")]
every_engine = each_engine(ENGINES)
some_answers = st.sets(st.sampled_from(ANSWERS), min_size=1).map(sorted)


def by_autograd(losses: Losses, engine: str | None, inputs: Case | None = None) -> dict[str, Array]:
    """The gradients as a user gets them."""
    case = inputs or losses.case
    leaves = {name: to_torch(torch, x.copy()).requires_grad_() for name, x in case.leaves.items()}
    matrix = ch.AttentionMatrix(leaves["q"], leaves["k"], engine=engine, **case.rules_with(leaves))
    flags = {name: True for name in losses.by if name != "output"}
    seen = matrix.observe(leaves["v"] if "output" in losses.by else None, **flags)
    answers = [getattr(seen, name) for name in losses.by]
    torch.autograd.backward(answers, [to_torch(torch, losses.problem.restore(x)) for x in losses.by.values()])
    zero = {name: torch.zeros(x.shape) if x.grad is None else x.grad for name, x in leaves.items()}
    return {name: x.double().numpy() for name, x in zero.items()}


@every_engine
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("answers", [*([name] for name in ANSWERS), ANSWERS])
@pytest.mark.parametrize("left_out", ["", "softcap scale causal window query_segments kv_segments"])
def test_gradients_under_all_rules_at_once(engine: str, dtype: np.dtype[Any], answers: list[str], left_out: str):
    if engine == "triton":  # its interpreter is slow: a few of the answers alone, and of them all at once
        alone, other = len(answers) == 1, bool(left_out) != FLOATS.index(dtype) % 2
        if (left_out or dtype != np.float32 if alone else other) or fresh().random() < (0.9 if alone else 0.75):
            return
    shape, kv = (2, 2, 4, 9, 5), (2, 2, 2, 8)
    q, k, v = (normal(*size).astype(dtype) for size in (shape, (*kv, 5), (*kv, 3)))
    rules = {name: value for name, value in every_rule((2, 2), 4, 9, 8).items() if name not in left_out.split()}
    losses = Losses(Case(q, k, v, rules, 0), answers)
    if not refused(engine, losses.case):
        losses.check(by_autograd(losses, engine))


@on_every_engine(ENGINES, times=0.3, limits={"most": 20_000}, answers=some_answers)
def test_gradients_under_drawn_rules(engine: str, case: Case, answers: list[str]):
    losses = Losses(case, answers)
    losses.check(by_autograd(losses, engine))


@on_every_engine(
    ENGINES, limits={"most": 20_000}, parts=st.sets(st.sampled_from(("output", "keys", "entropy", "bias", "spans")))
)
def test_gradients_of_each_engine_follow_the_formulas(engine: str, case: Case, parts: set[str]):
    """The gradients of scores, dS = a·(dO·v + rows + keys - entropy·ln a), and of the inputs."""
    problem = case.problem
    names = {"output": "output", "keys": "received", "entropy": "entropy"}
    losses = Losses(case, ["logsumexp", *(names[part] for part in sorted(parts) if part in names)])
    by, dtype = losses.by, statistics_dtype(problem.dtype)
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    local = tuple(size if case.rng.integers(2) else 1 for size in shape)
    upstream = Upstream(
        rows=by["logsumexp"], output=by.get("output"), keys=by.get("received"), entropy=by.get("entropy"),
        bias=local if "bias" in parts else None,
    )  # fmt: skip
    parts -= {"spans"} if problem.span_table is None else set()
    if "spans" in parts and problem.span_table is not None:
        upstream = replace(upstream, spans=(*local[:2], *problem.span_table.shape[2:]))
    result = engines.get(engine).gradients(case.given, State(*(x.astype(dtype) for x in case.book.state)), upstream)
    assert set(result) == {"q", "k"} | parts & {"bias", "spans"} | ({"v"} if "output" in parts else set())
    *usual, by_logit = by_hand(losses)
    truth = dict(zip("qkv", usual, strict=True)) | {"bias": summed(by_logit, local)}
    if upstream.spans is not None:
        truth["spans"] = summed(by_pair(case, by_logit), upstream.spans)
        losses.slack["spans"] = summed(by_pair(case, losses.slack["logit"]), upstream.spans)
    for name, x in result.items():
        allowed = summed(losses.slack["logit"], local) if name == "bias" else losses.slack[name]
        assert x.dtype == (dtype if name in ("bias", "spans") else problem.dtype)
        assert_close(x, truth[name], allowed + rounding(truth[name], x.dtype), name)


def by_hand(losses: Losses) -> tuple[Array, ...]:
    """The formulas that each engine implements, in float64."""
    problem, inputs, book = losses.problem, losses.case.given, losses.case.book
    q, k, v = (x.astype(np.float64) for x in (inputs.q, inputs.k, inputs.v))
    group = problem.heads // max(1, k.shape[1])
    logs = np.where(losses.visible, book.masked - np.where(losses.sees, book.logsumexp, 0.0)[..., None], 0.0)
    slope = losses.wide("logsumexp")[..., None] - np.asarray(losses.wide("entropy"))[..., None] * logs
    output = losses.wide("output") if "output" in losses.by else np.zeros((*slope.shape[:-1], v.shape[-1]))
    slope = slope + output @ np.repeat(v, group, axis=1).swapaxes(-1, -2)
    if "received" in losses.by:
        slope = slope + losses.wide("received")[:, :, None]
    by_logit = book.weights * slope
    cap_slope = 1.0 if problem.softcap is None else 1 - np.tanh(book.scaled / problem.softcap) ** 2
    by_score = problem.scale[:, None, None] * cap_slope * by_logit
    by_key, by_value = by_score.swapaxes(-1, -2) @ q, book.weights.swapaxes(-1, -2) @ output
    return by_score @ np.repeat(k, group, axis=1), grouped(by_key, k), grouped(by_value, v), by_logit


@every_engine
def test_gradients_are_nan_exactly_for_queries_that_see_nan(engine: str):
    q, k, v = (torch.randn(2, 6, 4, dtype=torch.float64) for _ in range(3))
    v[:, 5] = torch.nan
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    q.requires_grad_()
    ch.attention(q, k, v, causal=True, sinks=sinks, engine=engine).sum().backward()
    assert q.grad is not None
    assert sinks.grad is not None
    assert q.grad[:, :5].isfinite().all()
    assert q.grad[:, 5].isnan().all()
    assert sinks.grad.isnan().all()


@every_engine
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 2, 3, 5, 4), (3, 5, 4), (5, 4)])
def test_a_bias_of_every_shape(engine: str, shape: tuple[int, ...]):
    rng = fresh()
    q, k, v = (rng.standard_normal((*shape[:-2], size, 4)) for size in (shape[-2], 6, 6))
    full = (*shape[:-1], 6)
    for ndim in range(len(full) + 1):
        for ones in np.ndindex((2,) * ndim):
            local = tuple(1 if one else size for one, size in zip(ones, full[len(full) - ndim :], strict=True))
            if engine == "triton" and rng.random() < 0.985:  # Triton's interpreter is slow
                continue
            losses = Losses(Case(q, k, v, {"bias": rng.standard_normal(local)}, 0), list(ANSWERS))
            losses.check(by_autograd(losses, engine))


def test_an_engine_without_gradients_is_passed_over_or_refuses(monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(3, 4, requires_grad=True)
    first = ch.plan(q, q).engine
    monkeypatch.delattr(engines.get(first), "gradients", raising=False)
    if first == "portable":
        pytest.skip("there is no other engine here")
    ch.attention(q, q, q).sum().backward()
    assert q.grad is not None
    with pytest.raises(EngineError, match=f"^the {first} engine has no gradients"):
        ch.attention(q, q, q, engine=first).sum().backward()


def test_entropy_with_keys_of_weight_zero_has_finite_gradients():
    """A weight of 0 times a logarithm of -800 is 0, in the entropy and in its gradient."""
    case = Case(np.array([[40.0]]), np.array([[20.0], [0.0]]), np.eye(2), {"scale": 1.0}, 0)
    for engine in ENGINES:
        losses = Losses(case, ["entropy"])
        losses.check(by_autograd(losses, engine))


def test_gradients_of_sinks_are_zero_for_empty_rows_and_do_not_overflow():
    rows = np.ones((1, 1, 2))
    answers, by = {"largest": -np.inf * rows, "log_sum": 0 * rows}, {"log_sum": rows}
    case = Case(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), {"sinks": [1000.0], "mask": False}, 0)
    result = backward.gradients(engines.get("portable"), case.given, answers, by)
    assert {name: float(np.abs(part).sum()) for name, part in result.items()} == {"q": 0.0, "k": 0.0, "sinks": 0.0}
    assert reference.entropy(case.book).sum() == 0
