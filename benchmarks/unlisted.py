"""Attention with mistakes that students, porters and kernel writers make, each in plain NumPy.

Every function takes a `Case` and returns the output of such code. benchmarks/honesty.py asks `diagnose` about them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Code = Callable[["Case"], Array]


@dataclass(frozen=True)
class Case:
    """Inputs of an attention without rules or with them, and the rules: q (batch, heads, queries, d_k), k, v."""

    q: Array
    k: Array
    v: Array
    rng: np.random.Generator
    rules: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return int(self.q.shape[2])

    @property
    def m(self) -> int:
        return int(self.k.shape[2])

    @property
    def d(self) -> int:
        return int(self.q.shape[3])


def swapped(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def scores(c: Case) -> Array:
    return c.q @ swapped(c.k) / np.float32(c.d**0.5)


def softmax(x: Array, axis: Any = -1) -> Array:
    top = x.max(axis=axis, keepdims=True)
    powers = np.exp(x - np.where(np.isneginf(top), 0, top))
    total = powers.sum(axis=axis, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def weights(c: Case) -> Array:
    return softmax(scores(c))


def output(c: Case) -> Array:
    return weights(c) @ c.v


def put(x: Array, where: Any, value: Any) -> Array:
    """A copy with other numbers at one place."""
    x = x.copy()
    x[where] = value
    return x


def swap(x: Array, a: int, b: int, axis: int = 2) -> Array:
    order = np.arange(x.shape[axis])
    order[[a, b]] = order[[b, a]]
    return x.take(order, axis=axis)


def over(c: Case, q: Any = None, k: Any = None, v: Any = None) -> Array:
    """The output with other queries, keys or values."""
    q, k, v = (x if other is None else other for x, other in ((c.q, q), (c.k, k), (c.v, v)))
    return softmax(q @ swapped(k) / np.float32(q.shape[-1] ** 0.5)) @ v


def hidden(c: Case, seen: Array) -> Array:
    """The output where queries see only some keys."""
    return softmax(np.where(seen, scores(c), -np.inf)) @ c.v


def normed(x: Array, axis: int = -1) -> Array:
    return x / np.sqrt((x**2).sum(axis=axis, keepdims=True))


def layer_norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def flat_heads(x: Array) -> Array:
    """Heads from (batch, n, heads·d) by a reshape without the transpose."""
    return x.swapaxes(1, 2).reshape(x.shape)


def blocks(c: Case, size: int = 16) -> list[slice]:
    return [slice(start, min(start + size, c.m)) for start in range(0, c.m, size)]


def kernel(c: Case, step: Any, size: int = 16) -> Array:
    """An online softmax over blocks; `step(old, new, shrink, p @ v)` and so on are given by the mistake."""
    s = scores(c)
    top = np.full((*s.shape[:-1], 1), -np.inf, np.float32)
    acc, total = np.zeros((*s.shape[:-1], c.v.shape[-1]), np.float32), np.zeros_like(top)
    for block, part in enumerate(blocks(c, size)):
        new = np.maximum(top, s[..., part].max(-1, keepdims=True))
        acc, total = step(block, acc, total, top, new, s[..., part], c.v[..., part, :])
        top = new
    return acc / total


def _mixed_bases(_: int, acc: Array, total: Array, top: Array, new: Array, s: Array, v: Array) -> tuple[Array, Array]:
    p, shrink = np.exp(s - new), np.exp2(top - new)
    return acc * shrink + p @ v, total * shrink + p.sum(-1, keepdims=True)


def _local_maximum(_: int, acc: Array, total: Array, top: Array, new: Array, s: Array, v: Array) -> tuple[Array, Array]:
    p, shrink = np.exp(s - s.max(-1, keepdims=True)), np.exp(top - new)
    return acc * shrink + p @ v, total * shrink + p.sum(-1, keepdims=True)


def _rescaled_late(
    block: int, acc: Array, total: Array, top: Array, new: Array, s: Array, v: Array
) -> tuple[Array, Array]:
    p, shrink = np.exp(s - new), np.exp(top - new)
    return (acc + p @ v) * np.where(block, shrink, 1), total * shrink + p.sum(-1, keepdims=True)


def _divided_each_time(
    block: int, acc: Array, total: Array, top: Array, new: Array, s: Array, v: Array
) -> tuple[Array, Array]:
    p, shrink = np.exp(s - new), np.exp(top - new)
    total = total * shrink + p.sum(-1, keepdims=True)
    return (acc * shrink + p @ v) / np.where(block % 2, 1, 2), total


def _of_parts(c: Case, join: Any, size: int = 16) -> Array:
    """Each block's own attention, joined by the mistake."""
    s = scores(c)
    outs = [softmax(s[..., part]) @ c.v[..., part, :] for part in blocks(c, size)]
    totals = [
        np.exp(s[..., part] - s[..., part].max(-1, keepdims=True)).sum(-1, keepdims=True) for part in blocks(c, size)
    ]
    return np.asarray(join(outs, totals))


def _top(x: Array, count: int) -> Array:
    return x >= np.sort(x, axis=-1)[..., [-count]]


def _sparsemax(x: Array) -> Array:
    ordered = -np.sort(-x, axis=-1)
    sums, count = ordered.cumsum(-1), np.arange(1, x.shape[-1] + 1)
    size = (1 + count * ordered > sums).sum(-1, keepdims=True)
    threshold = (np.take_along_axis(sums, size - 1, -1) - 1) / size
    return np.maximum(x - threshold, 0)


def _features(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _linear(c: Case) -> Array:
    a = _features(c.q) @ swapped(_features(c.k))
    return a / a.sum(-1, keepdims=True) @ c.v


def _sinusoids(c: Case) -> Array:
    angles = np.arange(c.n)[:, None] / 10000 ** (np.arange(c.d) // 2 * 2 / c.d)
    return np.where(np.arange(c.d) % 2, np.cos(angles), np.sin(angles)).astype(np.float32)


def _quantised(x: Array, steps: int) -> Array:
    unit = np.abs(x).max() / steps
    return np.round(x / unit) * unit


def _mantissa(x: Array, bits: int) -> Array:
    fraction, power = np.frexp(x)
    return np.ldexp(np.round(fraction * 2**bits) / 2**bits, power)


def _ahead(c: Case, by: int) -> Array:
    return np.arange(c.m) <= np.arange(c.n)[:, None] + by


def _other_axes(c: Case, axes: tuple[int, int]) -> Array:
    """Attention along another axis than the tokens."""
    q, k, v = (np.swapaxes(x, *axes) for x in (c.q, c.k, c.v))
    return np.swapaxes(softmax(q @ swapped(k) / np.float32(c.d**0.5)) @ v, *axes)


def _moving(x: Array) -> Array:
    return (x + np.roll(x, 1, axis=2)) / 2


PLAIN: dict[str, Code] = {
    # the scale
    "scale d^-1/4": lambda c: softmax(c.q @ swapped(c.k) / c.d**0.25) @ c.v,
    "scale of the length": lambda c: softmax(c.q @ swapped(c.k) / c.m**0.5) @ c.v,
    "scale of the length itself": lambda c: softmax(c.q @ swapped(c.k) / c.m) @ c.v,
    "scale of the heads": lambda c: softmax(scores(c) / c.q.shape[1] ** 0.5) @ c.v,
    "exp2 for exp": lambda c: softmax(scores(c) * np.log(2)) @ c.v,
    "log2 e twice": lambda c: softmax(scores(c) / np.log(2)) @ c.v,
    "a hard-coded scale": lambda c: softmax(c.q @ swapped(c.k) * 0.177) @ c.v,
    "d**-1/2 read as (d**-1)/2": lambda c: softmax(c.q @ swapped(c.k) / c.d / 2) @ c.v,
    "scale after the softmax": lambda c: softmax(c.q @ swapped(c.k)) / c.d**0.5 @ c.v,
    "scale on the values too": lambda c: output(c) / np.float32(c.d**0.5),
    "divided by the largest score": lambda c: softmax(scores(c) / np.abs(scores(c)).max(-1, keepdims=True)) @ c.v,
    "a temperature of 1.1": lambda c: softmax(scores(c) / 1.1) @ c.v,
    "scale from each head's own norm": lambda c: softmax(scores(c) / scores(c).std((-1, -2), keepdims=True)) @ c.v,
    # the scores
    "cosine": lambda c: softmax(normed(c.q) @ swapped(normed(c.k))) @ c.v,
    "only queries normalised": lambda c: softmax(normed(c.q) @ swapped(c.k)) @ c.v,
    "minus the distance": lambda c: (
        softmax(-((c.q[..., None, :] - c.k[..., None, :, :]) ** 2).sum(-1) / c.d**0.5) @ c.v
    ),
    "negative scores": lambda c: softmax(-scores(c)) @ c.v,
    "half of d_k": lambda c: softmax(c.q[..., : c.d // 2] @ swapped(c.k[..., : c.d // 2]) / c.d**0.5) @ c.v,
    "all but the last of d_k": lambda c: softmax(c.q[..., :-1] @ swapped(c.k[..., :-1]) / c.d**0.5) @ c.v,
    "scores clipped at 1": lambda c: softmax(np.clip(scores(c), -1, 1)) @ c.v,
    "scores rounded to whole numbers": lambda c: softmax(np.round(scores(c))) @ c.v,
    "tanh on the scores": lambda c: softmax(np.tanh(scores(c))) @ c.v,
    "absolute scores": lambda c: softmax(np.abs(scores(c))) @ c.v,
    "relu on the scores": lambda c: softmax(np.maximum(scores(c), 0)) @ c.v,
    "scores symmetrised": lambda c: softmax((scores(c) + swapped(scores(c))) / 2) @ c.v,
    "scores averaged over heads": lambda c: (
        softmax(np.broadcast_to(scores(c).mean(1, keepdims=True), scores(c).shape)) @ c.v
    ),
    "additive scores": lambda c: softmax(np.tanh(c.q[..., None, :] + c.k[..., None, :, :]).sum(-1)) @ c.v,
    # the softmax
    "softmax1": lambda c: (lambda e: e / (1 + e.sum(-1, keepdims=True)))(np.exp(scores(c))) @ c.v,
    "sigmoid": lambda c: 1 / (1 + np.exp(-scores(c))) @ c.v,
    "sigmoid, normalised": lambda c: (lambda a: a / a.sum(-1, keepdims=True))(1 / (1 + np.exp(-scores(c)))) @ c.v,
    "relu, normalised": lambda c: (lambda a: a / a.sum(-1, keepdims=True))(np.maximum(scores(c), 1e-6)) @ c.v,
    "softmax twice": lambda c: softmax(weights(c)) @ c.v,
    "log softmax": lambda c: np.log(weights(c)) @ c.v,
    "no sum": lambda c: np.exp(scores(c)) @ c.v,
    "no sum, maximum subtracted": lambda c: np.exp(scores(c) - scores(c).max(-1, keepdims=True)) @ c.v,
    "keepdims missing": lambda c: (lambda e: e / e.sum(-1)[..., None, :])(np.exp(scores(c))) @ c.v,
    "maximum of the wrong axis": lambda c: (
        (lambda e: e / e.sum(-1, keepdims=True))(np.exp(scores(c) - scores(c).max(-2, keepdims=True))) @ c.v
    ),
    "softmax over the batch": lambda c: softmax(scores(c), 0) @ c.v,
    "softmax over everything": lambda c: softmax(scores(c), (0, 1, 2, 3)) @ c.v,
    "l2 in place of the softmax": lambda c: normed(scores(c)) @ c.v,
    "sparsemax": lambda c: _sparsemax(scores(c)) @ c.v,
    "hard attention": lambda c: (scores(c) == scores(c).max(-1, keepdims=True)).astype(np.float32) @ c.v,
    "uniform weights": lambda c: np.broadcast_to(c.v.mean(2, keepdims=True), c.q.shape),
    "linear attention": _linear,
    "top 4 only": lambda c: hidden(c, _top(scores(c), 4)),
    "top 4 only, not normalised": lambda c: weights(c) * _top(scores(c), 4) @ c.v,
    "small weights dropped": lambda c: np.where(weights(c) > 1 / c.m, weights(c), 0) @ c.v,
    "weights mixed with the identity": lambda c: (weights(c) + np.eye(c.n, dtype=np.float32)) / 2 @ c.v,
    "weights averaged over heads": lambda c: weights(c).mean(1, keepdims=True) @ c.v,
    "exp by its first terms": lambda c: (
        (lambda a: a / a.sum(-1, keepdims=True))(1 + scores(c) + scores(c) ** 2 / 2) @ c.v
    ),
    "eps of 0.1 in the denominator": lambda c: (
        (lambda e: e / (e.sum(-1, keepdims=True) + 0.1))(np.exp(scores(c))) @ c.v
    ),
    "softmax per block": lambda c: np.concatenate([softmax(scores(c)[..., p]) for p in blocks(c)], -1) @ c.v,
    # operands
    "k and v swapped": lambda c: over(c, k=c.v, v=c.k),
    "v for k": lambda c: over(c, k=c.v),
    "q for k": lambda c: over(c, k=c.q),
    "k for q": lambda c: over(c, q=c.k),
    "v for q": lambda c: over(c, q=c.v),
    "all three rotated": lambda c: over(c, q=c.k, k=c.v, v=c.q),
    "values reversed": lambda c: over(c, v=c.v[:, :, ::-1]),
    "values shifted by one": lambda c: over(c, v=np.roll(c.v, 1, 2)),
    "queries shifted by one": lambda c: over(c, q=np.roll(c.q, 1, 2)),
    "values of the first head": lambda c: over(c, v=np.broadcast_to(c.v[:, :1], c.v.shape)),
    "keys of the first head": lambda c: over(c, k=np.broadcast_to(c.k[:, :1], c.k.shape)),
    "queries of the first head": lambda c: over(c, q=np.broadcast_to(c.q[:, :1], c.q.shape)),
    "the first head for all": lambda c: np.broadcast_to(output(c)[:, :1], c.q.shape),
    "keys of the next head": lambda c: over(c, k=np.roll(c.k, 1, 1), v=np.roll(c.v, 1, 1)),
    "values of the next head": lambda c: over(c, v=np.roll(c.v, 1, 1)),
    "keys of the other batch entry": lambda c: over(c, k=np.roll(c.k, 1, 0)),
    "context of the first batch entry": lambda c: over(
        c, k=np.broadcast_to(c.k[:1], c.k.shape), v=np.broadcast_to(c.v[:1], c.v.shape)
    ),
    "only queries split flat": lambda c: over(c, q=flat_heads(c.q)),
    "only values split flat": lambda c: over(c, v=flat_heads(c.v)),
    "attention over heads": lambda c: _other_axes(c, (1, 2)),
    "attention over the batch": lambda c: _other_axes(c, (0, 2)),
    "attention over columns": lambda c: swapped(softmax(swapped(c.q) @ c.k / c.d**0.5) @ swapped(c.v)),
    "queries minus their mean": lambda c: over(c, q=c.q - c.q.mean(2, keepdims=True)),
    "values minus their mean": lambda c: over(c, v=c.v - c.v.mean(2, keepdims=True)),
    "layer norm on q and k": lambda c: over(c, q=layer_norm(c.q), k=layer_norm(c.k)),
    "sinusoids added to q and k": lambda c: over(c, q=c.q + _sinusoids(c), k=c.k + _sinusoids(c)),
    "the first key is zero": lambda c: over(c, k=put(c.k, np.s_[:, :, 0], 0)),
    "the last value is zero": lambda c: over(c, v=put(c.v, np.s_[:, :, -1], 0)),
    "two keys swapped, not their values": lambda c: over(c, k=swap(c.k, 3, 5)),
    "columns of v reversed": lambda c: over(c, v=c.v[..., ::-1]),
    # masks nobody asked for
    "causal without being asked": lambda c: hidden(c, _ahead(c, 0)),
    "one ahead without being asked": lambda c: hidden(c, _ahead(c, 1)),
    "no diagonal": lambda c: hidden(c, ~np.eye(c.n, dtype=bool)),
    "a window without being asked": lambda c: hidden(c, np.abs(np.subtract.outer(np.arange(c.n), np.arange(c.m))) < 6),
    "chunks of eight": lambda c: hidden(c, np.equal.outer(np.arange(c.n) // 8, np.arange(c.m) // 8)),
    "every fourth": lambda c: hidden(c, np.equal.outer(np.arange(c.n) % 4, np.arange(c.m) % 4)),
    "the first key is skipped": lambda c: hidden(c, np.arange(c.m) > 0),
    "the last key is skipped": lambda c: hidden(c, np.arange(c.m) < c.m - 1),
    "random keys hidden": lambda c: hidden(c, c.rng.random((c.n, c.m)) < 0.8),
    # kernels
    "a block in the middle skipped": lambda c: hidden(c, np.arange(c.m) // 8 != 1),
    "the first block skipped": lambda c: hidden(c, np.arange(c.m) >= 8),
    "the tail overlaps": lambda c: (lambda e: (e[0] / e[0].sum(-1, keepdims=True)) @ c.v)(
        [np.exp(scores(c)) * (1 + (np.arange(c.m) >= c.m - 3))]
    ),
    "blocks averaged": lambda c: _of_parts(c, lambda outs, _: sum(outs) / len(outs)),
    "blocks merged without maxima": lambda c: _of_parts(
        c, lambda outs, sums: sum(o * s for o, s in zip(outs, sums, strict=True)) / sum(sums)
    ),
    "blocks added": lambda c: _of_parts(c, lambda outs, _: sum(outs)),
    "the stale key tile": lambda c: over(c, k=np.concatenate([c.k[:, :, :8], c.k[:, :, : c.m - 8]], 2)),
    "the last tile's values stale": lambda c: over(c, v=put(c.v, np.s_[:, :, -8:], c.v[:, :, -16:-8])),
    "the last tile's queries stale": lambda c: over(c, q=put(c.q, np.s_[:, :, -8:], c.q[:, :, :8])),
    "mixed bases": lambda c: kernel(c, _mixed_bases),
    "the block's own maximum": lambda c: kernel(c, _local_maximum),
    "rescaled after the sum": lambda c: kernel(c, _rescaled_late),
    "divided in the loop": lambda c: kernel(c, _divided_each_time),
    "accumulator kept from the head before": lambda c: (
        output(c) + np.concatenate([0 * output(c)[:, :1], output(c)[:, :-1]], 1)
    ),
    "heads written in reverse": lambda c: output(c)[:, ::-1],
    "rows written one too far": lambda c: np.roll(output(c), 1, 2),
    "a tile written twice": lambda c: put(output(c), np.s_[:, :, 8:16], output(c)[:, :, :8]),
    "columns swapped in pairs": lambda c: output(c)[..., np.arange(c.d) ^ 1],
    "half of the columns zero": lambda c: put(output(c), np.s_[..., c.d // 2 :], 0),
    "the last column missing": lambda c: put(output(c), np.s_[..., -1], 0),
    "one head never written": lambda c: put(output(c), np.s_[:, -1], 0),
    "one batch entry never written": lambda c: put(output(c), np.s_[-1], 0),
    "the rows' blocks in reverse": lambda c: np.concatenate(np.split(output(c), [c.n // 2], 2)[::-1], 2),
    "a race in some rows": lambda c: put(
        output(c), np.s_[:, :, 5::9], output(c)[:, :, 4:-1:9][:, :, : len(range(5, c.n, 9))] * 0.5
    ),
    # small differences
    "noise of 1e-3": lambda c: output(c) + 1e-3 * c.rng.standard_normal(c.q.shape),
    "noise of a tenth": lambda c: output(c) * (1 + 0.1 * c.rng.standard_normal(c.q.shape)),
    "noise on the scores": lambda c: softmax(scores(c) + 0.1 * c.rng.standard_normal((c.n, c.m))) @ c.v,
    "noise on the queries": lambda c: over(c, q=c.q + 0.01 * c.rng.standard_normal(c.q.shape)),
    "0.01 added to one head": lambda c: put(output(c), np.s_[:, 1], output(c)[:, 1] + 0.01),
    "a hundredth of the neighbour": lambda c: output(c) + 0.01 * np.roll(output(c), 1, 2),
    "a hundredth of the next head": lambda c: output(c) + 0.01 * np.roll(output(c), 1, 1),
    "5 % leakage between heads": lambda c: 0.95 * output(c) + 0.05 * output(c).mean(1, keepdims=True),
    "one per cent too large": lambda c: output(c) * 1.01,
    "a constant added": lambda c: output(c) + 0.003,
    "a hundredth of the values": lambda c: output(c) + 0.01 * c.v,
    "eight bits for the keys": lambda c: over(c, k=_quantised(c.k, 127)),
    "four bits for the values": lambda c: over(c, v=_quantised(c.v, 7)),
    "three bits of mantissa": lambda c: over(c, v=_mantissa(c.v, 4)),
    "output rounded to two decimals": lambda c: np.round(output(c), 2),
    "output truncated to two decimals": lambda c: np.trunc(output(c) * 100) / 100,
    "one number wrong": lambda c: put(output(c), np.s_[0, 1, 7, 2], 1.5),
    "one row wrong": lambda c: put(output(c), np.s_[0, 1, 7], 0.3),
    "one row zero": lambda c: put(output(c), np.s_[:, :, 7], 0),
    "two rows swapped": lambda c: swap(output(c), 3, 9),
    "some NaN": lambda c: put(output(c), np.s_[:, :, ::7, 2], np.nan),
    "one head NaN": lambda c: put(output(c), np.s_[:, 1], np.nan),
    "infinite where it is large": lambda c: np.where(output(c) > 0.5, np.inf, output(c)),
    # after the attention
    "the residual of the queries": lambda c: output(c) + c.q,
    "the residual of the values": lambda c: output(c) + c.v,
    "layer norm": lambda c: layer_norm(output(c)),
    "normalised": lambda c: normed(output(c)),
    "relu": lambda c: np.maximum(output(c), 0),
    "tanh": lambda c: np.tanh(output(c)),
    "clipped": lambda c: np.clip(output(c), -0.3, 0.3),
    "squared": lambda c: output(c) ** 2,
    "a moving average": lambda c: _moving(output(c)),
    "summed over the rows": lambda c: output(c).cumsum(2),
    "mean over heads": lambda c: np.broadcast_to(output(c).mean(1, keepdims=True), c.q.shape),
    "applied twice": lambda c: weights(c) @ output(c),
    "dropout on the output": lambda c: output(c) * (c.rng.random(c.q.shape) < 0.9) / 0.9,
    "dropout on the values": lambda c: over(c, v=c.v * (c.rng.random(c.v.shape) < 0.9) / 0.9),
    "dropout on whole keys": lambda c: hidden(c, c.rng.random(c.m) < 0.9),
    "dropout on the scores": lambda c: softmax(scores(c) * (c.rng.random(scores(c).shape) < 0.9)) @ c.v,
    "values themselves": lambda c: c.v,
    "queries themselves": lambda c: c.q,
    "random numbers": lambda c: c.rng.standard_normal(c.q.shape),
    "all NaN": lambda c: np.full(c.q.shape, np.nan),
    "all zero": lambda c: np.zeros(c.q.shape),
    "all one": lambda c: np.ones(c.q.shape),
    "one row repeated": lambda c: np.broadcast_to(output(c)[:, :, :1], c.q.shape),
}
