"""Derivatives of every result by every input, of first and second order, against the plain formulas' in float64."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, observations, visibility
from clearhead.core.arrays import as_array, statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS, Groups, smooth
from clearhead.derivatives import backward, recomputed
from clearhead.errors import EngineError
from formula import formula
from problems import Case, cases, each_engine, every_rule, examples, on_every_engine
from seeds import normal

INPUTS = ("q", "k", "v", "bias", "sinks", "spans")
HEIGHT, WIDTH = 3, 2


@dataclass(frozen=True)
class Along:
    """A case, a direction for each of its inputs, and some of its results."""

    case: Case
    moving: tuple[str, ...]  # inputs with a tangent
    answers: tuple[str, ...]

    @cached_property
    def groups(self) -> Groups:
        problem = self.case.problem
        queries, keys = self.case.labels()
        wide = np.broadcast_to(keys, (problem.batch, problem.keys))
        return queries.reshape(problem.batch, problem.queries), wide, (3, 4)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """What has a derivative, (batch, heads, …), or as the caller gave it."""
        passed = self.case.given
        return self.case.leaves | {"q": passed.q, "k": passed.k, "v": passed.v}

    @cached_property
    def tangents(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.case.seed + 2)
        drawn = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in self.inputs.items()}
        return {name: x for name, x in drawn.items() if name in self.moving}

    def results(self, leaves: dict[str, Tensor], draw: int = 0) -> tuple[Tensor, ...]:
        """The results by the plain formulas; a draw other than 0 rounds each logit as float32 does."""
        problem = self.case.problem
        visible = torch.from_numpy(visibility.dense(problem))
        noise = np.random.default_rng((self.case.seed, draw)).uniform(-(2.0**-23), 2.0**-23, visible.shape)
        result = formula(self.case, visible, **leaves, noise=torch.from_numpy(noise) if draw else 0.0)
        weights = result["weights"]
        sides = [
            torch.zeros(size, problem_size, dtype=weights.dtype)
            for size, problem_size in ((HEIGHT, problem.queries), (WIDTH, problem.keys))
        ]
        for side, size, length in zip(sides, (HEIGHT, WIDTH), (problem.queries, problem.keys), strict=True):
            if length:
                pixels, shares = observations.areas(size, length, slice(0, length))
                side[pixels] = torch.from_numpy(shares).to(weights.dtype)
        result["image"] = sides[0] @ weights @ sides[1].T
        member = [
            torch.from_numpy((x[:, None, :, None] == np.arange(count)).astype(np.float64)).to(weights.dtype)
            for x, count in zip(self.groups[:2], self.groups[2], strict=True)
        ]
        result["groups"] = member[0].transpose(-1, -2) @ weights @ member[1]
        return tuple(result[name] for name in self.answers)

    def leaves(self, dtype: torch.dtype, spread: float, draw: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The inputs and their tangents, each number changed by a random share of itself, at most `spread`."""
        rng = np.random.default_rng((self.case.seed, draw))

        def tensor(x: Array) -> Tensor:
            wide = x.astype(np.float64)
            return torch.from_numpy(np.asarray(wide * (1 + rng.uniform(-spread, spread, x.shape)))).to(dtype)

        inputs = {name: tensor(x) for name, x in self.inputs.items()}
        zero = {name: torch.zeros_like(x) for name, x in inputs.items()}
        return inputs, zero | {name: tensor(x) for name, x in self.tangents.items()}

    def forward(
        self, dtype: torch.dtype = torch.float64, spread: float = 0.0, draw: int = 0
    ) -> dict[str, tuple[Array, Array]]:
        """Each result and its tangent."""
        inputs, moving = self.leaves(dtype, spread, draw)
        values, moved = torch.func.jvp(partial(self.results, draw=draw), (inputs,), (moving,))
        return {name: (x.numpy(), y.numpy()) for name, x, y in zip(self.answers, values, moved, strict=True)}

    @cached_property
    def first(self) -> dict[str, tuple[Array, Array]]:
        return self.forward()

    @cached_property
    def upstream(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Upstream gradients of the results, and their tangents."""
        rng = np.random.default_rng(self.case.seed + 3)
        usual = statistics_dtype(self.case.problem.dtype)
        return tuple(  # type: ignore[return-value]
            {
                name: rng.standard_normal(x.shape).astype(self.case.problem.dtype if name == "output" else usual)
                for name, (x, _) in self.first.items()
            }
            for _ in range(2)
        )

    def gradients(self, dtype: torch.dtype = torch.float64, spread: float = 0.0, draw: int = 0) -> dict[str, Array]:
        """The gradients of all inputs."""
        by = tuple(torch.from_numpy(x.astype(np.float64)).to(dtype) for x in self.upstream[0].values())
        back = torch.func.vjp(partial(self.results, draw=draw), self.leaves(dtype, spread, draw)[0])[1]
        return {name: x.double().numpy() for name, x in back(by)[0].items()}

    def lost(self) -> dict[str, Array]:
        """What an output that is rounded may change in gradients, each row's another way, as a share of a rounding."""
        if "output" not in self.answers:
            return {name: np.zeros(()) for name in self.inputs}
        row = np.abs(self.upstream[0]["output"].astype(np.float64) * self.first["output"][0]).sum(-1)
        q, k, scale = (np.abs(x).max(initial=0.0) for x in (self.case.q, self.case.k, self.case.problem.scale))
        by_score = {"q": scale * k.astype(np.float64), "k": scale * q.astype(np.float64)}
        return {name: np.linalg.norm(row.ravel()) * by_score.get(name, 1.0) for name in self.inputs}

    def backward(self, dtype: torch.dtype = torch.float64, spread: float = 0.0, draw: int = 0) -> dict[str, Array]:
        """The tangents of the gradients of all inputs."""
        inputs, moving = self.leaves(dtype, spread, draw)
        by, changing = ([torch.from_numpy(x.astype(np.float64)).to(dtype) for x in s.values()] for s in self.upstream)

        def gradients(leaves: dict[str, Tensor], grads: list[Tensor]) -> Any:
            return torch.func.vjp(partial(self.results, draw=draw), leaves)[1](tuple(grads))[0]

        result = torch.func.jvp(gradients, (inputs, by), (moving, changing))[1]
        return {name: x.numpy() for name, x in result.items()}

    @cached_property
    def second(self) -> dict[str, Array]:
        return self.backward()


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
DERIVED = tuple(name for name, one in STATISTICS.items() if one.derivative)


every_engine = each_engine([name for name in engines.NAMES if hasattr(engines.get(name), "gradients")])


def some_of(names: Iterable[str]) -> Any:
    return st.sets(st.sampled_from(sorted(names)), min_size=1).map(sorted)


DRAWN: dict[str, Any] = {
    "moving": some_of(INPUTS),
    "answers": some_of(smooth()),
    "block": st.sampled_from((100, 1 << 18)),
}
Named = dict[str, Array]


def close(result: Array, truth: Array, name: str) -> None:
    scale = np.abs(truth).max(initial=0) + 1.0  # a bias that is one number has sums of large numbers, which are 0
    kind = ml_dtypes.finfo(result.dtype)  # a bias may have fewer digits than q
    near, least = max(1e-8, float(kind.eps)), max(1e-9 * scale, float(kind.smallest_subnormal))
    np.testing.assert_allclose(result.astype(np.float64), truth, atol=least, rtol=near, err_msg=name)


def ours(along: Along, leaves: dict[str, Tensor], engine: str | None = None) -> tuple[Tensor, ...]:
    """The results of the case with these inputs, (batch, heads, …)."""
    case, problem = along.case, along.case.problem
    q, k, v = (leaves[name].reshape(getattr(case, name).shape) for name in "qkv")
    rules = case.rules_with(leaves)
    asked: dict[str, Any] = {name: True for name in along.answers if name not in ("output", "image", "groups")}
    asked |= {"top": 2} if "top" in asked else {}
    asked |= {"image": (HEIGHT, WIDTH)} if "image" in along.answers else {}
    asked |= {"groups": case.labels()} if "groups" in along.answers else {}
    seen = ch.AttentionMatrix(q, k, engine=engine, **rules).observe(v if "output" in along.answers else None, **asked)
    found = {name: seen.top.weights if name == "top" else getattr(seen, name) for name in along.answers}
    if "groups" in found:  # as many groups as the formulas have
        high, wide = found["groups"].shape[-2:]
        found["groups"] = torch.nn.functional.pad(found["groups"], (0, 4 - wide, 0, 3 - high))
    return tuple(x.reshape(problem.batch, problem.heads, *x.shape[len(problem.prefix) :]) for x in found.values())


def tensors(arrays: Named) -> dict[str, Tensor]:
    return {name: to_torch(torch, np.array(x)) for name, x in arrays.items()}


def drawn(case: Case, moving: list[str], answers: list[str]) -> Along:
    there = Along(case, (), ()).inputs
    return Along(case, tuple(name for name in moving if name in there) or ("q",), tuple(answers))


def derivatives(along: Along) -> tuple[Named, Named]:
    """The results' tangents, and those of the gradients, by our functions."""
    leaves, moving = tensors(along.inputs), tensors(along.tangents)
    moving = {name: x.to(leaves[name].dtype) for name, x in moving.items()}
    still = {name: x for name, x in leaves.items() if name not in moving}
    at = {name: leaves[name] for name in moving}
    moved = torch.func.jvp(lambda x: ours(along, {**still, **x}), (at,), (moving,))[1]
    by, changing = ([*tensors(side).values()] for side in along.upstream)

    def gradients(x: dict[str, Tensor], upstream: list[Tensor]) -> Any:
        results, back = torch.func.vjp(lambda y: ours(along, y), {**still, **x})
        return back(tuple(g.to(r.dtype) for g, r in zip(upstream, results, strict=True)))[0]

    second = torch.func.jvp(gradients, (at, by), (moving, changing))[1]
    names = along.answers, second
    return tuple(  # type: ignore[return-value]
        {name: as_array(x, name)[0] for name, x in zip(side, values, strict=True)}
        for side, values in zip(names, (moved, second.values()), strict=True)
    )


def check(engine: str, case: Case, answers: list[str]) -> None:
    """Gradients as a user gets them; in narrow dtypes of what no rounding moves from key to key."""
    exact, declared = case.q.dtype == np.float64, engines.get(engine).STATISTICS
    known = [name for name in answers if name in declared and (exact or name in smooth())] or ["output"]
    along = Along(case, (), tuple(known))
    leaves = {name: x.requires_grad_() for name, x in tensors(along.inputs).items()}
    answered, up = ours(along, leaves, engine), tensors(along.upstream[0]).values()
    up = [torch.where(x.isfinite(), y, 0.0) for x, y in zip(answered, up, strict=True)]  # none of empty rows
    found = torch.autograd.grad(answered, list(leaves.values()), up, allow_unused=True)
    grads = [torch.zeros_like(x) if y is None else y for x, y in zip(leaves.values(), found, strict=True)]
    result = {name: as_array(x, name)[0] for name, x in zip(leaves, grads, strict=True)}
    truth = along.gradients()
    if exact:
        for name, x in truth.items():
            close(result[name], x, name)
    else:
        as_close_as_plain(result, truth, along.gradients, case.q.dtype, along.lost())


@on_every_engine(limits={"most": 20_000}, answers=some_of(DERIVED))
def test_gradients_of_every_result(engine: str, case: Case, answers: list[str]):
    check(engine, case, answers)


@every_engine
@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("left_out", ["", "softcap scale causal window query_segments kv_segments"])
def test_the_gradient_of_one_result_under_all_rules(engine: str, name: str, left_out: str):
    lead = (2,) if engine == "triton" else (2, 2)  # its interpreter is slow
    left_out += " bias spans" if left_out and engine == "triton" else ""  # beside these, no gradient is its own
    q, k, v = (normal(*lead, *size) for size in ((4, 9, 5), (2, 8, 5), (2, 8, 3)))
    rules = {one: value for one, value in every_rule(lead, 4, 9, 8).items() if one not in left_out.split()}
    check(engine, Case(q, k, v, rules, 0), [name])


@every_engine
def test_entropy_with_keys_of_weight_zero_has_finite_gradients(engine: str):
    """A weight of 0 times a logarithm of -800 is 0, in the entropy and in its gradient."""
    check(engine, Case(np.array([[40.0]]), np.array([[20.0], [0.0]]), np.eye(2), {"scale": 1.0}, 0), ["entropy"])


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


def test_gradients_of_sinks_are_zero_for_empty_rows():
    rows = np.ones((1, 1, 2))
    answers, by = {"largest": -np.inf * rows, "log_sum": 0 * rows}, {"log_sum": rows}
    case = Case(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), {"sinks": [1000.0], "mask": False}, 0)
    result = backward.gradients(engines.get("portable"), case.given, answers, by)
    assert {name: float(np.abs(part).sum()) for name, part in result.items()} == {"q": 0.0, "k": 0.0, "sinks": 0.0}
    assert definition.entropy(case.book).sum() == 0


@pytest.mark.gate
def test_gradients_of_every_result_compiled():
    x, labels = torch.from_numpy(normal(1, 4, 6, 3)).requires_grad_(), torch.arange(6) // 2 - 1
    asked: dict[str, Any] = {"image": (2, 3), "groups": (labels, labels), "top": 2}
    asked = {name: asked.get(name, True) for name in DERIVED if name != "output"}

    def observed(x: Tensor) -> Tensor:
        seen = ch.AttentionMatrix(x, x, softcap=2.0).observe(x, **asked)
        results = [seen.output, seen.top.weights, *(getattr(seen, name) for name in asked if name != "top")]
        return sum(result.square().sum() for result in results)

    compiled = torch.compile(observed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x)[0] for f in (compiled, observed)))


@examples(0.4)
@given(case=cases(most=5_000), **DRAWN)
def test_tangents_of_every_result_and_gradient(case: Case, moving: list[str], answers: list[str], block: int):
    along, dtype = drawn(case, moving, answers), case.q.dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "_BLOCK", block)
        first, second = derivatives(along)
    truths = {name: truth for name, (_, truth) in along.first.items()}, along.second
    if dtype == np.float64:
        for name, truth in (*truths[0].items(), *truths[1].items()):
            close((first if name in first else second)[name], truth, name)
        return
    moved: Callable[..., Named] = lambda *place, **how: {n: y for n, (_, y) in along.forward(*place, **how).items()}  # noqa: E731
    as_close_as_plain(first, truths[0], moved, dtype)
    as_close_as_plain(second, truths[1], along.backward, dtype)


def as_close_as_plain(
    result: Named, truth: Named, run: Callable[..., Named], dtype: Any, lost: Named | None = None
) -> None:
    """Compare with `truth`: at most twenty times what float32, or rounded inputs and logits, change in a plain run.

    lost   what is lost besides, as a share of a rounding
    """
    rounding = float(ml_dtypes.finfo(dtype).eps)
    runs = [run(torch.float32), *(run(spread=rounding / 2, draw=i) for i in (1, 2, 3))]
    for name in result.keys() & truth.keys():
        apart = [np.abs(x[name] - truth[name]).max(initial=0) for x in runs]
        last = max(rounding, float(ml_dtypes.finfo(result[name].dtype).eps))  # a bias may have fewer digits than q
        allowed = 20 * max(apart) + 4 * last * np.abs(truth[name]).max(initial=0) + 1e-7
        allowed += 0.0 if lost is None else 4 * rounding * lost[name]
        np.testing.assert_allclose(np.asarray(result[name], np.float64), truth[name], 0, allowed, err_msg=name)
