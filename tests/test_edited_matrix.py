"""A.cut, A.boost and A.tempered: their weights are those of a dense softmax of edited logits; copies, words."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, visibility
from clearhead.core.arrays import bfloat16, to_torch
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.definition import Matrix
from problems import Case, cases, examples
from seeds import fresh
from slack import assert_close

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)
FACTOR = 6.0  # times the rounding of a naive run, as in slack.py; dividing the rules' numbers rounds once more


@dataclass
class Dense:
    """The logits of a problem, (batch, heads, queries, keys), and what edits make of them."""

    case: Case
    logits: Array = field(init=False)
    seen: Array = field(init=False)
    sinks: Array | None = field(init=False)
    size: Array = field(init=False)  # the sum of the magnitudes behind each logit

    def __post_init__(self) -> None:
        problem, book = self.case.problem, self.case.book
        self.logits, self.seen, self.sinks = book.biased, visibility.dense(problem), problem.sinks
        q, k = (np.abs(x.astype(np.float64)) for x in (self.case.given.q, self.case.given.k))
        scores = q @ np.repeat(k, problem.heads // max(1, k.shape[1]), axis=1).swapaxes(-1, -2)
        self.size = abs(problem.scale)[:, None, None] * scores + np.abs(book.biased - book.capped)

    def cut(self, queries: Array, keys: Array) -> None:
        self.seen = self.seen & ~(queries[:, None] & keys)

    def boost(self, queries: Array, keys: Array, by: float) -> None:
        more = by * (queries[:, None] & keys)
        self.logits, self.size = self.logits + more, self.size + abs(more)

    def temper(self, t: float) -> None:
        self.logits, self.size = self.logits / t, self.size / t
        self.sinks = None if self.sinks is None else self.sinks / t

    def book(self) -> Matrix:
        shape = (*self.case.problem.prefix, *self.logits.shape[2:])
        rules: dict[str, Any] = {"scale": 1.0, "mask": np.broadcast_to(self.seen, self.logits.shape).reshape(shape)}
        rules |= {} if self.sinks is None else {"sinks": self.sinks}
        book = definition.from_scores(describe(self.case.q, self.case.k, None, rules).problem, self.logits)
        v = self.case.given.v.astype(np.float64)
        v = np.repeat(v, self.case.problem.heads // max(1, v.shape[1]), axis=1)
        return replace(book, block=self.case.book.block, output=book.weights @ v)

    def slack(self, book: Matrix) -> Array:
        """The error allowed of a row's logits, (batch, heads, queries)."""
        eps = float(np.finfo(F64 if self.case.problem.dtype == F64 else F32).eps)
        largest = np.where(self.seen, self.size, 0.0).max(-1, initial=0.0)
        lse = np.where(np.isneginf(book.logsumexp), 0.0, abs(book.logsumexp))
        return np.asarray(FACTOR * eps * (1 + np.maximum(largest, lse)))


def selection(rng: np.random.Generator, size: int) -> Any:
    """Some positions, in any form that chooses one at least; None where there is none."""
    if not size:
        return None
    some = rng.random(size) < rng.choice((0.1, 0.5, 0.9))
    start, stop = sorted(int(x) for x in rng.integers(-size - 2, size + 3, 2))
    forms: list[Any] = [
        None,
        int(rng.integers(-size, size)),
        np.int32(rng.integers(0, size)),
        [int(x) for x in rng.integers(-size, size, min(size, 3))],
        rng.integers(-size, size, (size + 1) // 2),
        range(int(rng.integers(size)), size),
        slice(start, stop, int(rng.integers(1, 4))),
        slice(None, None, -int(rng.integers(1, 4))),
        slice(int(rng.integers(0, size + 1)), None),
        some,
        some.tolist(),
        torch.from_numpy(some),
    ]
    form = forms[int(rng.integers(len(forms)))]
    return form if chosen(form, size).any() else None


def chosen(form: Any, size: int) -> Array:
    """NumPy's own reading of a selection, (size,)."""
    hit = np.full(size, form is None)
    if form is not None:
        hit[form if isinstance(form, slice) else np.asarray(form)] = True
    return hit


def edit(rng: np.random.Generator, matrix: ch.AttentionMatrix, dense: Dense) -> ch.AttentionMatrix:
    """One random edit of a matrix, and the same of its dense logits."""
    problem = dense.case.problem
    kind = rng.choice(("cut", "boost", "tempered"))
    if kind == "tempered":
        t = float(np.exp(rng.uniform(-1, 1)))
        dense.temper(t)
        return matrix.tempered(t)
    queries, keys = (selection(rng, size) for size in (problem.queries, problem.keys))
    rows, columns = chosen(queries, problem.queries), chosen(keys, problem.keys)
    if kind == "boost":
        by = float(rng.normal() * 3)
        dense.boost(rows, columns, by)
        return matrix.boost(keys, by=by, queries=queries)
    if queries is None and keys is None:
        return matrix
    dense.cut(rows, columns)
    return matrix.cut(queries, keys)


def expected(case: Case, dense: Dense, book: Matrix) -> dict[str, tuple[Array, Array]]:
    """Each statistic of the dense weights, and the error that rounding may add."""
    problem, logit, tiny = case.problem, dense.slack(book), float(np.finfo(case.problem.dtype).tiny)
    off = logit[..., None] * book.weights + tiny
    values = np.repeat(abs(case.given.v.astype(np.float64)), problem.heads // max(1, problem.kv_heads), axis=1)
    rows = definition.per_query(book)
    slack = {name: logit * abs(truth) + tiny for name, truth in rows.items()}
    slack |= {"logsumexp": logit, "max_logit": logit, "entropy": logit * (1 + rows["entropy"])}
    blurred = Matrix(**{**vars(book), "weights": off})
    labels = [x.reshape(prod(x.shape[:-1]), x.shape[-1]) for x in case.labels()]
    return {
        "output": (book.output, 2 * off @ values + tiny),
        **{name: (truth, slack[name]) for name, truth in rows.items()},
        "received": (definition.received(book), 2 * definition.received(blurred) + tiny),
        "peak": (definition.peak(book), definition.peak(blurred) + tiny),
        "image": (definition.image(book, 2, 3), 2 * definition.image(blurred, 2, 3) + 64 * logit.max(initial=0)),
        "groups": (definition.groups(book, *labels), 2 * definition.groups(blurred, *labels) + tiny),
    }


@examples(2)
@given(case=cases(dtypes=(F64, F32), most=1500), count=st.integers(1, 4))
def test_weights_and_statistics_are_those_of_the_edited_logits(case: Case, count: int):
    dense, matrix, problem, rng = Dense(case), case.matrix(), case.problem, case.rng
    for _ in range(count):
        matrix = edit(rng, matrix, dense)
    book = dense.book()
    logit, tiny = dense.slack(book), float(np.finfo(problem.dtype).tiny)
    off = logit[..., None] * book.weights + tiny
    mass = matrix[...].reshape(book.weights.shape)
    assert_close(mass, book.weights, off, "weights")
    asked: dict[str, Any] = dict.fromkeys(expected(case, dense, book), True) | {"top": 3, "image": (2, 3)}
    del asked["output"]
    seen = matrix.observe(case.v, **asked | {"groups": case.labels()})
    for name, (truth, allowed) in expected(case, dense, book).items():
        assert_close(getattr(seen, name).reshape(truth.shape), truth, 2 * allowed, name)
    assert_close((matrix @ case.v).reshape(book.output.shape), seen.output.reshape(book.output.shape), tiny, "A @ v")
    weights, places = (x.reshape(*mass.shape[:3], 3) for x in seen.top)
    held = np.take_along_axis(mass, np.maximum(places, 0), -1) if mass.size else np.zeros(places.shape)
    assert_close(weights, np.where(places < 0, 0, held), 2 * logit[..., None] * weights + tiny, "top")
    assert_close(weights, definition.top(book, 3)[0], 2 * logit[..., None] * weights + tiny, "top")
    g = rng.standard_normal((*problem.prefix, problem.queries, 2)).astype(problem.dtype)
    full = g.reshape(*mass.shape[:3], 2)
    truth = book.weights.swapaxes(-1, -2) @ full
    assert_close((matrix.T @ g).reshape(truth.shape), truth, 2 * off.swapaxes(-1, -2) @ abs(full) + tiny, "A.T @ g")


def _softmax(scores: torch.Tensor, sinks: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    whole = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(whole, -1)[..., :-1]


LIMITS = {torch.float64: {"rtol": 1e-9, "atol": 1e-9}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}


def loss(output: torch.Tensor, entropy: torch.Tensor, received: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    return (output**2).sum() + entropy.sum() + (received**2).sum() + turned.sum()


def test_gradients_are_those_of_pytorchs_softmax():
    """By q, k, v, a bias, sinks and a table of spans, through cut, boost and tempered in both orders."""
    rng = fresh()
    q, k, v = (torch.from_numpy(rng.standard_normal((2, 3, n, 5))) for n in (6, 7, 7))
    bias, sinks = torch.from_numpy(rng.standard_normal((3, 6, 7))), torch.from_numpy(rng.standard_normal(3))
    table = torch.from_numpy(rng.standard_normal((2, 3, 2, 4))).float()
    leaves = [x.requires_grad_() for x in (q, k, v, bias, sinks, table)]
    rows, columns = rng.integers(0, 2, 6), rng.integers(0, 4, (2, 7))
    t, some = 1.5, rng.random(6) < 0.6
    some[0] = True

    matrix = ch.AttentionMatrix(q, k, bias=bias, sinks=sinks, spans=(rows, columns, table))
    matrix = matrix.boost([0, -1], by=1.5, queries=some).tempered(t).cut(slice(2, 4), 3).boost(2, by=-0.5)
    seen = matrix.observe(v, entropy=True, received=True)
    loss(seen.output, seen.entropy, seen.received, matrix.T @ v[..., :6, :]).backward()
    result = [x.grad.clone() for x in leaves]

    more = table[torch.arange(2)[:, None, None], :, rows[:, None], columns[:, None, :]].movedim(-1, 1)
    dense = q @ k.mT / 5**0.5 + bias + more + 1.5 * torch.from_numpy(some)[:, None] * torch.eye(7)[[0, 6]].sum(0)
    visible = torch.ones(6, 7, dtype=torch.bool)
    visible[2:4, 3] = False
    a = _softmax(dense / t - 0.5 * torch.eye(7)[2], sinks / t, visible)
    entropy = -(a * torch.where(a > 0, a, 1.0).log()).sum(-1)
    for x in leaves:
        x.grad = None
    loss(a @ v, entropy, a.sum(-2), a.mT @ v[..., :6, :]).backward()
    np.testing.assert_allclose(seen.output.detach(), (a @ v).detach(), rtol=1e-10, atol=1e-12)
    for one, other in zip(result, (x.grad for x in leaves), strict=True):
        torch.testing.assert_close(one, other, **LIMITS[one.dtype])


def _unreachable(*args: Any) -> Any:
    raise AssertionError("an edit computes nothing")


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_an_edit_shares_q_and_k_and_computes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch):
    rng = fresh()
    q, k = (rng.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (500, 600))
    local = (q, k) if kind == "arrays" else (torch.from_numpy(q), torch.from_numpy(k))
    with monkeypatch.context() as patch:
        for name in engines.NAMES:
            for work in ("rows", "columns", "weights", "transposed"):
                patch.setattr(engines.get(name), work, _unreachable)
        matrix = ch.AttentionMatrix(*local).cut(slice(3, 40), [1, 7]).boost(9, by=2.0).tempered(1.5).cut(keys=-1)
    assert np.shares_memory(matrix.call.q, q)
    assert np.shares_memory(matrix.call.k, k)
    problem = matrix.call.problem
    assert problem.span_table.shape[2:] == (2, 4)  # cut or not; keys 1 and 7, 9, the last, all others
    assert type(matrix.logsumexp()) is type(local[0])


def test_a_given_logsumexp_is_not_that_of_an_edited_matrix():
    rng = fresh()
    q, k = (rng.standard_normal((9, 4)) for _ in range(2))
    known = ch.AttentionMatrix(q, k, causal=True).logsumexp()
    matrix = ch.AttentionMatrix(q, k, causal=True, logsumexp=known)
    for edited in (matrix.cut(keys=0), matrix.boost(1, by=2), matrix.tempered(2)):
        assert edited.known_state is None
        np.testing.assert_allclose(edited[...].sum(-1)[1:], 1.0, rtol=1e-12)
    np.testing.assert_array_equal(matrix.logsumexp(), known)
    before = matrix[...][1:, 1:]
    after = matrix.cut(keys=0)[...][1:, 1:]
    np.testing.assert_allclose(after, before / before.sum(-1, keepdims=True), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16], ids=str)
def test_numbers_of_a_bias_stay_finite_and_keep_their_precision(dtype: Any):
    """The lowest number of a dtype is many a library's mask: over t it is no -inf, which would empty a row."""
    rng = fresh()
    q, k = (rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    bias = np.zeros((3, 3), np.float32)
    bias[0, :] = bias[1, 0] = np.finfo(np.float32).min if dtype is np.float32 else -60000
    bias[1, 1], bias[2, 0] = rng.normal(), -np.inf
    bias = bias.astype(dtype)
    for x in (bias, to_torch(torch, bias)):
        local = (q, k) if x is bias else (torch.from_numpy(q), torch.from_numpy(k))
        matrix = ch.AttentionMatrix(*local, bias=x, engine="portable").tempered(0.3)
        logits = (q.astype(np.float64) @ k.T / 2 + bias.astype(np.float64)) / 0.3
        with np.errstate(under="ignore"):
            weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(np.asarray(matrix[1:]), weights[1:], rtol=1e-4, atol=1e-7)
        assert not matrix[2, 0]
        ones = np.ones((3, 1), np.float32) if x is bias else torch.ones(3, 1)
        np.testing.assert_allclose(np.asarray(matrix @ ones), 1.0, rtol=1e-5)


def test_a_bias_that_is_broadcast_is_divided_once():
    row = np.arange(5.0)
    q = np.zeros((3, 2, 4, 2))
    matrix = ch.AttentionMatrix(q, np.zeros((3, 2, 5, 2)), bias=np.broadcast_to(row, (3, 2, 4, 5))).tempered(2.0)
    bias = matrix.call.problem.bias
    assert bias.strides[:3] == (0, 0, 0)
    np.testing.assert_allclose(matrix[2, 1, 3], np.exp(row / 2) / np.exp(row / 2).sum(), rtol=1e-12)


@examples(0.5)
@given(case=cases(most=800))
def test_parts_of_edited_matrices(case: Case):
    matrix = case.matrix()
    for _ in range(2):
        matrix = edit(case.rng, matrix, Dense(case))
    if not matrix.call.problem.batch:
        return
    part, whole = matrix.part(0), matrix[(0,) * (matrix.ndim - 3)]
    assert repr(part).partition("after")[2] == repr(matrix).partition("after")[2]
    np.testing.assert_array_equal(part[...].reshape(whole.shape), whole)
    again = part.tempered(1.0).boost(None, by=0.0)
    np.testing.assert_allclose(np.asarray(again[...], np.float64), np.asarray(part[...], np.float64), rtol=1e-6)


def test_the_repr_says_what_was_edited_in_order():
    whole = ch.AttentionMatrix(np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)))
    made = whole.cut(slice(4, 8), 0).boost([1, -1], by=2).tempered(1.3).cut(keys=np.arange(5) > 2)
    kept = "AttentionMatrix(batch 2, heads 4, queries 6, keys 5) float64, never stored"
    assert repr(whole) == kept
    assert repr(made) == (
        f"{kept}, after cut(queries=4:8, keys=0), boost(keys=[1, 4], by=2.0), tempered(1.3), cut(keys=[3, 4])"
    )
    long = ch.AttentionMatrix(np.ones((2, 1, 40, 2)), np.ones((2, 1, 40, 2)))
    assert repr(long.cut(np.arange(40) % 2 == 0, slice(None, None, 3))).endswith(
        "after cut(queries=20 of 40, keys=::3)"
    )
