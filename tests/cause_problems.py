"""Problems with values and a derivative g, and how far contributions and cuts of them may lie from the reference."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import clearhead as ch
from clearhead import engines
from clearhead.core import reference, visibility
from clearhead.core.axes import Array
from clearhead.ops.causes import CauseMatrix
from problems import LAYOUTS, Case
from problems import each_engine as on_each_engine
from seeds import fresh
from slack import Slack

ENGINES = [name for name in engines.NAMES if hasattr(engines.get(name), "effects")]
EVERYTHING: dict[str, Any] = {"by_key": True, "by_query": True, "top": 3, "strongest": 7, "image": (5, 6)}
each_engine = on_each_engine(ENGINES)


def normal(*shape: int, dtype: Any = np.float64) -> Array:
    return fresh().standard_normal(shape).astype(dtype)


@dataclass(frozen=True)
class Causes:
    """A case with g, (…, heads, queries, d_v), and the reference's dense effects."""

    case: Case

    @cached_property
    def g(self) -> Array:
        rng, problem = self.case.rng, self.case.problem
        g = rng.standard_normal((*problem.prefix, problem.queries, self.case.v.shape[-1])).astype(self.case.v.dtype)
        return LAYOUTS[sorted(LAYOUTS)[rng.integers(len(LAYOUTS))]](g)

    def made(self, kind: str, **changes: Any) -> CauseMatrix:
        A = self.case.matrix(**changes)
        return A.cuts(self.case.v, self.g) if kind == "cut" else A.contributions(self.case.v, self.g)

    @property
    def four(self) -> tuple[Array, Array]:
        """Values and g, each (batch, heads, …)."""
        problem = self.case.problem
        return self.case.given.v, self.g.reshape(problem.batch, problem.heads, *self.g.shape[-2:])

    def truth(self, kind: str) -> Array:
        """(batch, heads, queries, keys) in float64."""
        function = reference.cuts if kind == "cut" else reference.contributions
        return function(self.case.problem, self.case.book, *self.four)

    @cached_property
    def allowed(self) -> Array:
        """The error of each effect, (batch, heads, queries, keys): relative to its weight, and to what it moves.

        An effect is at most a/(1 - a) ≤ 2a, or a for a row's largest weight, times the difference of two means of t.
        """
        slack, (v, g) = Slack(self.case), (np.abs(x.astype(np.float64)) for x in self.four)
        values = np.repeat(v, self.case.problem.heads // max(1, v.shape[1]), axis=1)
        moved = np.where(visibility.dense(self.case.problem), g @ values.swapaxes(-1, -2), 0.0)
        largest: Array = 8 * slack.weights * (1e-30 + moved.max(axis=-1, initial=0.0, keepdims=True))
        return largest + slack.tiny

    def labels(self) -> tuple[Array, Array]:
        return self.case.labels()


def refused(engine: str, case: Case) -> bool:
    return bool(engines.get(engine).reasons_not(case.problem))


def in_float64(case: Case) -> Case:
    return Case(*(x.astype(np.float64) for x in (case.q, case.k, case.v)), case.rules, case.seed)


def without(case: Case, hidden: Array, v: Array) -> Array:
    """Attention's output where the pairs `hidden`, as the matrix's shape, may not see each other."""
    sight = np.broadcast_to(case.rules.get("mask", True), hidden.shape) & ~hidden
    return ch.attention(case.q, case.k, v, **{**case.rules, "mask": sight})


def everything(E: Any, labels: tuple[Array, Array]) -> dict[str, Array]:
    """Every answer by name."""
    seen = E.observe(**EVERYTHING, groups=labels)
    result = {name: getattr(seen, name) for name in ("by_key", "by_query", "groups")}
    for name in ("top", "strongest", "image"):
        result |= {f"{name} {part}": x for part, x in getattr(seen, name)._asdict().items()}
    spans = {"spans": E.spans(*labels)} if E.kind == "cut" else {}
    ones = {"product": E @ np.ones(E.shape[-1]), "transposed": E.T @ np.ones(E.shape[-2])}
    return {**result, **spans, **ones, "dense": E[...]}


def signed_largest(x: Array, height: int, width: int, *, second: bool = False) -> Array:
    """Under each pixel, what is largest in magnitude; or the largest magnitude of the other sign."""
    result = np.zeros((*x.shape[:2], height, width))
    for r in range(height):
        rows = covered(r, height, x.shape[-2])
        for c in range(width):
            under = x[:, :, rows][..., covered(c, width, x.shape[-1])].reshape(*x.shape[:2], -1)
            high, low = under.max(-1), under.min(-1)
            wins = high >= -low
            result[:, :, r, c] = np.where(wins != second, high, low)
    return result


def covered(pixel: int, pixels: int, size: int) -> slice:
    """The cells under a pixel, in whole numbers."""
    return slice(pixel * size // pixels, -(-(pixel + 1) * size // pixels))
