"""Forward mode and second derivatives of random problems, in blocks of any size, against the plain formulas."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.statistics import smooth
from clearhead.derivatives import recomputed
from problems import Case, cases, examples
from programs import python
from tangents import HEIGHT, INPUTS, WIDTH, Along

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
DRAWN: dict[str, Any] = {
    "moving": st.sets(st.sampled_from(INPUTS), min_size=1).map(sorted),
    "answers": st.sets(st.sampled_from(smooth()), min_size=1).map(sorted),
    "block": st.sampled_from((100, 1 << 18)),
}
HALVES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
Named = dict[str, Array]


def close(result: Array, truth: Array, name: str) -> None:
    scale = np.abs(truth).max(initial=0) + 1.0  # a bias that is one number has sums of large numbers, which are 0
    near = max(1e-8, float(ml_dtypes.finfo(result.dtype).eps))  # a bias may have fewer digits than q
    np.testing.assert_allclose(result.astype(np.float64), truth, atol=1e-9 * scale, rtol=near, err_msg=name)


def ours(along: Along, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The results of the case with these inputs, (batch, heads, …)."""
    case, problem = along.case, along.case.problem
    q, k, v = (leaves[name].reshape(getattr(case, name).shape) for name in "qkv")
    rules = case.rules_with(leaves)
    asked: dict[str, Any] = {name: True for name in along.answers if name not in ("output", "image", "groups")}
    asked |= {"image": (HEIGHT, WIDTH)} if "image" in along.answers else {}
    asked |= {"groups": case.labels()} if "groups" in along.answers else {}
    seen = ch.AttentionMatrix(q, k, **rules).observe(v if "output" in along.answers else None, **asked)
    found = {name: getattr(seen, name) for name in along.answers}
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


@examples(0.3)
@given(case=cases(dtypes=(np.dtype(np.float64),), most=5_000), **DRAWN)
def test_tangents_of_every_result_and_gradient(case: Case, moving: list[str], answers: list[str], block: int):
    along = drawn(case, moving, answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "_BLOCK", block)
        first, second = derivatives(along)
    for name, (_, truth) in along.first.items():
        close(first[name], truth, name)
    for name, truth in along.second.items():
        close(second[name], truth, name)


@examples(0.1)
@given(case=cases(dtypes=(np.dtype(np.float32), *HALVES), most=5_000), **DRAWN)
def test_rounded_tangents_of_every_result_and_gradient(case: Case, moving: list[str], answers: list[str], block: int):
    along, dtype = drawn(case, moving, answers), case.q.dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "_BLOCK", block)
        first, second = derivatives(along)
    moved: Callable[..., Named] = lambda *place, **how: {n: y for n, (_, y) in along.forward(*place, **how).items()}  # noqa: E731
    as_close_as_plain(first, {n: y for n, (_, y) in along.first.items()}, moved, dtype)
    as_close_as_plain(second, along.second, along.backward, dtype)


def as_close_as_plain(result: Named, truth: Named, run: Callable[..., Named], dtype: Any) -> None:
    """Compare with `truth`: at most twenty times what float32, or rounded inputs and logits, change in a plain run."""
    rounding = float(ml_dtypes.finfo(dtype).eps)
    runs = [run(torch.float32), *(run(spread=rounding / 2, draw=i) for i in (1, 2, 3))]
    for name in result.keys() & truth.keys():
        apart = [np.abs(x[name] - truth[name]).max(initial=0) for x in runs]
        allowed = 20 * max(apart) + 4 * rounding * np.abs(truth[name]).max(initial=0) + 1e-7
        np.testing.assert_allclose(np.asarray(result[name], np.float64), truth[name], 0, allowed, err_msg=name)


PROGRAM = """
import resource, torch, clearhead as ch
def hvp(n):
    q, k, v, *along = (torch.randn(1, 8, n, 16) for _ in range(6))
    for x in (q, k, v):
        x.requires_grad_()
    first = torch.autograd.grad(ch.attention(q, k, v, causal=True).sum(), (q, k, v), create_graph=True)
    torch.autograd.grad(first, (q, k, v), along)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hvp(64)
before = peak()
hvp(2048)
print(peak() - before)
"""


def test_a_second_derivative_stores_no_weights():
    assert float(python(PROGRAM)) < 130  # MB; the weights of 8 heads are 134 MB, and a dense one holds some twenty such
