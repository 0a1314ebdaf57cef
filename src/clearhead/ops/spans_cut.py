"""What cutting a whole span of keys changes, exactly: the span's answer and that of all other keys, each by itself."""

from dataclasses import replace

import numpy as np

from clearhead.core.arrays import on_cpu, statistics_dtype
from clearhead.core.axes import Array, blocks
from clearhead.core.call import Call
from clearhead.core.effects import joined
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Engine
from clearhead.ops.matrix_data import MatrixData

_NUMBERS = 1 << 20  # (heads · queries · key groups) at a time


def cut_spans(factors: MatrixData, v: Array, g: Array, groups: Groups) -> Array:
    """Σ over the queries of a group of what g·o changes by without a span, (batch, heads, query and key groups).

    A span of several runs of keys is joined from them by their log-sum-exp; float64, in the CPU's memory.
    """
    problem = factors.problem
    counts = groups.counts
    result = np.zeros((problem.batch, problem.heads, *counts))
    if 0 in (*result.shape, problem.queries, problem.keys):
        return result
    step = max(1, _NUMBERS // (problem.heads * counts[1]))
    along = on_cpu(g)
    for batch in range(problem.batch):
        for rows in blocks(problem.queries, step):
            part = factors.take(batches=np.array([batch]), queries=range(rows.start, rows.stop))
            call = part.with_values(v[batch : batch + 1])
            answers = of_spans(part.engine, call, along[batch, :, rows], groups.keys[batch], counts[1])
            add_changes(result[batch], changes(*answers, problem.sinks), groups.queries[batch, rows])
    return result


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinity are legal values, and need no warning
def of_spans(engine: Engine, call: Call, g: Array, labels: Array, count: int) -> tuple[Array, Array]:
    """The log-sum-exp and g·o of each span alone, (heads, queries, count + 1); the last one is of the keys of no span.

    call     of one batch item
    g        (heads, queries, d_v)
    labels   the span of each key, (keys,)

    Without sinks. Answers over disjoint keys merge by `joined`.
    """
    problem, q, k, v = call.problem, call.q, call.k, call.v
    assert v is not None
    lse = np.full((problem.heads, problem.queries, count + 1), -np.inf)
    mean = np.zeros(lse.shape)
    edges = np.flatnonzero(np.diff(labels)) + 1
    want = Wanted(output=True, logsumexp=True, keep_float32=True)
    for start, stop in zip([0, *map(int, edges)], [*map(int, edges), len(labels)], strict=True):
        span = int(labels[start]) if labels[start] >= 0 else count
        values = v[:, :, start:stop].astype(statistics_dtype(problem.dtype))  # so that no engine rounds its weights
        part = replace(problem.take(keys=range(start, stop)), sinks=None)
        result = engine.rows(Call(part, q, k[:, :, start:stop], values), want)
        one, output = (on_cpu(result[name])[0].astype(np.float64) for name in ("logsumexp", "output"))
        lse[..., span], mean[..., span] = joined((lse[..., span], mean[..., span]), (one, (output * g).sum(axis=-1)))
    return lse, mean


@np.errstate(invalid="ignore", over="ignore")
def changes(lse: Array, mean: Array, sinks: Array | None) -> Array:
    """What g·o changes by without each span, (…, heads, queries, spans), from `of_spans` over all keys; sinks (heads,).

    The sink is added to the keys of no span, in place.
    """
    if sinks is not None:
        sink = np.where(np.isneginf(lse).all(axis=-1), -np.inf, sinks[:, None])
        lse[..., -1], mean[..., -1] = joined((lse[..., -1], mean[..., -1]), (sink, np.zeros(sink.shape)))
    before, after = _running(lse, mean), [x[..., ::-1] for x in _running(lse[..., ::-1], mean[..., ::-1])]
    others = joined((before[0][..., :-1], before[1][..., :-1]), (after[0][..., 1:], after[1][..., 1:]))[1]
    whole = np.logaddexp.reduce(lse, axis=-1, keepdims=True)
    share = np.exp(lse - np.where(np.isneginf(whole), 0.0, whole))
    change: Array = (share * (others - mean))[..., :-1]
    return change


@np.errstate(invalid="ignore")  # inf - inf
def add_changes(total: Array, change: Array, labels: Array) -> None:
    """Add the changes (heads, queries, spans) of the queries of each group to found (heads, groups, spans)."""
    for into, each in zip(total, change, strict=True):
        np.add.at(into, labels[labels >= 0], each[labels >= 0])


def _running(lse: Array, mean: Array) -> list[Array]:
    """For each place, the log-sum-exp and the mean of all spans before it, (…, spans + 1)."""
    shape = (*lse.shape[:-1], lse.shape[-1] + 1)
    total, average = np.full(shape, -np.inf), np.zeros(shape)
    for place in range(lse.shape[-1]):
        now = (total[..., place], average[..., place]), (lse[..., place], mean[..., place])
        total[..., place + 1], average[..., place + 1] = joined(*now)
    return [total, average]
