"""The native engine's gradients against PyTorch's autograd of the plain formula in float64."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clearhead.core import visibility
from clearhead.core.arrays import FLOATS, bfloat16, statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import describe
from clearhead.core.statistics import Wanted
from clearhead.engines import native
from clearhead.engines.base import Upstream
from clearhead.engines.threads import get_num_threads, set_num_threads
from problems import Case, cases, draw_layout, examples
from slack import Slack, assert_close, rounding

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
PARTS = ("output", "logsumexp", "keys", "entropy")
NAMES = ("q", "k", "v", "bias")


def wide(x: Array) -> Any:
    return torch.from_numpy(np.array(x, np.float64))


class Truth:
    """A loss that is linear in the results: its gradients, and the upstream gradients that an engine receives."""

    def __init__(self, case: Case, parts: set[str], bias_shape: tuple[int, ...], seed: int) -> None:
        rng, p, given = np.random.default_rng(seed), case.problem, case.given
        stats = statistics_dtype(p.dtype)
        shape = (p.batch, p.heads, p.queries)
        keys = (*shape[:2], p.keys)
        sizes = {"output": (*shape, given.v.shape[-1]), "logsumexp": shape, "keys": keys, "entropy": shape}
        self.by = {
            name: rng.standard_normal(sizes[name]).astype(p.dtype if name == "output" else stats)
            for name in PARTS
            if name in parts
        }
        leaves = [wide(x).requires_grad_() for x in (given.q, given.k, given.v, np.zeros(bias_shape))]
        q, k, v, extra = leaves
        k, v = (x.repeat_interleave(p.heads // max(1, x.shape[1]), dim=1) for x in (k, v))
        seen = torch.from_numpy(visibility.dense(p))
        score = wide(p.scale)[:, None, None] * (q @ k.mT)
        if p.softcap:
            score = p.softcap * torch.tanh(score / p.softcap)
        score = score + extra + wide(case.book.biased - case.book.capped)
        score = torch.where(seen, score, 0.0)
        sinks = torch.full((1, p.heads, 1, 1), -torch.inf) if p.sinks is None else wide(p.sinks)[None, :, None, None]
        low = torch.where(seen, score, -torch.inf).detach()
        top = torch.cat([low, sinks.expand(*shape, 1)], -1).amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        power = torch.where(seen, torch.exp(score - top), 0.0)
        total = power.sum(-1, keepdim=True) + torch.exp(sinks - top)
        total = torch.where(seen.any(-1, keepdim=True), total, 1.0)
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
        self.sizes(case, get)

    def sizes(self, case: Case, get: dict[str, Array]) -> None:
        """The allowed error of each gradient: the magnitudes of its terms times the allowed error of each term."""
        p, given, slack = case.problem, case.given, Slack(case)
        q, k, v = (np.abs(x.astype(np.float64)) for x in (given.q, given.k, given.v))
        k, v = (np.repeat(x, p.heads // max(1, x.shape[1]), axis=1) for x in (k, v))
        inner = np.abs(get["output"]) @ v.swapaxes(-1, -2) + np.abs(get["keys"])[..., None, :]
        inner = inner + np.abs(get["entropy"])[..., None] * (1 + np.abs(self.log_a))
        inner = inner + (self.a * inner).sum(-1, keepdims=True)  # this is where `rows` comes from
        inner = inner + (np.abs(get["logsumexp"]) + np.abs(get["entropy"]))[..., None]
        logit = slack.logit[..., None]
        by_logit = logit * self.a * inner + slack.tiny
        if p.dtype == bfloat16:  # an engine may round weights and slopes to it, as the processor multiplies pairs
            logit = logit + float(ml_dtypes.finfo(bfloat16).eps)
        by_score = logit * self.a * inner + slack.tiny
        steep = abs(p.scale)[:, None, None] * (1 + slack.logit[..., None] / slack.eps / p.softcap if p.softcap else 1)
        fold = lambda x, to: x.reshape(p.batch, to, p.heads // max(1, to), *x.shape[2:]).sum(2)  # noqa: E731
        shared = tuple(axis for axis in range(4) if self.upstream.bias and self.upstream.bias[axis] == 1)
        self.allowed = {
            "q": (steep * by_score) @ k,
            "k": fold((steep * by_score).swapaxes(-1, -2) @ q, given.k.shape[1]),
            "v": fold((logit * self.a + slack.tiny).swapaxes(-1, -2) @ np.abs(get["output"]), given.v.shape[1]),
            "bias": by_logit.sum(axis=shared, keepdims=True),
        }
        for name in NAMES:
            self.allowed[name] = self.allowed[name] + rounding(self.gradients[name], p.dtype) + slack.tiny


def ask(case: Case, truth: Truth, arrays: Any = None, upstream: Upstream | None = None) -> dict[str, Array]:
    arrays, upstream = arrays or case.given, upstream or truth.upstream
    v = arrays.v if upstream.output is not None else None
    return native.gradients(case.problem, arrays.q, arrays.k, v, truth.logsumexp, upstream)


@st.composite
def losses(draw: st.DrawFn) -> tuple[Case, Truth]:
    case = draw(cases())
    assume(not native.reasons_not(case.problem))
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
def test_gradients_equal_those_of_the_plain_formula(loss: tuple[Case, Truth]) -> None:
    case, truth = loss
    found = ask(case, truth)
    assert ("v" in found, "bias" in found) == ("output" in truth.by, truth.upstream.bias is not None)
    for name, x in found.items():
        assert x.dtype == (statistics_dtype(case.problem.dtype) if name == "bias" else case.problem.dtype)
        assert_close(x, truth.gradients[name], truth.allowed[name], name)


@given(losses(), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_nonfinite_values_reach_only_gradients_that_see_them(loss: tuple[Case, Truth], bad: float) -> None:
    case, truth = loss
    given, told, seen = case.given, truth.upstream, visibility.dense(case.problem)
    if not seen.size:
        return
    clean, others = ask(case, truth), np.arange(case.problem.keys) != case.seed % case.problem.keys
    replaced = lambda x, where: None if x is None else np.where(where, bad, x).astype(x.dtype)  # noqa: E731
    at = ~others[:, None]
    dirty = replace(given, k=replaced(given.k, at), v=replaced(given.v, at))
    found = ask(case, truth, dirty, replace(told, keys=replaced(told.keys, ~others)))
    np.testing.assert_array_equal(found["q"][~seen[..., ~others][..., 0]], clean["q"][~seen[..., ~others][..., 0]])
    for name in {"k", "v"} & set(found):
        np.testing.assert_array_equal(found[name][:, :, others], clean[name][:, :, others])
    others = np.arange(case.problem.queries) != case.seed % case.problem.queries
    at = ~others[:, None]
    dirty = replace(given, q=replaced(given.q, at))
    rows, output = replaced(told.rows, ~others), replaced(told.output, at)
    found = ask(case, truth, dirty, replace(told, rows=rows, output=output, entropy=replaced(told.entropy, ~others)))
    np.testing.assert_array_equal(found["q"][:, :, others], clean["q"][:, :, others])
    for name in {"k", "v"} & set(found):
        heads = clean[name].shape[1]
        met = seen[:, :, ~others, :].reshape(case.problem.batch, heads, -1, case.problem.keys).any(2)
        np.testing.assert_array_equal(found[name][~met], clean[name][~met])
    if told.bias is not None and told.bias[2:] == seen.shape[2:] and told.bias[:2] == seen.shape[:2]:
        np.testing.assert_array_equal(found["bias"][:, :, others], clean["bias"][:, :, others])


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(a: dict[str, Array], b: dict[str, Array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def some_loss(rules: dict[str, Any], dtype: Any, queries: int = 500, keys: int = 700) -> tuple[Case, Upstream, Array]:
    q, k, v = (random(2, h, size, 40, dtype=dtype, seed=h) for h, size in ((4, queries), (2, keys), (2, keys)))
    case = Case(q, k, v, {**rules, "query_offset": keys - queries}, 0)
    lse = native.rows(case.problem, q, k, None, Wanted(logsumexp=True))["logsumexp"]
    rows, entropy = random(2, 4, queries, seed=3), random(2, 4, queries, seed=4)
    return case, Upstream(rows, random(*q.shape, dtype=dtype, seed=5), random(2, 4, keys, seed=6), entropy), lse


RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (100, None), "softcap": 20.0},
    {"kv_lengths": [300, 650], "sinks": [0.5, 1.0, -1.0, 0.0]},
    {"mask": np.random.default_rng(0).random((500, 700)) < 0.01},
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rules", RULES)
def test_threads_and_batch_change_no_bit_of_the_gradients(dtype: Any, rules: dict[str, Any]) -> None:
    case, told, lse = some_loss(rules, dtype)
    before = get_num_threads()
    try:
        for shape in ((2, 4, 500, 700), (1, 4, 500, 1), (2, 1, 1, 700), (1, 1, 500, 700)):
            told = replace(told, bias=shape)
            set_num_threads(1)
            alone = native.gradients(case.problem, case.q, case.k, case.v, lse, told)
            for count in (2, 3, 5):
                set_num_threads(count)
                same(native.gradients(case.problem, case.q, case.k, case.v, lse, told), alone)
    finally:
        set_num_threads(before)
    one = {name: x[1:] if name == "kv_lengths" else x for name, x in case.rules.items()}
    single = Case(case.q[1:], case.k[1:], case.v[1:], one, 0)
    parts = {name: getattr(told, name)[1:] for name in ("rows", "output", "keys", "entropy")}
    found = native.gradients(single.problem, single.q, single.k, single.v, lse[1:], Upstream(**parts))
    same(found, {name: alone[name][1:] for name in found})


def test_keys_and_values_may_have_different_numbers_of_heads() -> None:
    case, told, lse = some_loss({"causal": True}, np.float32)
    v = random(2, 4, 700, 40, seed=9)
    found = native.gradients(case.problem, case.q, case.k, v, lse, told)
    full = describe(case.q, case.k.repeat(2, axis=1), v, case.rules)
    truth = native.gradients(full.problem, case.q, full.k, v, lse, told)
    for name in ("q", "v"):
        np.testing.assert_array_equal(found[name], truth[name])
    np.testing.assert_allclose(found["k"], truth["k"].reshape(2, 2, 2, 700, 40).sum(2), rtol=1e-4, atol=1e-5)


def test_values_of_another_dtype() -> None:
    case, told, lse = some_loss({"causal": True}, np.float32)
    found = native.gradients(case.problem, case.q, case.k, case.v.astype(np.float64), lse, told)
    truth = native.gradients(case.problem, case.q, case.k, case.v, lse, told)
    for name in truth:
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-4, atol=1e-4)


def test_more_than_two_to_the_32_weights() -> None:
    n = 70_000
    q, k = random(1, 1, n, 4), random(1, 1, n, 4, seed=1)
    problem = describe(q, k, None, {"window": (0, 0)}).problem  # each query sees one key, with a weight of 1
    lse, rows = (q * k).sum(-1) / 2, random(1, 1, n, seed=2)
    found = native.gradients(problem, q, k, None, lse, Upstream(rows, bias=(1, 1, 1, n)))
    np.testing.assert_allclose(found["q"], rows[..., None] * k / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["k"], rows[..., None] * q / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["bias"][:, :, 0], rows, rtol=1e-5)


INTERRUPT = """
import os, signal, threading
import numpy as np, clearhead as ch
from clearhead.engines import native
from clearhead.engines.base import Upstream
from clearhead.core.statistics import Wanted
from clearhead.core.problem import describe
q, rows = np.zeros((1, 4, 60000, 64), np.float32), np.zeros((1, 4, 60000), np.float32)
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    native.gradients(describe(q, q, q, {}).problem, q, q, q, rows, Upstream(rows, q))
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_stops_the_backward_pass() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "stopped\n", done.stderr
