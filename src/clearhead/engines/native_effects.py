"""The native engine's matrices of effects: what single edges did, by the formulas in core/effects.py.

The kernel goes through the queries in segments that do not depend on the number of threads, and adds what each gives to
the sums in their order; so no bit depends on it either.
"""

from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.effects import ORDERS, Others, Terms, WantedEffects, no_keys
from clearhead.core.problem import Problem
from clearhead.engines.base import room_for_effects
from clearhead.engines.native_calls import TYPES, bits, call, labels

_SUMMED = ("by_key", "by_query", "groups")  # in float64; the kernel fills all others in the statistics' dtype


def others(problem: Problem, q: Array, k: Array, v: Array, g: Array) -> Others:
    """Each row's strongest key and what all its other keys answer, in one pass over the keys."""
    results = no_keys((problem.batch, problem.heads, problem.queries))
    call("others", problem, bits(q), bits(k), bits(v), bits(g), results._asdict())
    return results


def effects(
    problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms, want: WantedEffects
) -> dict[str, Array]:
    """What is wanted of the matrix of effects, in one pass over weights recomputed with the log-sum-exp."""
    dtype = statistics_dtype(problem.dtype)
    results = room_for_effects(problem, want)
    rounded = {name: x for name, x in results.items() if x.dtype != np.int64 and name not in _SUMMED}
    results |= {name: np.zeros(x.shape, dtype) for name, x in rounded.items()}
    more: dict[str, Any] = labels(want.groups)
    if want.top is not None:
        more["order"] = ORDERS.index(want.order)
    answers = {"received" if name == "by_key" else name: x for name, x in results.items()}
    _effects(problem, q, k, v, g, terms, answers, **more)
    return {name: x if x.dtype == np.int64 else x.astype(dtype, copy=False) for name, x in results.items()}


def effect_tile(problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms) -> Array:
    """Every effect of this (small) problem, (batch, heads, queries, keys)."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    tile = np.zeros(shape, statistics_dtype(problem.dtype))
    _effects(problem, q, k, v, g, terms, {"weights": tile})
    return tile


def effect_product(
    problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms, x: Array, *, transposed: bool
) -> Array:
    """E·x, (batch, heads, queries, d), or with `transposed` Eᵀ·x, (batch, heads, keys, d)."""
    dtype = statistics_dtype(problem.dtype)
    size = problem.keys if transposed else problem.queries
    product = np.zeros((problem.batch, problem.heads, size, x.shape[-1]), dtype if transposed else np.float64)
    answers = {"transposed" if transposed else "product": product}
    _effects(problem, q, k, v, g, terms, answers, x=bits(x), x_type=TYPES[x.dtype])
    return product.astype(dtype, copy=False)


def _effects(
    problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms, answers: dict[str, Array], **more: Any
) -> None:
    """Run the pass over effects, which fills `answers`; `more` holds labels, an order, or x and its type."""
    dtype = statistics_dtype(problem.dtype)
    known = {"logsumexp": terms.logsumexp, "whole": terms.whole, "others": terms.others}
    known = {name: np.ascontiguousarray(x, dtype) for name, x in known.items() if x is not None}
    if terms.strongest is not None:
        known["strongest"] = np.ascontiguousarray(terms.strongest, np.int64)
    call("effects", problem, bits(q), bits(k), bits(v), bits(g), {**known, **more}, answers)
