"""The textbook's attention as data: every choice that people get wrong is a field, and its default is the right one.

A mistake is a change of fields; workings.py computes what a recipe gives, right or wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clearhead.axes import Array
from clearhead.problem import Problem

Stage = Literal["scores", "scaled", "capped", "biased", "masked", "weights", "output"]
STAGES: tuple[Stage, ...] = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
Change = Mapping[str, Any]  # field of Recipe -> value


class Recipe(NamedTuple):
    """How attention is computed, step by step; `Recipe()` is the textbook."""

    # projections, layer only: W^Q, W^K, W^V, W^O "given" or "transposed"; biases "given" or "missing"
    w_q: str = "given"
    w_k: str = "given"
    w_v: str = "given"
    w_o: str = "given"  # also "missing", "per head", "on values"
    b_q: str = "given"
    b_k: str = "given"
    b_v: str = "given"
    b_o: str = "given"
    split: str = "heads"  # "flat": reshaped without the transpose; "interleaved": head h takes columns h, h + H, …
    rotary: str = "given"  # "missing", "pairing": the other of half-split and interleaved
    rotary_shift: int = 0  # added to the queries' positions
    rotary_values: bool = False
    # scores
    product: str = "q·kᵀ"  # "q·k", "k·qᵀ"
    groups: str = "repeat"  # "tile": query head h reads key head h % kv_heads
    half: str = ""  # "scores", "logits", "powers", "weights", "sum", "somewhere": what is rounded to `half_dtype`
    half_dtype: str = "float16"
    # logits
    scale: float | None = None  # None is the problem's
    softcap: str = "given"  # "missing", "after mask"
    bias: str = "given"  # "missing", "scaled": added before the scale
    alibi: str = "given"  # "missing", "added"
    # who sees whom
    causal: str = "given"  # "missing", "inverted", "upper", "strict", "first corner", "last corner"
    window: tuple[int, int] | None = (0, 0)  # added to left and right; None: missing
    mask: str = "given"  # "missing", "inverted", "transposed"
    padding: str = "given"  # "missing", "inverted", "queries"
    query_padding: str = "given"  # "missing"
    segments: str = "given"  # "missing"
    key_tail: tuple[str, int] = ("", 0)  # ("skipped", block), ("zeros", block)
    # how the mask acts
    masking: str = "forbid"  # "after", "renormalised", "one seen", "one hidden", "fill", "add" (a finite number)
    fill: float | None = None  # for "fill" and "add"; None is found from the numbers
    # softmax
    axis: str = "keys"  # "queries", "matrix", "heads", "none", "none, 0 where hidden"
    overflow: str = ""  # the dtype whose range exp leaves: no maximum is subtracted
    sinks: str = "given"  # "missing"
    blocks: tuple[str, int] = ("", 0)  # a tiled kernel: (what is wrong, keys per block)
    empty: str = "zero"  # rows that see nothing: "nan", "mean"
    dropout: float = 0.0
    # output
    turned: bool = False  # Aᵀ·V
    values: str = "v"  # "k", "q"
    merge: str = "heads"  # "flat", "interleaved"; layer only
    tail: tuple[str, int] = ("", 0)  # rows from here on: "zero", "unknown"
    step: str = ""  # another step's numbers


RIGHT = Recipe()

# The first stage that shows a change of the field; what is not listed shows in the output only.
_SHOWN_FROM: dict[str, Stage] = {
    **dict.fromkeys(
        ("w_q", "w_k", "b_q", "b_k", "split", "rotary", "rotary_shift", "product", "groups", "step"), "scores"
    ),
    "scale": "scaled",
    "softcap": "capped",
    **dict.fromkeys(("bias", "alibi"), "biased"),
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
_DETAILS = ("half_dtype", "fill")  # say more about another field


def shown(change: Change, stage: Stage) -> bool:
    """Can a change be seen at this stage?"""
    return all(
        STAGES.index(_BY_VALUE.get((field, value), _SHOWN_FROM.get(field, "output"))) <= STAGES.index(stage)
        for field, value in change.items()
        if field not in _DETAILS
    )


def changed(recipe: Recipe, change: Change) -> Recipe:
    """The recipe with other fields."""
    return recipe._replace(**change)


class Rotary(NamedTuple):
    """Rotary positions: angles position·base^(-2i/d); the pairs are (i, i + d/2), or (2i, 2i + 1) where interleaved."""

    base: float
    interleaved: bool


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """A layer's arrays in rows convention; x (batch, queries, d_model), context (batch, keys, d_model)."""

    x: Array
    context: Array
    w: dict[str, Array]  # "q", "k", "v" and, where there is one, "o"
    b: dict[str, Array]


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What is looked at: q (batch, heads, queries, d_k), k and v, the layer they came from, and what theirs gave."""

    problem: Problem
    q: Array
    k: Array
    v: Array | None
    theirs: Array  # (batch, heads, queries, …); a layer's output has one head
    stage: Stage
    layer: Layer | None = None
    rotary: Rotary | None = None
    apart: bool = False  # a layer's heads, before they are joined

    @property
    def merged(self) -> bool:
        """Is theirs the layer's output, all heads in one?"""
        return self.layer is not None and self.stage == "output" and not self.apart


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Some heads and some queries of all."""

    heads: tuple[int, ...]
    rows: tuple[int, ...]
