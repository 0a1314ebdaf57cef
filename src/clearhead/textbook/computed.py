"""Reads and checks a layer's arrays and weights for a trace; and differences of arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import read_numbers
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import Convention, Sizes, check_convention, layer_sizes, turned


@np.errstate(invalid="ignore", over="ignore")
def differences(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one is."""
    gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gaps), np.inf, gaps)


def largest_difference(a: Array, b: Array) -> float:
    """The largest of `differences`; infinite if the shapes differ."""
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
        """The shape of W^O; None if there is none, and the joined heads are the output."""
        return self.w["o"].shape if "o" in self.w else None

    @np.errstate(invalid="ignore", over="ignore")  # infinite and NaN projections are shown in the trace
    def projected(self, tokens: Array, part: str) -> Array:
        """Project tokens by the weight and the bias of "q", "k", "v" or "o", in float64."""
        product: Array = tokens.astype(np.float64) @ self.w[part].astype(np.float64)
        return product + self.b[part].astype(np.float64) if part in self.b else product


def read_layer(arrays: Mapping[str, Any], num_heads: int, convention: Convention) -> tuple[LayerArrays, Sizes]:
    """Read x, context, w_q … w_o and b_q … b_o by name, None if absent; return them and the attention's sizes.

    Raises RuleError, ShapeError or DtypeError, which name the array that does not fit.
    """
    check_convention(convention)
    needed = ("x", "w_q", "w_k", "w_v")
    ready = {name: read_numbers(name, a) for name, a in arrays.items() if a is not None or name in needed}
    for name, array in ready.items():
        if array.ndim < 2 and not name.startswith("b_"):
            raise ShapeError(f"{name} has shape {array.shape}: expected at least two axes.")
    w = {name[2:]: turned(array, convention) for name, array in ready.items() if name.startswith("w_")}
    x = turned(ready["x"], convention)
    context = turned(ready["context"], convention) if "context" in ready else x
    layer = LayerArrays(x, context, w, {name[2:]: b for name, b in ready.items() if name.startswith("b_")})
    if "o" in layer.b and "o" not in w:
        raise RuleError("b_o is given but w_o is not: it is the bias of the output projection.", "give w_o as well.")
    w_shapes = w["q"].shape, w["k"].shape, w["v"].shape
    sizes = layer_sizes(x.shape, context.shape, w_shapes, layer.out, num_heads, convention)
    for name, b in layer.b.items():
        if b.shape != w[name].shape[-1:]:
            raise ShapeError(
                f"b_{name} has shape {b.shape}: expected one number per output column, {w[name].shape[-1:]}."
            )
    return layer, sizes
