"""Shows why scores are divided by √d_k: the variance of q·k, the softmax that saturates, and its gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.room import check_room
from clearhead.core.rule_values import read_members, whole_number
from clearhead.errors import SelectionError
from clearhead.textbook.computed import listed

WIDTHS = (1, 4, 16, 64, 256)


class WhyScale(NamedTuple):
    """Statistics of random queries and keys of several widths, for the softmax of q·k and that of q·k/√d_k.

    Arrays are (widths, 2, …), the 2 being without and with the scale; largest and slope are means over the queries.
    """

    d_k: Array  # (widths,)
    variance: Array  # (widths, 2): of q·k, about d_k, and of q·k/√d_k, about 1
    largest: Array  # (widths, 2): the largest weight
    slope: Array  # (widths, 2): a(1 - a), the largest weight's derivative by its score
    gradient: Array  # (widths, 2, 2): ‖∂a/∂q‖ of the largest weight: median and maximum over the queries

    def to_json(self) -> dict[str, Any]:
        """The arrays as lists, by name."""
        return {name: listed(array) for name, array in self._asdict().items()}


def why_scale(widths: Sequence[int] = WIDTHS, *, keys: int = 16, queries: int = 1000, seed: int = 0) -> WhyScale:
    """Measure the variance of q·k, its softmax and the gradients, without and with 1/√d_k, for some widths.

    widths          the values of d_k
    keys, queries   the number of queries, and of keys that each of them has; more queries give steadier numbers
    seed            the seed of the random numbers, which are independent with mean 0 and variance 1

    Returns a WhyScale; the same seed gives the same numbers, whatever the other widths are. Raises SelectionError or
    RuleError unless all are whole numbers and `widths` has one, SizeError if they do not fit in memory.
    O(queries·keys·d_k) for each width.
    Source: Vaswani et al. 2017, section 3.2.1, footnote 4: q·k = Σ q_c·k_c has mean 0 and variance d_k.

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


def _one_width(rng: "np.random.Generator", d_k: int, keys: int, queries: int) -> tuple[Array, ...]:
    """Compute a WhyScale's rows for one width; each query with its own keys is one head of the definition."""
    q, k = rng.standard_normal((queries, 1, d_k)), rng.standard_normal((queries, keys, d_k))
    calls = [describe(q, k, None, {"scale": scale}) for scale in (1.0, d_k**-0.5)]
    books = [definition.attend(call.problem, call.q, call.k) for call in calls]
    weights, logits = (np.stack([getattr(book, name)[0, :, 0] for book in books]) for name in ("weights", "masked"))
    norms = np.stack([_gradients(book, call.k) for book, call in zip(books, calls, strict=True)])
    largest = weights.max(axis=-1)
    middle = np.stack([np.median(norms, axis=-1), norms.max(axis=-1)], axis=-1)
    return logits.var(axis=(1, 2)), largest.mean(axis=1), (largest * (1 - largest)).mean(axis=1), middle


def _gradients(book: definition.Matrix, k: Array) -> Array:
    """‖∂a/∂q‖ for the largest weight a of every query, (queries,)."""
    largest = book.weights.max(axis=-1, keepdims=True)
    slopes = (np.arange(k.shape[-2]) == book.weights.argmax(axis=-1)[..., None]) - largest
    by_scores = definition.by_scores(book.block, book.capped, definition.by_logits(book, slopes))
    return np.asarray(np.linalg.norm(definition.product(by_scores, k), axis=-1)[0, :, 0])
