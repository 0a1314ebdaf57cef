"""EffectMatrix: what every edge did, exact at the head's output and never stored; contributions and cuts.

core/effects.py has the formulas; the engines compute tiles of it. Whole spans of keys are cut here: the answer of a
span, and that of all other keys, each by itself.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack, cast

import numpy as np

from clearhead.core.arrays import (
    as_array,
    broadcast,
    on_cpu,
    statistics_dtype,
    to_device_of,
    unrepeated,
)
from clearhead.core.axes import WEIGHTS, Array, blocks, named
from clearhead.core.call import Call
from clearhead.core.effects import Kind, Terms, alone, joined, read_rest, terms_of_cuts
from clearhead.core.observations import operand, values_of, wanted
from clearhead.core.rules import with_options
from clearhead.core.state import State
from clearhead.core.statistics import (
    STATISTICS,
    AskedEffects,
    Groups,
    Order,
    Ranked,
    SignedImage,
    Strongest,
    Wanted,
)
from clearhead.engines.base import Engine, kinds, room_for_sums
from clearhead.errors import RuleError, ShapeError
from clearhead.loading import Shown
from clearhead.ops.lazy_matrix import LazyMatrix
from clearhead.ops.observation import Observation, observation

Inputs = tuple[Any, Array, Array]  # the matrix, v (batch, its heads, keys, d_v) and g (batch, heads, queries, d_v)
_NUMBERS = 1 << 20  # (heads · queries · key groups) at a time


class EffectMatrix(Shown, LazyMatrix):
    """The effect of every edge, (…, heads, queries, keys), as an array-like object that is never stored.

    Made by `AttentionMatrix.contributions` and `AttentionMatrix.cut_effects`, which have the formulas. `kind` is
    "contribution", "cut" or "moved" (a cut with rest="first"). Where query i may not see key j, e_ij is 0.

    Elements have the statistics' dtype; answers are of q's kind, products of x's. Creating it computes nothing; what
    cuts need of every row is computed once, when first needed, and kept: O(queries) memory. It has no derivative.
    np.asarray stores it, as it stores an AttentionMatrix; NumPy's other functions and arithmetic are refused.
    Copies and pickles keep q, k, v, g, the rules and what is known of every row.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> E = A.cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3))
    >>> E, E[2].round(3)
    (EffectMatrix(cut, queries 3, keys 3) float64, array([ 0.413,  0.773, -1.649]))
    """

    words = (
        "effects",
        "E[..., :512, :512] is a tile; E.image(256, 256) shows the whole, E.strongest(20) its strongest edges.",
    )
    instead = "E.by_query() sums over keys, E.by_key() over queries, E.top(1, 'largest') has each query's largest"

    def __init__(self, kind: Kind, weights: Any, v: Array, g: Array) -> None:
        self.kind, self._weights, self._v, self._g = kind, weights, v, g
        self._engine  # noqa: B018  raises where the engine that was asked for computes no effects

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_v": unrepeated(self._v), "_g": unrepeated(self._g)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        problem, width = self.call.problem, self._v.shape[-1]
        self._v = broadcast(self._v, (problem.batch, self._v.shape[1], problem.keys, width))
        self._g = broadcast(self._g, (problem.batch, problem.heads, problem.queries, width))

    @property
    def call(self) -> Call:
        """q, k, v and the rules."""
        call: Call = self._weights.call
        return call.with_values(self._v)

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._weights.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the effects: float32, or float64 where q, v or g is."""
        return self._weights.dtype

    def __repr__(self) -> str:
        return f"EffectMatrix({self.kind}, {named(self.shape, WEIGHTS)[1:]} {self.dtype}"

    def spans(self, query_groups: Any, key_groups: Any) -> Any:
        """What g·o changes by when a query may see no key of a span at all, summed over the queries of each group.

        With a = Σ_J a_ij and n = Σ_J a_ij·t_ij over a span J, that is (g_i·o_i - n)/(1 - a) - g_i·o_i for one query,
        computed as a·(m - n/a), where m is what all keys outside the span answer by themselves: 0 if there are none.
        Returns (…, heads, query groups, key groups); labels as in `groups`. Raises RuleError for contributions, which
        just add up (`groups`), as cuts with rest="first" do; and what `groups` raises. One pass over the keys, cut into
        the runs of neighbouring keys of one group; O(queries·key groups) memory, in blocks of queries.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3), scale=0).cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> E.spans([0, 1, 1], [0, 0, 1]).round(3), E.groups([0, 1, 1], [0, 0, 1]).round(3)
        (array([[ 2.333, -1.167],
               [ 4.667, -2.333]]), array([[ 1.167, -1.167],
               [ 2.333, -2.333]]))
        """
        if self.kind == "moved":
            return self.groups(query_groups, key_groups)
        if self.kind != "cut":
            raise RuleError("spans are of cuts: contributions of a span are the sum of those of its edges.", "E.groups")
        problem = self.call.problem
        want = wanted(problem, {"groups": (query_groups, key_groups)}, of="effects")
        assert want.groups is not None
        result = _cut_spans(self._engine, self.call, self._g, want.groups).astype(self.dtype)
        return self._restore(problem.restore(result))

    @with_options
    def observe(self, *, order: Order = "magnitude", **asked: Unpack[AskedEffects]) -> Observation:
        """Everything asked for, together, in one pass (a GPU takes several), and for cuts one more, the first time.

        by_key=True, by_query=True, top=8 with order="magnitude", strongest=20, image=(256, 256),
        groups=(query_groups, key_groups): what the methods of these names answer. Returns an Observation; what was not
        asked for is None. Raises UnknownNameError, RuleError, ShapeError or DtypeError for requests that do not fit,
        SizeError for answers larger than memory, all before any work. O(queries·keys·(d_k + d_v)) time,
        O(queries + keys) memory beyond the answers.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> seen = E.observe(by_key=True, strongest=1)
        >>> seen.by_key.round(3), seen.strongest.key, seen.top is None
        (array([1., 0., 4.]), array([2]), True)
        """
        problem = self.call.problem
        want = wanted(problem, asked, of="effects", order=order)
        if 0 in self.shape:
            zeros = room_for_sums(kinds(problem, want, want.names(), STATISTICS))
            arrays = {name: x if x.dtype == np.int64 else x.astype(self.dtype) for name, x in zeros.items()}
        else:
            arrays = dict(self._engine.columns(self.call, self._terms, want))
        strongest = _take_strongest(arrays, problem.keys, asked.get("strongest"))
        answers = {name: self._restore(problem.restore(x)) for name, x in arrays.items()}
        seen = observation(answers, problem.queries, problem.keys, of="effects")
        return seen if strongest is None else replace(seen, strongest=Strongest(*map(self._restore, strongest)))

    def by_key(self) -> Any:
        """Σ_i e_ij, (…, heads, keys): what each key did in all rows together. Summed in float64.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_key()
        array([2., 6.])
        """
        return self.observe(by_key=True).by_key

    def by_query(self) -> Any:
        """Σ_j e_ij, (…, heads, queries). Contributions along g sum to g_i·o_i; cuts do not sum to anything simple.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_query()
        array([4., 4.])
        """
        return self.observe(by_query=True).by_query

    def top(self, k: int, order: Order = "magnitude") -> Ranked:
        """The k first effects of each query and their keys, (…, heads, queries, k) each.

        order   "magnitude" (largest |e| first), "largest" (most positive first) or "smallest" (most negative first)

        Of equal effects the earlier key comes first. Only keys that the rules allow are listed, and no effect that is
        NaN; the rest has effect 0 and index -1. Raises RuleError for another order, or unless k is a whole number from
        1 up. O(queries·keys·(d_k + d_v)) time, O(queries·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
        >>> A.cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3)).top(2, "smallest").indices.tolist()
        [[0, -1], [0, 1], [2, 0]]
        """
        return cast("Ranked", self.observe(top=0 if k is None else k, order=order).top)

    def strongest(self, k: int) -> Strongest:
        """The k edges of largest magnitude in the whole matrix: batch, head, query, key and value, each (≤ k,).

        `batch` counts over all leading axes together. Of equal effects the earlier place comes first. Only edges that
        the rules allow are listed, and no effect that is NaN. Raises RuleError unless k is a whole number from 1 up.
        O(queries·keys·(d_k + d_v)) time, O(batch·heads·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> E.strongest(2).key, E.strongest(2).value.round(3)
        (array([2, 2]), array([1.884, 1.058]))
        """
        return cast("Strongest", self.observe(strongest=0 if k is None else k).strongest)

    def image(self, height: int, width: int) -> SignedImage:
        """The matrix as a picture, (…, heads, height, width): the mean under each pixel, and what is largest there.

        `largest` is the effect of largest magnitude, with its sign, of all cells that a pixel covers, if only in part;
        of two equal ones the positive, and NaN where there is one. Raises RuleError unless both sides are whole numbers
        from 1 up.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
        >>> A.cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3)).image(1, 1).largest.round(3)
        array([[-1.649]])
        """
        return cast("SignedImage", self.observe(image=(height, width)).image)

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of e_ij between labelled spans, (…, heads, query groups, key groups); labels as in AttentionMatrix.groups.

        Effects of single edges do not add up to that of a whole span where it is a cut: see `spans`. Raises ShapeError,
        DtypeError or RuleError for labels that do not fit.
        """
        return self.observe(groups=(query_groups, key_groups)).groups

    @property
    def _terms(self) -> Terms:
        return replace(self._rows, g=self._g)

    @cached_property
    def _rows(self) -> Terms:
        state = self._weights.state
        if self.kind != "cut":
            return Terms(self.kind, state)
        others = self._engine.others(self.call, self._g)
        return terms_of_cuts(others, self.call.problem.sinks, state)

    @property
    def _engine(self) -> Engine:  # type: ignore[override]
        return self._weights.effect_engine()

    def _known(self, batches: Array | None, heads: range | None, rows: range, cols: range) -> Terms:
        return self._terms.part(batches, heads, rows).among(cols)

    def _multiply(self, columns: Array, *, transposed: bool) -> Array:
        result = self.call.problem.keys if transposed else self.call.problem.queries
        if 0 in (*self.shape, columns.shape[-1]):
            size = (*self._g.shape[:2], result, columns.shape[-1])
            return to_device_of(np.zeros(size, self.dtype), columns)
        return (self._engine.transposed if transposed else self._engine.product)(self.call, self._terms, columns)


def contributions(weights: Any, v: Any, g: Any) -> EffectMatrix:
    """Make the matrix of contributions along g."""
    return EffectMatrix("contribution", *_along_g(weights, v, g))


def cut_effects(weights: Any, v: Any, g: Any, rest: Any) -> EffectMatrix:
    """Make the matrix of cuts; with rest="first" of values v_0 - v_j, or -v_j where there are learned sinks."""
    weights, values, along = _along_g(weights, v, g)
    if read_rest(rest) == "renormalise":
        return EffectMatrix("cut", weights, values, along)
    dtype = statistics_dtype(values.dtype)
    shifted = on_cpu(values).astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = (shifted[:, :, :1] if weights.call.problem.sinks is None else 0) - shifted
    return EffectMatrix("moved", *_in_one_dtype(weights, to_device_of(shifted, values), along))


def _along_g(weights: Any, v: Any, g: Any) -> Inputs:
    """Validated v and g, in one dtype with q and k."""
    problem = weights.call.problem
    values = values_of(problem, v, problem.kv_heads, problem.heads)
    along = operand(problem, as_array(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    if along.shape[-1] != values.shape[-1]:
        raise ShapeError(
            f"g has {along.shape[-1]} columns but v has d_v {values.shape[-1]}: g is the derivative by the head's "
            "output, which has v's columns.",
            "o = A @ v; g, = torch.autograd.grad(number, o)",
        )
    rows = problem.batch, problem.heads, problem.queries
    return _in_one_dtype(weights, values, broadcast(along, (*rows, along.shape[-1])))


def _in_one_dtype(weights: Any, v: Array, g: Array) -> Inputs:
    """Convert all to their common dtype: theirs where it is one, else float64 if any is float64, else float32."""
    dtypes = {weights.call.problem.dtype, v.dtype, g.dtype}
    if len(dtypes) == 1:
        return weights, v, g
    dtype = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    known = weights.known_state if statistics_dtype(dtype) == weights.dtype else None
    return weights.with_call(weights.call.astype(dtype), known), v.astype(dtype), g.astype(dtype)


def _take_strongest(arrays: dict[str, Array], keys: int, count: int | None) -> Strongest | None:
    """The strongest of all batches and heads, (≤ count,) each, from those of each, which leave `arrays`; None without.

    strongest_values and strongest_indices are (batch, heads, k); an index is query·keys + key, -1 is free.
    """
    if "strongest_values" not in arrays:
        return None
    values, places = (on_cpu(arrays.pop(f"strongest_{name}")) for name in ("values", "indices"))
    batch, head, rank = np.nonzero(places >= 0)
    value, place = values[batch, head, rank], places[batch, head, rank]
    order = np.lexsort((place, head, batch, -np.abs(value)))[:count]
    query, key = np.divmod(place[order], max(1, keys))
    return Strongest(batch[order], head[order], query, key, value[order])


def _cut_spans(engine: Engine, call: Call, g: Array, groups: Groups) -> Array:
    """Σ over the queries of a group of what g·o changes by without a span, (batch, heads, query and key groups).

    A span of several runs of keys is joined from them by their states; float64, in the CPU's memory.
    """
    problem = call.problem
    counts = groups.counts
    result = np.zeros((problem.batch, problem.heads, *counts))
    if 0 in (*result.shape, problem.queries, problem.keys):
        return result
    step = max(1, _NUMBERS // (problem.heads * counts[1]))
    along = on_cpu(g)
    for batch in range(problem.batch):
        for rows in blocks(problem.queries, step):
            part = call.take(batches=np.array([batch]), queries=range(rows.start, rows.stop))
            answers = _of_spans(engine, part, along[batch, :, rows], groups.keys[batch], counts[1])
            labels, change = groups.queries[batch, rows], _changes(*answers, problem.sinks)
            with np.errstate(invalid="ignore"):  # inf - inf
                for into, each in zip(result[batch], change, strict=True):
                    np.add.at(into, labels[labels >= 0], each[labels >= 0])
    return result


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinity are legal values, and need no warning
def _of_spans(engine: Engine, call: Call, g: Array, labels: Array, count: int) -> tuple[State, Array]:
    """The state and g·o of each span alone, (heads, queries, count + 1); the last one is of the keys of no span.

    call     of one batch item
    g        (heads, queries, d_v)
    labels   the span of each key, (keys,)

    Without sinks. Answers over disjoint keys merge by `joined`.
    """
    problem, q, k, v = call.problem, call.q, call.k, call.v
    assert v is not None
    shape = problem.heads, problem.queries, count + 1
    state, mean = State(np.full(shape, -np.inf), np.zeros(shape)), np.zeros(shape)
    edges = np.flatnonzero(np.diff(labels)) + 1
    want = Wanted(output=True, logsumexp=True, keep_float32=True)
    for start, stop in zip([0, *map(int, edges)], [*map(int, edges), len(labels)], strict=True):
        span = int(labels[start]) if labels[start] >= 0 else count
        values = v[:, :, start:stop].astype(statistics_dtype(problem.dtype))  # so that no engine rounds its weights
        part = replace(problem.take(keys=range(start, stop)), sinks=None)
        result = engine.rows(Call(part, q, k[:, :, start:stop], values), want)
        *one, output = (on_cpu(result[name])[0].astype(np.float64) for name in (*State._fields, "output"))
        before = State(*(x[..., span] for x in state)), mean[..., span]
        whole, average = joined(before, (State(*one), (output * g).sum(axis=-1)))
        for x, y in zip((*state, mean), (*whole, average), strict=True):
            x[..., span] = y
    return state, mean


@np.errstate(invalid="ignore", over="ignore")
def _changes(state: State, mean: Array, sinks: Array | None) -> Array:
    """What g·o changes by without each span, (…, heads, queries, spans), by `_of_spans` of all keys; sinks (heads,).

    What all others answer is summed from those before and after, so nothing is subtracted; without the strongest span,
    whose share may be all of 1, they are weighed anew.
    """
    if sinks is not None:
        seen = ~np.isneginf(state.largest).all(axis=-1)
        rest = State(*(x[..., -1] for x in state)), mean[..., -1]
        more = alone(np.where(seen, sinks[:, None], -np.inf), np.zeros(seen.shape))
        (largest, log_sum), average = joined(rest, more)
        for x, y in zip((*state, mean), (largest, log_sum, average), strict=True):
            x[..., -1] = y
    best = np.arange(mean.shape[-1]) == state.largest.argmax(axis=-1)[..., None]
    weights, weaker = (_weights(State(np.where(none, -np.inf, state.largest), state.log_sum)) for none in (False, best))
    parts, left = (_others(weights * mean), _others(weights)), (weaker * np.where(best, 0.0, mean), weaker)
    total, weight = (np.where(best, x.sum(axis=-1, keepdims=True), y) for x, y in zip(left, parts, strict=True))
    others = np.where(weight == 0, 0.0, total / weight)
    share = weights / np.where(weights.sum(axis=-1, keepdims=True) == 0, 1.0, weights.sum(axis=-1, keepdims=True))
    change: Array = (share * (others - mean))[..., :-1]
    return change


def _weights(state: State) -> Array:
    """The weight of each span beside the one of the largest logit; 0 where all are empty."""
    top = state.largest.max(axis=-1, keepdims=True)
    return np.exp(state.largest - np.where(np.isneginf(top), 0.0, top) + state.log_sum)


def _others(x: Array) -> Array:
    """The sum of all others along the last axis, of those before and those after."""
    before, after = (np.cumsum(side, axis=-1) for side in (x, x[..., ::-1]))
    none = np.zeros((*x.shape[:-1], 1))
    return np.concatenate([none, before[..., :-1]], -1) + np.concatenate([after[..., -2::-1], none], -1)
