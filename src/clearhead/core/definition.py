"""What attention is: the weights of a block of rows and the sums over them, written like the formulas.

    S = Q·Kᵀ    S' = c·tanh(scale·S / c) + bias - slope·|i - j| + table    M = S', -inf where i may not see j
    m_i = max_j M_ij    l_i = ln Σ_j exp(M_ij - m_i)    A_ij = exp((M_ij - m_i) - l_i)    O = A·V

Arrays are NumPy's or PyTorch's and broadcast to (…, heads, rows, keys). This one definition serves three times: over
the whole in float64 as the oracle of the tests (`attend`), over blocks of rows as the portable engine on any device,
and differentiated by PyTorch, block by block, for every derivative that no kernel has.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core import room
from clearhead.core.axes import Array
from clearhead.core.block import Block, block_of, everything
from clearhead.core.effects import Others
from clearhead.core.namespace import astype, beside, dtype_name, largest, namespace, ranked, still, surely_finite, take
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.rule_values import MOST_ADDED, limited
from clearhead.core.rules import EVERYWHERE, check_supported
from clearhead.core.spans import added
from clearhead.core.state import State
from clearhead.core.statistics import PER_QUERY, listed
from clearhead.core.visibility import visible

RULES = EVERYWHERE


def _biased(x: Block, s: Any) -> Any:
    """Add the bias, ALiBi and the table of spans."""
    if x.bias is not None:
        s = s + limited(x.bias)
    if x.alibi_slopes is not None:
        s = s - x.alibi_slopes * abs(x.ahead)
    if x.span_table is not None:
        s = s + limited(added(x.query_spans, x.key_spans, x.span_table))
    return s if x.unknown is None else s + x.unknown


def _masked(x: Block, s: Any) -> Any:
    """Set what a query may not see to -inf."""
    seen = visible(x)
    return s if seen is None else namespace(s).where(seen, s, -np.inf)


# From scores q·kᵀ to the logits: each step by name, a function of the block and the step before.
STEPS: dict[str, Callable[[Block, Any], Any]] = {
    "scaled": lambda x, s: x.scale * s,
    "capped": lambda x, s: s if x.softcap is None else x.softcap * namespace(s).tanh(s / x.softcap),
    "biased": _biased,
    "masked": _masked,
}


def steps(x: Block, scores: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield each step from q and k, or from scores q·kᵀ, to the logits, by name, (…, heads, rows, keys)."""
    s = product(x.q, x.k.swapaxes(-1, -2)) if scores is None else scores
    yield "scores", s
    for name, step in STEPS.items():
        s = step(x, s)
        yield name, s


def logits(x: Block) -> Any:
    """The logits, the softmax's input: the last of the steps."""
    return deque(steps(x), maxlen=1).pop()[1]


def softmax(masked: Any, sinks: Any = None, dtype: Any = None) -> tuple[State, Any]:
    """Each row's state, and its weights; a sink, (heads, 1, 1), is one more logit in the denominator.

    The largest logits are rounded to `dtype`, in which they will be kept; l makes up for the rest.
    """
    xp, m = namespace(masked), still(largest(masked))
    empty = xp.isneginf(m)
    if sinks is not None:
        sinks = limited(sinks)
        m = xp.where(empty, m, xp.maximum(m, still(sinks)))
    m = m if dtype is None else astype(astype(m, dtype), dtype_name(m))
    base = xp.where(empty, 0.0, m)
    shares = xp.exp(masked - base)
    total = shares.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - base)
    total = xp.where(empty, 1.0, total)
    return State(m[..., 0], xp.log(total)[..., 0]), _of_visible(shares / total, masked, total)


def weights(masked: Any, state: State) -> Any:
    """exp((s - m) - l), for rows whose state over all keys is known."""
    return _of_visible(namespace(masked).exp(log_weights(masked, state)), masked, state.log_sum)


def log_weights(masked: Any, state: State) -> Any:
    """Return ln a = (s - m) - l; -inf where a query may not see a key, but NaN there in a row that has a NaN."""
    m = state.largest[..., None]
    return (masked - namespace(m).where(namespace(m).isneginf(m), 0.0, m)) - state.log_sum[..., None]


def _of_visible(x: Any, masked: Any, of_rows: Any) -> Any:
    """Set x to 0 where a query may not see a key; a row's NaN would otherwise spread there."""
    xp = namespace(x)
    return x if surely_finite(of_rows) else xp.where(xp.isneginf(masked), 0.0, x)


@dataclass(frozen=True, eq=False)
class Matrix:
    """The weights of a block of rows, with block, logits and state; in the oracle, with every intermediate."""

    block: Block
    masked: Any  # the logits
    state: State  # of each row
    weights: Any
    scores: Any = None  # q·kᵀ
    scaled: Any = None  # scale·scores
    capped: Any = None  # c·tanh(scaled/c)
    biased: Any = None  # capped + bias - slope·|i - j| + table[query_spans[i], key_spans[j]]
    output: Any = None  # (…, heads, rows, d_v): weights·v

    def hidden(self) -> Any:
        """Where a query may not see a key."""
        return namespace(self.masked).isneginf(self.masked)

    @property
    def logsumexp(self) -> Any:
        """ln(Σ exp(s) + exp(sink)), (…, heads, rows); -inf for a row that sees nothing."""
        return self.state.logsumexp


Values = tuple[Any, Any]  # (…, kv_heads, keys, d_v) each: the finite ones, else 0, and the others, or None


def split(v: Any) -> Values:
    """Split values so that NaN and infinity reach only the queries that may see their key."""
    xp = namespace(v)
    finite = xp.isfinite(v)
    return (v, None) if finite.all() else (xp.where(finite, v, 0.0), xp.where(finite, 0.0, v))


def mix(weights: Any, values: Values, hidden: Callable[[], Any]) -> Any:
    """A·V, (…, heads, rows, d_v); a nonfinite value does not reach rows that may not see it (0·NaN would be NaN)."""
    finite, nonfinite = values
    total = product(weights, finite)
    if nonfinite is None:
        return total
    xp, bad = namespace(total), over_heads(nonfinite, total.shape[-3])
    by_key = (bad != 0).any(axis=-1).reshape(-1, bad.shape[-2]).any(axis=0).tolist()
    for key in (place for place, found in enumerate(by_key) if found):
        here = bad[..., key, None, :] + xp.zeros_like(total)
        seen = ~hidden()[..., key, None] & (here != 0)
        total = total + xp.where(seen, weights[..., key, None] * here, 0.0)
    return total


def product(a: Any, b: Any) -> Any:
    """a·b, a (…, heads, rows, x), b (…, fewer heads, x, y): each head of b serves a group of heads of a."""
    *lead, heads, rows, inner = a.shape
    few = b.shape[-3]
    if few in (0, heads):
        return a @ b
    return (a.reshape(*lead, few, heads // few * rows, inner) @ b).reshape(*lead, heads, rows, b.shape[-1])


def over_heads(x: Any, heads: int) -> Any:
    """Grouped-query attention: head h // group of x (…, fewer heads, y, z) serves query head h."""
    *lead, few, tall, wide = x.shape
    group = heads // max(1, few)
    spread = namespace(x).broadcast_to(x[..., None, :, :], (*lead, few, group, tall, wide))
    return spread.reshape(*lead, few * group, tall, wide)


# The statistics: per query (…, heads, rows), per key (…, heads, keys), or a picture


def max_logit(a: Matrix) -> Any:
    """max_j s_ij; -inf where a query sees nothing."""
    return largest(a.masked)[..., 0]


def entropy(a: Matrix) -> Any:
    """-Σ_j a_ij ln a_ij, in nats."""
    logs = namespace(a.masked).clip(log_weights(a.masked, a.state), -MOST_ADDED, None)  # 0·ln 0 is 0
    return -(a.weights * logs).sum(axis=-1)


def distance(a: Matrix) -> Any:
    """Σ_j a_ij |position of i - j|."""
    return (a.weights * abs(a.block.ahead)).sum(axis=-1)


def diagonal(a: Matrix) -> Any:
    """a_ij for the key j at the position of query i; 0 if no key is there."""
    return namespace(a.masked).where(a.block.ahead == 0, a.weights, 0.0).sum(axis=-1)


def per_query(a: Matrix, names: Container[str] | None = None) -> dict[str, Any]:
    """Every statistic that is one number per query, by name, or those of these names."""
    each: dict[str, Callable[[Matrix], Any]] = {
        "logsumexp": lambda a: a.logsumexp,
        "largest": lambda a: a.state.largest,
        "log_sum": lambda a: a.state.log_sum,
        "max_logit": max_logit,
        "entropy": entropy,
        "distance": distance,
        "diagonal": diagonal,
    }
    return {name: of(a) for name, of in each.items() if name in (names or listed(axes=PER_QUERY))}


def top(a: Matrix, count: int) -> tuple[Any, Any]:
    """The strongest weights and their keys, (…, heads, rows, count); 0 and -1 where fewer are visible."""
    logits, places = ranked(a.masked, count)
    return namespace(logits).exp(log_weights(logits, a.state)), places


def received(a: Matrix) -> Any:
    """Σ_i a_ij."""
    return a.weights.sum(axis=-2)


def peak(a: Matrix) -> Any:
    """max_i a_ij; 0 for a key that no query may attend to."""
    return namespace(a.weights).clip(largest(a.weights, -2), 0.0, None)[..., 0, :]


def image(a: Matrix, height: int, width: int) -> Any:
    """The matrix as a picture, (…, heads, height, width): each pixel is the mean of the weights over its area."""
    sides = zip((height, width), a.weights.shape[-2:], strict=True)
    tall, broad = (areas(pixels, size, slice(0, size))[1] if size else np.zeros((pixels, 0)) for pixels, size in sides)
    return pooled(a.weights, beside(tall, a.weights), beside(broad, a.weights))


def groups(a: Matrix, query_groups: Array, key_groups: Array) -> Any:
    """Σ of a_ij between labelled spans, (…, heads, query groups, key groups); labels below 0 belong to none."""
    sides = ((np.arange(x.max(initial=-1) + 1), x) for x in (query_groups, key_groups))
    return pooled(a.weights, *(beside(members(of, labels), a.weights) for of, labels in sides))


def members(of: Array, labels: Array) -> Array:
    """1 where a token has one of the labels `of`, else 0: (batch, 1, labels, tokens)."""
    return (of[:, None] == labels[..., None, None, :]).astype(np.float64)


def pooled(x: Any, left: Any, right: Any) -> Any:
    """left·x·rightᵀ, left and right at least 0; NaN or infinity reaches only sums in which its factors are not 0."""
    xp, right = namespace(x), right.swapaxes(-1, -2)
    finite = xp.isfinite(x)
    if finite.all():
        return left @ x @ right
    known = xp.where(finite, x, 0.0)
    total = left @ known @ right
    rows, cols = ((shares > 1e-9) + 0 * shares for shares in (left, right))  # smaller shares are rounding errors
    for value, cells in ((np.nan, xp.isnan(x)), (np.inf, x == np.inf), (-np.inf, x == -np.inf)):
        total = total + xp.where(rows @ (cells + 0 * known) @ cols > 0, value, 0.0)
    return total


# Effects of edges: core/effects.py has the formulas


def contributions(a: Matrix, along: Any) -> Any:
    """a_ij·t_ij, for t_ij = g_i·v_j."""
    return namespace(along).where(a.hidden(), 0.0, a.weights * along)


def cut_effects(a: Matrix, along: Any, whole: Any, others: Any, strongest: Any) -> Any:
    """a_ij/(1 - a_ij)·(g_i·o_i - t_ij), and a_ij·(m_i - t_ij) for each row's strongest key; (…, heads, rows) each."""
    xp, w = namespace(along), a.weights
    alone = strongest[..., None] == beside(np.arange(w.shape[-1]), w)
    effects = xp.where(alone, w * (others[..., None] - along), w / (1 - w) * (whole[..., None] - along))
    return xp.where(a.hidden(), 0.0, effects)


def others_of(masked: Any, along: Any) -> Others:
    """Each row's key with the largest logit, and the mean of t over its other keys, without sinks; needs a key."""
    xp, best = namespace(masked), masked.argmax(axis=-1)[..., None]
    logit, term = take(masked, best, -1)[..., 0], take(along, best, -1)[..., 0]
    seen = ~xp.isneginf(masked).all(axis=-1)
    rest = xp.where(best == beside(np.arange(masked.shape[-1]), masked), -np.inf, masked)
    state, shares = softmax(rest)
    mean = xp.where(xp.isneginf(rest), 0.0, shares * along).sum(axis=-1)
    strongest = {"strongest": xp.where(seen, best[..., 0], -1), "logit": logit, "term": xp.where(seen, term, 0.0)}
    return {**strongest, **state._asdict(), "others": mean}


# First derivatives; Upstream in engines/base.py has the formula


def by_logits(a: Matrix, slopes: Any) -> Any:
    """The gradient of the loss at the logits, a_ij·slope_ij, for slopes ∂loss/∂a_ij less their mean over the row."""
    return namespace(slopes).where(a.hidden(), 0.0, a.weights * slopes)


def by_scores(x: Block, capped: Any, by_logits: Any) -> Any:
    """The gradient of the loss at q·k, from that at the logits; `capped` is the softcap's result."""
    slope = 1.0 if x.softcap is None else 1 - (capped / x.softcap) ** 2
    return namespace(by_logits).where(by_logits == 0, 0.0, x.scale * slope * by_logits)


# The whole in float64: the oracle


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def attend(problem: Problem, q: Array, k: Array, v: Array | None = None) -> Matrix:
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
            room.check_room(f"{name} in float64", size, hint)
    book = from_scores(problem, product(q.astype(np.float64), k.astype(np.float64).swapaxes(-1, -2)))
    return book if v is None else replace(book, output=mix(book.weights, split(v.astype(np.float64)), book.hidden))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def from_scores(problem: Problem, scores: Array) -> Matrix:
    """Compute every intermediate from the scores q·kᵀ, (batch, heads, queries, keys), to the weights, without output.

    Raises RuleError for a rule that the definition does not have.
    """
    check_supported("the definition", RULES, problem.active_rules())
    block = block_of(problem, everything(problem), np.zeros(()))
    way = dict(steps(block, scores))
    masked = way.pop("masked")
    state, shares = softmax(masked, block.sinks)
    return Matrix(block, masked, state, shares, **way)


def check_room(weights: int, steps: int = 0) -> None:
    """Raise SizeError where the intermediates of so many weights exceed free memory.

    Four are always kept in float64 (scores, scaled scores, masked scores, weights), and a fifth is temporary; `steps`
    is how many more the rules in use add.
    """
    room.check_room(
        f"every step of {weights:,} weights in float64",
        weights * 8 * (5 + steps),
        "fewer tokens, or ch.AttentionMatrix(q, k), which stores no weights.",
    )
