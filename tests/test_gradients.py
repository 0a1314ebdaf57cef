"""Fused gradients: as exact as rounding allows beside autograd's in float64, and finite where they should be."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import to_torch
from clearhead.core.axes import Array
from clearhead.derivatives import backward
from clearhead.errors import EngineError
from losses import ANSWERS, Losses
from problems import Case, each_engine, on_every_engine

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


@on_every_engine(ENGINES, limits={"most": 20_000}, answers=some_answers)
def test_gradients_under_drawn_rules(engine: str, case: Case, answers: list[str]):
    losses = Losses(case, answers)
    losses.check(by_autograd(losses, engine))


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


def test_an_engine_without_gradients_is_passed_over_or_refuses(monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(3, 4, requires_grad=True)
    first = ch.plan(q, q).engine
    monkeypatch.delattr(engines.get(first), "gradients", raising=False)
    if first == "portable":
        pytest.skip("there is no other engine here")
    ch.attention(q, q, q).sum().backward()
    assert q.grad is not None
    with pytest.raises(EngineError, match=f"the {first} engine has no gradients"):
        ch.attention(q, q, q, engine=first).sum().backward()


def test_entropy_with_keys_of_weight_zero_has_finite_gradients():
    """A weight of 0 times a logarithm of -800 is 0, in the entropy and in its gradient."""
    case = Case(np.array([[40.0]]), np.array([[20.0], [0.0]]), np.eye(2), {"scale": 1.0}, 0)
    for engine in ENGINES:
        losses = Losses(case, ["entropy"])
        losses.check(by_autograd(losses, engine))


def test_gradients_of_sinks_are_zero_for_empty_rows():
    rows = np.ones((1, 1, 2))
    answers, by = {"largest": -np.inf * rows, "log_sum": 0 * rows}, {"log_sum": rows}
    case = Case(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), {"sinks": [1000.0], "mask": False}, 0)
    result = backward.gradients(engines.get("portable"), case.given, answers, by)
    assert {name: float(np.abs(part).sum()) for name, part in result.items()} == {"q": 0.0, "k": 0.0, "sinks": 0.0}
    assert definition.entropy(case.book).sum() == 0
