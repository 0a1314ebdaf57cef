"""What is diagnosed, and recipes: how the textbook's attention is changed, as data.

A recipe names what is changed, by field; what it does not name is as the textbook has it. operands.py has the changes
of queries, keys and values, rule_changes.py those of the rules, workings.py those of the steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.textbook.computed import LayerArrays

Stage = Literal["scores", "scaled", "capped", "biased", "masked", "weights", "output"]
STAGES: tuple[Stage, ...] = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
Change = Mapping[str, Any]  # field -> value
RULES = EVERYWHERE  # that recipes change


class Recipe(dict[str, Any]):
    """The changes of a computation, by field; None for a field that is not changed. Never changed itself."""

    def __missing__(self, field: str) -> None:
        return None

    def key(self, fields: frozenset[str]) -> tuple[tuple[str, Any], ...]:
        """The changes of these fields, as a key."""
        return tuple((field, value) for field, value in self.items() if field in fields)

    def but(self, **changes: Any) -> "Recipe":
        """The recipe with other values; None takes a change back."""
        return Recipe({field: value for field, value in {**self, **changes}.items() if value is not None})

    @property
    def unfilled(self) -> bool:
        """Is the number in hidden places still to be solved from theirs?"""
        return self["masking"] in ("fill", "add") and self["fill"] is None

    @property
    def wide(self) -> bool:
        """Does a row need the scores of all rows?"""
        turned = self["turned"] or str(self["softmax"]).startswith("unkept")
        return bool(turned) or self["axis"] in ("queries", "matrix", "all")


RIGHT = Recipe()


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
