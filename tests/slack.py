"""Tolerances derived from rounding: how far a result may lie from the reference.

A naive run in the statistics' dtype gets each logit wrong by about eps times the size of its terms, and so
each weight by that much relative to itself. Everything else is a sum of weights, times what multiplies them. FACTOR is
the one number allowed on top.
"""

import os
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from clearhead.core import definition, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from problems import Case

FACTOR = 4.0


class Slack:
    """The allowed error of every result for one problem, in the reference's axes (batch, heads, …).

    Any engine may round weights to bfloat16 before it multiplies, as processors multiply pairs of them; to float16 only
    the Triton engine, as a GPU multiplies halves by halves. Without a name it is the engine that a call would take.
    """

    def __init__(self, case: Case, engine: str | None = None) -> None:
        engine = engine or os.environ.get("CLEARHEAD_ENGINE")
        self.rounding_weights = (ml_dtypes.bfloat16, np.float16) if engine == "triton" else (ml_dtypes.bfloat16,)
        self.case, self.book, problem = case, case.book, case.problem
        self.eps = FACTOR * float(np.finfo(statistics_dtype(problem.dtype)).eps)
        self.tiny = float(np.finfo(statistics_dtype(problem.dtype)).tiny)  # an engine may flush what is smaller to zero
        self.logit = self.eps * (1 + _size(case))  # (batch, heads, queries): of each logit; relative, of each weight
        self.weights = self.logit[..., None] * self.book.weights + self.tiny

    def output(self, output_dtype: np.dtype[Any]) -> Array:
        values = np.abs(self.case.given.v.astype(np.float64))
        spread = np.repeat(values, self.case.problem.heads // max(1, values.shape[1]), axis=1)
        return self.product(spread, self.book.output, output_dtype)

    def product(self, spread: Array, truth: Array, output_dtype: np.dtype[Any]) -> Array:
        """For weights times an operand of magnitudes `spread`, (batch, heads, keys, columns)."""
        allowed = self.weights @ spread + rounding(truth, output_dtype)
        if output_dtype in self.rounding_weights:
            allowed = allowed + float(ml_dtypes.finfo(output_dtype).eps) * (self.book.weights @ spread) + self.tiny
        return allowed

    def row(self, name: str) -> Array:
        if name in ("logsumexp", "max_logit"):
            return self.logit
        if name == "entropy":
            return self.logit * (1 + definition.entropy(self.book))
        return self.logit * definition.per_query(self.book)[name] + self.tiny

    def image(self, weights: Array, height: int, width: int) -> Array:
        """A pixel's edges are rounded too: by eps times their position, which is eps · pixels of a pixel's width."""
        largest = weights.max(axis=(-1, -2), initial=0)[..., None, None]
        slack = definition.Matrix(**{**vars(self.book), "weights": self.logit.max(initial=0) * weights})
        return (
            definition.image(slack, height, width)
            + self.eps * (height + width + sum(weights.shape[-2:])) * largest
            + self.tiny
        )


def rounding(x: Array, dtype: np.dtype[Any]) -> Array:
    """The error that rounding x to `dtype` may add."""
    narrow = ml_dtypes.finfo(dtype)
    return float(narrow.eps) * np.abs(x) + float(narrow.smallest_subnormal)


def _size(case: Case) -> Array:
    """The largest sum of magnitudes behind any visible logit of a row, (batch, heads, queries)."""
    problem, inputs = case.problem, case.given
    keys = np.repeat(np.abs(inputs.k.astype(np.float64)), problem.heads // max(1, inputs.k.shape[1]), axis=1)
    size = abs(problem.scale)[:, None, None] * (np.abs(inputs.q.astype(np.float64)) @ keys.swapaxes(-1, -2))
    size = size + np.abs(case.book.biased - case.book.capped)  # bias, ALiBi and spans
    seen = np.where(visibility.dense(problem), size, 0.0)
    lse = np.where(np.isneginf(case.book.logsumexp), 0.0, np.abs(case.book.logsumexp))
    return np.asarray(np.maximum(seen.max(axis=-1, initial=0.0), lse))


def assert_close(actual: Array, expected: Array, allowed: Array, what: str = "") -> None:
    """Equal up to `allowed`; infinities and NaN must match exactly."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        close = same | (np.abs(actual - expected) <= np.broadcast_to(allowed, actual.shape))
    if not close.all():
        worst = tuple(map(int, np.unravel_index(np.argmin(close), close.shape)))
        limit = np.broadcast_to(allowed, actual.shape)[worst]
        raise AssertionError(
            f"{what}: {(~close).sum()} of {close.size} differ, at {worst} {actual[worst]!r} instead of "
            f"{expected[worst]!r}, where {limit!r} is allowed"
        )


def assert_rows(case: Case, seen: Any, top: int, engine: str | None = None, times: float = 1.0) -> None:
    """The output, every statistic of a query and the top weights are the reference's, up to `times` the rounding."""
    slack, restore = Slack(case, engine), case.restore
    for name, truth in definition.per_query(case.book).items():
        assert_close(getattr(seen, name), restore(truth), times * restore(slack.row(name)), name)
        assert getattr(seen, name).dtype == statistics_dtype(case.problem.dtype)
    assert_close(seen.output, restore(case.book.output), times * restore(slack.output(case.q.dtype)), "output")
    assert seen.output.dtype == case.q.dtype
    assert_top(case, seen.top, top, times)


def assert_top(case: Case, top: Any, count: int, times: float = 1.0) -> None:
    """The weights equal the reference's; the keys are distinct and visible, and have these weights."""
    book, slack = case.book, times * Slack(case).weights
    weights, indices = definition.top(book, count)
    result, places = (x.reshape(weights.shape) for x in top)
    allowed = np.take_along_axis(slack, np.maximum(indices, 0), -1) if book.weights.shape[-1] else 0
    assert_close(result, weights, allowed, "top weights")
    np.testing.assert_array_equal(places < 0, indices < 0)
    if book.weights.shape[-1]:
        held = np.where(places < 0, 0, np.take_along_axis(book.weights, np.maximum(places, 0), -1))
        assert_close(held, weights, allowed, "what lies at the top's keys")
    chosen = np.sort(places, axis=-1)
    assert not ((chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)).any()


def assert_columns(
    case: Case, seen: Any, queries: slice, pixels: tuple[int, int] | None, labels: tuple[Array, Array] | None = None
) -> None:
    """The column statistics, of which an image was asked for where there are pixels, and groups where labels."""
    slack, restore = Slack(case), case.restore
    chosen = np.isin(np.arange(case.problem.queries), np.arange(case.problem.queries)[queries])[:, None]
    book = replace(case.book, weights=case.book.weights * chosen)
    allowed = replace(case.book, weights=slack.weights * chosen)
    # so many additions round too, in an order that depends on the engine
    adding = slack.eps * np.sqrt(sum(book.weights.shape[-2:]))
    received = definition.received(book)
    within = definition.received(allowed) + adding * received
    assert_close(seen.received, restore(received), restore(within), "received")
    assert_close(seen.peak, restore(definition.peak(book)), restore(definition.peak(allowed)), "peak")
    if labels is not None:
        sides = ((labels[0], case.problem.queries), (labels[1], case.problem.keys))
        lead = case.problem.prefix[:-1]
        rows, cols = (np.broadcast_to(x, (*lead, n)).reshape(case.problem.batch, n) for x, n in sides)
        truth = definition.groups(book, rows, cols)
        within = definition.groups(allowed, rows, cols) + adding * truth
        assert_close(seen.groups, restore(truth), restore(within), "groups")
    if pixels is not None:
        some = case.book.weights[:, :, queries]
        picture = definition.image(replace(book, weights=some), *pixels)
        assert_close(seen.image, restore(picture), restore(slack.image(some, *pixels)), "image")
