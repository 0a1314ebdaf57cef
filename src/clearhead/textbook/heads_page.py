"""One head against several on the page of a trace: what the layer would be with all its columns in one head."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clearhead.core.axes import Array, join_heads
from clearhead.core.problem import Problem
from clearhead.core.rules import along
from clearhead.digits import significant
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.shapes import Steps
from clearhead.words import LANGUAGES, say

_MOST = 4096  # weights of a head that are shown and stored
_OF_WEIGHTS = ("scaled", "capped", "masked", "weights")  # steps whose cost grows with the number of heads


@np.errstate(invalid="ignore", over="ignore")
def one_head(problem: Problem, layer: Mapping[str, Array], steps: Steps) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the page says about the same layer with one head, and that head's weights and output by name.

    layer   the layer's arrays: q (batch, heads, queries, d_k) and so on; where known x, w_q, w_k, w_v, w_o, b_q, …

    Both are empty where it is not known: where the projections are not, where they do not make q (rotary positions),
    where heads share keys or have rules of their own, and where there are too many weights to show.
    """
    rules: dict[str, Any] = dict(problem.keywords())
    usual = np.allclose(rules.pop("scale", 0.0), max(1, problem.d_k) ** -0.5) and rules.keys().isdisjoint(
        along("heads")
    )
    known = {"x", "w_q", "w_k", "w_v"} <= set(layer)
    sizes = problem.queries * problem.keys
    if not (known and usual and 1 < problem.heads == problem.kv_heads and 0 < sizes <= _MOST):
        return {}, {}
    exact = {name: np.asarray(layer[name], dtype=np.float64) for name in (*"qkv", "x")}
    joined = {name: join_heads(exact[name])[:, None] for name in "qkv"}
    projected = exact["x"] @ layer["w_q"] + layer.get("b_q", 0.0)
    off = 1e-3 * float(np.abs(projected).max())
    if not np.isfinite(projected).all() or not np.allclose(projected, joined["q"][:, 0], rtol=1e-3, atol=off):
        return {}, {}
    one, several = (AttentionMatrix(sides["q"], sides["k"], **rules) for sides in (joined, exact))
    outputs = [np.asarray(x)[:, 0] for x in (one @ joined["v"], join_heads(several @ exact["v"])[:, None])]
    if "w_o" in layer:
        outputs = [output @ layer["w_o"] + layer.get("b_o", 0.0) for output in outputs]
    work = [step.multiply_adds / (problem.heads if step.name in _OF_WEIGHTS else 1) for step in steps]
    counts = {
        "parameters beside": [sum(np.size(a) for name, a in layer.items() if name[:2] in ("w_", "b_"))] * 2,
        "work beside": [round(sum(work)), sum(step.multiply_adds for step in steps)],
        "scores beside": [one[:].size, several[:].size],
    }
    costs = {key: [f"{number:,}" for number in numbers] for key, numbers in counts.items()}
    costs["entropy beside"] = [entropy_range(np.asarray(each.entropy()).mean(axis=(0, -1))) for each in (one, several)]
    costs["difference beside"] = [significant(float(np.abs(outputs[0] - outputs[1]).max())), ""]
    pairs: list[Any] = [*((joined[name], layer[name]) for name in "qkv"), (one, several)]
    shapes = [["×".join(map(str, x.shape[1:])) for x in pair] for pair in pairs]
    rows: dict[str, list[list[str]]] = {
        each: [["", "h = 1", f"h = {problem.heads}"]]
        + [[name, *pair] for name, pair in zip("QKVA", shapes, strict=True)]
        + [[say(each, key), *pair] for key, pair in costs.items()]
        for each in LANGUAGES
    }
    arrays = {"one_weights": np.asarray(one[:])[:, 0], "one_output": outputs[0]}
    return rows, {name: array.astype(np.float32) for name, array in arrays.items()}


def entropy_range(entropies: Array) -> str:
    """The entropies of the heads: one, or the lowest and the highest; 0 where there are none."""
    low, high = (significant(float(x)) for x in (entropies.min(initial=np.inf), entropies.max(initial=-np.inf)))
    return "0" if not entropies.size else low if low == high else f"{low} … {high}"
