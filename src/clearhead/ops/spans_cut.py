"""What cutting a whole span of keys changes, exactly: the span's answer and that of all other keys, each by itself."""

from dataclasses import replace

import numpy as np

from clearhead.core.arrays import on_cpu
from clearhead.core.axes import Array
from clearhead.core.effects import joined
from clearhead.core.statistics import Groups, Wanted
from clearhead.ops.factors import Factors

_NUMBERS = 1 << 20  # (heads · queries · key groups) at a time


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinity are legal values, and need no warning
def cut_spans(factors: Factors, v: Array, g: Array, groups: Groups) -> Array:
    """Σ over the queries of a group of what g·o changes by without a span, (batch, heads, query and key groups).

    A span of several runs of keys is joined from them by their log-sum-exp; float64, in the CPU's memory.
    """
    problem = factors.problem
    counts = groups.counts
    found = np.zeros((problem.batch, problem.heads, *counts))
    if 0 in (*found.shape, problem.queries, problem.keys):
        return found
    step = max(1, _NUMBERS // (problem.heads * counts[1]))
    along = on_cpu(g)
    for batch in range(problem.batch):
        one = factors.take_batches(np.array([batch]))
        for start in range(0, problem.queries, step):
            rows = slice(start, min(start + step, problem.queries))
            change = _changes(one, v[batch : batch + 1], along[batch, :, rows], groups.keys[batch], counts[1], rows)
            labels = groups.queries[batch, rows]
            for head in range(problem.heads):
                np.add.at(found[batch, head], labels[labels >= 0], change[head][labels >= 0])
    return found


def _changes(factors: Factors, v: Array, g: Array, labels: Array, count: int, rows: slice) -> Array:
    """(heads, queries, key groups): what each of these queries' g·o changes by without each span; g is theirs."""
    part = factors.take_queries(range(rows.start, rows.stop))
    heads, queries = part.problem.heads, part.problem.queries
    lse = np.full((heads, queries, count + 1), -np.inf)  # the last one: keys of no span, and the sink
    mean = np.zeros(lse.shape)
    edges = np.flatnonzero(np.diff(labels)) + 1
    for first, last in zip([0, *edges], [*edges, len(labels)], strict=True):
        at = int(labels[first]) if labels[first] >= 0 else count
        one = _answer(part, v, g, range(int(first), int(last)))
        lse[..., at], mean[..., at] = joined((lse[..., at], mean[..., at]), one)
    if part.problem.sinks is not None:
        sink = np.where(np.isneginf(lse).all(axis=-1), -np.inf, part.problem.sinks[:, None])
        lse[..., count], mean[..., count] = joined((lse[..., count], mean[..., count]), (sink, np.zeros(sink.shape)))
    before, after = _running(lse, mean), [x[..., ::-1] for x in _running(lse[..., ::-1], mean[..., ::-1])]
    others = joined((before[0][..., :-1], before[1][..., :-1]), (after[0][..., 1:], after[1][..., 1:]))[1][..., :count]
    whole = np.logaddexp.reduce(lse, axis=-1, keepdims=True)
    share = np.exp(lse[..., :count] - np.where(np.isneginf(whole), 0.0, whole))
    change: Array = share * (others - mean[..., :count])
    return change


def _answer(factors: Factors, v: Array, g: Array, keys: range) -> tuple[Array, Array]:
    """The log-sum-exp and g·o of some keys alone, (heads, queries) each."""
    at = slice(keys.start, keys.stop)
    problem = replace(factors.problem.take(keys=keys), sinks=None)
    want = Wanted(output=True, logsumexp=True, keep_float32=True)
    found = factors.engine.rows(problem, factors.q, factors.k[:, :, at], v[:, :, at], want)
    lse, output = (on_cpu(found[name])[0].astype(np.float64) for name in ("logsumexp", "output"))
    return lse, (output * g).sum(axis=-1)


def _running(lse: Array, mean: Array) -> list[Array]:
    """For each place, the log-sum-exp and the mean of all spans before it, (…, spans + 1)."""
    shape = (*lse.shape[:-1], lse.shape[-1] + 1)
    total, average = np.full(shape, -np.inf), np.zeros(shape)
    for at in range(lse.shape[-1]):
        now = (total[..., at], average[..., at]), (lse[..., at], mean[..., at])
        total[..., at + 1], average[..., at + 1] = joined(*now)
    return [total, average]
