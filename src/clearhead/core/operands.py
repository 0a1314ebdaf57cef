"""Reads and checks the right-hand side of a product with the weights: v in A·v, g in Aᵀ·g."""

from typing import Any

from clearhead.core.arrays import FLOATS, as_array, autocast, broadcast, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.problem import Problem
from clearhead.core.room import array_bytes, check_room
from clearhead.errors import DtypeError, ShapeError


def operand(problem: Problem, x: Array, name: str, length: int, heads: tuple[int, ...]) -> tuple[Array, bool]:
    """Read the right-hand side of a product.

    x         (…, one of `heads`, length, d), or for all heads alike (length, d) or (length,)
    length    the number of keys for A·v, of queries for Aᵀ·g
    heads     the numbers of heads that it may have

    Returns it as (batch, its heads, length, d), its heads being 1 where it is for all alike, and whether it was a
    vector. Raises DtypeError for what is no float, ShapeError for another shape.
    """
    if x.dtype not in FLOATS:
        raise DtypeError(f"{name} is {x.dtype}: expected float64, float32, bfloat16 or float16.")
    vector = x.ndim == 1
    columns = x[:, None] if vector else x
    lead = problem.prefix[:-1]
    shared = columns.ndim == 2
    fits = columns.ndim >= 2 and columns.shape[-2] == length
    if not shared:
        fits = fits and columns.shape[:-3] == lead and len(problem.prefix) > 0 and columns.shape[-3] in heads
    if not fits:
        axes = f"({', '.join(map(str, (*lead, heads[0])))}, {length}, d)" if problem.prefix else f"({length}, d)"
        raise ShapeError(
            f"{name} has shape {x.shape}: expected {axes}, or one for all heads, ({length},) or ({length}, d).",
            f"the matrix is {named(problem.shape, WEIGHTS)}.",
        )
    if shared:
        return broadcast(columns, (problem.batch, 1, *columns.shape)), vector
    return columns.reshape(problem.batch, *columns.shape[-3:]), vector


def values_of(problem: Problem, v: Any, *heads: int) -> Array:
    """Read v, (batch, 1 or one of these numbers of heads, keys, d_v), narrowed by autocast as q and k are.

    Raises ShapeError or DtypeError where it does not fit.
    """
    return operand(problem, as_array(autocast(v), "v", problem.device)[0], "v", problem.keys, heads)[0]


def check_transposed(problem: Problem, columns: Array) -> None:
    """Raise SizeError where Aᵀ·g for these columns (batch, 1 or heads, queries, d) is larger than memory."""
    shape = (problem.batch, problem.heads, problem.keys, columns.shape[-1])
    size = array_bytes(shape, statistics_dtype(problem.dtype).itemsize)
    check_room(f"Aᵀ·g of shape {shape}", size, "give fewer columns of g.", problem.device)
