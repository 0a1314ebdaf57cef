"""The few questions an engine answers. An engine is a module with these names; it imports nothing above it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.observations import Wanted
from clearhead.problem import Problem

Answers = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Upstream:
    """What is known of a loss: its derivatives by what attention answered, ready for an engine (backward.py makes it).

    With a_ij the weights, the loss's derivative by the logit of query i and key j, where i may see j, is

        dS_ij = a_ij·(output_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|),

    a·ln a being 0 for a = 0, and 0 elsewhere. Numbers per query and per key are in the statistics' dtype.
    """

    rows: Array  # (batch, heads, queries)
    output: Array | None = None  # (batch, heads, queries, d_v), any strides, the problem's dtype
    keys: Array | None = None  # (batch, heads, keys)
    entropy: Array | None = None  # (batch, heads, queries)
    distance: Array | None = None  # (batch, heads, queries)
    bias: tuple[int, int, int, int] | None = None  # the bias's own shape, 1 where it is broadcast; None: not asked
    unrounded: bool = False  # the answers in the statistics' dtype, for a sum over ranks


class Engine(Protocol):
    """All arrays are (batch, heads, …); q, k and v come in any strides. Statistics are float32, float64 for float64."""

    def reasons_not(self, problem: Problem) -> list[str]:
        """Why this engine cannot run `problem`, one sentence each; empty when it can."""

    def rows(self, problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> Answers:
        """The output (batch, heads, queries, d_v) and the row statistics asked for; `top` as top_weights, top_indices.

        The output is in the problem's dtype, or unrounded in the statistics' (want.unrounded). v may have any number of
        heads that divides the query heads. An engine that can finish `received` in the same pass answers it here too,
        to the bits that `columns` would give.
        """

    def columns(self, problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> Answers:
        """The column statistics asked for, given the final log-sum-exp (batch, heads, queries)."""

    def weights(self, problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
        """Every weight of this (small) problem, (batch, heads, queries, keys)."""

    def transposed(self, problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
        """Aᵀ·g: g (batch, heads or 1, queries, d) to (batch, heads, keys, d)."""

    def gradients(
        self, problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
    ) -> Answers:
        """The loss's derivatives by "q", "k" and "v" in the problem's dtype, or unrounded, each shaped as its array.

        "v" only where upstream.output is given (then v is too): Σ_i a_ij·output_i, summed over the query heads of a
        value head. By the score q_i·k_j the loss changes by scale·(1 - tanh²(scale·q_i·k_j / softcap))·dS_ij. "bias",
        where asked, is dS summed over the axes along which the bias is broadcast, in the statistics' dtype.
        """


def elsewhere(problem: Problem) -> str:
    """Why an engine of the CPU cannot read the arrays; "" where it can."""
    return "" if problem.device == "cpu" else f"the arrays are on device {problem.device}: this engine runs on the CPU."


def widened(problem: Problem, v: Array) -> Problem:
    """Where values have another dtype: the same problem in one that holds both."""
    return replace(problem, dtype=np.dtype(np.float64 if np.float64 in (v.dtype, problem.dtype) else np.float32))


def narrowed(problem: Problem, found: Answers, *, unrounded: bool) -> dict[str, Array]:
    """What a widened problem answered, in the dtypes of the problem's own answers."""
    usual = statistics_dtype(problem.dtype)
    own = usual if unrounded else problem.dtype
    dtypes = dict.fromkeys(("output", "q", "k", "v"), own) | {"top_indices": np.dtype(np.int64)}
    return {name: array.astype(dtypes.get(name, usual), copy=False) for name, array in found.items()}


def room_for_rows(problem: Problem, v: Array | None, want: Wanted) -> dict[str, Array]:
    """Where the answers of a row pass go, by name; to be filled."""
    shape = (problem.batch, problem.heads, problem.queries)
    dtype = statistics_dtype(problem.dtype)
    room: dict[str, Array] = {}
    if want.output and v is not None:
        room["output"] = np.empty((*shape, v.shape[-1]), dtype if want.unrounded else problem.dtype)
    for name in ("logsumexp", "max_logit", "entropy", "distance"):
        if getattr(want, name):
            room[name] = np.empty(shape, dtype)
    if want.top is not None:
        room["top_weights"] = np.empty((*shape, want.top), dtype)
        room["top_indices"] = np.empty((*shape, want.top), np.int64)
    return room
