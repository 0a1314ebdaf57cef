"""The right side of a product with the weights: A·v and Aᵀ·g."""

from clearhead.arrays import FLOATS, broadcast
from clearhead.axes import WEIGHTS, Array, named
from clearhead.errors import DtypeError, ShapeError
from clearhead.problem import Problem


def operand(problem: Problem, x: Array, name: str, length: int, heads: tuple[int, ...]) -> tuple[Array, bool]:
    """Read the right side of a product as (batch, its heads, length, d), and whether it is a vector."""
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
