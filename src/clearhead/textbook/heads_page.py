"""One head against several on the page of a trace: what the layer would be with all its columns in one head."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.digits import significant
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.shapes import Steps
from clearhead.words import LANGUAGES, say

_MOST = 4096  # weights of a head that are shown and stored
_PER_HEAD = ("alibi_slopes", "sinks", "bias", "mask", "spans")  # rules that may differ from head to head
_OF_WEIGHTS = ("scaled", "capped", "masked", "weights")  # steps whose cost grows with the number of heads


@np.errstate(invalid="ignore", over="ignore")
def one_head(problem: Problem, given: Mapping[str, Array], steps: Steps) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the page says about the same layer with one head, and that head's weights and output by name.

    given   the layer's arrays: q (batch, heads, queries, d_k) and so on; where known x, w_q, w_k, w_v, w_o, b_q, …

    Both are empty where it is not known: where the projections are not, where they do not make q (rotary positions),
    where heads share keys or have rules of their own, and where there are too many weights to show.
    """
    rules: dict[str, Any] = dict(problem.keywords())
    usual = np.allclose(rules.pop("scale", 0.0), max(1, problem.d_k) ** -0.5) and not any(
        rule in rules for rule in _PER_HEAD
    )
    known = {"x", "w_q", "w_k", "w_v"} <= set(given)
    sizes = problem.queries * problem.keys
    if not (known and usual and 1 < problem.heads == problem.kv_heads and 0 < sizes <= _MOST):
        return {}, {}
    joined = {name: _joined(np.asarray(given[name], dtype=np.float64)) for name in "qkv"}
    projected = np.asarray(given["x"], dtype=np.float64) @ given["w_q"] + given.get("b_q", 0.0)
    if not np.isfinite(projected).all() or not np.allclose(
        projected, joined["q"][:, 0], rtol=1e-3, atol=1e-3 * float(np.abs(projected).max())
    ):
        return {}, {}
    one = AttentionMatrix(joined["q"], joined["k"], **rules)
    several = AttentionMatrix(*(np.asarray(given[name], dtype=np.float64) for name in "qk"), **rules)
    outputs = [_mixed(heads, given) for heads in (one @ joined["v"], _joined(several @ given["v"].astype(np.float64)))]
    work = [step.multiply_adds / (problem.heads if step.name in _OF_WEIGHTS else 1) for step in steps]
    cells = {
        "parameters beside": [sum(np.size(a) for name, a in given.items() if name[:2] in ("w_", "b_"))] * 2,
        "work beside": [round(sum(work)), sum(step.multiply_adds for step in steps)],
        "scores beside": [one[:].size, several[:].size],
    }
    told = {key: [f"{number:,}" for number in numbers] for key, numbers in cells.items()}
    told["entropy beside"] = [_reach(np.asarray(each.entropy()).mean(axis=(0, -1))) for each in (one, several)]
    told["difference beside"] = [significant(float(np.abs(outputs[0] - outputs[1]).max())), ""]
    shapes = [["×".join(map(str, x.shape[1:])) for x in (joined[name], given[name])] for name in "qkv"]
    shapes.append(["×".join(map(str, each.shape[1:])) for each in (one, several)])
    rows: dict[str, list[list[str]]] = {
        each: [["", "h = 1", f"h = {problem.heads}"]]
        + [[name, *pair] for name, pair in zip("QKVA", shapes, strict=True)]
        + [[say(each, key), *pair] for key, pair in told.items()]
        for each in LANGUAGES
    }
    arrays = {"one_weights": np.asarray(one[:])[:, 0], "one_output": outputs[0]}
    return rows, {name: array.astype(np.float32) for name, array in arrays.items()}


def _joined(x: Array) -> Array:
    """(batch, heads, tokens, width) as one head: (batch, 1, tokens, heads·width)."""
    batch, heads, tokens, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, 1, tokens, heads * width)


def _mixed(joined: Any, given: Mapping[str, Array]) -> Array:
    """The layer's output (batch, queries, d_model) from the heads side by side."""
    output = np.asarray(joined)[:, 0]
    return output @ given["w_o"] + given.get("b_o", 0.0) if "w_o" in given else output


def _reach(entropies: Array) -> str:
    low, high = significant(float(entropies.min())), significant(float(entropies.max()))
    return low if low == high else f"{low} … {high}"
