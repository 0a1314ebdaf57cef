"""What cutting a whole span of keys changes, exactly: the span's answer and that of all other keys, each by itself."""

from dataclasses import replace

import numpy as np

from clearhead.core.arrays import on_cpu, statistics_dtype
from clearhead.core.axes import Array, blocks
from clearhead.core.call import Call
from clearhead.core.effects import alone, joined
from clearhead.core.state import State
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Engine

_NUMBERS = 1 << 20  # (heads · queries · key groups) at a time


def cut_spans(engine: Engine, call: Call, g: Array, groups: Groups) -> Array:
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
            answers = of_spans(engine, part, along[batch, :, rows], groups.keys[batch], counts[1])
            labels, change = groups.queries[batch, rows], changes(*answers, problem.sinks)
            with np.errstate(invalid="ignore"):  # inf - inf
                for into, each in zip(result[batch], change, strict=True):
                    np.add.at(into, labels[labels >= 0], each[labels >= 0])
    return result


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinity are legal values, and need no warning
def of_spans(engine: Engine, call: Call, g: Array, labels: Array, count: int) -> tuple[State, Array]:
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
def changes(state: State, mean: Array, sinks: Array | None) -> Array:
    """What g·o changes by without each span, (…, heads, queries, spans), from `of_spans` over all keys; sinks (heads,).

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
