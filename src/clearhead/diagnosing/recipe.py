"""The textbook's attention as data: every choice that people get wrong is a field, and its default is the right one.

A mistake is a change of fields; workings.py computes the numbers of a recipe, right or wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.textbook.computed import LayerArrays

Stage = Literal["scores", "scaled", "capped", "biased", "masked", "weights", "output"]
STAGES: tuple[Stage, ...] = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
Change = Mapping[str, Any]  # field of Recipe -> value
RULES = EVERYWHERE  # that recipes are made of

_Weight = Literal["given", "transposed"]  # W, or W used as its transpose
_Present = Literal["given", "missing"]  # a rule as the caller gave it, or left out
_Head = Literal["first head", "next head"]  # the values of head 0, or of head h + 1, in place of head h's
# How heads lie in a layer's columns: head h in a run of d columns; reshaped without the transpose, so that a head
# holds whole tokens; or head h in columns h, h + H, h + 2H, …
_Layout = Literal["heads", "flat", "interleaved"]
_Softcap = Literal["given", "missing", "after mask", "before scale", "after bias", "not multiplied", "clipped"]
_Cache = Literal[
    "given", "ignored", "another batch", "newest empty", "newest keys empty", "newest values empty", "newest twice",
    "newest early",
]  # fmt: skip
_Padding = Literal[  # of the lengths: the shortest or longest for all, or that of another head's batch entry
    "given", "missing", "inverted", "queries", "both", "left", "shortest", "longest", "tiled",
]  # fmt: skip
_Tile = Literal[
    "", "diagonal seen", "diagonal skipped", "local indices", "local indices, all blocks", "first missing",
    "overlapping", "stale keys", "stale values", "first keys", "first values", "visited",
]  # fmt: skip
_Softmax = Literal[  # one more: 1 + Σ in the denominator; unkept: sums, or maxima too, lie along the other axis
    "once", "twice", "twice, hidden keys too", "no sum", "no sum, no maximum", "one more", "one more, shifted",
    "unkept sum", "unkept sum and maximum", "sigmoid", "logarithm",
]  # fmt: skip
_Blocks = Literal["", "rescale", "rescale values", "rescale sum", "last", "last values", "averaged", "unshifted", "nan"]


class Recipe(NamedTuple):
    """How attention is computed, step by step; `Recipe()` is the textbook.

    The fields stand in the order of the stages that first show a change of theirs.
    """

    # scores: what a layer projects, and by which matrices
    source: Literal["given", "x only", "swapped", "normalised"] = "given"  # x and context
    w_q: _Weight = "given"
    w_k: _Weight = "given"
    b_q: _Present = "given"
    b_k: _Present = "given"
    # columns of [Q|K|V] read as (heads, 3, d) or (heads, d, 3); or columns so packed, read as [Q|K|V]
    packing: Literal["thirds", "read per head", "read interleaved", "packed per head", "packed interleaved"] = "thirds"
    # which array, or a layer's matrix, serves as queries, keys and values
    order: Literal["qkv", "qvk", "kqv", "kvq", "vqk", "vkq"] = "qkv"
    split: _Layout | Literal["one"] = "heads"  # one: each head has the queries and keys of all heads
    # pairing: the other of half-split and interleaved; mixed: the angles of one and the pairs of the other
    rotary: Literal["given", "missing", "pairing", "mixed", "mixed, pairing", "backwards"] = "given"
    rotary_on: Literal["qk", "q", "k", "qkv"] = "qk"
    rotary_part: float = 1.0  # of the columns
    rotary_shift: int = 0  # added to the queries' positions
    rotary_from: Literal["offset", "zero"] = "offset"  # the position of the first query
    # what a cache holds where there are more keys than queries; the newest keys are as many as there are queries
    cache: _Cache = "given"
    queries: Literal["q", "k"] = "q"
    keys: Literal["k", "q", "v"] = "k"
    product: Literal["q·kᵀ", "q·k", "k·qᵀ", "cosine"] = "q·kᵀ"
    groups: Literal["repeat", "tile", "first"] = "repeat"  # tile: query head h reads key head h % kv_heads
    half_dtype: Literal["", "float32", "float16", "bfloat16"] = ""  # what something on the way was rounded to
    step: Literal[Stage, ""] = ""  # the step whose numbers these are, where it is not the stage asked for
    # scaled
    scale: float | None = None  # None is the problem's
    # capped
    softcap: _Softcap = "given"
    # biased
    bias: Literal["given", "missing", "scaled", "negated", "transposed", "twice"] | _Head = "given"  # or before scale
    alibi: Literal["given", "missing", "added", "scaled"] = "given"
    alibi_slopes: Literal["given", "reversed", "all alike", "next head", "square root", "squared"] = "given"
    spans: Literal["given", "missing", "transposed", "wrapped"] = "given"  # wrapped: labels below 0 count from the end
    # masked: which keys a query sees
    causal: Literal["given", "missing", "inverted", "upper", "strict", "ahead", "first corner", "last corner"] = "given"
    window: tuple[int, int] | Literal["missing", "both sides", "left only"] = (0, 0)  # added to left and right
    chunk: int = 0  # a query sees its own chunk of so many tokens
    mask: Literal["given", "missing", "inverted", "transposed", "tiled"] = "given"
    padding: _Padding = "given"
    padding_shift: int = 0  # added to the lengths
    query_padding: _Present = "given"
    segments: _Present = "given"
    joined: Literal["and", "or"] = "and"  # the rules, among each other
    tile: tuple[_Tile, int] = ("", 0)  # what goes wrong with a block of keys, and how many keys it has
    key_tail: tuple[Literal["", "skipped", "zeros"], int] = ("", 0)  # keys behind the last whole block; keys per block
    # how the mask acts: after the softmax, as 1 where seen or where hidden, as a finite number
    masking: Literal["forbid", "after", "renormalised", "one seen", "one hidden", "fill", "add"] = "forbid"
    fill: float | None = None  # for "fill" and "add"; None until it is solved from theirs
    # weights
    scaling: Literal["logits", "weights"] = "logits"
    axis: Literal["keys", "queries", "matrix", "heads", "batch", "all", "none", "none, 0 where hidden"] = "keys"
    softmax: _Softmax = "once"
    powers: Literal["e", "2"] = "e"
    overflow: Literal["", "float64", "float32", "float16"] = ""  # no maximum subtracted: exp leaves this dtype's range
    sinks: Literal["given", "missing", "unshifted", "scaled"] | _Head = "given"
    blocks: tuple[_Blocks, int] = ("", 0)
    empty: Literal["zero", "nan", "mean"] = "zero"  # rows that see no key
    heads: Literal["each", "first", "mean"] = "each"  # whose result each head gets
    turned: bool = False  # Aᵀ·V
    # output
    w_v: _Weight = "given"
    b_v: _Present = "given"
    values: Literal["v", "k", "q"] = "v"
    across: Literal["tokens", "heads", "batch"] = "tokens"  # what attends to each other
    merge: _Layout = "heads"
    w_o: Literal["given", "transposed", "missing", "per head", "on values"] = "given"  # the last two: before joining
    b_o: _Present = "given"
    added: Literal["", "residual", "norm", "norm of sum"] = ""  # to the output, or done to it
    tail: tuple[Literal["", "zero", "unknown"], int] = ("", 0)  # what stands in the rows from this one on

    @property
    def unfilled(self) -> bool:
        """Is the number in hidden places still to be solved from theirs?"""
        return self.masking in ("fill", "add") and self.fill is None

    @property
    def wide(self) -> bool:
        """Does a row need the scores of all rows?"""
        return self.axis in ("queries", "matrix", "all") or self.turned or self.softmax.startswith("unkept")


def between(first: str, last: str) -> tuple[str, ...]:
    """The fields from one to another, both included."""
    return Recipe._fields[Recipe._fields.index(first) : Recipe._fields.index(last) + 1]


RIGHT = Recipe()
VISIBILITY = attrgetter(*between("causal", "tile"), "spans", "bias", "cache")  # the fields that change what is seen
_FIRST = {"source": "scores", "scale": "scaled", "softcap": "capped", "bias": "biased", "causal": "masked"}
_FIRST |= {"scaling": "weights", "w_v": "output"}  # the first field of each stage
_OF_VALUES: dict[str, dict[Any, Stage]] = {  # values that show at another stage than their field, and that stage
    "softcap": {"after bias": "biased", "after mask": "masked"},
    "cache": {"ignored": "masked", "newest values empty": "output", "newest twice": "output"},
    "tile": {"overlapping": "output", "stale values": "output", "first values": "output"},
}
_OF_VALUES["tile"] |= {"stale keys": "scores", "first keys": "scores"}


def shown(change: Change, stage: Stage) -> bool:
    """Can a change be seen at this stage?"""
    for field, value in change.items():
        *_, by_field = (_FIRST[until] for until in between("source", field) if until in _FIRST)
        first = _OF_VALUES.get(field, {}).get(value[0] if field == "tile" else value, by_field)
        if field != "fill" and STAGES.index(first) > STAGES.index(stage):
            return False
    return True


def acts_after_weights(change: Change) -> bool:
    """Can it be made where the weights are given: on the way from weights and values to the output?"""
    return "groups" in change or "turned" in change or ("values" not in change and not shown(change, "weights"))


def changed(recipe: Recipe, change: Change) -> Recipe:
    """The recipe with other fields."""
    return recipe._replace(**change)


class Rotary(NamedTuple):
    """Rotary positions: angles position·base^(-2i/d); the pairs are (i, i + d/2), or (2i, 2i + 1) where interleaved."""

    base: float
    interleaved: bool


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosed:
    """The inputs that are diagnosed: q (batch, heads, queries, d_k), k and v, their layer, and their code's numbers."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    theirs: Array  # (batch, heads, queries, …); a layer's output has one head
    stage: Stage
    layer: LayerArrays | None = None  # x (batch, queries, d_model), context (batch, keys, d_model)
    rotary: Rotary | None = None
    per_head: bool = False  # is theirs a layer's heads, before they are joined?
    weights: Array | None = None  # (batch, heads, queries, keys), where they are given; then q and k are zeros
    whole: "Diagnosed | None" = None  # the inputs of which these are some batch entries
    entries: tuple[int, ...] = ()

    @property
    def merged(self) -> bool:
        """Is theirs the layer's output, all heads in one?"""
        return self.layer is not None and self.stage == "output" and not self.per_head

    @property
    def tokens(self) -> dict[str, Array]:
        """What the caller gave that has tokens, by name."""
        if self.layer is not None:
            return {"x": self.layer.x, "context": self.layer.context}
        return ({"q": self.q, "k": self.k} if self.weights is None else {"weights": self.weights}) | {"v": self.v}

    def mapped(self, tokens: Callable[[Array], Array], matrices: Callable[[Array], Array] = lambda x: x) -> "Diagnosed":
        """The same with other numbers: `tokens` makes the arrays that have tokens, `matrices` a layer's W and b."""
        layer = self.layer
        if layer is not None:
            x = tokens(layer.x)
            context = x if layer.context is layer.x else tokens(layer.context)
            w, b = ({name: matrices(array) for name, array in arrays.items()} for arrays in (layer.w, layer.b))
            layer = LayerArrays(x, context, w, b)
        q, k, v = map(tokens, (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, weights=None if self.weights is None else tokens(self.weights), layer=layer)


class Selection(NamedTuple):
    """The heads and queries that are compared."""

    heads: tuple[int, ...]
    rows: tuple[int, ...]
