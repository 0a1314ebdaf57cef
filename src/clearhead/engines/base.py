"""The few questions an engine answers. An engine is a module with these names; it imports nothing above it."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.observations import Wanted
from clearhead.problem import Problem

Answers = Mapping[str, Array]


class Engine(Protocol):
    """All arrays are (batch, heads, …); q, k and v come in any strides. Statistics are float32, float64 for float64."""

    def reasons_not(self, problem: Problem) -> list[str]:
        """Why this engine cannot run `problem`, one sentence each; empty when it can."""

    def rows(self, problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> Answers:
        """The output (batch, heads, queries, d_v) and the row statistics asked for; `top` as top_weights, top_indices.

        v may have any number of heads that divides the query heads. An engine that can finish `received` in the same
        pass answers it here too, to the bits that `columns` would give.
        """

    def columns(self, problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> Answers:
        """The column statistics asked for, given the final log-sum-exp (batch, heads, queries)."""

    def weights(self, problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
        """Every weight of this (small) problem, (batch, heads, queries, keys)."""

    def transposed(self, problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
        """Aᵀ·g: g (batch, heads or 1, queries, d) to (batch, heads, keys, d)."""


def room_for_rows(problem: Problem, v: Array | None, want: Wanted) -> dict[str, Array]:
    """Where the answers of a row pass go, by name; to be filled."""
    shape = (problem.batch, problem.heads, problem.queries)
    dtype = statistics_dtype(problem.dtype)
    room: dict[str, Array] = {}
    if want.output and v is not None:
        room["output"] = np.empty((*shape, v.shape[-1]), problem.dtype)
    for name in ("logsumexp", "max_logit", "entropy", "distance"):
        if getattr(want, name):
            room[name] = np.empty(shape, dtype)
    if want.top is not None:
        room["top_weights"] = np.empty((*shape, want.top), dtype)
        room["top_indices"] = np.empty((*shape, want.top), np.int64)
    return room
