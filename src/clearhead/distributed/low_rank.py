"""Answers that are products with known numbers on both sides, rowsᵀ·A·columns: image, groups and received.

Each has a part of low rank in the gradient of A, dA_ij = X_i·Y_j, so its derivatives are those of further columns of
the output, with Y appended to the values and X to the output's gradient, as in ops/backward.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.room import check_room
from clearhead.core.statistics import Groups
from clearhead.distributed import passes
from clearhead.distributed.layout import Pieces, placed
from clearhead.distributed.messages import total
from clearhead.distributed.sharded_problem import Names, Shards
from clearhead.ops.backward import side_by_side, with_columns, without_columns
from clearhead.ops.tangents import ROWS

_OF_ROWS = ("output", "logsumexp", *ROWS)
MatrixData = tuple[Array, Array]  # X, (batch or 1, heads or 1, own queries, columns), and Y, (…, own keys, columns)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """An image or groups, (batch, heads, height, width), and this rank's factors, which the backward pass needs."""

    answer: Array
    rows: Array  # each own query's share in the answer's rows, (batch or 1, own queries, height)
    values: Array  # each own key's share in the answer's columns, (batch or 1, own keys, width)
    mixed: Array  # A·values, (batch, heads, own queries, width)
    logsumexp: Array  # (batch, heads, own queries)


def check_sums(problem: Problem, what: str, shape: tuple[int, int]) -> None:
    """Raise SizeError where a rank's buffers for an answer of this shape (height, width) exceed free memory."""
    height, width = shape
    hint = "ask for a smaller picture, or for fewer groups."
    rows = problem.queries * (height + problem.batch * problem.heads * width)
    check_room(f"{what}, summed on this rank,", 8 * (rows + problem.batch * problem.keys * width), hint)


def image(method: str, shards: Shards, chosen: range, shape: tuple[int, int]) -> Product:
    """The picture of the chosen queries and all keys; shape is (height, width) in pixels."""

    def shares(pixels: int, axis: range, held: Pieces, length: int) -> Array:
        each = np.zeros((1, length, pixels))
        for where, piece in placed(held):
            if piece:
                first = axis.index(piece[0])
                touched, parts = areas(pixels, len(axis), slice(first, first + len(piece)))
                each[0, where, touched] = parts.T
        return each

    queries, keys = shards.lengths
    rows = shares(shape[0], chosen, shards.query_pieces[shards.rank], queries)
    values = shares(shape[1], range(shards.whole.keys), shards.key_pieces[shards.rank], keys)
    return _product("sum of pictures", method, shards, rows, values)


def groups(method: str, shards: Shards, labels: Groups) -> Product:
    """Sums of weights between groups of queries and of keys; labels are those of own positions, < 0 for no group."""
    sides = zip(labels[:2], labels.counts, strict=True)
    rows, values = ((side[..., None] == np.arange(count)).astype(np.float64) for side, count in sides)
    return _product("sum of groups", method, shards, rows, values)


def _product(what: str, method: str, shards: Shards, rows: Array, values: Array) -> Product:
    spread = np.broadcast_to(values, (shards.whole.batch, *values.shape[1:]))
    mixed, logsumexp = passes.mixed(method, shards, spread[:, None])
    return Product(total(shards.ranks, what, rows[:, None].swapaxes(-1, -2) @ mixed), rows, values, mixed, logsumexp)


def factors(shards: Shards, products: Mapping[str, Product], by: Mapping[str, Array]) -> dict[str, MatrixData]:
    """X and Y for each of image, groups and received in `by`, in this order; all ranks call it.

    by    the upstream gradients: of image and groups this rank's part of their sum, of received own keys'
    """
    pairs = {}
    for name, one in products.items():
        if name in by:
            slopes = total(shards.ranks, f"derivative by {name}", by[name].astype(np.float64))
            pairs[name] = one.rows[:, None] @ slopes, one.values[:, None]
    if "received" in by:
        pairs["received"] = np.ones((1, 1, shards.lengths[0], 1)), by["received"][..., None]
    return pairs


def gradients(
    method: str,
    shards: Shards,
    answers: Mapping[str, Array],
    by: Mapping[str, Array],
    products: Mapping[str, Product],
    asked: Names,
) -> dict[str, Array]:
    """`passes.gradients` for a loss of image, groups and received too.

    products    image and groups, where they were answered
    """
    known, loss = ({name: side[name] for name in _OF_ROWS if name in side} for side in (answers, by))
    pairs = factors(shards, products, by)
    if not pairs:
        return passes.gradients(method, shards, known, loss, asked=asked)
    mixed = [products[name].mixed for name in pairs if name in products]
    if "received" in by:
        mixed.append(passes.mixed(method, shards, by["received"][..., None])[0])
    if shards.v is not None:
        mixed.insert(0, known["output"])
    known |= {"output": side_by_side(shards.whole, mixed)}
    loss["output"], values = with_columns(shards.local(), shards.v, loss.get("output"), [*pairs.values()])
    result = passes.gradients(method, passes.widened(shards, values), known, loss, asked=asked)
    by_values = result.pop("v")
    return result if shards.v is None else {**result, "v": without_columns(shards.v, by_values)}
