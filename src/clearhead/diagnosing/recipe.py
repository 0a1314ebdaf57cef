"""What is diagnosed, and recipes: how the textbook's attention is changed, as data.

A recipe names what is changed, by field; what it does not name is as the textbook has it. operands.py has the changes
of queries, keys and values, rule_changes.py those of the rules, workings.py those of the steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, bfloat16
from clearhead.core.axes import KEY, QUERY, VALUE, WEIGHTS, Array, heads_first, named
from clearhead.core.call import describe, describe_whole
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_flag, read_number
from clearhead.core.rules import EVERYWHERE, Rules, check_names
from clearhead.errors import DtypeError, RuleError, ShapeError, expected, shown
from clearhead.textbook.case_file import INPUTS, LAYER, WEIGHTS_AND_V, check_alone, inputs_of
from clearhead.textbook.computed import LayerArrays, read_layer, read_weights
from clearhead.textbook.shapes import Convention, check_convention, turned

Stage = Literal["q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "heads", "concat", "output"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_OF_LAYERS = {"q": QUERY, "k": KEY, "v": VALUE, "heads": (*QUERY[:3], "d_v"), "concat": ("batch", "queries", "d_out")}
Change = Mapping[str, Any]  # field -> value
RULES = EVERYWHERE  # that recipes change
Rotary = tuple[float, bool]  # the base of the angles position·base^(-2i/d); are pairs (2i, 2i + 1)? else (i, i + d/2)
Rows = tuple[int, ...]  # the queries that are compared


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
    weights: Array | None = None  # (batch, heads, queries, keys), where they are given; then q and k are zeros

    @property
    def merged(self) -> bool:
        """Has theirs the layer's heads joined?"""
        return self.layer is not None and self.stage in ("concat", "output")

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


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


# ── what is diagnosed, read from a call or a file's values ──


def plain_inputs(q: Any, k: Any, v: Any, theirs: Any, stage: Stage, rotary: Any, rules: Rules) -> Diagnosed:
    """The inputs of `diagnose`, checked; `rotary` is a base or None, and whether pairs are interleaved."""
    turning, described = _rotary_of(*rotary), describe_whole(q, k, v, rules)
    assert described.v is not None
    stages = {"output": (*described.problem.prefix, described.problem.queries, described.d_v)}
    result = heads_first(read_theirs(theirs, stages, described.problem, stage))
    return Diagnosed(described.problem, described.q, described.k, described.v, result, stage, None, turning)


def weights_inputs(weights: Any, v: Any, theirs: Any, convention: Convention, stage: Stage) -> Diagnosed:
    """The inputs of `diagnose_weights`, checked."""
    described, weights = read_weights(weights, v, convention)
    values, problem = described.v, described.problem
    assert values is not None
    if stage != "output":
        raise RuleError(f"stage is {shown(stage)}: where the weights are given, only the output can be wrong.")
    stages = {"output": (*problem.prefix, problem.queries, values.shape[-1])}
    result = heads_first(read_theirs(turned(as_array(theirs, "theirs")[0], convention), stages, problem, stage))
    return Diagnosed(problem, described.q, described.k, values, result, stage, weights=weights)


def layer_inputs(
    arrays: dict[str, Any],
    theirs: Any,
    num_heads: int,
    convention: Convention,
    stage: Stage,
    rotary: Any,
    rules: Rules,
) -> Diagnosed:
    """The inputs of a layer's diagnosis, checked; arguments as in `diagnose_layer`, `rotary` as in `plain_inputs`."""
    turning = _rotary_of(*rotary)
    check_names(rules)
    layer, sizes = read_layer(arrays, num_heads, convention)
    kv_heads = sizes.kv_heads or 1
    shapes = (num_heads, sizes.queries, sizes.d_k), (kv_heads, sizes.keys, sizes.d_k), (kv_heads, sizes.keys, sizes.d_v)
    zero = np.zeros((), layer.x.dtype)  # only shapes and dtype are used: `workings` computes each recipe's projections
    q, k, v = (np.broadcast_to(zero, (*sizes.lead, *shape)) for shape in shapes)
    described = describe(q, k, v, rules)
    assert described.v is not None
    joined = *sizes.lead, sizes.queries, num_heads * sizes.d_v
    stages = {name: (*sizes.lead, *shape) for name, shape in zip("qkv", shapes, strict=True)}
    stages |= {"heads": (*sizes.lead, num_heads, sizes.queries, sizes.d_v), "concat": joined}
    stages["output"] = joined if layer.out is None else (*joined[:-1], layer.out[1])
    theirs = read_theirs(turned(as_array(theirs, "theirs")[0], convention), stages, described.problem, stage)
    theirs = theirs.reshape(described.problem.batch, -1, *theirs.shape[-2:])
    flat = [array.reshape(prod(sizes.lead), *array.shape[-2:]) for array in (layer.x, layer.context)]
    layer = replace(layer, x=flat[0], context=flat[1])
    return Diagnosed(described.problem, described.q, described.k, described.v, theirs, stage, layer, turning)


def _rotary_of(base: Any, interleaved: Any) -> Rotary | None:
    """Rotary positions; None without a base."""
    if base is None:
        return None
    number = read_number("rotary", base, 0.0)
    if number <= 0:
        raise RuleError(expected("rotary", base, "the base of the angles, a positive number"), "rotary=10000.0")
    return number, read_flag("rotary_interleaved", interleaved)


def file_inputs(place: Path, values: dict[str, Any], theirs: Array, stage: Any) -> Diagnosed:
    """The inputs among a file's values, checked; inputs and rules by name."""
    values = dict(values)
    needed = inputs_of(place, values)
    stage = str(stage.item()) if isinstance(stage, np.ndarray) and stage.ndim == 0 else stage
    rotation = values.pop("rotary", None), values.pop("rotary_interleaved", False)
    convention = values.pop("convention", "rows")
    if needed == WEIGHTS_AND_V:
        weights, v = values.pop("weights"), values.pop("v")
        check_alone(place, [*values, *(["rotary"] if rotation[0] is not None else [])])
        return weights_inputs(weights, v, theirs, convention, stage)
    if needed == INPUTS:
        q, k, v = (values.pop(name) for name in INPUTS)
        check_convention(convention)
        q, k, v, theirs = (turned(x, convention) for x in (q, k, v, theirs))
        return plain_inputs(q, k, v, theirs, stage, rotation, cast("Rules", values))
    arrays, heads = {name: values.pop(name, None) for name in LAYER}, values.pop("num_heads", 1)
    return layer_inputs(arrays, theirs, heads, convention, stage, rotation, cast("Rules", values))


def read_theirs(theirs: Any, stages: dict[str, tuple[int, ...]], problem: Problem, stage: Stage) -> Array:
    """Their numbers, where they have the stage's shape; else a ShapeError that says how to give them that shape.

    stages   the shapes of all stages but those of the weights' shape
    """
    known = [name for name in STAGES if name in stages or name not in _OF_LAYERS]
    if not isinstance(stage, str) or stage not in known:
        raise RuleError(f"stage is {shown(stage)}: expected one of {', '.join(known)}.")
    array: Array = as_array(theirs, "theirs")[0]
    if array.dtype not in FLOATS:
        raise DtypeError(f"theirs is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    want = stages.get(stage, problem.shape)
    if array.shape == want:
        return array
    if stage == "weights" and problem.prefix and array.shape == (*want[:-3], *want[-2:]):  # perhaps a mean over heads
        return np.broadcast_to(array[..., None, :, :], want)
    axes = _OF_LAYERS | {"output": _OF_LAYERS["concat" if "concat" in stages else "heads"]}
    hint = _hint(array.shape, want, stages, problem)
    raise ShapeError(
        f"theirs has shape {array.shape}: at stage {stage!r} expected {named(want, axes.get(stage, WEIGHTS))}.", hint
    )


def _hint(shape: tuple[int, ...], want: tuple[int, ...], stages: dict[str, tuple[int, ...]], problem: Problem) -> str:
    for stage, other in (("output", stages["output"]), ("weights", problem.shape)):
        if shape == other:
            return f'it has the shape of the {stage}: stage="{stage}".'
    if shape == (*want[:-2], want[-1], want[-2]):
        return "its last two axes are swapped: theirs.swapaxes(-1, -2)."
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3], want[-1]):
        return "it is (batch, queries, heads, …): theirs.swapaxes(-2, -3)."
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3] * want[-1]):
        return f"its heads are joined: theirs.reshape(*theirs.shape[:-1], {want[-3]}, {want[-1]}).swapaxes(-2, -3)."
    return "it has as many numbers: a reshape may do, if their order is right." if prod(shape) == prod(want) else ""
