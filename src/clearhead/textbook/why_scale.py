"""Why scores are divided by √d_k, in numbers: the variance of q·k, and the derivative of a softmax that saturates."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import Array
from clearhead.core.room import check_room
from clearhead.core.rule_values import read_members, read_numbers, whole_number
from clearhead.digits import significant
from clearhead.errors import RuleError, SelectionError, ShapeError
from clearhead.textbook.page import lesson
from clearhead.textbook.trace import listed
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, read_language, say, slider_words

WIDTHS = (1, 4, 16, 64, 256)
EDGE = 40  # where the page's histograms of scores end
_DRAWN = 32  # keys
_PARTS = (("scores", "variance"), ("weights", "largest"), ("slopes", "slope"))


class WhyScale(NamedTuple):
    """Random queries and keys of several widths; arrays are (widths, …), means over the queries but for variances.

    The slope of a query is a(1 - a) for its largest weight a: what a changes by with its own score.
    """

    d_k: Array
    variance: Array  # of q·k: d_k, but for the luck of the draw
    scaled_variance: Array  # of q·k/√d_k: 1
    largest: Array  # weight, where scores are not divided
    slope: Array
    scaled_largest: Array  # where they are divided by √d_k
    scaled_slope: Array
    histogram: Array  # (widths, 2, 80): the share of q·k, and of q·k/√d_k, in each unit from -40 to 40
    ranked: Array  # (widths, 2, keys): weights from the largest to the smallest
    slopes: Array  # (widths, 2, keys): and a(1 - a) of each

    def to_json(self) -> dict[str, Any]:
        """The arrays as lists, by name."""
        return {name: listed(array) for name, array in self._asdict().items()}

    def save(self, path: str | os.PathLike[str], language: Language = "en", *, queries: int = 1000) -> None:
        """Write the page with a slider over the widths.

        queries   how many were drawn, for the sentences

        Raises FileError, RuleError for another language or number of queries, SelectionError where there is no width.
        """
        if not len(self.d_k):
            raise SelectionError("there is no width to show.", "why_scale((1, 4, 16)), for example.")
        whole_number("queries", queries, 0)
        page.write(path, lambda: self._document(read_language(language), queries))

    def _document(self, language: Language, queries: int) -> Document:
        values = {"edge": EDGE, "queries": f"{queries:,}", "keys": self.ranked.shape[-1]}
        now = [f"dₖ = {d_k}, √dₖ = {significant(d_k**0.5)}" for d_k in self.d_k.tolist()]
        words: dict[str, Any] = {}
        for each in LANGUAGES:  # of each part its heading, the name of its number, and what stands below it
            said = {key: say(each, f"scale {key}", **values) for key in ("title", "says", "means")}
            named = [[say(each, f"scale {key}", **values) for key in names] for names in _PARTS]
            named[0] += [f"−{EDGE}", "0", f"{EDGE}"]
            words[each] = {**said, "parts": named, "columns": ["q·k", "q·k / √dₖ"], "now": now}
            words[each] |= slider_words(each, "d_k")
        peaks = self.histogram.max(axis=-1, keepdims=True)
        histogram, variances = self.histogram / np.where(peaks > 0, peaks, 1), (self.variance, self.scaled_variance)
        pictures = (
            ("plain", histogram, np.stack(variances, 1)),
            ("weights", self.ranked[..., :_DRAWN], self.ranked[..., 0]),
            ("value", 4 * self.slopes[..., :_DRAWN], self.slopes[..., 0]),
        )
        parts = [{"role": role, "bars": listed(bars), "shown": listed(shown)} for role, bars, shown in pictures]
        return lesson("scale", {"parts": parts, "words": words}, language, {})


class Saturation(NamedTuple):
    """One query's weights while its scores are multiplied by growing factors."""

    factors: Array  # (factors,)
    weights: Array  # (factors, keys): softmax of factor·scores
    slopes: Array  # (factors, keys): ∂a_j/∂s_j = a_j(1 - a_j), s_j being the multiplied score


def why_scale(widths: Sequence[int] = WIDTHS, *, keys: int = 16, queries: int = 1000, seed: int = 0) -> WhyScale:
    """The variance of q·k and the softmax of it, with and without 1/√d_k, for queries and keys of several widths d_k.

    widths          the values of d_k
    keys, queries   each query has this many keys of its own; more queries make the numbers steadier
    seed            of the random numbers, which are independent with mean 0 and variance 1

    Returns plain arrays, the same for the same seed; those of a width do not depend on the other widths. Raises
    SelectionError or RuleError for anything but whole numbers, SizeError for more than the memory.
    O(queries·keys·d_k) for each width.
    Source: Vaswani et al. 2017, section 3.2.1, footnote 4: then q·k = Σ q_c·k_c has mean 0 and variance d_k.

    >>> scale = why_scale((4, 64))
    >>> scale.variance.round().tolist(), scale.scaled_variance.round(1).tolist()
    ([4.0, 64.0], [1.0, 1.0])
    """
    members = read_members("widths", widths, (int, np.integer), "whole numbers", "widths=(1, 64)")
    sizes = [whole_number("widths", width, 1) for width in members]
    keys, queries = whole_number("keys", keys, 1), whole_number("queries", queries, 1)
    seed = whole_number("seed", seed, 0)
    check_room("the queries and keys", 16 * queries * (keys + 1) * max(sizes, default=0), "give smaller widths.")
    drawn = [_one_width(np.random.default_rng((seed, d_k)), d_k, keys, queries) for d_k in sizes]
    shapes = ((2,), (2, 2 * EDGE), (2, keys), (2, keys))
    by_part = [[each[part] for each in drawn] for part in range(len(shapes))]
    parts = [np.array(part).reshape(-1, *shape) for part, shape in zip(by_part, shapes, strict=True)]
    variance, histogram, ranked, slopes = parts
    return WhyScale(
        d_k=np.array(sizes),
        variance=variance[:, 0],
        scaled_variance=variance[:, 1],
        largest=ranked[:, 0, 0],
        slope=slopes[:, 0, 0],
        scaled_largest=ranked[:, 1, 0],
        scaled_slope=slopes[:, 1, 0],
        histogram=histogram,
        ranked=ranked,
        slopes=slopes,
    )


def saturation(scores: Any = (2.0, 1.0, 0.0), factors: Any = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)) -> Saturation:
    """The softmax of one query's scores, multiplied by each factor, and the derivative of each weight by its own score.

    The larger the scores, the nearer the largest weight is to 1 and the nearer every derivative a(1 - a) is to 0: the
    softmax saturates, and the query no longer learns.

    scores    (keys,)
    factors   (factors,)

    Raises ShapeError where these are no lists, DtypeError where they hold no numbers, RuleError for one that is NaN or
    infinite. O(factors·keys).

    >>> saturation((0.0, 0.0), (1.0,)).slopes.tolist()
    [[0.25, 0.25]]
    """
    scores, factors = _list("scores", scores), _list("factors", factors)
    weights = _softmax(factors[:, None] * scores)
    return Saturation(factors, weights, weights * (1 - weights))


def _one_width(rng: np.random.Generator, d_k: int, keys: int, queries: int) -> tuple[Array, ...]:
    """For q·k and for q·k/√d_k: the variance, the histogram, the weights by rank, and the derivative of each."""
    q, k = rng.standard_normal((queries, 1, d_k)), rng.standard_normal((queries, keys, d_k))
    scores = (q * k).sum(axis=-1)
    both = np.stack([scores, scores / np.sqrt(d_k)])
    weights = -np.sort(-_softmax(both), axis=-1)
    counts = [np.histogram(logits, 2 * EDGE, (-EDGE, EDGE))[0] / scores.size for logits in both]
    variances = scores.var() / np.array([1, d_k])
    return variances, np.array(counts), weights.mean(axis=1), (weights * (1 - weights)).mean(axis=1)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=-1, keepdims=True)


def _list(name: str, value: Any) -> Array:
    array = read_numbers(name, as_rule_array(value, name)).astype(np.float64)
    if array.ndim != 1 or not array.size:
        raise ShapeError(
            "{name} has shape {shape}: expected a list of numbers.", "{name}=[2.0, 1.0]", name=name, shape=array.shape
        )
    if not np.isfinite(array).all():
        raise RuleError("{name} holds NaN or infinity: expected finite numbers.", name=name)
    return array
