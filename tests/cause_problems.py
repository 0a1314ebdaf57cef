"""Problems with values and a derivative g, and how far contributions and cuts of them may lie from the reference."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, visibility
from clearhead.core.axes import Array
from clearhead.ops.causes import EffectMatrix
from problems import LAYOUTS, Case
from problems import each_engine as on_each_engine
from slack import Slack, assert_close

ENGINES = [name for name in engines.NAMES if hasattr(engines.get(name), "others")]
EVERYTHING: dict[str, Any] = {"by_key": True, "by_query": True, "top": 3, "strongest": 7, "image": (5, 6)}
each_engine = on_each_engine(ENGINES)


@dataclass(frozen=True)
class Causes:
    """A case with g, (…, heads, queries, d_v), and the reference's dense effects."""

    case: Case

    @cached_property
    def g(self) -> Array:
        rng, problem = self.case.rng, self.case.problem
        g = rng.standard_normal((*problem.prefix, problem.queries, self.case.v.shape[-1])).astype(self.case.v.dtype)
        return LAYOUTS[sorted(LAYOUTS)[rng.integers(len(LAYOUTS))]](g)

    def made(self, kind: str, **changes: Any) -> EffectMatrix:
        return effects(self.case.matrix(**changes), kind, self.case.v, self.g)

    @property
    def four(self) -> tuple[Array, Array]:
        """Values and g, each (batch, heads, …)."""
        problem = self.case.problem
        return self.case.given.v, self.g.reshape(problem.batch, problem.heads, *self.g.shape[-2:])

    def truth(self, kind: str) -> Array:
        """(batch, heads, queries, keys) in float64."""
        if kind == "cut":
            return cuts_anew(self.case.book, *self.four)
        result = definition.contributions(self.case.book, along(*self.four))
        if kind == "contribution" or self.case.problem.sinks is not None or not result.size:
            return result if kind == "contribution" else -result
        v, g = (x.astype(np.float64) for x in self.four)
        first = np.repeat(v[:, :, :1], self.case.problem.heads // max(1, v.shape[1]), axis=1) * g
        return self.case.book.weights * first.sum(-1, keepdims=True) - result

    @cached_property
    def allowed(self) -> Array:
        """The error of each effect, (batch, heads, queries, keys): relative to its weight, and to what it moves.

        An effect is at most a/(1 - a) ≤ 2a, or a for a row's largest weight, times the difference of two means of t.
        """
        slack, (v, g) = Slack(self.case), (np.abs(x.astype(np.float64)) for x in self.four)
        values = np.repeat(v, self.case.problem.heads // max(1, v.shape[1]), axis=1)
        moving = visibility.dense(self.case.problem) | (np.arange(v.shape[2]) == 0)
        moved = np.where(moving, g @ values.swapaxes(-1, -2), 0.0)
        largest: Array = 8 * slack.weights * (1e-30 + moved.max(axis=-1, initial=0.0, keepdims=True))
        return largest + slack.tiny


def along(v: Array, g: Array) -> Array:
    """g_i·v_j in float64, (batch, heads, queries, keys)."""
    result: Array = definition.product(g.astype(np.float64), v.astype(np.float64).swapaxes(-1, -2))
    return result


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def cuts_anew(book: definition.Matrix, v: Array, g: Array) -> Array:
    """What g_i·o_i changes by when query i may not see key j: each edge is forbidden, and its row computed again."""
    terms, result = along(v, g), np.zeros(book.masked.shape)
    for j in range(result.shape[-1]):
        seen = ~np.isneginf(book.masked[..., j])
        masked = book.masked.copy()
        masked[..., j] = -np.inf
        left = definition.softmax(masked, book.block.sinks)[1]
        others = np.delete(np.arange(result.shape[-1]), j)
        # g·o' - g·o, in which the others' weights grow by a' - a = a'·a_j: so no digits cancel
        more = left[..., others] * book.weights[..., j, None] * terms[..., others]
        more = np.where(np.isneginf(masked[..., others]), 0.0, more).sum(axis=-1)
        result[..., j] = np.where(seen, more - book.weights[..., j] * terms[..., j], 0.0)
    return result


def effects(A: ch.AttentionMatrix, kind: str, v: Any, g: Any) -> EffectMatrix:
    if kind == "contribution":
        return A.contributions(v, g)
    return A.cut_effects(v, g, rest="first" if kind == "moved" else "renormalise")


def check_elements(engine: str, case: Case, kind: str, index: Any = ...) -> None:
    """The effects are the reference's, also where they are indexed and multiplied."""
    causes = Causes(case)
    E, truth, allowed = causes.made(kind, engine=engine), case.restore(causes.truth(kind)), case.restore(causes.allowed)
    assert (E.shape, E.dtype, E.kind) == (case.matrix().shape, case.matrix().dtype, kind)
    dense = np.asarray(E)
    assert dense.dtype == E.dtype
    assert_close(dense, truth, allowed, "dense")
    assert_close(E[index], truth[index], allowed[index], "indexed")
    problem, adding = case.problem, Slack(case).eps * np.sqrt(sum(E.shape[-2:]))
    x = case.rng.standard_normal((problem.keys, 2)).astype(case.q.dtype)
    y = case.rng.standard_normal((*problem.prefix, problem.queries, 3))
    for result, left, right, within in (
        (E @ x, truth, x.astype(np.float64), allowed + adding * np.abs(truth)),
        (E.T @ y, truth.swapaxes(-1, -2), y, (allowed + adding * np.abs(truth)).swapaxes(-1, -2)),
    ):
        assert result.dtype == E.dtype
        assert_close(result, left @ right, within @ np.abs(right), "product")


def check_observed(engine: str, case: Case, kind: str, pixels: tuple[int, int] = (3, 4)) -> None:
    """What is observed is NumPy's answer to the reference's effects."""
    causes, labels = Causes(case), case.labels()
    E, truth, allowed = causes.made(kind, engine=engine), causes.truth(kind), causes.allowed
    seen = E.observe(**{**EVERYTHING, "image": pixels}, groups=labels)
    rough = allowed + Slack(case).eps * np.sqrt(sum(E.shape[-2:])) * np.abs(truth)
    for axis, result in ((-2, seen.by_key), (-1, seen.by_query)):
        assert_close(result, case.restore(truth.sum(axis)), case.restore(rough.sum(axis)), f"sum over {axis}")
    problem = case.problem
    rows, cols = (
        np.broadcast_to(x, (*problem.prefix[:-1], n)).reshape(problem.batch, n)
        for x, n in zip(labels, E.shape[-2:], strict=True)
    )
    book, within = (definition.Matrix(**{**vars(case.book), "weights": x}) for x in (truth, rough))
    grouped = [case.restore(definition.groups(one, rows, cols)) for one in (book, within)]
    assert_close(seen.groups, *grouped, "groups")
    if 0 not in E.shape:
        mean = case.restore(definition.image(book, *pixels)), case.restore(definition.image(within, *pixels))
        edges = Slack(case).eps * sum((*pixels, *E.shape[-2:])) * np.abs(truth).max()
        assert_close(seen.image, mean[0], mean[1] + edges, "image")
    assert_ranked(case, seen.top, truth, allowed)
    edges = seen.strongest
    visible = np.broadcast_to(visibility.dense(problem), truth.shape)
    count = min(EVERYTHING["strongest"], visible.sum())
    assert [len(part) for part in edges] == [count] * 5
    place = edges.batch, edges.head, edges.query, edges.key
    assert visible[place].all()
    assert len({*zip(*(x.tolist() for x in place), strict=True)}) == count
    assert_close(edges.value, truth[place], allowed[place], "strongest")
    best = np.argsort(-np.abs(truth[visible]))[:count]
    assert_close(np.abs(edges.value), np.abs(truth[visible])[best], allowed.max(initial=0), "strongest")


def assert_ranked(case: Case, result: Any, truth: Array, allowed: Array) -> None:
    """The values are the first ones by magnitude, and the keys are distinct, visible and have these values."""
    values, keys = (x.reshape(*truth.shape[:-1], x.shape[-1]) for x in result)
    count = keys.shape[-1]
    visible = np.broadcast_to(visibility.dense(case.problem), truth.shape)
    by = -np.abs(truth)
    rank = np.argsort(np.where(visible, by, np.inf), axis=-1, kind="stable")[..., :count]
    rest = [(0, 0)] * 3 + [(0, count - rank.shape[-1])]
    number = np.pad(np.take_along_axis(visible, rank, -1), rest)
    np.testing.assert_array_equal(keys >= 0, number)
    np.testing.assert_array_equal(values[keys < 0], 0)
    if not truth.shape[-1]:
        return
    place = np.maximum(keys, 0)
    assert np.take_along_axis(visible, place, -1)[keys >= 0].all()
    assert_close(values, np.where(keys < 0, 0, np.take_along_axis(truth, place, -1)), allowed.max(-1, keepdims=True))
    expected = np.where(number, np.pad(np.take_along_axis(by, rank, -1), rest), 0)
    assert_close(-np.abs(values), expected, allowed.max(-1, keepdims=True), "order")
    ordered = np.sort(keys, axis=-1)
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
