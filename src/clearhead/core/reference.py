"""The definition: softmax(q·kᵀ/√d_k + …)·v in float64, written as the formulas are, and every statistic of it.

Nothing is optimised: every intermediate (batch, heads, queries, keys) is stored. All engines are tested against this
file.
"""

from dataclasses import dataclass, replace

import numpy as np

from clearhead.core import room, spans, visibility
from clearhead.core.axes import Array, group_size
from clearhead.core.problem import Problem
from clearhead.core.rule_values import within_range
from clearhead.core.rules import EVERYWHERE, check_supported
from clearhead.core.state import State

RULES = EVERYWHERE


@dataclass(frozen=True, eq=False)
class Textbook:
    """Every intermediate of attention, each (batch, heads, queries, keys) unless said."""

    scores: Array  # q·kᵀ
    scaled: Array  # scale·scores
    capped: Array  # c·tanh(scaled/c)
    biased: Array  # capped + bias - slope·|i - j| + table[query_spans[i], key_spans[j]]
    masked: Array  # biased, -inf where a query may not see a key
    state: State  # m, the largest of masked and the sink, and ln(Σ exp(masked - m) + exp(sink - m))
    weights: Array  # exp((masked - m) - log_sum)
    output: Array | None  # (batch, heads, queries, d_v): weights·v

    @property
    def logsumexp(self) -> Array:
        """(batch, heads, queries): ln(Σ exp(masked) + exp(sink))."""
        return np.asarray(self.state.logsumexp)


def check_room(weights: int, steps: int = 0) -> None:
    """Raise SizeError where the intermediates of so many weights exceed free memory.

    Four are always kept in float64 (scores, scaled scores, masked scores, weights), and a fifth is temporary; `steps`
    is how many more the rules in use add.
    """
    room.check_room(
        "every step of {weights:,} weights in float64",
        weights * 8 * (5 + steps),
        "fewer tokens, or ch.AttentionMatrix(q, k), which stores no weights.",
        weights=weights,
    )


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def attend(problem: Problem, q: Array, k: Array, v: Array | None = None) -> Textbook:
    """Attention in float64, with every intermediate between its inputs and its output.

    q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v (batch, kv_heads, keys, d_v) or None. Raises
    SizeError, before any work, where it does not fit in memory, and RuleError as `from_scores`.
    O(batch·heads·queries·keys·(d_k + d_v)) time, O(batch·heads·queries·keys) memory.
    """
    more = (problem.softcap is not None) + (problem.bias is not None) + 2 * (problem.alibi_slopes is not None)
    more += 2 * (problem.span_table is not None)
    check_room(problem.batch * problem.heads * problem.queries * problem.keys, more)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            size, hint = room.array_bytes(x.shape, 8), "give fewer tokens or columns."
            room.check_room("{name} in float64", size, hint, name=name)
    k = _per_query_head(problem, k.astype(np.float64))
    book = from_scores(problem, q.astype(np.float64) @ k.swapaxes(-1, -2))
    if v is None:
        return book
    values = _per_query_head(problem, v.astype(np.float64))
    return replace(book, output=mix(book.weights, values, visibility.dense(problem)))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def from_scores(problem: Problem, scores: Array) -> Textbook:
    """All intermediates from the scores q·kᵀ, (batch, heads, queries, keys), to the weights; the output is None.

    Raises RuleError for a rule that the reference does not implement.
    """
    check_supported("the reference", RULES, problem.active_rules())
    scaled = problem.scale[:, None, None] * scores
    capped = scaled if problem.softcap is None else problem.softcap * np.tanh(scaled / problem.softcap)
    biased = capped
    if problem.bias is not None:
        biased = biased + within_range(problem.bias)
    if problem.alibi_slopes is not None:
        biased = biased - problem.alibi_slopes[:, None, None] * all_distances(problem)
    if problem.span_table is not None:
        biased = biased + added_by_spans(problem)
    masked = np.where(visibility.dense(problem), biased, -np.inf)
    return Textbook(scores, scaled, capped, biased, masked, *_softmax(masked, problem.sinks), None)


def per_query(problem: Problem, book: Textbook) -> dict[str, Array]:
    """Every statistic that is one number per query, (batch, heads, queries), by name."""
    return {
        "logsumexp": book.logsumexp,
        "max_logit": max_logit(book),
        "entropy": entropy(book),
        "distance": distance(problem, book),
        "diagonal": diagonal(problem, book),
    }


def max_logit(book: Textbook) -> Array:
    """max_j s_ij, (batch, heads, queries); -inf where a query sees nothing."""
    return book.masked.max(axis=-1, initial=-np.inf)


def entropy(book: Textbook) -> Array:
    """-Σ_j a_ij ln a_ij in nats, (batch, heads, queries)."""
    positive = np.where(book.weights > 0, book.weights, 1.0)
    return -np.sum(book.weights * np.log(positive), axis=-1)


def distance(problem: Problem, book: Textbook) -> Array:
    """Σ_j a_ij |position of i - j|, (batch, heads, queries)."""
    return np.sum(book.weights * all_distances(problem), axis=-1)


def diagonal(problem: Problem, book: Textbook) -> Array:
    """a_ij of the key j at the position of query i, (batch, heads, queries); 0 where there is none."""
    return np.where(all_distances(problem) == 0, book.weights, 0.0).sum(axis=-1)


def top(book: Textbook, count: int) -> tuple[Array, Array]:
    """The strongest weights and their keys, (batch, heads, queries, count); 0 and -1 where fewer are visible."""
    order = np.argsort(-book.masked, axis=-1, kind="stable")[..., :count]
    weights = np.take_along_axis(book.weights, order, axis=-1)
    order = np.where(np.isneginf(np.take_along_axis(book.masked, order, axis=-1)), -1, order)
    missing = [(0, 0)] * 3 + [(0, count - order.shape[-1])]
    return np.pad(weights, missing), np.pad(order, missing, constant_values=-1)


def received(book: Textbook) -> Array:
    """Σ_i a_ij, (batch, heads, keys)."""
    return book.weights.sum(axis=-2)


def peak(book: Textbook) -> Array:
    """max_i a_ij, (batch, heads, keys); 0 for a key that no query may attend to."""
    return book.weights.max(axis=-2, initial=0.0)


def image(book: Textbook, height: int, width: int) -> Array:
    """The matrix as a picture, (batch, heads, height, width): each pixel is the mean of the weights over its area."""
    queries, keys = book.weights.shape[-2:]
    return _areas(height, queries) @ book.weights @ _areas(width, keys).T


def groups(book: Textbook, query_groups: Array, key_groups: Array) -> Array:
    """Σ of a_ij between labelled spans, (batch, heads, query groups, key groups); labels below 0 belong to none."""
    rows = np.arange(query_groups.max(initial=-1) + 1)[:, None] == query_groups[..., None, None, :]
    cols = np.arange(key_groups.max(initial=-1) + 1)[:, None] == key_groups[..., None, None, :]
    return rows.astype(np.float64) @ book.weights @ cols.swapaxes(-1, -2).astype(np.float64)


def contributions(problem: Problem, book: Textbook, v: Array, g: Array) -> Array:
    """a_ij·(g_i·v_j), for v (batch, kv_heads, keys, d_v) and g (batch, heads, queries, d_v)."""
    return np.where(np.isneginf(book.masked), 0.0, book.weights * _along(problem, v, g))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def cuts(problem: Problem, book: Textbook, v: Array, g: Array) -> Array:
    """What g_i·o_i changes by when query i may not see key j: each edge is forbidden, and its row computed again.

    O(queries·keys²) time.
    """
    along = _along(problem, v, g)
    result = np.zeros(book.masked.shape)
    for j in range(result.shape[-1]):
        seen = ~np.isneginf(book.masked[..., j])
        masked = book.masked.copy()
        masked[..., j] = -np.inf
        left = _softmax(masked, problem.sinks)[1]
        others = np.delete(np.arange(result.shape[-1]), j)
        # g·o' - g·o, in which the others' weights grow by a' - a = a'·a_j: so no digits cancel
        more = left[..., others] * book.weights[..., j, None] * along[..., others]
        more = np.where(np.isneginf(masked[..., others]), 0.0, more).sum(axis=-1)
        result[..., j] = np.where(seen, more - book.weights[..., j] * along[..., j], 0.0)
    return result


def _along(problem: Problem, v: Array, g: Array) -> Array:
    values = _per_query_head(problem, v.astype(np.float64))
    along: Array = g.astype(np.float64) @ values.swapaxes(-1, -2)
    return along


def _per_query_head(problem: Problem, x: Array) -> Array:
    """Grouped-query attention: key head h // group serves query head h."""
    return np.repeat(x, group_size(problem.heads, x.shape[1]), axis=1)


def _softmax(masked: Array, sinks: Array | None) -> tuple[State, Array]:
    """Each row's state, and its weights; a sink is one more logit in the denominator."""
    peak = masked.max(axis=-1, initial=-np.inf)
    empty = np.isneginf(peak)
    if sinks is not None:
        peak = np.where(empty, peak, np.maximum(peak, sinks[:, None]))
    safe = np.where(empty, 0.0, peak)
    shares = np.exp(masked - safe[..., None])
    total = shares.sum(axis=-1)
    if sinks is not None:
        total = np.where(empty, total, total + np.exp(sinks[:, None] - safe))
    weights = np.where(np.isneginf(masked), 0.0, shares / np.where(empty, 1.0, total)[..., None])
    return State(peak, np.log(np.where(empty, 1.0, total))), weights


def mix(weights: Array, values: Array, visible: Array) -> Array:
    """weights·values, (batch, heads, queries, d_v); a value that is not visible is not read (0·NaN would be NaN)."""
    finite = np.isfinite(values)
    output = weights @ np.where(finite, values, 0.0)
    for key in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        poison = np.where(finite[:, :, key], 0.0, values[:, :, key])[:, :, None, :]
        seen = visible[..., key, None] & (poison != 0)
        output = output + np.where(seen, weights[..., key, None] * poison, 0.0)
    return output


def _areas(pixels: int, size: int) -> Array:
    """(pixels, size): row r averages r·size/pixels … (r+1)·size/pixels; one that a border cuts counts in part."""
    edges = np.arange(pixels + 1) * (size / pixels)
    low, high = edges[:-1, None], edges[1:, None]
    cells = np.arange(size)
    overlap = np.minimum(high, cells + 1) - np.maximum(low, cells)
    return np.maximum(overlap, 0.0) / max(size / pixels, 1e-300)


def added_by_spans(problem: Problem) -> Array:
    """table[query_spans[i], key_spans[j]], 0 where a label is -1, (batch, heads, queries, keys)."""
    rows, cols = slice(0, problem.queries), slice(0, problem.keys)
    result = np.zeros((problem.batch, problem.heads, problem.queries, problem.keys))
    for batch, head in np.ndindex(result.shape[:2]):
        result[batch, head] = spans.added(*visibility.spans_of(problem, batch, head, rows, cols))
    return result


def all_distances(problem: Problem) -> Array:
    """|position of i - j|, (batch, 1, queries, keys)."""
    rows, cols = slice(0, problem.queries), slice(0, problem.keys)
    each = [visibility.distances(problem, batch, rows, cols) for batch in range(problem.batch)]
    return np.array(each, dtype=np.float64).reshape(problem.batch, 1, problem.queries, problem.keys)
