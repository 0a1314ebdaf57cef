"""Why scores are divided by √d_k, in numbers: the variance of q·k, and the derivative of a softmax that saturates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.room import check_room
from clearhead.core.rule_values import read_members, read_numbers, whole_number
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.trace import listed

WIDTHS = (1, 4, 16, 64, 256)


class WhyScale(NamedTuple):
    """Random queries and keys of several widths; all arrays are (widths,), means over the queries but for variances.

    The slope of a query is a(1 - a) for its largest weight a: what a changes by with its own score.
    """

    d_k: Array
    variance: Array  # of q·k: d_k, but for the luck of the draw
    scaled_variance: Array  # of q·k/√d_k: 1
    largest: Array  # weight, where scores are not divided
    slope: Array
    scaled_largest: Array  # where they are divided by √d_k
    scaled_slope: Array

    def to_json(self) -> dict[str, Any]:
        """The arrays as lists, by name."""
        return {name: listed(array) for name, array in self._asdict().items()}


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

    Returns plain arrays, the same for the same seed. Raises SelectionError or RuleError for anything but whole numbers,
    SizeError for more than the memory. O(queries·keys·d_k) for each width.
    Source: Vaswani et al. 2017, section 3.2.1, footnote 4: then q·k = Σ q_c·k_c has mean 0 and variance d_k.

    >>> found = why_scale((4, 64))
    >>> found.variance.round().tolist(), found.scaled_variance.round(1).tolist()
    ([4.0, 65.0], [1.0, 1.0])
    """
    members = read_members("widths", widths, (int, np.integer), "whole numbers", "widths=(1, 64)")
    sizes = [whole_number("widths", width, 1) for width in members]
    keys, queries = whole_number("keys", keys, 1), whole_number("queries", queries, 1)
    rng = np.random.default_rng(whole_number("seed", seed, 0))
    check_room("the queries and keys", 16 * queries * (keys + 1) * max(sizes, default=0), "give smaller widths.")
    rows = [_one_width(rng, d_k, keys, queries) for d_k in sizes]
    return WhyScale(np.array(sizes), *np.array(rows).reshape(-1, 6).T)


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
    read = {name: _list(name, value) for name, value in (("scores", scores), ("factors", factors))}
    weights = _softmax(read["factors"][:, None] * read["scores"])
    return Saturation(read["factors"], weights, weights * (1 - weights))


def _one_width(rng: np.random.Generator, d_k: int, keys: int, queries: int) -> tuple[float, ...]:
    q, k = rng.standard_normal((queries, 1, d_k)), rng.standard_normal((queries, keys, d_k))
    scores = (q * k).sum(axis=-1)
    found = [float(scores.var()), float(scores.var()) / d_k]
    for logits in (scores, scores / np.sqrt(d_k)):
        largest = _softmax(logits).max(axis=-1)
        found += [float(largest.mean()), float((largest * (1 - largest)).mean())]
    return tuple(found)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=-1, keepdims=True)


def _list(name: str, value: Any) -> Array:
    array = read_numbers(name, np.asarray(value) if isinstance(value, (list, tuple)) else value).astype(np.float64)
    if array.ndim != 1 or not array.size:
        raise ShapeError(f"{name} has shape {array.shape}: expected a list of numbers.", f"{name}=[2.0, 1.0]")
    if not np.isfinite(array).all():
        raise RuleError(f"{name} holds NaN or infinity: expected finite numbers.")
    return array
