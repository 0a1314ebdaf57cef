"""What single edges did, by the GPU's kernels in Triton's interpreter, against the float64 reference."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core import reference
from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.core.effects import ORDERS
from clearhead.engines.gpu import causes, column_pass, row_pass
from problems import Case, cases, examples
from seeds import fresh
from slack import Slack

pytestmark = pytest.mark.gate  # Triton's interpreter is slow

TINY: dict[str, Any] = {"most": 250, "most_heads": 2}
KINDS = "contributions", "cuts"
ASKED = ("by_key", "by_query", "top", "strongest", "image", "groups")


class Truth:
    """The reference's effects of one problem, and how far another's may lie from them."""

    def __init__(self, case: Case, kind: str) -> None:
        self.case, problem, slack = case, case.problem, Slack(case, "triton")
        v = case.given.v
        self.g = case.rng.standard_normal((*problem.shape[:-1], v.shape[-1])).astype(v.dtype)
        along = self.g.reshape(problem.batch, problem.heads, problem.queries, v.shape[-1])
        compute = reference.contributions if kind == "contributions" else reference.cuts
        self.effects = compute(problem, case.book, v, along)
        self.visible = ~np.isneginf(case.book.masked)
        values = np.repeat(np.abs(v.astype(np.float64)), problem.heads // max(1, v.shape[1]), axis=1)
        most = (np.abs(along.astype(np.float64)) @ values.swapaxes(-1, -2)).max(-1, initial=0)
        self.allowed = (20 * slack.logit * (1 + most))[..., None] * self.visible + slack.tiny

    def close(self, result: Any, reduce: Any, name: str) -> None:
        """`reduce` is linear in the effects; rounding errors add up through its magnitudes."""
        truth = self.case.restore(reduce(self.effects))
        allowed = self.case.restore(reduce(self.allowed))
        assert result.shape == truth.shape, name
        assert (np.abs(result - truth) <= allowed + 1e-6 * np.abs(truth)).all(), name


def matrix(case: Case, truth: Truth, kind: str) -> Any:
    return getattr(case.matrix(engine="triton"), kind)(case.v, truth.g)


def check(case: Case, kind: str, asked: tuple[str, ...] = ASKED) -> None:
    truth = Truth(case, kind)
    effects = matrix(case, truth, kind)
    truth.close(effects[...], lambda e: e, "elements")
    if 0 in case.problem.shape:
        return
    labels = case.labels()
    every = {"top": 3, "strongest": 5, "image": (3, 4), "groups": labels}
    order = case.rng.choice(ORDERS)
    result = effects.observe(order=order, **{name: every.get(name, True) for name in asked})
    if "by_key" in asked:
        truth.close(result.by_key, lambda e: e.sum(-2), "by_key")
    if "by_query" in asked:
        truth.close(result.by_query, lambda e: e.sum(-1), "by_query")
    if "top" in asked:
        check_top(truth, result.top, order)
    if "strongest" in asked:
        check_strongest(truth, result.strongest)
    if "image" in asked:
        check_image(case, truth, result.image)
    if "groups" in asked:
        one_hot = [np.arange(x.max(initial=-1) + 1)[:, None] == x[..., None, :] for x in labels]
        left = one_hot[0] if labels[0].ndim == 1 else one_hot[0].reshape(len(case.given.q), 1, *one_hot[0].shape[-2:])
        truth.close(result.groups, lambda e: left.astype(float) @ e @ one_hot[1].astype(float).T, "groups")


def check_top(truth: Truth, result: Any, order: str) -> None:
    shape = (*truth.effects.shape[:3], 3)
    values, keys = result.values.reshape(shape), result.indices.reshape(shape)
    assert ((keys >= 0).sum(-1) == np.minimum(3, truth.visible.sum(-1))).all()
    assert (values[keys < 0] == 0).all()
    columns = np.maximum(keys, 0)
    expected, allowed = np.take_along_axis(truth.effects, columns, -1), np.take_along_axis(truth.allowed, columns, -1)
    assert (np.abs(expected - values)[keys >= 0] <= (allowed + 1e-6 * np.abs(expected))[keys >= 0]).all()
    rank = {"magnitude": np.abs, "largest": lambda e: e, "smallest": lambda e: -e}[order]
    best = -np.sort(-np.where(truth.visible, rank(truth.effects), -np.inf), axis=-1)[..., :3]
    listed = rank(values)[..., : best.shape[-1]]
    both = keys[..., : best.shape[-1]] >= 0
    slack = truth.allowed.max(-1, keepdims=True) + 1e-6 * np.abs(best)
    assert (np.abs(listed - best)[both] <= np.broadcast_to(slack, best.shape)[both]).all()


def check_strongest(truth: Truth, result: Any) -> None:
    expected = truth.effects[result.batch, result.head, result.query, result.key]
    allowed = truth.allowed.max() + 1e-6 * np.abs(expected)
    assert truth.visible[result.batch, result.head, result.query, result.key].all()
    assert (np.abs(result.value - expected) <= allowed).all()
    best = -np.sort(-np.abs(truth.effects[truth.visible]))[:5]
    assert len(best) == len(result.value)
    assert (np.abs(np.abs(result.value) - best) <= allowed).all()
    places = np.ravel_multi_index((result.batch, result.head, result.query, result.key), truth.effects.shape)
    assert len(set(places.tolist())) == len(best)


def check_image(case: Case, truth: Truth, result: Any) -> None:
    high, wide = (reference._areas(size, n) for size, n in zip((3, 4), case.problem.shape[-2:], strict=True))
    truth.close(result.mean, lambda e: high @ e @ wide.T, "mean")
    for row, col in np.ndindex(3, 4):
        under = np.ix_(high[row] > 0, wide[col] > 0)
        cells = truth.effects[..., under[0], under[1]].reshape(*truth.effects.shape[:2], -1)
        largest = case.restore(np.abs(cells).max(-1))
        local = result.largest[..., row, col]
        slack = case.restore(truth.allowed[..., under[0], under[1]].max((-1, -2)))
        assert (np.abs(np.abs(local) - largest) <= slack + 1e-6 * largest).all()
        away = np.abs(cells - local.reshape(*cells.shape[:2], 1)).min(-1)  # it is one of them, sign and all
        assert (case.restore(away) <= slack + 1e-6 * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_random_problems(kind: str):
    @examples(0.04)
    @given(cases(**TINY), st.sampled_from(ASKED))
    def body(case: Case, asked: str) -> None:
        check(case, kind, (asked,))

    body()


def test_everything_of_a_small_problem():
    check(several_tiles(9, 34, causal=True, query_offset=20, sinks=np.zeros(2)), "cuts")


@pytest.mark.gate
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_problems(kind: str):
    @examples(0.15)
    @given(cases(**TINY))
    def body(case: Case) -> None:
        check(case, kind)

    body()


def several_tiles(queries: int = 70, keys: int = 75, dtype: Any = np.float64, **rules: Any) -> Case:
    rng = fresh()
    q, k, v = (
        rng.standard_normal((heads, n, d)).astype(dtype)
        for heads, n, d in ((2, queries, 5), (1, keys, 5), (1, keys, 4))
    )
    return Case(q, k, v, rules, int(rng.integers(2**31)))


LARGER: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "query_offset": 9},
    "sinks": {"sinks": np.arange(2.0), "window": (40, 20), "query_offset": 3},
    "mask": {"mask": np.arange(70)[:, None] % 7 != np.arange(75) % 5, "softcap": 2.0},
    "labels": {"query_segments": np.arange(70) // 33, "kv_segments": np.arange(75) // 33},
    "lengths": {"kv_lengths": 40, "query_lengths": 35, "alibi_slopes": np.ones(2) / 9},
}


@pytest.mark.gate
@pytest.mark.parametrize("rules", LARGER)
def test_problems_of_several_tiles(rules: str):
    check(several_tiles(**LARGER[rules]), str(fresh().choice(KINDS)))


@pytest.mark.parametrize("kind", ["cuts", pytest.param("contributions", marks=pytest.mark.gate)])
def test_products(kind: str):
    case = several_tiles(33, 35, np.dtype(fresh().choice(["float32", "float64"])), causal=True, query_offset=2)
    truth = Truth(case, kind)
    effects, dtype = matrix(case, truth, kind), case.q.dtype
    x, y = case.rng.standard_normal((35, 3)).astype(dtype), case.rng.standard_normal((33, 2)).astype(dtype)
    assert (np.abs(effects @ x - truth.effects[0] @ x) <= truth.allowed[0] @ np.abs(x) + 1e-6).all()
    turned, allowed = (e[0].swapaxes(-1, -2) for e in (truth.effects, truth.allowed))
    assert (np.abs(effects.T @ y - turned @ y) <= allowed @ np.abs(y) + 1e-6).all()


def test_an_operand_that_is_not_finite_reaches_only_those_that_see_its_key_and_keeps_its_sign():
    rng = fresh()
    q, k, v, g = (rng.standard_normal((6, 3)) for _ in range(4))
    effects = ch.AttentionMatrix(q, k, causal=True, engine="triton").cuts(v, g)
    x = np.ones(6)
    x[3] = np.inf
    result = effects @ x
    assert np.isfinite(result[:3]).all()
    np.testing.assert_array_equal(result[3:], np.sign(effects[3:, 3]) * np.inf)


def test_digits_where_one_key_has_nearly_all_the_weight():
    rng = fresh()
    q, k = np.ones((4, 1)), np.concatenate([rng.uniform(0, 1, (6, 1)), [[32.0]]])
    v, g = rng.standard_normal((7, 3)), rng.standard_normal((4, 3))
    for rules in ({}, {"sinks": 1.0}):
        case = Case(q, k, v, {**rules, "scale": 1.0}, 0)
        truth = reference.cuts(case.problem, case.book, case.given.v, g[None, None])[0, 0]
        result = case.matrix(engine="triton").cuts(v, g)
        np.testing.assert_allclose(result[...], truth, 1e-9)


def test_values_wider_than_a_tile_and_keys_split_among_programs(monkeypatch: pytest.MonkeyPatch):
    for module in (causes, column_pass):
        monkeypatch.setattr(module, "WIDTH", 16)
    for name, size in (("LONG", 32), ("SPLIT", 32), ("SPLITS", 4)):
        monkeypatch.setattr(row_pass, name, size)
    rng = fresh()
    q, k, v = rng.standard_normal((3, 5)), rng.standard_normal((90, 5)), rng.standard_normal((90, 37))
    case = Case(q, k, v, {"causal": True, "query_offset": 80, "sinks": 0.5}, int(rng.integers(2**31)))
    assert row_pass.split_of(case.problem, 1) == 32
    check(case, "cuts", ("by_query", "top", "strongest"))
    truth = Truth(case, "cuts")
    x = rng.standard_normal((90, 20))
    np.testing.assert_allclose(matrix(case, truth, "cuts") @ x, truth.effects[0, 0] @ x, 1e-9, 1e-9)


def test_norms_and_spans():
    rng = fresh()
    q, k, v = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (8, 9, 9))
    result, truth = (ch.AttentionMatrix(q, k, engine=engine) for engine in ("triton", "portable"))
    output = rng.standard_normal((8, 5)).astype(np.float32)
    for given_output in (None, output):
        one, other = (a.contributions(v, output=given_output)[...] for a in (result, truth))
        np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    g, labels = rng.standard_normal((2, 8, 4)).astype(np.float32), (np.arange(8) // 3, np.arange(9) // 4 - 1)
    one, other = (a.cuts(v, g).spans(*labels) for a in (result, truth))
    np.testing.assert_allclose(one, other, 1e-4, 1e-4)


def test_answers_stay_on_the_device():
    rng = fresh()
    q, k, v, g = (rng.standard_normal((2, 2, 7, 4)) for _ in range(4))

    def there(x: Array) -> Any:
        return DeviceArray(torch.from_numpy(x))

    result = ch.AttentionMatrix(*map(there, (q, k)), causal=True).cuts(there(v), there(g))
    truth = ch.AttentionMatrix(q, k, causal=True, engine="portable").cuts(v, g)
    labels = np.arange(7) // 2, np.arange(7) // 3
    local, expected = (x.observe(by_query=True, top=2, strongest=3, groups=labels) for x in (result, truth))
    for x, y in (
        *zip(local.strongest, expected.strongest, strict=True), *zip(local.top, expected.top, strict=True),
        (local.by_query, expected.by_query), (local.groups, expected.groups), (result[1, :, ::-2], truth[1, :, ::-2]),
        (result[..., 2:5], truth[..., 2:5]), (result.spans(*labels), truth.spans(*labels)),
        (result @ there(v), truth @ v), (result.T @ there(g), truth.T @ g),
    ):  # fmt: skip
        assert isinstance(x, DeviceArray)
        np.testing.assert_allclose(x.tensor.numpy(), y, 1e-9, 1e-12)
    norms, expected = (
        ch.AttentionMatrix(*arrays[:2], engine=engine).contributions(arrays[2]).by_key()
        for arrays, engine in ((tuple(map(there, (q, k, v))), "triton"), ((q, k, v), "portable"))
    )
    np.testing.assert_allclose(norms.tensor.numpy(), expected, 1e-9)
