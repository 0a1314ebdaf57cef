"""Dual numbers: a value and its tangent in one array, which turn the portable engine's passes into their derivatives.

In x + ẋ·ε with ε² = 0, every formula carries its own derivative along: products follow the product rule, and exp, tanh
and log the chain rule. NumPy's complex numbers are dual numbers for ε = 2^-300·i: ε² is -2^-600, which no rounding of
float64 can see (Squire & Trapp 1998, "Using complex variables to estimate derivatives of real functions"). So a pass
that takes complex arrays computes derivatives along a direction; core/directions.py has the formulas.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.arrays import unrepeated
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Inputs
from clearhead.core.rule_values import within_range
from clearhead.core.statistics import ROW_TERMS
from clearhead.engines.base import Upstream

_EPSILON = 2.0**-300


def dual(x: Array | None, moved: Array | None) -> Array:
    """The dual numbers x + moved·ε; one of them may be None, which stands for zeros."""
    shape = np.broadcast_shapes(*(part.shape for part in (x, moved) if part is not None))
    made = np.zeros(shape, np.complex128)
    made.real = 0.0 if x is None else x
    made.imag = 0.0 if moved is None else moved.astype(np.float64) * _EPSILON
    return made


def values_alone(x: Array) -> Array:
    """What a pass over plain numbers keeps: the numbers themselves."""
    return x


def tangent(x: Array) -> Array:
    """What a pass over dual numbers keeps: their tangents."""
    return x.imag / _EPSILON


def wide(x: Array) -> Any:
    """The type in which a pass over x computes: complex for dual numbers, else float64."""
    return np.complex128 if np.iscomplexobj(x) else np.float64


def log_add(a: Array, b: Array | float) -> Array:
    """ln(exp(a) + exp(b)), of dual numbers too."""
    if not (np.iscomplexobj(a) or np.iscomplexobj(b)):
        return np.asarray(np.logaddexp(a, b))
    larger = np.maximum(np.real(a), np.real(b))
    total: Array = larger + np.log(np.exp(a - larger) + np.exp(b - larger))
    return total


def dual_inputs(inputs: Inputs, along: Directions) -> Inputs:
    """A problem and its arrays as dual numbers. A broadcast bias stays a broadcast view; q is complex in any case."""
    problem, q, k, v = inputs
    rules: dict[str, Any] = {} if along.sinks is None else {"sinks": dual(problem.sinks, along.sinks)}
    for name, direction in (("bias", along.bias), ("span_table", along.spans)):
        if direction is not None:
            x = getattr(problem, name)
            numbers = dual(within_range(unrepeated(x)), unrepeated(direction))
            rules[name] = np.broadcast_to(numbers, x.shape)
    keys = k if along.k is None else dual(k, along.k)
    values = v if along.v is None else dual(v, along.v)
    return Inputs(replace(problem, **rules), dual(q, along.q), keys, values)


def dual_upstream(upstream: Upstream, changing: Upstream) -> Upstream:
    """The upstream gradient with its tangent; what both lack stays None."""
    pairs = {name: (getattr(upstream, name), getattr(changing, name)) for name in ("rows", "output", *ROW_TERMS)}
    numbers: dict[str, Any] = {name: dual(*pair) for name, pair in pairs.items() if any(x is not None for x in pair)}
    return replace(upstream, **numbers)
