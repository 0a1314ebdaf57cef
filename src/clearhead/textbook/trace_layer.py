"""`ch.trace_layer`: every intermediate of an attention layer, from X through its heads to U."""

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from clearhead.core import reference
from clearhead.core.arrays import as_array
from clearhead.core.axes import Array
from clearhead.core.problem import describe
from clearhead.core.rule_values import read_numbers
from clearhead.core.rules import Rules, check_names
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import Convention, check_convention, layer_sizes, layer_steps, turned
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

    Inputs are numbers of any dtype and are computed with in float64; rules are as in `attention`, and keep their axes
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
    check_convention(convention)
    check_names(rules)
    restore = as_array(x, "x")[1]
    if w_o is None and b_o is not None:
        raise RuleError("b_o is given but w_o is not: a bias of the output projection needs one.")
    parts = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v} | _present(w_o=w_o, context=context)
    read: dict[str, Array] = {}
    for name, value in parts.items():
        array = read_numbers(name, value)
        if array.ndim < 2:
            raise ShapeError("{name} has {count} axes: expected at least two.", name=name, count=array.ndim)
        read[name] = turned(array, convention)
    biases = {name: read_numbers(name, value) for name, value in _present(b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o).items()}
    x, out = read["x"], read.get("w_o")
    source = read.get("context", x)
    out_shape = None if out is None else out.shape
    w_shapes = (read["w_q"].shape, read["w_k"].shape, read["w_v"].shape)
    sizes = layer_sizes(x.shape, source.shape, w_shapes, out_shape, num_heads, convention)
    q = split(_project(x, read["w_q"], biases, "b_q"), num_heads)
    k, v = (split(_project(source, read[f"w_{p}"], biases, f"b_{p}"), sizes.kv_heads or 1) for p in "kv")
    described = replace(describe(q, k, v, rules), restore=restore)
    problem = described.problem
    book = reference.attend(problem, described.q, described.k, described.v)
    used, cross, names = used_rules(rules), context is not None, frozenset(biases)
    steps = layer_steps(sizes, x.shape, source.shape, out_shape, used, names, convention, x.itemsize, cross=cross)
    arrays = {**read, **biases, "context": source, "q": q, "k": k, "v": v, **intermediates(problem, book)}
    heads = arrays["output"]
    arrays |= {"heads": heads, "concat": joined(heads)}
    arrays["output"] = arrays["concat"] if out is None else _project(arrays["concat"], out, biases, "b_o")
    return Trace(described, book, steps, arrays, convention)


def _present(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


@np.errstate(invalid="ignore", over="ignore")  # infinite and NaN projections are shown in the trace
def _project(x: Array, w: Array, biases: dict[str, Array], name: str) -> Array:
    product = x.astype(np.float64) @ w.astype(np.float64)
    b = biases.get(name)
    if b is None:
        return product
    if b.shape != (w.shape[-1],):
        values = {"name": name, "shape": b.shape, "columns": w.shape[-1]}
        raise ShapeError("{name} has shape {shape}: expected one number per output column, ({columns},).", **values)
    return product + b.astype(np.float64)


def joined(heads: Array) -> Array:
    """(…, heads, tokens, width) to (…, tokens, heads·width)."""
    return heads.swapaxes(-2, -3).reshape(*heads.shape[:-3], heads.shape[-2], heads.shape[-3] * heads.shape[-1])


def split(x: Array, heads: int) -> Array:
    """(…, tokens, heads·width) to (…, heads, tokens, width)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)
