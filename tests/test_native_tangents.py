"""The native engine's derivatives along a direction: the same bits always, and nothing from what nobody sees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Problem, describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Kept, Upstream
from seeds import fresh

native: Any = engines.get("native")
portable: Any = engines.get("portable")
pytestmark = pytest.mark.skipif(bool(native.missing()), reason=native.missing())
Named = dict[str, Array]
Rules = dict[str, Any]
BFLOAT16 = ml_dtypes.bfloat16


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


class Question:
    """All that an engine answers along one direction, of numbers drawn once: heads 4, kv_heads 2."""

    def __init__(
        self, n: int, m: int, rules: Rules | None = None, dtype: Any = np.float32, d: int = 20, batch: int = 2
    ) -> None:
        rng = fresh()
        make = lambda *shape: normal(rng, *shape, dtype=dtype)  # noqa: E731
        self.q, self.k, self.v = make(batch, 4, n, d), make(batch, 2, m, d), make(batch, 2, m, d)
        self.rules = rules or {}
        self.along = Directions(make(batch, 4, n, d), make(batch, 2, m, d), make(batch, 2, m, d))
        if "bias" in self.rules:
            self.along = replace(self.along, bias=make(batch, 4, n, m))
        if "spans" in self.rules:
            self.along = replace(self.along, spans=make(batch, 4, *self.rules["spans"][2].shape[-2:]))
        if "sinks" in self.rules:
            self.along = replace(self.along, sinks=rng.standard_normal(4))
        self.g, self.g_moved = make(batch, 4, n, d), make(batch, 4, n, d)
        self.rows = [
            normal(rng, batch, 4, n, dtype=np.float64 if dtype == np.float64 else np.float32) for _ in range(6)
        ]
        self.groups = Groups(rng.integers(-1, 3, (batch, n)), rng.integers(-1, 4, (batch, m)), (3, 4))

    def problem(self, threads: int | None = None) -> Problem:
        return describe(self.q, self.k, self.v, self.rules, threads).problem

    def answers(self, engine: Any, threads: int | None = None) -> Named:
        """Every answer, by a name of its own."""
        problem, along = self.problem(threads), self.along
        want = Wanted(output=True, logsumexp=True, entropy=True, distance=True, own=True)
        found = dict(engine.tangents(problem, self.q, self.k, self.v, along, want))
        kept = Kept(found["logsumexp"], found["logsumexp_tangent"])
        arrays = problem, self.q, self.k, self.v
        again = engine.tangents(*arrays, along, want, kept.logsumexp)
        known = engine.tangents(*arrays, along, want, kept.logsumexp, found["output"])
        columns = Wanted(received=True, image=(3, 5), groups=self.groups)
        bias = (1, 4, problem.queries, problem.keys) if problem.bias is not None else None
        spans = None if problem.span_table is None else problem.span_table.shape
        rows, entropy, distance, own, more, rows_moved = self.rows
        given = Upstream(rows, self.g, None, entropy, distance, own, bias, spans)
        moving = Upstream(rows_moved, self.g_moved, None, more, None, rows, bias, spans)
        parts = {
            "again ": again,
            "known ": known,
            "columns ": engine.column_tangents(problem, self.q, self.k, along, kept, columns),
            "gradient ": engine.gradient_tangents(problem, self.q, self.k, self.v, along, kept, given, moving),
        }
        return found | {title + name: x for title, part in parts.items() for name, x in part.items()}


def spans_of(rng: np.random.Generator, n: int, m: int) -> tuple[Array, Array, Array]:
    table = rng.standard_normal((4, 3, 5))
    table[:, 0, 1] = -np.inf
    return rng.integers(-1, 3, n), rng.integers(-1, 5, m), table


def all_rules(n: int, m: int) -> Rules:
    rng = fresh()
    bias = rng.standard_normal((4, n, m))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    return {
        "bias": bias, "spans": spans_of(rng, n, m), "sinks": rng.standard_normal(4), "softcap": 3.0,
        "causal": True, "query_offset": m - n,
    }  # fmt: skip


def same_bits(found: Named, truth: Named) -> None:
    assert found.keys() == truth.keys()
    for name in truth:
        np.testing.assert_array_equal(found[name], truth[name], err_msg=name)


@pytest.mark.parametrize(
    ("n", "m", "rules"), [(300, 500, "few"), (300, 500, "all"), (2, 4500, "few"), (3, 2200, "all")]
)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_same_bits_with_any_number_of_threads(n: int, m: int, rules: str, dtype: Any):
    question = Question(n, m, all_rules(n, m) if rules == "all" else {"scale": -0.3}, dtype)
    truth = question.answers(native, 1)
    for threads in (2, 3):
        same_bits(question.answers(native, threads), truth)


@pytest.mark.parametrize(("n", "m"), [(2, 4500), (130, 2200), (20, 600)])
def test_long_rows_equal_the_portable_engine(n: int, m: int):
    question = Question(n, m, all_rules(n, m), np.float64)
    truth = question.answers(portable)
    for name, x in question.answers(native).items():
        scale = np.abs(truth[name]).max() + 1e-3
        np.testing.assert_allclose(x, truth[name], atol=1e-11 * scale, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("rules", ["few", "all"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_results_have_the_bits_of_the_row_pass(rules: str, dtype: Any):
    question = Question(150, 300, all_rules(150, 300) if rules == "all" else {}, dtype)
    problem, want = question.problem(), Wanted(output=True, logsumexp=True, entropy=True, distance=True, own=True)
    truth = native.rows(problem, question.q, question.k, question.v, want)
    found = native.tangents(problem, question.q, question.k, question.v, question.along, want)
    same_bits({name: found[name] for name in truth}, truth)


def test_a_row_with_all_its_weight_on_one_key_has_an_output_that_stays():
    """The tangents of logits cancel there, which what is rounded of them would not."""
    question = Question(40, 1, dtype=BFLOAT16)
    question.along = replace(question.along, v=None)
    found = question.answers(native)
    logits = np.abs(found["logsumexp_tangent"]).max()
    assert np.abs(found["output_tangent"].astype(np.float64)).max() < 1e-5 * logits * np.abs(question.v).max()


def in_other_strides(x: Array) -> Array:
    room = np.zeros((*x.shape[:-2], x.shape[-1] + 3, 2 * x.shape[-2]), x.dtype).swapaxes(-1, -2)
    room[..., ::2, 1:-2] = x
    return room[..., ::2, 1:-2]


def test_same_bits_with_any_strides():
    question = Question(70, 300, all_rules(70, 300))
    truth = question.answers(native)
    for name in ("q", "k", "v", "g", "g_moved"):
        setattr(question, name, in_other_strides(getattr(question, name)))
    along = question.along
    question.along = replace(along, **{name: in_other_strides(along.given[name]) for name in ("q", "k", "v", "bias")})
    same_bits(question.answers(native), truth)


def spoil(x: Array, at: tuple[Any, ...], rng: np.random.Generator) -> Array:
    """A copy with NaN and infinities there."""
    spoilt = x.copy()
    spoilt[at] = rng.choice(np.array([np.nan, np.inf, -np.inf]), spoilt[at].shape).astype(x.dtype)
    return spoilt


HIDING: dict[str, Callable[[int, int], Rules]] = {
    "kv_lengths": lambda n, m: {"kv_lengths": m - 30},
    "mask": lambda n, m: {"mask": np.arange(m) < m - 30},
    "bias": lambda n, m: {"bias": np.where(np.arange(m) < m - 30, 0.5, -np.inf) * np.ones((n, m))},
    "spans": lambda n, m: {
        "spans": (np.zeros(n, np.int64), (np.arange(m) >= m - 30).astype(np.int64), np.array([[0.5, -np.inf]]))
    },
}


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16])
def test_what_nobody_sees_changes_nothing(hiding: str, dtype: Any):
    check_unseen(native, hiding, 60, 290, dtype)


def check_unseen(engine: Any, hiding: str, n: int, m: int, dtype: Any, batch: int = 2) -> None:
    """The last 30 keys are hidden from all queries, and the last 10 queries see nothing."""
    rng = fresh()
    rules = HIDING[hiding](n, m) | {"query_lengths": n - 10, "softcap": 2.0}
    question = Question(n, m, rules, dtype, batch=batch)
    keys, queries = (..., slice(m - 30, None), slice(None)), (..., slice(n - 10, None), slice(None))
    along = question.along
    clean = {
        "k": zeroed(question.k, keys), "v": zeroed(question.v, keys), "q": zeroed(question.q, queries),
        "g": zeroed(question.g, queries), "g_moved": zeroed(question.g_moved, queries),
    }  # fmt: skip
    moving = {name: zeroed(along.given[name], queries if name == "q" else keys) for name in "qkv"}
    for name, x in clean.items():
        setattr(question, name, x)
    question.along = replace(along, **moving)
    truth = question.answers(engine)
    for name, x in clean.items():
        setattr(question, name, spoil(x, keys if name in "kv" else queries, rng))
    question.along = replace(
        along, **{name: spoil(x, queries if name == "q" else keys, rng) for name, x in moving.items()}
    )
    if along.bias is not None:
        question.along = replace(question.along, bias=spoil(along.bias, (..., slice(m - 30, None)), rng))
    found = question.answers(engine)
    for name in truth:
        mine, right = (x[name].astype(np.float64) for x in (found, truth))
        assert np.isfinite(right).all() or name == "logsumexp"
        scale = np.abs(np.where(np.isfinite(right), right, 0)).max()
        np.testing.assert_allclose(mine, right, 0, 1e-5 * scale + last_place(right, found[name].dtype), err_msg=name)
        if found[name].shape[2:3] == (n,) and name not in ("logsumexp", "gradient bias"):
            assert not found[name][:, :, n - 10 :].any(), name


def last_place(x: Array, dtype: Any) -> float:
    """By how much a number of two bytes may be rounded apart."""
    finite = np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0)
    return float(ml_dtypes.finfo(dtype).eps) * finite if dtype.itemsize == 2 else 0.0


def zeroed(x: Array, at: tuple[Any, ...]) -> Array:
    found = x.copy()
    found[at] = 0
    return found


def test_no_keys_and_no_queries():
    for n, m in ((0, 5), (5, 0), (0, 0)):
        found = Question(n, m).answers(native)
        for name, x in found.items():
            assert not np.where(np.isneginf(x), 0, x).any(), name
