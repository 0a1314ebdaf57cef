"""`ch.shapes`: every step from X to the output with symbol, formula, axes, shape and cost, without computing.

The list of steps is written only here; `trace` adds the arrays.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

from clearhead.core.axes import Array, named
from clearhead.core.problem import check_shapes
from clearhead.core.rule_values import has_axes, is_whole, whole_number
from clearhead.core.rules import Rules
from clearhead.digits import significant
from clearhead.errors import RuleError, ShapeError, expected, shape_of
from clearhead.tables import aligned
from clearhead.words import in_columns

Convention = Literal["rows", "columns"]
_RULES = {"query_segments": "segments", "kv_lengths": "key lengths", "query_lengths": "query lengths"}
_RULES |= {"alibi_slopes": "ALiBi"}  # as formulas name them


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Step:
    """One step of attention; `array` is None until it is computed."""

    name: str
    symbol: str
    formula: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    multiply_adds: int
    bytes: int
    words: str = ""  # the key of the sentence in words/ that describes it
    array: Any = None

    def to_json(self) -> dict[str, Any]:
        """The step's description as plain values, without its array."""
        described = {"name": self.name, "symbol": self.symbol, "formula": self.formula, "axes": self.axes}
        return described | {"shape": self.shape, "multiply_adds": self.multiply_adds, "bytes": self.bytes}

    def __str__(self) -> str:
        return f"{self.formula:<34} {named(self.shape, self.axes)}"

    def __repr__(self) -> str:
        return f"Step({self.name}: {self.formula}, {named(self.shape, self.axes)})"


class Steps(tuple[Step, ...]):
    """The steps in order; prints as a table of formula, shape and cost."""

    __slots__ = ()

    def __str__(self) -> str:
        lead = [(step.formula, named(step.shape, step.axes)) for step in self] + [("in all", "")]
        work, size = [step.multiply_adds for step in self], [step.bytes for step in self]
        costs = zip([*work, sum(work)], [*size, sum(size)], strict=True)
        said = [(f"{some:,} multiply-adds" if some else " ", f"{count:,} bytes") for some, count in costs]
        widths = [max(map(len, column)) + 2 for column in zip(*lead, strict=True)]
        rows = ([*left, *right] for left, right in zip(lead, said, strict=True))
        return "\n".join(aligned([*widths, 28, 0], row) for row in rows)

    def __repr__(self) -> str:
        return f"Steps({', '.join(step.name for step in self)})"


class Sizes(NamedTuple):
    """The sizes of one attention: lead (batch axes), then heads (None in 2-D), then the rest."""

    lead: tuple[int, ...]
    heads: int | None
    kv_heads: int | None
    queries: int
    keys: int
    d_k: int
    d_v: int
    convention: Convention = "rows"
    itemsize: int = 4

    @staticmethod
    def of(shapes: Iterable[Sequence[int]], convention: Convention, itemsize: int) -> "Sizes":
        """The sizes of q, k and v of these shapes, in rows convention."""
        q, k, v = shapes
        heads, kv_heads = (q[-3], k[-3]) if len(q) > 2 else (None, None)
        return Sizes(tuple(q[:-3]), heads, kv_heads, q[-2], k[-2], q[-1], v[-1], convention, itemsize)


def shapes(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    x: Any = None,
    w_q: Any = None,
    w_k: Any = None,
    w_v: Any = None,
    w_o: Any = None,
    num_heads: int = 1,
    context: Any = None,
    convention: Convention = "rows",
) -> Steps:
    """List the shape and cost of every step of attention, without computing anything.

    Give arrays, or only their shapes as tuples: either

    q, k, v         (…, heads, queries, d_k), (…, kv_heads, keys, d_k), (…, kv_heads, keys, d_v)

    or a layer's

    x               (…, queries, d_model)
    w_q, w_k, w_v   (d_model, heads·d_k), (d_model, kv_heads·d_k), (d_model, kv_heads·d_v)
    w_o             (heads·d_v, d_out), or None
    num_heads       query heads
    context         (…, keys, d_context) for cross-attention

    convention      "rows" for tokens as rows; "columns" for all of these with their last two axes swapped

    Returns the steps in order, each with name, symbol, formula, axes, shape, multiply-adds and bytes (as float32 if
    only shapes are given); they print as a table.
    Raises ShapeError if shapes do not fit, with the transpose that would fit; RuleError for another convention or a
    num_heads that is not a whole number from 1 up. O(1) time and memory.

    >>> import clearhead as ch
    >>> [step.shape for step in ch.shapes((3, 2), (5, 2), (5, 4))]
    [(3, 2), (5, 2), (5, 4), (3, 5), (3, 5), (3, 5), (3, 4)]
    >>> scores = ch.shapes((3, 2), (5, 2), (5, 4))[3]
    >>> print(scores, scores.multiply_adds)
    S = Q·Kᵀ                           (queries 3, keys 5) 30
    """
    check_convention(convention)
    turn = convention == "columns"
    itemsize = next((int(a.itemsize) for a in (q, x) if hasattr(a, "itemsize")), 4)
    if q is not None:
        sides = [_shape(name, value, turn=turn) for name, value in (("q", q), ("k", k), ("v", v))]
        check_shapes(*sides)
        return attention_steps(Sizes.of(sides, convention, itemsize), {})
    weights = (_shape("w_q", w_q, turn=turn), _shape("w_k", w_k, turn=turn), _shape("w_v", w_v, turn=turn))
    x_shape = _shape("x", x, turn=turn)
    source = x_shape if context is None else _shape("context", context, turn=turn)
    out = None if w_o is None else _shape("w_o", w_o, turn=turn)
    sizes = layer_sizes(x_shape, source, weights, out, num_heads, convention)._replace(itemsize=itemsize)
    widths = x_shape[-1], None if context is None else source[-1], None if out is None else out[-1]
    return layer_steps(sizes, *widths, {})


def check_convention(convention: str) -> None:
    """Raise RuleError for anything but "rows" and "columns"."""
    if not isinstance(convention, str) or convention not in ("rows", "columns"):
        raise RuleError(expected("convention", convention, "'rows' (X·W) or 'columns' (W·X)"))


def layer_sizes(
    x: Sequence[int],
    context: Sequence[int],
    w_qkv: tuple[Sequence[int], Sequence[int], Sequence[int]],
    w_o: Sequence[int] | None,
    num_heads: int,
    convention: Convention,
) -> Sizes:
    """Compute a layer's sizes, all in rows convention. Raises ShapeError, which names the matrix that does not fit."""
    num_heads = whole_number("num_heads", num_heads, 1)
    other = "columns" if convention == "rows" else "rows"
    w_q, w_k, w_v = w_qkv
    alone = context is x or tuple(context) == tuple(x)
    sources = (("w_q", w_q, "x", x), ("w_k", w_k, "context", context), ("w_v", w_v, "context", context))
    for name, w, source, shape in sources:
        if len(w) != 2 or w[0] != shape[-1]:
            label = "x" if alone else source
            swap = len(w) == 2 and w[1] == shape[-1]
            raise ShapeError(
                f"{name} is {named(w, ('d_in', 'd_out'))} but {label} has d_model {shape[-1]}: d_in must match.",
                f"it fits as its transpose: {name}.T, or convention='{other}' for all." if swap else "",
            )
    if tuple(x[:-2]) != tuple(context[:-2]):
        batches = tuple(context[:-2]), tuple(x[:-2])
        raise ShapeError(f"context has batch {batches[0]} but x has batch {batches[1]}: they must be equal.")
    d_k = _share("w_q", w_q[1], num_heads, f"num_heads {num_heads}")
    kv_heads = _share("w_k", w_k[1], d_k, f"d_k {d_k}, the width of one query head")
    if kv_heads == 0 or num_heads % kv_heads:
        what = f"w_k makes {kv_heads} key heads but num_heads is {num_heads}"
        raise ShapeError(f"{what}: query heads must be a multiple of key heads.")
    d_v = _share("w_v", w_v[1], kv_heads, f"{kv_heads} key heads")
    if w_o is not None and (len(w_o) != 2 or w_o[0] != num_heads * d_v):
        raise ShapeError(
            f"w_o is {named(w_o, ('d_in', 'd_out'))} but the heads are {num_heads}·{d_v} = {num_heads * d_v} wide.",
            "it fits as its transpose." if len(w_o) == 2 and w_o[1] == num_heads * d_v else "",
        )
    return Sizes(tuple(x[:-2]), num_heads, kv_heads, x[-2], context[-2], d_k, d_v, convention)


def attention_steps(sizes: Sizes, rules: Rules) -> Steps:
    """The steps from Q, K, V to A·V, and what the rules in use add to them."""
    rows, a = sizes.convention == "rows", ("queries", "keys")
    cells = prod(sizes.lead) * (1 if sizes.heads is None else sizes.heads) * sizes.queries * sizes.keys

    def used(*names: str) -> list[str]:
        asked = (name for name in names if rules.get(name) is not None and rules.get(name) is not False)
        return [_RULES.get(name, name) for name in asked]

    scale, scaling = rules.get("scale"), ("S' = S/√d_k", "scaled")
    if scale is not None:
        scaling = f"S' = {'s_h' if has_axes(scale) else significant(float(scale), 6)}·S", "scaled by"
    steps = [
        _step(sizes, "q", "Q", ("queries", "d_k"), 0),
        _step(sizes, "k", "K", ("keys", "d_k"), 0),
        _step(sizes, "v", "V", ("keys", "d_v"), 0),
        _step(sizes, "scores", f"S = {_product(sizes, 'Q', 'Kᵀ')}", a, cells * sizes.d_k),
        _step(sizes, "scaled", scaling[0], a, cells, scaling[1]),
    ]
    if (softcap := rules.get("softcap")) is not None:
        cap = significant(float(softcap), 6)
        steps.append(_step(sizes, "capped", f"C = {cap}·tanh(S'/{cap})", a, 2 * cells))
    if added := used("bias", "alibi_slopes", "spans"):
        words = "biased by spans" if added == ["spans"] else "biased"
        steps.append(_step(sizes, "biased", f"B = {steps[-1].symbol} + {' + '.join(added)}", a, cells, words))
    if forbidding := used("causal", "window", "mask", "kv_lengths", "query_lengths", "query_segments"):
        steps.append(
            _step(sizes, "masked", f"M = {steps[-1].symbol}, -∞ where forbidden ({', '.join(forbidding)})", a, 0)
        )
    sinks = rules.get("sinks") is not None
    inside = f"[{steps[-1].symbol}, sink]" if sinks else steps[-1].symbol
    formula = f"A = softmax({inside}), each {'row' if rows else 'column'}"
    steps.append(_step(sizes, "weights", formula, a, cells, "weights with sink" if sinks else "weights"))
    output = f"O = {_product(sizes, 'A', 'V')}"
    return Steps([*steps, _step(sizes, "output", output, ("queries", "d_v"), cells * sizes.d_v)])


def layer_steps(
    sizes: Sizes,
    x: int,
    context: int | None,
    out: int | None,
    rules: Rules,
    biases: Collection[str] | None = (),
    through: str = "{}",
    *,
    normalised: bool = False,
) -> Steps:
    """The steps from X to U: projections, heads, attention, concatenation, output projection.

    x, context, out   the widths of X, of the other text (None is self-attention) and of U (None is no W^O)
    biases            the names of the biases, such as b_q; None: the projections are unknown functions
    through           what is applied to Q and K after their projections, such as RoPE({})
    normalised        is X the output of a layer norm?
    """
    heads, kv_heads = sizes.heads or 1, sizes.kv_heads or 1
    flat = sizes._replace(heads=None, kv_heads=None)
    queries, keys = (prod(sizes.lead) * count for count in (sizes.queries, sizes.keys))
    source, width = ("X", x) if context is None else ("C", context)
    wide = heads * sizes.d_v

    def project(part: str, tokens: str) -> str:
        if biases is None:
            return f"{part}({tokens})"
        product = _product(sizes, tokens, f"W^{part.upper()}")
        product += f" + b^{part.upper()}" if f"b_{part}" in biases else ""
        return through.format(product) if part in "qk" else product

    said = "x normalised" if normalised else "x"
    steps = [_step(flat, "x", "X", ("queries", "d_model"), 0, said, x)]
    if context is not None:
        steps.append(_step(flat, "context", "C", ("keys", "d_model"), 0, wide=context))
    made = {
        "q": (f"Q = {project('q', 'X')}", queries * x * heads * sizes.d_k),
        "k": (f"K = {project('k', source)}", keys * width * kv_heads * sizes.d_k),
        "v": (f"V = {project('v', source)}", keys * width * kv_heads * sizes.d_v),
    }
    *inner, output = attention_steps(sizes, rules)
    for step in inner:
        formula, work = made.get(step.name, (step.formula, step.multiply_adds))
        steps.append(replace(step, formula=formula, multiply_adds=work))
    together = "O_0" if heads == 1 else f"concat(O_0 … O_{heads - 1})"
    steps.append(replace(output, name="heads", words="heads"))
    steps.append(_step(flat, "concat", f"H = {together}", ("queries", "heads·d_v"), 0, wide=wide))
    mixed = (f"U = {project('o', 'H')}", queries * wide * out, "layer output", out) if out else ()
    formula, work, said, wide = mixed or ("U = H", 0, "layer output joined", wide)
    return Steps([*steps, _step(flat, "output", formula, ("queries", "d_model"), work, said, wide)])


def _product(sizes: Sizes, left: str, right: str) -> str:
    """A product as it is written for tokens as rows, X·W, or as columns, W·X."""
    return f"{left}·{right}" if sizes.convention == "rows" else f"{right}·{left}"


def _step(
    sizes: Sizes, name: str, formula: str, axes: tuple[str, str], work: int, words: str = "", wide: int | None = None
) -> Step:
    """Make a step with its leading axes; `words` is the key of its sentence, by default its name.

    wide   the size of the last axis, if it is not in Sizes
    """
    heads = "kv_heads" if name in ("k", "v") else "heads"
    lead = [("batch", size) for size in sizes.lead]
    lead += [] if sizes.heads is None else [(heads, getattr(sizes, heads))]
    matrix = [(axes[0], getattr(sizes, axes[0])), (axes[1], getattr(sizes, axes[1]) if wide is None else wide)]
    turn = sizes.convention == "columns"
    names, shape = zip(*lead, *(reversed(matrix) if turn else matrix), strict=True)
    said = in_columns(words or name) if turn else words or name
    return Step(name, formula.partition(" = ")[0], formula, names, shape, work, prod(shape) * sizes.itemsize, said)


def turned(array: Array, convention: Convention) -> Array:
    """Convert between rows and columns convention: swap the last two axes for "columns"."""
    return array.swapaxes(-1, -2) if convention == "columns" and array.ndim >= 2 else array


def _shape(name: str, value: Any, *, turn: bool) -> tuple[int, ...]:
    if value is None:
        raise ShapeError(f"{name} is missing.", "give q, k and v, or x, w_q, w_k and w_v: arrays or shapes.")
    sizes = value if shape_of(value) is None else value.shape
    if not isinstance(sizes, (tuple, list)) or not all(is_whole(size) and size >= 0 for size in sizes):
        raise ShapeError(expected(name, sizes, "an array, or its shape in whole numbers"), f"{name}=(3, 4)")
    shape = tuple(map(int, sizes))
    if len(shape) < 2:
        raise ShapeError(f"{name} has shape {shape}: expected at least two axes.")
    return (*shape[:-2], shape[-1], shape[-2]) if turn else shape


def _share(name: str, width: int, parts: int, what: str) -> int:
    if parts == 0 or width % parts:
        raise ShapeError(f"{name} is {width} wide, no multiple of {what}.", f"{name} is (d_model, heads·width).")
    return width // parts
