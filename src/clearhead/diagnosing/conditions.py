"""The conditions under which a mistake can be made, by the names that mistakes.toml uses."""

from collections.abc import Callable
from math import prod

import numpy as np

from clearhead.core.arrays import unrepeated
from clearhead.core.problem import Problem
from clearhead.diagnosing.recipe import Diagnosed
from clearhead.diagnosing.recipe_visibility import masks


def holds(condition: str, inputs: Diagnosed) -> bool:
    """Does the condition hold? It is a key of the tables below, or a rule that is in use; "not …" denies it."""
    if condition.startswith("not "):
        return not holds(condition[4:], inputs)
    if condition in OF_INPUTS:
        return OF_INPUTS[condition](inputs)
    return OF_PROBLEM[condition](inputs.problem) if condition in OF_PROBLEM else inputs.problem.uses(condition)


def with_context(inputs: Diagnosed) -> bool:
    """Are a layer's keys of other tokens than its queries?"""
    layer = inputs.layer
    return layer is not None and not (
        layer.x.shape == layer.context.shape and np.array_equal(layer.x, layer.context, equal_nan=True)
    )


def hides(inputs: Diagnosed) -> bool:
    """Does a rule hide keys from queries?"""
    p = inputs.problem
    if p.span_table is not None and np.isneginf(p.span_table).any():
        return True
    return any(map(p.uses, ("causal", "window", "mask", "kv_lengths", "query_segments"))) or _forbids(inputs)


def _forbids(inputs: Diagnosed) -> bool:
    """Does the bias hide keys, as a float mask of 0 and -inf does?"""
    bias = inputs.problem.bias
    return bias is not None and bool(np.isneginf(unrepeated(bias)).any())


def _alike(names: str, inputs: Diagnosed) -> bool:
    """Have a layer's matrices, or q, k and v, the same shape, so that one can be taken for the other?"""
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v} if inputs.layer is None else inputs.layer.w
    return inputs.weights is None and len({arrays[name].shape for name in names}) == 1


def _as_wide(inputs: Diagnosed) -> bool:
    """Is the output as wide as what enters?"""
    if inputs.layer is not None:
        return inputs.merged and inputs.theirs.shape[-1] == inputs.layer.x.shape[-1]
    return inputs.v.shape[-1] == inputs.problem.d_k


def _square_output(inputs: Diagnosed) -> bool:
    """Is W^O square, so that leaving it out goes unnoticed?"""
    return inputs.layer is not None and "o" in inputs.layer.w and len(set(inputs.layer.w["o"].shape)) == 1


def _labelled_below_zero(p: Problem) -> bool:
    labels = [x for x in (p.query_spans, p.key_spans) if x is not None]
    return p.span_table is not None and p.span_table.size > 0 and any(bool((x < 0).any()) for x in labels)


OF_PROBLEM: dict[str, Callable[[Problem], bool]] = {
    # sizes
    "square": lambda p: p.queries == p.keys,
    "several heads": lambda p: p.heads > 1,
    "several entries": lambda p: p.batch > 1,
    "several matrices": lambda p: p.heads * p.batch > 1,
    "few weights": lambda p: prod(p.shape) <= 2**21,
    "d_k of 4 or more": lambda p: p.d_k >= 4,
    "keys as many as d_k": lambda p: p.keys == p.d_k,
    # scores
    "scaled": lambda p: bool((p.scale != 1).any()),
    "bias or ALiBi": lambda p: p.uses("bias") or p.uses("alibi_slopes"),
    "square table": lambda p: (table := p.span_table) is not None and table.shape[-2] == table.shape[-1],
    "labels below 0": _labelled_below_zero,
    # visibility
    "several masks": lambda p: len(masks(p)) > 1,
    "positions": lambda p: p.uses("causal") or p.uses("window"),
    "offset": lambda p: bool(p.query_offset.any()),
    "first corner": lambda p: not p.query_offset.any(),
    "last corner": lambda p: bool((p.query_offset == p.keys - p.queries).all()),
    "cache": lambda p: p.keys > p.queries and (p.queries == 1 or (p.causal and OF_PROBLEM["last corner"](p))),
    "later keys in the window": lambda p: p.window[1] is None or p.window[1] > 0,
    "left side": lambda p: p.window[0] is not None,
    "left side above 0": lambda p: bool(p.window[0]),
    "right side": lambda p: p.window[1] is not None and not (p.causal and p.window[1] == 0),
    "right side above 0": lambda p: bool(p.window[1]),
    "both sides above 0": lambda p: bool(p.window[0] and p.window[1]),
    "other right side": lambda p: p.causal or p.window[1] != p.window[0],
    "open to the right": lambda p: p.window[1] != 0,
    "mask per entry": lambda p: (mask := p.mask) is not None and mask.strides[0] != 0 and mask.strides[1] == 0,
    "lengths differ": lambda p: (lengths := p.kv_lengths) is not None and bool((lengths != lengths[0]).any()),
}
OF_INPUTS: dict[str, Callable[[Diagnosed], bool]] = {
    "hidden keys": hides,
    "finite bias": lambda inputs: not _forbids(inputs),
    "groups": lambda inputs: inputs.k.shape[1] not in (1, inputs.problem.heads),
    "no groups": lambda inputs: inputs.k.shape[1] == inputs.problem.heads,
    "v as wide as k": lambda inputs: inputs.v.shape[-1] == inputs.k.shape[-1],
    "k shaped as v": lambda inputs: _alike("kv", inputs),
    "q, k, v shaped alike": lambda inputs: _alike("qkv", inputs),
    "output as wide as input": _as_wide,
    "NaN in theirs": lambda inputs: bool(np.isnan(inputs.theirs.astype(np.float64)).any()),
    "rotary": lambda inputs: inputs.rotary is not None,
    "layer": lambda inputs: inputs.layer is not None,
    "context": with_context,
    "joined": lambda inputs: inputs.merged,
    "square W^O": _square_output,
    "biases": lambda inputs: inputs.layer is not None and bool(inputs.layer.b),
}
