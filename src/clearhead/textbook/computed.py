"""What the definition computes of q, k and v, of a whole layer, or of weights that are given: every step by name.

Nothing is computed here that core/definition.py has: this reads and checks inputs, and projects a layer's X.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import FLOATS, as_array
from clearhead.core.axes import KEY, VALUE, WEIGHTS, Array, heads_first, join_heads, named, split_heads
from clearhead.core.block import block_of, everything
from clearhead.core.call import Call, describe, describe_whole
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_numbers
from clearhead.core.rules import Rules, check_names
from clearhead.core.state import State
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import (
    Convention,
    Sizes,
    Steps,
    attention_steps,
    check_convention,
    layer_sizes,
    layer_steps,
    turned,
    weights_steps,
)

_NAMES = ("scores", "scaled", "capped", "biased", "masked", "logsumexp", "weights", "output")


class Computed(NamedTuple):
    """One attention, computed."""

    call: Call
    book: definition.Textbook
    steps: Steps
    arrays: dict[str, Array]  # by the names of the steps, tokens as rows, with the caller's leading axes
    convention: Convention


def of_inputs(q: Any, k: Any, v: Any, convention: Convention, rules: Rules) -> Computed:
    """Compute every step from q, k and v. Raises what `attention` raises."""
    check_convention(convention)
    if convention == "columns":
        read = [as_array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        q, k, v = (restore(turned(array, convention)) for array, restore in read)
    call = describe_whole(q, k, v, rules)
    book = definition.attend(call.problem, call.q, call.k, call.v)
    raw = {name: as_array(x, name)[0] for name, x in (("q", q), ("k", k), ("v", v))}
    sizes = Sizes.of((x.shape for x in raw.values()), convention, call.problem.dtype.itemsize)
    return Computed(call, book, attention_steps(sizes, rules), raw | _named(call.problem, book), convention)


def of_layer(inputs: Mapping[str, Any], num_heads: int, convention: Convention, rules: Rules) -> Computed:
    """Compute every step of a layer: `heads` are the heads' outputs, `concat` those side by side, `output` is U.

    inputs   x, w_q, w_k, w_v and, where there are any, context, w_o, b_q, b_k, b_v, b_o by name
    """
    check_names(rules)
    layer, sizes = read_layer(inputs, num_heads, convention)
    q = split_heads(layer.projected(layer.x, "q"), num_heads)
    k, v = (split_heads(layer.projected(layer.context, part), sizes.kv_heads or 1) for part in "kv")
    call = describe(q, k, v, rules).giving_back(as_array(inputs["x"], "x")[1])
    book = definition.attend(call.problem, call.q, call.k, call.v)
    arrays = {"x": layer.x, "context": layer.context, "q": q, "k": k, "v": v, **_named(call.problem, book)}
    arrays |= {f"w_{part}": w for part, w in layer.w.items()} | {f"b_{part}": b for part, b in layer.b.items()}
    arrays |= {"heads": arrays["output"], "concat": join_heads(arrays["output"])}
    arrays["output"] = arrays["concat"] if layer.out is None else layer.projected(arrays["concat"], "o")
    context = None if inputs.get("context") is None else layer.context.shape[-1]
    widths = layer.x.shape[-1], context, layer.out and layer.out[-1]
    steps = layer_steps(sizes._replace(itemsize=layer.x.itemsize), *widths, rules, [f"b_{part}" for part in layer.b])
    return Computed(call, book, steps, arrays, convention)


def of_weights(weights: Any, v: Any, convention: Convention) -> Computed:
    """Compute the output of weights that are given; errors as in `trace_weights`."""
    call, a = read_weights(weights, v, convention)
    problem = call.problem
    assert call.v is not None
    book = mixed(problem, a, call.v)
    axes = 1 if problem.prefix else 2  # two axes are one head without an axis of its own
    arrays = {"weights": a, "v": call.v, "output": book.output}
    arrays = {name: x.reshape(*problem.prefix[:-1], *x.shape[axes:]) for name, x in arrays.items()}
    shapes = (arrays[name].shape for name in ("output", "v", "v"))
    sizes = Sizes.of(shapes, convention, problem.dtype.itemsize)
    return Computed(call, book, weights_steps(sizes), arrays, convention)


def row(computed: Computed, query: int) -> definition.Textbook:
    """Compute one query's attention from q_i alone, or from its weights where these were given."""
    call, given = computed.call, "scores" not in computed.arrays
    assert call.v is not None
    alone, rows = call.problem.take(queries=range(query, query + 1)), np.s_[:, :, query : query + 1]
    if given:
        return mixed(alone, computed.book.weights[rows], call.v)
    return definition.attend(alone, call.q[rows], call.k, call.v)


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def mixed(problem: Problem, weights: Array, v: Array) -> definition.Textbook:
    """The definition's results where the weights are given; a key of weight 0 counts as one that is not seen."""
    zeros, sums = np.where(weights == 0, -np.inf, 0.0), weights.sum(axis=-1)
    way = dict.fromkeys(("scores", "scaled", "capped", "biased"), zeros)
    output = definition.mix(weights, definition.split(v.astype(np.float64)), lambda: weights == 0)
    block, state = block_of(problem, everything(problem)), State(np.zeros(sums.shape), np.log(sums))
    return definition.Textbook(block, zeros, state, weights, **way, output=output)


def _named(problem: Problem, book: definition.Textbook) -> dict[str, Array]:
    """The definition's intermediate results by name, with the axes of the caller's inputs."""
    return {name: problem.restore(getattr(book, name)) for name in _NAMES}


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
