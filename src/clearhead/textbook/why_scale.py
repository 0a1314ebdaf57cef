"""Why scores are divided by √d_k, in numbers: the variance of q·k, a softmax that saturates, and its gradients."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.room import check_room
from clearhead.core.rule_values import read_members, whole_number
from clearhead.digits import significant
from clearhead.errors import SelectionError
from clearhead.textbook.computed import listed
from clearhead.textbook.page import lesson
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, read_language, say, slider_words

WIDTHS = (1, 4, 16, 64, 256)
EDGE = 40  # where the page's histograms of scores end
_DRAWN = 32  # keys
_PARTS = (("scores", "variance"), ("weights", "largest"), ("slopes", "slope"))


class WhyScale(NamedTuple):
    """Random queries and keys of several widths: the softmax of q·k, and beside it that of q·k/√d_k.

    Arrays are (widths, 2, …), means over the queries but for variance and gradient.
    """

    d_k: Array  # (widths,)
    variance: Array  # (widths, 2): of q·k, which is d_k but for the luck of the draw, and of q·k/√d_k, which is 1
    ranked: Array  # (widths, 2, keys): weights from the largest to the smallest
    slopes: Array  # (widths, 2, keys): a(1 - a) of each, what it changes by with its own score
    gradient: Array  # (widths, 2, 2): ‖∂a/∂q‖ of the largest weight: the median over the queries, and the largest
    histogram: Array  # (widths, 2, 80): the share of scores in each unit from -40 to 40

    @property
    def largest(self) -> Array:
        """The largest weight, (widths, 2)."""
        return self.ranked[..., 0]

    @property
    def slope(self) -> Array:
        """Its derivative by its own score, (widths, 2)."""
        return self.slopes[..., 0]

    def to_json(self) -> dict[str, Any]:
        """The arrays as lists, by name."""
        more = {"largest": self.largest, "slope": self.slope}
        return {name: listed(array) for name, array in (self._asdict() | more).items()}

    def save(self, path: str | os.PathLike[str], language: Language = "en", *, queries: int = 1000) -> None:
        """Write the page with a slider over the widths.

        queries   how many were drawn, for the sentences

        Raises FileError, RuleError for another language or number of queries.
        """
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
        pictures = (
            ("plain", self.histogram / np.where(peaks > 0, peaks, 1), self.variance),
            ("weights", self.ranked[..., :_DRAWN], self.largest),
            ("value", 4 * self.slopes[..., :_DRAWN], self.slope),
        )
        parts = [{"role": role, "bars": listed(bars), "shown": listed(shown)} for role, bars, shown in pictures]
        return lesson("scale", {"parts": parts, "words": words}, language, {})


def why_scale(widths: Sequence[int] = WIDTHS, *, keys: int = 16, queries: int = 1000, seed: int = 0) -> WhyScale:
    """The variance of q·k, its softmax and the gradients, without and with 1/√d_k, for queries and keys of some widths.

    widths          the values of d_k
    keys, queries   each query has this many keys of its own; more queries make the numbers steadier
    seed            of the random numbers, which are independent with mean 0 and variance 1

    Returns plain arrays, the same for the same seed; those of a width do not depend on the other widths. Raises
    SelectionError or RuleError for anything but whole numbers, at least one, SizeError for more than the memory.
    O(queries·keys·d_k) for each width.
    Source: Vaswani et al. 2017, section 3.2.1, footnote 4: then q·k = Σ q_c·k_c has mean 0 and variance d_k.

    >>> scale = why_scale((4, 64))
    >>> scale.variance.round(1).tolist()
    [[4.0, 1.0], [64.1, 1.0]]
    """
    members = read_members("widths", widths, (int, np.integer), "whole numbers", "widths=(1, 64)")
    sizes = [whole_number("widths", width, 1) for width in members]
    keys, queries = whole_number("keys", keys, 1), whole_number("queries", queries, 1)
    seed = whole_number("seed", seed, 0)
    if not sizes:
        raise SelectionError("widths is empty: there is nothing to show.", "why_scale((1, 4, 16)), for example.")
    check_room("the queries and keys", 16 * queries * (keys + 1) * max(sizes), "give smaller widths.")
    drawn = (_one_width(np.random.default_rng((seed, d_k)), d_k, keys, queries) for d_k in sizes)
    return WhyScale(np.array(sizes), *map(np.stack, zip(*drawn, strict=True)))


def _one_width(rng: np.random.Generator, d_k: int, keys: int, queries: int) -> tuple[Array, ...]:
    """The parts of a WhyScale for one width; every query, with keys of its own, is a head of the definition."""
    q, k = rng.standard_normal((queries, 1, d_k)), rng.standard_normal((queries, keys, d_k))
    calls = [describe(q, k, None, {"scale": scale}) for scale in (1.0, d_k**-0.5)]
    books = [definition.attend(call.problem, call.q, call.k) for call in calls]
    weights, logits = (np.stack([getattr(book, name)[0, :, 0] for book in books]) for name in ("weights", "masked"))
    norms = np.stack([_gradients(book, call.k) for book, call in zip(books, calls, strict=True)])
    ranked = -np.sort(-weights, axis=-1)
    counts = [np.histogram(each, 2 * EDGE, (-EDGE, EDGE))[0] / each.size for each in logits]
    middle = np.stack([np.median(norms, axis=-1), norms.max(axis=-1)], axis=-1)
    return logits.var(axis=(1, 2)), ranked.mean(axis=1), (ranked * (1 - ranked)).mean(axis=1), middle, np.array(counts)


def _gradients(book: definition.Matrix, k: Array) -> Array:
    """‖∂a/∂q‖ for the largest weight a of every query, (queries,)."""
    largest = book.weights.max(axis=-1, keepdims=True)
    slopes = (np.arange(k.shape[-2]) == book.weights.argmax(axis=-1)[..., None]) - largest
    by_scores = definition.by_scores(book.block, book.capped, definition.by_logits(book, slopes))
    return np.asarray(np.linalg.norm(definition.product(by_scores, k), axis=-1)[0, :, 0])
