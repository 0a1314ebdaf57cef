"""Attention with mistakes that no entry of the catalogue describes, each in plain NumPy.

Every function takes a `Case` and returns the output of such code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Code = Callable[["Case"], Array]


@dataclass(frozen=True)
class Case:
    """Inputs of an attention: q (batch, heads, queries, d_k), k, v; and numbers for what a mistake draws."""

    q: Array
    k: Array
    v: Array
    rng: np.random.Generator

    @property
    def n(self) -> int:
        return int(self.q.shape[2])

    @property
    def m(self) -> int:
        return int(self.k.shape[2])

    @property
    def d(self) -> int:
        return int(self.q.shape[3])


def drawn(rng: np.random.Generator, tokens: int = 48) -> Case:
    """Random inputs."""
    return Case(*rng.standard_normal((3, 2, 4, tokens, 16)).astype(np.float32), rng)


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


def over(c: Case, q: Any = None, k: Any = None, v: Any = None) -> Array:
    """The output with other queries, keys or values."""
    q, k, v = (x if other is None else other for x, other in ((c.q, q), (c.k, k), (c.v, v)))
    return softmax(q @ swapped(k) / np.float32(q.shape[-1] ** 0.5)) @ v


def hidden(c: Case, seen: Array) -> Array:
    """The output where queries see only some keys."""
    return softmax(np.where(seen, scores(c), -np.inf)) @ c.v


CODES: dict[str, Code] = {
    "a hard-coded scale": lambda c: softmax(c.q @ swapped(c.k) * 0.177) @ c.v,
    "a temperature of 1.1": lambda c: softmax(scores(c) / 1.1) @ c.v,
    "scores clipped at 1": lambda c: softmax(np.clip(scores(c), -1, 1)) @ c.v,
    "uniform weights": lambda c: np.broadcast_to(c.v.mean(2, keepdims=True), c.q.shape),
    "small weights dropped": lambda c: np.where(weights(c) > 1 / c.m, weights(c), 0) @ c.v,
    "values of the next head": lambda c: over(c, v=np.roll(c.v, 1, 1)),
    "keys of the next head": lambda c: over(c, k=np.roll(c.k, 1, 1), v=np.roll(c.v, 1, 1)),
    "no diagonal": lambda c: hidden(c, ~np.eye(c.n, dtype=bool)),
    "the last key is skipped": lambda c: hidden(c, np.arange(c.m) < c.m - 1),
    "0.01 added to one head": lambda c: put(output(c), np.s_[:, 1], output(c)[:, 1] + 0.01),
    "a hundredth of the neighbour": lambda c: output(c) + 0.01 * np.roll(output(c), 1, 2),
    "5 % leakage between heads": lambda c: 0.95 * output(c) + 0.05 * output(c).mean(1, keepdims=True),
    "output rounded to two decimals": lambda c: np.round(output(c), 2),
    "one row wrong": lambda c: put(output(c), np.s_[0, 1, 7], 0.3),
    "some NaN": lambda c: put(output(c), np.s_[:, :, ::7, 2], np.nan),
    "dropout on whole keys": lambda c: hidden(c, c.rng.random(c.m) < 0.9),
    "noise of 1e-3": lambda c: output(c) + 1e-3 * c.rng.standard_normal(c.q.shape),
    "one head never written": lambda c: put(output(c), np.s_[:, -1], 0),
    "the last column missing": lambda c: put(output(c), np.s_[..., -1], 0),
}
