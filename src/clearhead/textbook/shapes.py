"""`ch.shapes`: every step from X to the output with its symbol, formula, axes, shape and cost, before computing.

The list of steps is written once, here; `trace` adds the arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

from clearhead.core.axes import Array, named
from clearhead.core.problem import check_shapes
from clearhead.core.rule_values import whole_number
from clearhead.digits import significant
from clearhead.errors import RuleError, Sentence, ShapeError, expected, shape_of
from clearhead.tables import aligned
from clearhead.textbook.symbols import Size, Term, is_symbolic, plain, read_count, read_size, total
from clearhead.words import in_columns

Convention = Literal["rows", "columns"]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Step:
    """One step of attention; `array` is None until it is computed."""

    name: str
    symbol: str
    formula: str
    axes: tuple[str, ...]
    shape: tuple[Size, ...]
    multiply_adds: Size
    bytes: Size
    words: str = ""  # which sentence of words/ says what it does
    array: Any = None

    @property
    def sizes(self) -> str:
        """The shape as text: (queries 3, keys 5), or (n, m) where there are symbols."""
        symbols = is_symbolic(self.shape)
        return f"({', '.join(map(str, self.shape))})" if symbols else named(self.shape, self.axes)

    def to_json(self) -> dict[str, Any]:
        """What describes the step, without its array; a size is a number, or a symbol's text."""
        described = {"name": self.name, "symbol": self.symbol, "formula": self.formula, "axes": self.axes}
        sizes = {"shape": self.shape, "multiply_adds": self.multiply_adds, "bytes": self.bytes}
        return described | {name: plain(size) for name, size in sizes.items()}

    def __str__(self) -> str:
        return f"{self.formula:<34} {self.sizes}"

    def __repr__(self) -> str:
        return f"Step({self.name}: {self.formula}, {self.sizes})"


class Steps(tuple[Step, ...]):
    """The steps in order; prints as a table of formula, shape and cost."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(step.formula) for step in self), default=0) + 2
        wide = max((len(step.sizes) for step in self), default=0) + 2
        rows = [[step.formula, step.sizes, *_cost([step.multiply_adds], [step.bytes])] for step in self]
        work, size = [step.multiply_adds for step in self], [step.bytes for step in self]
        last = ["in all", "", *_cost(work, size)]
        if is_symbolic(work + size):
            last = [f"in all: {total(work)} multiply-adds\n        {total(size)} bytes"]
        return "\n".join(aligned([width, wide, 28, 0], row) for row in [*rows, last])

    def __repr__(self) -> str:
        return f"Steps({', '.join(step.name for step in self)})"


class Sizes(NamedTuple):
    """The sizes behind one attention: lead (batch axes), then heads or None in 2-D, then the rest."""

    lead: tuple[Size, ...]
    heads: Size | None
    kv_heads: Size | None
    queries: Size
    keys: Size
    d_k: Size
    d_v: Size

    @staticmethod
    def of(q: Sequence[Size], k: Sequence[Size], v: Sequence[Size]) -> "Sizes":
        many = len(q) > 2
        return Sizes(tuple(q[:-3]), q[-3] if many else None, k[-3] if many else None, q[-2], k[-2], q[-1], v[-1])


class Used(NamedTuple):
    """Which rules are used, for the formulas."""

    scale: float | str | None = None  # None is the default, 1/√d_k; "s_h" where each head has its own
    softcap: float | None = None
    biased: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    sinks: bool = False
    through: str = "{}"  # what is applied to Q and K after their projections, such as RoPE({})


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
    num_heads: Any = 1,
    context: Any = None,
    convention: Convention = "rows",
) -> Steps:
    """The shape of every step of attention, before anything is computed.

    Give arrays, or only their shapes as tuples, in numbers or in symbols such as "n", "h·d_k" and "d_model/h": either

    q, k, v         (…, heads, queries, d_k), (…, kv_heads, keys, d_k), (…, kv_heads, keys, d_v)

    or a layer's

    x               (…, queries, d_model)
    w_q, w_k, w_v   (d_model, heads·d_k), (d_model, kv_heads·d_k), (d_model, kv_heads·d_v)
    w_o             (heads·d_v, d_out), or None
    num_heads       query heads
    context         (…, keys, d_context) for cross-attention

    convention      "rows" for tokens as rows; "columns" swaps the last two axes of all of these

    Returns the steps in order, each with name, symbol, formula, axes, shape, multiply-adds and bytes (those of float32
    for bare shapes); they print as a table. Where symbols are given, shapes and costs are products of them.
    Raises ShapeError where shapes do not fit, with the transpose that would, RuleError for another convention or a
    num_heads that is neither a whole number from 1 up nor a symbol. O(1) time and memory.

    >>> import clearhead as ch
    >>> [step.shape for step in ch.shapes((3, 2), (5, 2), (5, 4))]
    [(3, 2), (5, 2), (5, 4), (3, 5), (3, 5), (3, 5), (3, 4)]
    >>> scores = ch.shapes(("n", "d_k"), ("m", "d_k"), ("m", "d_v"))[3]
    >>> print(scores, scores.multiply_adds)
    S = Q·Kᵀ                           (n, m) n·m·d_k
    """
    check_convention(convention)
    turn = convention == "columns"
    itemsize = next((int(a.itemsize) for a in (q, x) if hasattr(a, "itemsize")), 4)
    if q is not None:
        sides = [_shape(name, value, turn=turn) for name, value in (("q", q), ("k", k), ("v", v))]
        check_shapes(*sides)
        return attention_steps(Sizes.of(*sides), Used(), convention, itemsize)
    weights = (_shape("w_q", w_q, turn=turn), _shape("w_k", w_k, turn=turn), _shape("w_v", w_v, turn=turn))
    x_shape = _shape("x", x, turn=turn)
    source = x_shape if context is None else _shape("context", context, turn=turn)
    out = None if w_o is None else _shape("w_o", w_o, turn=turn)
    heads = read_count("num_heads", num_heads) if isinstance(num_heads, str) else num_heads
    sizes = layer_sizes(x_shape, source, weights, out, heads, convention)
    cross = context is not None
    return layer_steps(sizes, x_shape, source, out, Used(), frozenset(), convention, itemsize, cross=cross)


def check_convention(convention: str) -> None:
    """Raise RuleError for anything but "rows" and "columns"."""
    if not isinstance(convention, str) or convention not in ("rows", "columns"):
        raise RuleError(expected("convention", convention, "'rows' (X·W) or 'columns' (W·X)"))


def layer_sizes(
    x: Sequence[Size],
    context: Sequence[Size],
    w_qkv: tuple[Sequence[Size], Sequence[Size], Sequence[Size]],
    w_o: Sequence[Size] | None,
    num_heads: Any,
    convention: Convention,
) -> Sizes:
    """The sizes of a layer's attention, or a ShapeError that says which matrix does not fit; all in rows convention."""
    num_heads = num_heads if isinstance(num_heads, Term) else whole_number("num_heads", num_heads, 1)
    other = "columns" if convention == "rows" else "rows"
    w_q, w_k, w_v = w_qkv
    alone = context is x or tuple(context) == tuple(x)
    sources = (("w_q", w_q, "x", x), ("w_k", w_k, "context", context), ("w_v", w_v, "context", context))
    for name, w, source, shape in sources:
        if len(w) != 2 or w[0] != shape[-1]:
            label = "x" if alone else source
            swap = len(w) == 2 and w[1] == shape[-1]
            raise ShapeError(
                "{name} is {shape} but {input} has d_model {width}: they must meet.",
                "it fits as its transpose: {name}.T, or convention='{other}' for all." if swap else "",
                name=name,
                shape=named(w, ("d_in", "d_out")),
                input=label,
                width=shape[-1],
                other=other,
            )
    if tuple(x[:-2]) != tuple(context[:-2]):
        what = "context has batch {context} but x has batch {x}: they must be equal."
        raise ShapeError(what, context=tuple(context[:-2]), x=tuple(x[:-2]))
    d_k = _share("w_q", w_q[1], num_heads, Sentence("num_heads {heads}", heads=num_heads))
    kv_heads = _share("w_k", w_k[1], d_k, Sentence("d_k {width}, the width of one query head", width=d_k))
    if kv_heads == 0 or num_heads % kv_heads:
        what = "w_k makes {keys} key heads but num_heads is {heads}: query heads must be a multiple of key heads."
        raise ShapeError(what, keys=kv_heads, heads=num_heads)
    d_v = _share("w_v", w_v[1], kv_heads, Sentence("{count} key heads", count=kv_heads))
    if w_o is not None and (len(w_o) != 2 or w_o[0] != num_heads * d_v):
        values = {"shape": named(w_o, ("d_in", "d_out")), "heads": num_heads, "width": d_v, "joined": num_heads * d_v}
        raise ShapeError(
            "w_o is {shape} but the heads are {heads}·{width} = {joined} wide.",
            "it fits as its transpose." if len(w_o) == 2 and w_o[1] == num_heads * d_v else "",
            **values,
        )
    return Sizes(tuple(x[:-2]), num_heads, kv_heads, x[-2], context[-2], d_k, d_v)


def attention_steps(sizes: Sizes, used: Used, convention: Convention, itemsize: int) -> Steps:
    """The steps from Q, K, V to A·V."""
    rows = convention == "rows"
    cells = prod(sizes.lead) * (1 if sizes.heads is None else sizes.heads) * sizes.queries * sizes.keys
    write = _Writer(sizes, convention, itemsize)
    a = ("queries", "keys")
    scale = used.scale if isinstance(used.scale, str | None) else significant(used.scale, 6)
    scaling = ("S' = S/√d_k", "scaled") if used.scale is None else (f"S' = {scale}·S", "scaled by")
    steps = [
        write("q", "Q", ("queries", "d_k"), 0),
        write("k", "K", ("keys", "d_k"), 0),
        write("v", "V", ("keys", "d_v"), 0),
        write("scores", "S = Q·Kᵀ" if rows else "S = Kᵀ·Q", a, cells * sizes.d_k),
        write("scaled", scaling[0], a, cells, scaling[1]),
    ]
    if used.softcap is not None:
        cap = significant(used.softcap, 6)
        steps.append(write("capped", f"C = {cap}·tanh({steps[-1].symbol}/{cap})", a, 2 * cells))
    if used.biased:
        words = "biased by spans" if used.biased == ("spans",) else "biased"
        steps.append(write("biased", f"B = {steps[-1].symbol} + {' + '.join(used.biased)}", a, cells, words))
    if used.masked:
        forbidden = f"-∞ where forbidden ({', '.join(used.masked)})"
        steps.append(write("masked", f"M = {steps[-1].symbol}, {forbidden}", a, 0))
    inside = f"[{steps[-1].symbol}, sink]" if used.sinks else steps[-1].symbol
    per = "row" if rows else "column"
    words = "weights with sink" if used.sinks else "weights"
    steps.append(write("weights", f"A = softmax({inside}), each {per}", a, cells, words))
    steps.append(write("output", "O = A·V" if rows else "O = V·A", ("queries", "d_v"), cells * sizes.d_v))
    return Steps(steps)


def weights_steps(sizes: Sizes, convention: Convention, itemsize: int) -> Steps:
    """The steps from weights that are given, A and V, to A·V."""
    _, _, v, *_, a, output = attention_steps(sizes, Used(), convention, itemsize)
    words = "weights given" if convention == "rows" else in_columns("weights given")
    return Steps((replace(a, formula="A", multiply_adds=0, words=words), v, output))


def layer_steps(
    sizes: Sizes,
    x: Sequence[Size],
    context: Sequence[Size],
    w_o: Sequence[Size] | None,
    used: Used,
    biases: frozenset[str],
    convention: Convention,
    itemsize: int,
    *,
    cross: bool,
    normalised: bool = False,
) -> Steps:
    """The steps from X to U: projections, heads, attention, concatenation, output projection.

    biases      the names of those there are, such as "b_q"
    normalised  is x the output of a layer norm? The sentence about it says so
    """
    rows = convention == "rows"
    lead, heads, kv_heads = sizes.lead, sizes.heads or 1, sizes.kv_heads or 1
    flat = _Writer(sizes._replace(heads=None, kv_heads=None), convention, itemsize)
    many = prod(lead)
    source = "C" if cross else "X"
    n, m = sizes.queries, sizes.keys

    def project(symbol: str, tokens: str, bias: str) -> str:
        plus = f" + b^{symbol}" if bias in biases else ""
        product = f"{tokens}·W^{symbol}{plus}" if rows else f"W^{symbol}·{tokens}{plus}"
        return f"{symbol} = {used.through.format(product) if symbol in 'QK' else product}"

    steps = [flat("x", "X", ("queries", "d_model"), 0, "x normalised" if normalised else "x", wide=x[-1])]
    if cross:
        steps.append(flat("context", "C", ("keys", "d_model"), 0, wide=context[-1]))
    inner = attention_steps(sizes, used, convention, itemsize)
    made = {
        "q": (project("Q", "X", "b_q"), many * n * x[-1] * heads * sizes.d_k),
        "k": (project("K", source, "b_k"), many * m * context[-1] * kv_heads * sizes.d_k),
        "v": (project("V", source, "b_v"), many * m * context[-1] * kv_heads * sizes.d_v),
    }
    for step in inner:
        formula, work = made.get(step.name, (step.formula, step.multiply_adds))
        step = replace(step, formula=formula, multiply_adds=work)
        steps.append(replace(step, name="heads", words="heads") if step.name == "output" else step)
    wide = heads * sizes.d_v
    last = f"{{{heads}-1}}" if is_symbolic([heads]) else heads - 1
    together = "O_0" if heads == 1 else f"concat(O_0 … O_{last})"
    steps.append(flat("concat", f"H = {together}", ("queries", "heads·d_v"), 0, wide=wide))
    plus = " + b^O" if "b_o" in biases else ""
    formula, work, said = "U = H", 0, "layer output joined"
    if w_o is not None:
        formula, work, said = (
            f"U = H·W^O{plus}" if rows else f"U = W^O·H{plus}",
            many * n * wide * w_o[1],
            "layer output",
        )
        wide = w_o[1]
    steps.append(flat("output", formula, ("queries", "d_model"), work, said, wide=wide))
    return Steps(steps)


class _Writer:
    """Makes steps: adds the leading axes, finds the sizes, and swaps the last two axes in columns convention."""

    def __init__(self, sizes: Sizes, convention: Convention, itemsize: int) -> None:
        self.sizes, self.turn, self.itemsize = sizes, convention == "columns", itemsize

    def __call__(
        self, name: str, formula: str, axes: tuple[str, str], work: Size, words: str = "", *, wide: Size = None
    ) -> Step:
        """A step; `words` is what is said of it, else its name; `wide` the size of a last axis that is not in Sizes."""
        heads = "kv_heads" if name in ("k", "v") else "heads"
        count = getattr(self.sizes, heads)
        last = getattr(self.sizes, axes[1]) if wide is None else wide
        lead = [*(("batch", size) for size in self.sizes.lead), *([] if count is None else [(heads, count)])]
        matrix = [(axes[0], getattr(self.sizes, axes[0])), (axes[1], last)]
        names, shape = zip(*lead, *(reversed(matrix) if self.turn else matrix), strict=True)
        said = in_columns(words or name) if self.turn else words or name
        return Step(name, formula.partition(" = ")[0], formula, names, shape, work, prod(shape) * self.itemsize, said)


def turned(array: Array, convention: Convention) -> Array:
    """Between rows and columns convention: the last two axes swapped for columns."""
    return array.swapaxes(-1, -2) if convention == "columns" and array.ndim >= 2 else array


def _shape(name: str, value: Any, *, turn: bool) -> tuple[Size, ...]:
    if value is None:
        raise ShapeError("{name} is missing.", "give q, k and v, or x, w_q, w_k and w_v: arrays or shapes.", name=name)
    sizes = value if shape_of(value) is None else value.shape
    shape = tuple(map(read_size, sizes)) if isinstance(sizes, (tuple, list)) else (None,)
    if None in shape:
        raise ShapeError(
            expected(name, sizes, "an array, or its shape in whole numbers or symbols"),
            '{name}=(3, 4), or {name}=("n", "d_k")',
            name=name,
        )
    if len(shape) < 2:
        raise ShapeError("{name} has {count} axes: expected at least two.", name=name, count=len(shape))
    return (*shape[:-2], shape[-1], shape[-2]) if turn else shape


def _share(name: str, width: Size, parts: Size, what: str) -> Size:
    if parts == 0 or width % parts:
        values = {"name": name, "width": width, "wanted": what}
        raise ShapeError(
            "{name} is {width} wide, which {wanted} does not divide.", "{name} is (d_model, heads·width).", **values
        )
    return width // parts


def _cost(multiply_adds: Sequence[Size], sizes: Sequence[Size]) -> tuple[str, str]:
    work = "" if set(multiply_adds) <= {0} else f"{total(multiply_adds)} multiply-adds"
    return f"{work} ", f"{total(sizes)} bytes"
