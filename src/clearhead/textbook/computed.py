"""What a trace is computed of: a layer's arrays and weights that are given, read and checked; and differences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import FLOATS, as_array
from clearhead.core.axes import KEY, VALUE, WEIGHTS, Array, heads_first, named
from clearhead.core.block import block_of, everything
from clearhead.core.call import Call, describe
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_numbers
from clearhead.core.state import State
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import Convention, Sizes, check_convention, layer_sizes, turned


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def mixed(problem: Problem, weights: Array, v: Array) -> definition.Matrix:
    """The definition's results where the weights are given; a key of weight 0 counts as one that is not seen."""
    zeros, sums = np.where(weights == 0, -np.inf, 0.0), weights.sum(axis=-1)
    way = dict.fromkeys(("scores", "scaled", "capped", "biased"), zeros)
    output = definition.mix(weights, definition.split(v.astype(np.float64)), lambda: weights == 0)
    block, state = block_of(problem, everything(problem)), State(np.zeros(sums.shape), np.log(sums))
    return definition.Matrix(block, zeros, state, weights, **way, output=output)


@np.errstate(invalid="ignore", over="ignore")
def differences(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one is."""
    gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gaps), np.inf, gaps)


def largest_difference(a: Array, b: Array) -> float:
    """The largest of them; infinite where the shapes differ."""
    return float(differences(a, b).max(initial=0.0)) if a.shape == b.shape else float("inf")


def listed(x: Any) -> Any:
    """An array as nested lists; -∞, ∞ and NaN, which JSON lacks, become None."""
    array = np.asarray(x, dtype=np.float64)
    if np.isfinite(array).all():
        return array.tolist()
    cells = array.astype(object)
    cells[~np.isfinite(array)] = None
    return cells.tolist()


@dataclass(frozen=True, eq=False, slots=True)
class LayerArrays:
    """A layer's arrays in rows convention; x (…, queries, d_model), context (…, keys, d_context)."""

    x: Array
    context: Array
    w: dict[str, Array]  # "q", "k", "v" and, where there is one, "o"
    b: dict[str, Array]  # one number per output column

    @property
    def out(self) -> tuple[int, ...] | None:
        """The shape of W^O; None where the joined heads are the output."""
        return self.w["o"].shape if "o" in self.w else None

    @np.errstate(invalid="ignore", over="ignore")  # infinite and NaN projections are shown in the trace
    def projected(self, tokens: Array, part: str) -> Array:
        """Tokens by the weight and the bias of this part, in float64."""
        product: Array = tokens.astype(np.float64) @ self.w[part].astype(np.float64)
        return product + self.b[part].astype(np.float64) if part in self.b else product


def read_layer(arrays: Mapping[str, Any], num_heads: int, convention: Convention) -> tuple[LayerArrays, Sizes]:
    """Read x, context, w_q … w_o and b_q … b_o by name, None for what there is not; and the sizes of its attention.

    Raises RuleError, ShapeError or DtypeError, which name the array that does not fit.
    """
    check_convention(convention)
    needed = ("x", "w_q", "w_k", "w_v")
    ready = {name: read_numbers(name, a) for name, a in arrays.items() if a is not None or name in needed}
    for name, array in ready.items():
        if array.ndim < 2 and not name.startswith("b_"):
            raise ShapeError(f"{name} has {array.ndim} axes: expected at least two.")
    w = {name[2:]: turned(array, convention) for name, array in ready.items() if name.startswith("w_")}
    x = turned(ready["x"], convention)
    context = turned(ready["context"], convention) if "context" in ready else x
    layer = LayerArrays(x, context, w, {name[2:]: b for name, b in ready.items() if name.startswith("b_")})
    if "o" in layer.b and "o" not in w:
        raise RuleError("b_o is given but w_o is not: a bias of the output projection needs one.")
    w_shapes = w["q"].shape, w["k"].shape, w["v"].shape
    sizes = layer_sizes(x.shape, context.shape, w_shapes, layer.out, num_heads, convention)
    for name, b in layer.b.items():
        if b.shape != w[name].shape[-1:]:
            raise ShapeError(
                f"b_{name} has shape {b.shape}: expected one number per output column, {w[name].shape[-1:]}."
            )
    return layer, sizes


def read_weights(weights: Any, v: Any, convention: Convention) -> tuple[Call, Array]:
    """Read weights and values: the problem, and the weights as they are, float64 (batch, heads, queries, keys).

    The problem's logits are the weights' logarithms, so that its softmax gives their shares. Errors as in
    `trace_weights`.
    """
    check_convention(convention)
    restore = as_array(v, "v")[1]
    a, values = read_numbers("weights", weights), turned(read_numbers("v", v), convention)
    a = a[None] if a.ndim == 1 else turned(a, convention)
    if a.size and not ((a >= 0) & np.isfinite(a)).all():
        raise RuleError(
            f"weights holds {a[~((a >= 0) & np.isfinite(a))][0]:g}: a weight is a share, finite and not below 0.",
            "scores may be anything; the softmax makes shares of them.",
        )
    _check_weights(a, values)
    definition.check_room(a.size)
    values = values if values.dtype in FLOATS else values.astype(np.float64)
    q, k = (np.broadcast_to(np.zeros((), values.dtype), (*x.shape[:-1], 1)) for x in (a, values))
    exact = a.astype(np.float64)
    with np.errstate(divide="ignore"):
        call = describe(q, k, values, {"bias": np.log(exact), "scale": 1.0}).giving_back(restore)
    return call, heads_first(exact)


def _check_weights(a: Array, v: Array) -> None:
    """Raise ShapeError where weights and values do not fit each other."""
    both = f"weights is {named(a.shape, WEIGHTS)} and v is {named(v.shape, VALUE)}"
    if v.ndim != a.ndim or v.ndim < 2:
        hint = f"v is {named((4, 2), VALUE)} for 4 weights."
        raise ShapeError(f"{both}: expected as many axes, at least two.", hint)
    if a.shape[-1] != v.shape[-2]:
        hint = "weights.swapaxes(-1, -2) would fit, or convention='columns'." if a.shape[-2] == v.shape[-2] else ""
        raise ShapeError(f"{both}: each of the {a.shape[-1]} weights of a query needs a value.", hint)
    if a.shape[:-3] != v.shape[:-3] or (a.ndim > 2 and (not v.shape[-3] or a.shape[-3] % v.shape[-3])):
        raise ShapeError(f"{both}: batches must be equal, and query heads a multiple of the values' {KEY[1]}.")
