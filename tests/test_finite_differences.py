"""Derivatives of every observation against finite differences of the float64 reference."""

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
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS, listed
from problems import Case, cases, on_every_engine

STEP = 1e-5
ANSWERS = tuple(name for name, one in STATISTICS.items() if one.derivative)
F64 = np.dtype(np.float64)
Function = Callable[[Mapping[str, Any]], dict[str, Any]]
SMALL: dict[str, Any] = {"most": 300, "dtypes": (F64,)}
any_case = cases(**SMALL)
some_answers = st.sets(st.sampled_from(ANSWERS), min_size=1).map(sorted)


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
        asked["groups"] = labels if engine is None or "groups" in engines.get(engine).STATISTICS else None
        seen = ch.AttentionMatrix(q, k, engine=engine, **rules).observe(v, top=2, image=(2, 3), **asked)
        result = {name: getattr(seen, name) for name in ANSWERS}
        return {**result, "top": seen.top.weights}  # type: ignore[union-attr]

    return answer


def _apart(given: Mapping[str, Any]) -> tuple[Any, ...]:
    rules = dict(given)
    q, k, v, labels = (rules.pop(name) for name in ("q", "k", "v", "labels"))
    return q, k, v, tuple(map(torch.as_tensor, labels)), rules


@on_every_engine(times=0.7, limits=SMALL, answers=some_answers)
def test_through_autograd(engine: str, case: Case, answers: list[str]):
    check(case, [name for name in answers if name in engines.get(engine).STATISTICS], observing(engine))


@pytest.mark.parametrize("name", ANSWERS)
def test_through_a_compiled_function(name: str):
    rng = np.random.default_rng(ANSWERS.index(name))
    q, k, v = (rng.standard_normal((1, heads, length, 3)) for heads, length in ((4, 5), (2, 6), (2, 6)))
    rules = {"bias": rng.standard_normal((4, 5, 6)), "sinks": rng.standard_normal(4), "softcap": 2.0}
    case = Case(q, k, v, rules, 0)
    compiled = torch.compile(observing(None), fullgraph=True, backend="aot_eager")
    labels = tuple(torch.from_numpy(x) for x in case.labels())
    check(case, [name], lambda given: compiled({**given, "labels": labels}))
