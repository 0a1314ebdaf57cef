"""`ch.trace_layer`: every intermediate of an attention layer, from X through its heads to U."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import as_array
from clearhead.core.axes import Array, join_heads, split_heads
from clearhead.core.call import describe
from clearhead.core.rule_values import read_numbers
from clearhead.core.rules import Rules, check_names
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import Convention, Sizes, check_convention, layer_sizes, layer_steps, turned
from clearhead.textbook.trace import Trace, intermediates, used_rules


def trace_layer(
    x: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any = None,
    *,
    num_heads: int = 1,
    context: Any = None,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    convention: Convention = "rows",
    **rules: Unpack[Rules],
) -> Trace:
    """A whole attention layer step by step, from X to U: projections, heads, attention, joining, output projection.

    x           (…, queries, d_model), tokens as rows (X·W), or (…, d_model, queries) with convention="columns" (W·X)
    w_q, w_k    (d_model, heads·d_k), (d_model, kv_heads·d_k); in columns convention their transposes
    w_v         (d_model, kv_heads·d_v)
    w_o         (heads·d_v, d_out), or None: the concatenated heads are the output
    num_heads   query heads; the number of key heads follows from w_k's width
    context     (…, keys, d_context) for cross-attention; None is self-attention
    b_q … b_o   biases, one number per output column

    Call are numbers of any dtype and are computed with in float64; rules are as in `attention`, and keep their axes
    (queries, keys) in columns convention.
    Returns a Trace with x, q, k, v (…, heads, tokens, width), the intermediates of `trace` per head, `heads`
    (…, heads, queries, d_v), `concat` (…, queries, heads·d_v) and `output`, which is U (…, queries, d_out).
    Raises what `trace` raises; ShapeError and DtypeError name the matrix that does not fit, RuleError a num_heads that
    is not a whole number or a b_o without w_o. O(queries·d_model²) time for the projections, besides that of `trace`.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> import numpy as np, clearhead as ch
    >>> w = np.eye(4)
    >>> ch.trace_layer(np.eye(3, 4), w, w, w, num_heads=2).output.shape
    (3, 4)
    """
    check_names(rules)
    values = {"x": x, "context": context, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    layer, sizes = read_layer(values | {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}, num_heads, convention)
    q = split_heads(layer.projected(layer.x, "q"), num_heads)
    k, v = (split_heads(layer.projected(layer.context, part), sizes.kv_heads or 1) for part in "kv")
    described = describe(q, k, v, rules).giving_back(as_array(x, "x")[1])
    problem = described.problem
    book = definition.attend(described.problem, described.q, described.k, described.v)
    used, cross, names = used_rules(rules), context is not None, frozenset(f"b_{part}" for part in layer.b)
    shapes = layer.x.shape, layer.context.shape, layer.out
    steps = layer_steps(sizes, *shapes, used, names, convention, layer.x.itemsize, cross=cross)
    arrays = {"x": layer.x, "context": layer.context, "q": q, "k": k, "v": v, **intermediates(problem, book)}
    arrays |= {f"w_{part}": w for part, w in layer.w.items()} | {f"b_{part}": b for part, b in layer.b.items()}
    heads = arrays["output"]
    arrays |= {"heads": heads, "concat": join_heads(heads)}
    arrays["output"] = arrays["concat"] if layer.out is None else layer.projected(arrays["concat"], "o")
    return Trace(described, book, steps, arrays, convention)


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
            raise ShapeError("{name} has {count} axes: expected at least two.", name=name, count=array.ndim)
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
            values = {"name": name, "shape": b.shape, "columns": w[name].shape[-1:]}
            raise ShapeError("b_{name} has shape {shape}: expected one number per output column, {columns}.", **values)
    return layer, sizes
