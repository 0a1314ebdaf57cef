"""The interface of an engine, and helpers for engines. An engine is a module with the functions of `Engine`."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import NamedTuple, Protocol

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import WEIGHTS, Array
from clearhead.core.call import Call
from clearhead.core.effects import Others, Terms
from clearhead.core.problem import Problem
from clearhead.core.rules import RULES, refusals
from clearhead.core.state import State
from clearhead.core.statistics import Wanted, arrays_of
from clearhead.errors import EngineError

Results = Mapping[str, Array]
Rows = Callable[[Call, Wanted], dict[str, Array]]
_INT64 = np.dtype(np.int64)
Kind = tuple[tuple[int, ...], np.dtype[np.generic]]  # an array's shape and dtype


class Upstream(NamedTuple):
    """The upstream gradient: that of the loss at attention's results, in the form that backward.py gives engines.

    With a_ij the weights, the gradient of the loss at the logit of query i and key j, where i may see j, is

        dS_ij = a_ij·(output_i·v_j + rows_i + keys_j - entropy_i·ln a_ij + distance_i·|position of i - j|),

    a·ln a being 0 for a = 0, and 0 elsewhere. Numbers per query and per key are in the statistics' dtype.
    """

    rows: Array  # (batch, heads, queries)
    output: Array | None = None  # (batch, heads, queries, d_v), any strides, the problem's dtype
    keys: Array | None = None  # (batch, heads, keys)
    entropy: Array | None = None  # (batch, heads, queries)
    distance: Array | None = None  # (batch, heads, queries)
    bias: tuple[int, int, int, int] | None = None  # the bias's own shape, 1 where it is broadcast; None: not asked
    spans: tuple[int, int, int, int] | None = None  # the table's own shape, likewise


class Engine(Protocol):
    """What every engine has. All arrays are (batch, heads, …); q, k and v may have any strides.

    Statistics are float32, or float64 for float64. An engine that also computes effects of edges (core/effects.py has
    the formulas) has `others` and `product`, and takes the rows' Terms wherever others take their State.
    """

    STATISTICS: frozenset[str]  # the statistics that it computes; it is never asked for another

    RULES: frozenset[str]  # the score rules that it supports; it refuses a problem with another one

    GRADIENTS: frozenset[str]  # the inputs whose gradients it computes; PyTorch recomputes the other gradients

    def reasons_not(self, problem: Problem) -> list[str]:
        """Why this engine cannot run `problem`, one sentence each; empty when it can."""

    def rows(self, call: Call, want: Wanted) -> Results:
        """Compute the output (batch, heads, queries, d_v) and the requested row statistics.

        `top` is answered as top_weights and top_indices, logsumexp as a State's largest and log_sum. The output is in
        the problem's dtype, or in the statistics' (want.keep_float32). v may have any number of heads that divides the
        query heads. An engine that can finish `received` in the same pass also answers it here, bit for bit as
        `columns` would.
        """

    def columns(self, call: Call, state: State | Terms, want: Wanted) -> Results:
        """Compute the requested column statistics, or all requested ones of effects, from the rows' final states."""

    def weights(self, call: Call, state: State | Terms) -> Array:
        """Compute every weight or effect of this (small) problem, (batch, heads, queries, keys)."""

    def transposed(self, call: Call, state: State | Terms, g: Array) -> Array:
        """Aᵀ·g, or Eᵀ·g: g (batch, heads or 1, queries, d) to (batch, heads, keys, d)."""

    def gradients(self, call: Call, state: State, upstream: Upstream) -> Results:
        """Compute the gradients of the loss at "q", "k" and "v", each shaped as its array.

        They are in the problem's dtype, as are v and upstream.output. "v" only if upstream.output is given (then v is
        too): Σ_i a_ij·output_i, summed over the query heads of a value head. The gradient at the score q_i·k_j is
        scale·(1 - tanh²(scale·q_i·k_j / softcap))·dS_ij. "bias", on request, is dS summed over the axes along which the
        bias is broadcast; "spans", on request, is dS summed in float64 over each pair of labels, and over batch and
        heads where the table is broadcast. Both are in the statistics' dtype.
        """

    def others(self, call: Call, g: Array) -> Others:
        """Compute each row's strongest key and the softmax of its other keys, without sinks, as NumPy arrays."""

    def product(self, call: Call, terms: Terms, x: Array) -> Array:
        """E·x: x (batch, heads that divide the query heads, keys, d) to (batch, heads, queries, d)."""


def unsupported(who: str, supported: frozenset[str], problem: Problem) -> list[str]:
    """Why `who` cannot compute with the problem's rules: a sentence for each rule in use that it does not support."""
    if supported.issuperset(RULES):  # decided without looking at the problem, so that short calls stay fast
        return []
    return refusals(who, supported, problem.active_rules())


def in_one_dtype(rows: Rows) -> Rows:
    """Let a row pass take a v whose dtype differs from that of q and k.

    It converts all to float64 if v or the problem is float64, else to float32, and rounds the answers to the dtypes
    that the problem's answers have.
    """

    @wraps(rows)
    def run(call: Call, want: Wanted) -> dict[str, Array]:
        problem, v = call.problem, call.v
        if v is None or not want.output or v.dtype == problem.dtype:
            return rows(call, want)
        answers = rows(
            call.astype(np.dtype(np.float64 if np.float64 in (v.dtype, problem.dtype) else np.float32)), want
        )
        if "largest" in answers:  # from q and k as given: other passes must compute the same logits, bit for bit
            answers |= rows(call.with_values(None), Wanted(logsumexp=True))
        usual = statistics_dtype(problem.dtype)
        dtypes = {"output": usual if want.keep_float32 else problem.dtype, "top_indices": _INT64}
        return {name: array.astype(dtypes.get(name, usual), copy=False) for name, array in answers.items()}

    return run


def kinds(
    problem: Problem, want: Wanted, names: Iterable[str], declared: Collection[str], d_v: int = 0
) -> dict[str, Kind]:
    """The shape and dtype of each array of these statistics, by the array's name.

    Raises EngineError for a statistic that is not among the declared ones.
    """
    usual, sizes = statistics_dtype(problem.dtype), {axis: getattr(problem, axis) for axis in WEIGHTS} | {"d_v": d_v}
    result: dict[str, Kind] = {}
    for name in names:
        if name not in declared:
            raise EngineError(f"this engine does not compute {name}.", "leave `engine` out to let clearhead choose.")
        for array in arrays_of(name, want.of):
            result[array] = want.shape(name, sizes), _INT64 if array.endswith("_indices") else usual
    if "output" in result and not want.keep_float32:
        result["output"] = result["output"][0], problem.dtype
    return result


def row_kinds(problem: Problem, v: Array | None, want: Wanted, declared: frozenset[str]) -> dict[str, Kind]:
    """The shape and dtype of each array that a row pass answers, by name; the output only if there are values."""
    names = want.rows()
    if v is None and want.output:
        names.remove("output")
    return kinds(problem, want, names, declared, 0 if v is None else v.shape[-1])


def room_for_sums(each: Mapping[str, Kind]) -> dict[str, Array]:
    """Make the arrays in which a pass adds up its answers, by name: zeros in float64; indices start at -1."""
    return {
        name: np.full(shape, -1, dtype) if dtype == _INT64 else np.zeros(shape) for name, (shape, dtype) in each.items()
    }
