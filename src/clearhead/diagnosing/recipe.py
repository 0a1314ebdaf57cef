"""The textbook's attention as data: every choice that people get wrong is a field, and its default is the right one.

A mistake is a change of fields; workings.py computes the numbers of a recipe, right or wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clearhead.core.axes import Array
from clearhead.core.problem import Problem

Stage = Literal["scores", "scaled", "capped", "biased", "masked", "weights", "output"]
STAGES: tuple[Stage, ...] = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
Change = Mapping[str, Any]  # field of Recipe -> value
RULES = frozenset({  # that recipes are made of
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip


_Weight = Literal["given", "transposed"]  # W, or W used as its transpose
_Present = Literal["given", "missing"]  # a rule as the caller gave it, or left out
_Head = Literal["first head", "next head"]  # the values of head 0, or of head h + 1, in place of head h's own
# How heads lie in a layer's columns: head h in a run of d columns; reshaped without the transpose, so that a head
# holds whole tokens; or head h in columns h, h + H, h + 2H, …
_Layout = Literal["heads", "flat", "interleaved"]

_Cache = Literal[
    "given", "ignored", "another batch", "newest empty", "newest keys empty", "newest values empty", "newest twice",
    "newest early",
]  # fmt: skip
_Tile = Literal[
    "", "diagonal seen", "diagonal skipped", "local indices", "local indices, all blocks", "first missing",
    "overlapping", "stale keys", "stale values", "first keys", "first values", "visited",
]  # fmt: skip
_Softmax = Literal[
    "once", "twice", "twice, hidden keys too", "no sum", "no sum, no maximum", "one more", "one more, shifted",
    "unkept sum", "unkept sum and maximum", "sigmoid", "logarithm",
]  # fmt: skip
_Blocks = Literal["", "rescale", "rescale values", "rescale sum", "last", "last values", "averaged", "unshifted", "nan"]
_FITTED = ("scale_factor", "rotary_base", "rotary_factor", "alibi_factor")  # None until they are found from theirs


class Recipe(NamedTuple):
    """How attention is computed, step by step; `Recipe()` is the textbook."""

    # projections, of a layer only
    source: Literal["given", "x only", "swapped", "normalised"] = "given"  # what is projected: x and context
    w_q: _Weight = "given"
    w_k: _Weight = "given"
    w_v: _Weight = "given"
    w_o: Literal["given", "transposed", "missing", "per head", "on values"] = "given"  # both of these before joining
    b_q: _Present = "given"
    b_k: _Present = "given"
    b_v: _Present = "given"
    b_o: _Present = "given"
    # columns of [Q|K|V] read as (heads, 3, d) or (heads, d, 3); or columns so packed, read as [Q|K|V]
    packing: Literal["thirds", "read per head", "read interleaved", "packed per head", "packed interleaved"] = "thirds"
    # which array, or a layer's matrix, serves as queries, keys and values
    order: Literal["qkv", "qvk", "kqv", "kvq", "vqk", "vkq"] = "qkv"
    split: _Layout | Literal["one"] = "heads"  # one: each head has the queries and keys of all heads
    # pairing: the other of half-split and interleaved; mixed: the angles of one and the pairs of the other
    rotary: Literal["given", "missing", "pairing", "mixed", "mixed, pairing", "backwards"] = "given"
    rotary_on: Literal["qk", "q", "k", "qkv"] = "qk"
    rotary_part: float = 1.0  # of the columns
    rotary_base: float | None = 0.0  # 0 is the given one
    rotary_factor: float | None = 1.0  # divides the positions
    rotary_shift: int = 0  # added to the queries' positions
    rotary_from: Literal["offset", "zero"] = "offset"  # the position of the first query
    # what a cache holds where there are more keys than queries; the newest keys are as many as there are queries
    cache: _Cache = "given"
    # scores
    queries: Literal["q", "k"] = "q"
    keys: Literal["k", "q", "v"] = "k"
    product: Literal["q·kᵀ", "q·k", "k·qᵀ", "cosine"] = "q·kᵀ"
    groups: Literal["repeat", "tile", "first"] = "repeat"  # tile: query head h reads key head h % kv_heads
    half: Literal["", "scores", "logits", "powers", "weights", "sum", "somewhere"] = ""  # what `half_dtype` rounds
    half_dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    # logits
    scale: float | None = None  # None is the problem's
    scale_factor: float | None = 1.0
    scaling: Literal["logits", "weights"] = "logits"
    softcap: Literal["given", "missing", "after mask", "before scale", "after bias", "not multiplied", "clipped"] = (
        "given"
    )
    bias: Literal["given", "missing", "scaled", "negated", "transposed", "twice"] | _Head = "given"  # or before scale
    alibi: Literal["given", "missing", "added", "scaled"] = "given"
    alibi_slopes: Literal["given", "reversed", "all alike", "next head", "square root", "squared"] = "given"
    alibi_factor: float | None = 1.0
    # wrapped: a label below 0 counts from the table's end
    spans: Literal["given", "missing", "transposed", "wrapped"] = "given"
    # visibility
    causal: Literal["given", "missing", "inverted", "upper", "strict", "ahead", "first corner", "last corner"] = "given"
    window: tuple[int, int] | Literal["missing", "both sides", "left only"] = (0, 0)  # added to left and right
    chunk: int = 0  # a query sees its own chunk of so many tokens
    mask: Literal["given", "missing", "inverted", "transposed", "tiled"] = "given"
    # of the lengths: the shortest or longest for all, or that of another head's batch entry
    padding: Literal["given", "missing", "inverted", "queries", "both", "left", "shortest", "longest", "tiled"] = (
        "given"
    )
    padding_shift: int = 0  # added to the lengths
    query_padding: _Present = "given"
    segments: _Present = "given"
    joined: Literal["and", "or"] = "and"  # the rules, among each other
    key_tail: tuple[Literal["", "skipped", "zeros"], int] = ("", 0)  # keys behind the last whole block; keys per block
    # what goes wrong with a block of keys, and how many keys it has
    tile: tuple[_Tile, int] = ("", 0)
    # how the mask acts: after the softmax, as 1 where seen or where hidden, as a finite number
    masking: Literal["forbid", "after", "renormalised", "one seen", "one hidden", "fill", "add"] = "forbid"
    fill: float | None = None  # for "fill" and "add"; None is fitted to theirs
    # softmax
    axis: Literal["keys", "queries", "matrix", "heads", "batch", "all", "none", "none, 0 where hidden"] = "keys"
    # of the scores; one more: 1 + Σ in the denominator; unkept: sums, or maxima too, lie along the other axis
    softmax: _Softmax = "once"
    powers: Literal["e", "2"] = "e"
    overflow: Literal["", "float64", "float32", "float16"] = ""  # no maximum subtracted: exp leaves this dtype's range
    sinks: Literal["given", "missing", "unshifted", "scaled"] | _Head = "given"
    blocks: tuple[_Blocks, int] = ("", 0)
    empty: Literal["zero", "nan", "mean"] = "zero"  # rows that see no key
    dropout: float = 0.0
    # output
    across: Literal["tokens", "heads", "batch"] = "tokens"  # what attends to each other
    turned: bool = False  # Aᵀ·V
    values: Literal["v", "k", "q"] = "v"
    heads: Literal["own", "first", "mean"] = "own"  # whose result each head gets
    merge: _Layout = "heads"
    added: Literal["", "residual", "norm", "norm of sum"] = ""  # to the output, or done to it
    tail: tuple[Literal["", "zero", "unknown"], int] = ("", 0)  # what stands in the rows from this one on
    step: Literal[Stage, ""] = ""  # the step whose numbers these are, where it is not the stage asked for

    @property
    def unknown(self) -> str:
        """The field whose number is still to be found from theirs; "" where there is none."""
        if self.masking in ("fill", "add") and self.fill is None:
            return "fill"
        return next((field for field in _FITTED if getattr(self, field) is None), "")


RIGHT = Recipe()

# The first stage that shows a change of the field; changes of other fields show in the output only.
_SHOWN_FROM: dict[str, Stage] = {
    **dict.fromkeys(
        (
            *("source", "w_q", "w_k", "b_q", "b_k", "packing", "order", "split", "rotary", "rotary_on", "rotary_part"),
            *("rotary_base", "rotary_factor", "rotary_shift", "rotary_from", "cache", "queries", "keys", "product"),
            *("groups", "step"),
        ),
        "scores",
    ),
    **dict.fromkeys(("scale", "scale_factor"), "scaled"),
    "softcap": "capped",
    **dict.fromkeys(("bias", "alibi", "alibi_slopes", "alibi_factor", "spans"), "biased"),
    **dict.fromkeys(
        (
            *("causal", "window", "chunk", "mask", "padding", "padding_shift", "query_padding", "segments", "joined"),
            *("key_tail", "tile", "masking"),
        ),
        "masked",
    ),
    **dict.fromkeys(
        (
            *("scaling", "axis", "softmax", "powers", "overflow", "sinks", "blocks", "empty", "dropout"),
            "heads",
            "turned",
        ),
        "weights",
    ),
}
_BY_VALUE: dict[tuple[str, Any], Stage] = {
    ("half", "scores"): "scores",
    ("half", "logits"): "scaled",
    ("half", "weights"): "weights",
    ("half", "powers"): "weights",
    ("half", "sum"): "weights",
    ("half", "somewhere"): "scores",
    ("cache", "newest values empty"): "output",
    ("cache", "newest twice"): "output",
    ("tile", "stale keys"): "scores",
    ("tile", "first keys"): "scores",
    **{("tile", kind): "output" for kind in ("overlapping", "stale values", "first values")},
    ("cache", "ignored"): "masked",
    ("softcap", "after bias"): "biased",
    ("softcap", "after mask"): "masked",
}
_DETAILS = ("half_dtype", "fill")  # these qualify another field


def shown(change: Change, stage: Stage) -> bool:
    """Can a change be seen at this stage?"""
    return all(
        STAGES.index(_BY_VALUE.get((field, value[0] if field == "tile" else value), _SHOWN_FROM.get(field, "output")))
        <= STAGES.index(stage)
        for field, value in change.items()
        if field not in _DETAILS
    )


def acts_on_given_weights(change: Change) -> bool:
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
class LayerInputs:
    """A layer's arrays in rows convention; x (batch, queries, d_model), context (batch, keys, d_model)."""

    x: Array
    context: Array
    w: dict[str, Array]  # "q", "k", "v" and, where there is one, "o"
    b: dict[str, Array]


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """The inputs that are diagnosed: q (batch, heads, queries, d_k), k and v, their layer, and their code's numbers."""

    problem: Problem
    q: Array
    k: Array
    v: Array | None
    theirs: Array  # (batch, heads, queries, …); a layer's output has one head
    stage: Stage
    layer: LayerInputs | None = None
    rotary: Rotary | None = None
    per_head: bool = False  # is theirs a layer's heads, before they are joined?
    weights: Array | None = None  # (batch, heads, queries, keys), where they are given; then q and k are zeros
    whole: "Inputs | None" = None  # the inputs of which these are some batch entries
    entries: tuple[int, ...] = ()

    @property
    def merged(self) -> bool:
        """Is theirs the layer's output, all heads in one?"""
        return self.layer is not None and self.stage == "output" and not self.per_head


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The heads and queries that are compared."""

    heads: tuple[int, ...]
    rows: tuple[int, ...]
