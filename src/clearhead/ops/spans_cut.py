"""What cutting a whole span of keys changes, exactly: the span's answer and that of all other keys, each by itself."""

from dataclasses import replace

import numpy as np

from clearhead.core import state as states
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
        _join(state, mean, span, (State(*one), (output * g).sum(axis=-1)))
    return state, mean


def _join(state: State, mean: Array, span: int, part: tuple[State, Array]) -> None:
    """Join a part to one of the spans, in place."""
    whole, average = joined((states.taken(state, ..., span), mean[..., span]), part)
    for x, y in zip((*state, mean), (*whole, average), strict=True):
        x[..., span] = y


@np.errstate(invalid="ignore", over="ignore")
def changes(state: State, mean: Array, sinks: Array | None) -> Array:
    """What g·o changes by without each span, (…, heads, queries, spans), from `of_spans` over all keys; sinks (heads,).

    The sink is added to the keys of no span, in place.
    """
    if sinks is not None:
        sink = np.where(np.isneginf(state.largest).all(axis=-1), -np.inf, sinks[:, None])
        _join(state, mean, -1, alone(sink, np.zeros(sink.shape)))
    before, means_before = _running(state, mean)
    after, means_after = _running(states.taken(state, ..., slice(None, None, -1)), mean[..., ::-1])
    others = joined(
        (states.taken(before, ..., slice(-1)), means_before[..., :-1]),
        (states.taken(after, ..., slice(-2, None, -1)), means_after[..., -2::-1]),
    )[1]
    share = states.share(np, state, states.taken(before, ..., slice(-1, None)))
    change: Array = (share * (others - mean))[..., :-1]
    return change


def _running(state: State, mean: Array) -> tuple[State, Array]:
    """For each place, the state and the mean of all spans before it, (…, spans + 1)."""
    shape = (*mean.shape[:-1], mean.shape[-1] + 1)
    total, average = State(np.full(shape, -np.inf), np.zeros(shape)), np.zeros(shape)
    for place in range(mean.shape[-1]):
        before = states.taken(total, ..., place), average[..., place]
        _join(total, average, place + 1, joined(before, (states.taken(state, ..., place), mean[..., place])))
    return total, average
