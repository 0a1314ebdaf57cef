"""Gradients of every result by every input: autograd's in float64, and finite differences of the reference."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import FLOATS, to_torch
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS, listed
from clearhead.derivatives import backward
from clearhead.errors import EngineError
from losses import ANSWERS, Losses
from problems import Case, cases, each_engine, every_rule, on_every_engine, refused
from seeds import fresh, normal

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


@on_every_engine(ENGINES, limits={"most": 20_000}, answers=some_answers)
def test_gradients_under_drawn_rules(engine: str, case: Case, answers: list[str]):
    losses = Losses(case, answers)
    losses.check(by_autograd(losses, engine))


@every_engine
def test_a_window_reaches_later_blocks_of_queries(engine: str):
    q, k = normal(130, 3), normal(70, 3)
    losses = Losses(Case(q, k, k, {"window": (60, 0), "query_offset": 0}, 0), list(ANSWERS))
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


STEP = 1e-5
DERIVED = tuple(name for name, one in STATISTICS.items() if one.derivative)
F64 = np.dtype(np.float64)
Function = Callable[[Mapping[str, Any]], dict[str, Any]]
SMALL: dict[str, Any] = {"most": 300, "dtypes": (F64,)}
any_case = cases(**SMALL)
some_derived = st.sets(st.sampled_from(DERIVED), min_size=1).map(sorted)


def truth(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Every result, (batch, heads, …), and which queries or keys the maxima and top weights were taken from."""
    problem, book = case.problem, case.book
    queries, keys = case.labels()
    weights, indices = definition.top(book, 2)
    answers = {
        **definition.per_query(book), "output": book.output, "top": weights,
        "received": definition.received(book), "peak": definition.peak(book), "image": definition.image(book, 2, 3),
        "groups": definition.groups(book, queries.reshape(problem.batch, problem.queries), keys),
    }  # fmt: skip
    chosen = {"top": indices, "max_logit": definition.top(book, 1)[1][..., 0]}
    chosen["peak"] = book.weights.argmax(-2) if problem.queries else np.zeros(answers["peak"].shape, int)
    return {name: np.where(np.isneginf(x), 0.0, x) for name, x in answers.items()}, chosen


def with_leaves(case: Case, leaves: Mapping[str, Array]) -> Case:
    return replace(case, q=leaves["q"], k=leaves["k"], v=leaves["v"], rules=case.rules_with(leaves))


def check(case: Case, names: list[str], answer: Function) -> None:
    """Compare the derivative by each leaf along a random direction; `answer` observes torch tensors on some path."""
    leaves = {name: np.array(x, F64) for name, x in case.leaves.items()}
    case = with_leaves(case, leaves)
    values, chosen = truth(case)
    names = [name for name in names if case.problem.batch or name != "groups"]  # an empty batch has no labels to count
    up = {name: case.rng.standard_normal(values[name].shape) for name in names}
    if not up:
        return
    along = {name: np.where(np.isfinite(x), case.rng.standard_normal(x.shape), 0.0) for name, x in leaves.items()}
    sides = {
        name: [truth(with_leaves(case, {**leaves, name: x + step * along[name]})) for step in (STEP, -STEP)]
        for name, x in leaves.items()
    }
    for kinks in sides.values():  # there is no derivative where the step changes which key or query is chosen
        for _, choice in kinks:
            for name in up.keys() & chosen.keys():
                up[name] = np.where(choice[name] == chosen[name], up[name], 0.0)
    tensors = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in leaves.items()}
    seen = answer({**tensors, **case.rules_with(tensors), "labels": case.labels()})
    losses = []
    for name, weight in up.items():
        slope = torch.from_numpy(case.problem.restore(weight))
        losses.append(torch.where(seen[name] == -torch.inf, 0.0, seen[name] * slope).sum())
    result = torch.autograd.grad(sum(losses), list(tensors.values()), allow_unused=True)  # type: ignore[arg-type]
    for (name, direction), grad in zip(along.items(), result, strict=True):
        ahead, behind = (side[0] for side in sides[name])
        by_steps = sum(float((weight * (ahead[one] - behind[one])).sum()) for one, weight in up.items()) / (2 * STEP)
        terms = np.zeros(1) if grad is None else grad.numpy() * direction
        size = sum(float(np.abs(weight * values[one]).sum()) for one, weight in up.items())
        allowed = 1e-5 * float(np.abs(terms).sum()) + 1e-6 * (1 + size)
        assert abs(float(terms.sum()) - by_steps) <= allowed, (name, float(terms.sum()), by_steps, allowed)


def observing(engine: str | None) -> Function:
    """A path: all observations together."""

    def answer(given: Mapping[str, Any]) -> dict[str, Any]:
        q, k, v, labels, rules = _apart(given)
        asked: Any = dict.fromkeys(listed(asked="flag"), True)
        if engine is None or "groups" in engines.get(engine).STATISTICS:
            asked |= {"groups": labels, "image": (2, 3)}
        seen = ch.AttentionMatrix(q, k, engine=engine, **rules).observe(v, top=2, **asked)
        result = {name: getattr(seen, name) for name in DERIVED}
        return {**result, "top": seen.top.weights}  # type: ignore[union-attr]

    return answer


def _apart(given: Mapping[str, Any]) -> tuple[Any, ...]:
    rules = dict(given)
    q, k, v, labels = (rules.pop(name) for name in ("q", "k", "v", "labels"))
    return q, k, v, tuple(map(torch.as_tensor, labels)), rules


@on_every_engine(times=0.7, limits=SMALL, answers=some_derived)
def test_through_autograd(engine: str, case: Case, answers: list[str]):
    check(case, [name for name in answers if name in engines.get(engine).STATISTICS], observing(engine))


@pytest.mark.parametrize("name", DERIVED)
def test_through_a_compiled_function(name: str):
    rng = np.random.default_rng(DERIVED.index(name))
    q, k, v = (rng.standard_normal((1, heads, length, 3)) for heads, length in ((4, 5), (2, 6), (2, 6)))
    rules = {"bias": rng.standard_normal((4, 5, 6)), "sinks": rng.standard_normal(4), "softcap": 2.0}
    case = Case(q, k, v, rules, 0)
    compiled = torch.compile(observing(None), fullgraph=True, backend="aot_eager")
    labels = tuple(torch.from_numpy(x) for x in case.labels())
    check(case, [name], lambda given: compiled({**given, "labels": labels}))
