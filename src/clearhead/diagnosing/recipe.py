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
# How heads lie in a layer's columns: head h in a run of d columns; reshaped without the transpose, so that a head
# holds whole tokens; or head h in columns h, h + H, h + 2H, …
_Layout = Literal["heads", "flat", "interleaved"]


class Recipe(NamedTuple):
    """How attention is computed, step by step; `Recipe()` is the textbook."""

    # projections, of a layer only
    w_q: _Weight = "given"
    w_k: _Weight = "given"
    w_v: _Weight = "given"
    w_o: Literal["given", "transposed", "missing", "per head", "on values"] = "given"  # both of these before joining
    b_q: _Present = "given"
    b_k: _Present = "given"
    b_v: _Present = "given"
    b_o: _Present = "given"
    split: _Layout = "heads"
    rotary: Literal["given", "missing", "pairing"] = "given"  # pairing: the other of half-split and interleaved
    rotary_shift: int = 0  # added to the queries' positions
    rotary_values: bool = False
    # scores
    product: Literal["q·kᵀ", "q·k", "k·qᵀ"] = "q·kᵀ"
    groups: Literal["repeat", "tile"] = "repeat"  # tile: query head h reads key head h % kv_heads
    half: Literal["", "scores", "logits", "powers", "weights", "sum", "somewhere"] = ""  # what `half_dtype` rounds
    half_dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    # logits
    scale: float | None = None  # None is the problem's
    softcap: Literal["given", "missing", "after mask"] = "given"
    bias: Literal["given", "missing", "scaled"] = "given"  # scaled: added before the scale
    alibi: Literal["given", "missing", "added"] = "given"
    # wrapped: a label below 0 counts from the table's end
    spans: Literal["given", "missing", "transposed", "wrapped"] = "given"
    # visibility
    causal: Literal["given", "missing", "inverted", "upper", "strict", "first corner", "last corner"] = "given"
    window: tuple[int, int] | None = (0, 0)  # added to left and right; None: missing
    mask: Literal["given", "missing", "inverted", "transposed"] = "given"
    padding: Literal["given", "missing", "inverted", "queries"] = "given"
    query_padding: _Present = "given"
    segments: _Present = "given"
    key_tail: tuple[Literal["", "skipped", "zeros"], int] = ("", 0)  # keys behind the last whole block; keys per block
    # how the mask acts: after the softmax, as 1 where seen or where hidden, as a finite number
    masking: Literal["forbid", "after", "renormalised", "one seen", "one hidden", "fill", "add"] = "forbid"
    fill: float | None = None  # for "fill" and "add"; None is fitted to theirs
    # softmax
    axis: Literal["keys", "queries", "matrix", "heads", "none", "none, 0 where hidden"] = "keys"
    overflow: Literal["", "float64", "float32", "float16"] = ""  # no maximum subtracted: exp leaves this dtype's range
    sinks: _Present = "given"
    blocks: tuple[Literal["", "rescale", "rescale values", "rescale sum", "last", "last values"], int] = ("", 0)
    empty: Literal["zero", "nan", "mean"] = "zero"  # rows that see no key
    dropout: float = 0.0
    # output
    turned: bool = False  # Aᵀ·V
    values: Literal["v", "k", "q"] = "v"
    merge: _Layout = "heads"
    tail: tuple[Literal["", "zero", "unknown"], int] = ("", 0)  # what stands in the rows from this one on
    step: Literal[Stage, ""] = ""  # the step whose numbers these are, where it is not the stage asked for


RIGHT = Recipe()

# The first stage that shows a change of the field; changes of other fields show in the output only.
_SHOWN_FROM: dict[str, Stage] = {
    **dict.fromkeys(
        ("w_q", "w_k", "b_q", "b_k", "split", "rotary", "rotary_shift", "product", "groups", "step"), "scores"
    ),
    "scale": "scaled",
    "softcap": "capped",
    **dict.fromkeys(("bias", "alibi", "spans"), "biased"),
    **dict.fromkeys(
        ("causal", "window", "mask", "padding", "query_padding", "segments", "key_tail", "masking"), "masked"
    ),
    **dict.fromkeys(("axis", "overflow", "sinks", "blocks", "empty", "dropout"), "weights"),
}
_BY_VALUE: dict[tuple[str, Any], Stage] = {
    ("half", "scores"): "scores",
    ("half", "logits"): "scaled",
    ("half", "weights"): "weights",
    ("half", "powers"): "weights",
    ("half", "sum"): "weights",
    ("half", "somewhere"): "scores",
}
_DETAILS = ("half_dtype", "fill")  # these qualify another field


def shown(change: Change, stage: Stage) -> bool:
    """Can a change be seen at this stage?"""
    return all(
        STAGES.index(_BY_VALUE.get((field, value), _SHOWN_FROM.get(field, "output"))) <= STAGES.index(stage)
        for field, value in change.items()
        if field not in _DETAILS
    )


def acts_on_given_weights(change: Change) -> bool:
    """Can it be made where the weights are given: on the way from weights and values to the output?"""
    return "groups" in change or ("values" not in change and not shown(change, "weights"))


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

    @property
    def merged(self) -> bool:
        """Is theirs the layer's output, all heads in one?"""
        return self.layer is not None and self.stage == "output" and not self.per_head


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The heads and queries that are compared."""

    heads: tuple[int, ...]
    rows: tuple[int, ...]
