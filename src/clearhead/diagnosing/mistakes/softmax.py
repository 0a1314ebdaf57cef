"""Mistakes in the softmax and in what its weights are multiplied by."""

from collections.abc import Iterable

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants, always, hides, several_heads, square, when
from clearhead.diagnosing.recipe import Change, Inputs


def _overflows(inputs: Inputs) -> Iterable[Change]:
    """Where no maximum is subtracted, exp can leave the dtype's range; only NaN in theirs shows that."""
    if np.isfinite(inputs.theirs.astype(np.float64)).all():
        return []
    kinds = {
        dtype.name for dtype in (inputs.theirs.dtype, inputs.problem.dtype) if dtype.name in ("float16", "float64")
    }
    return [{"overflow": kind} for kind in sorted({*kinds, "float32"})]


def _empties(value: str) -> Variants:
    """Only where a rule can leave a row without keys."""
    return when(hides, {"empty": value})


_SOFTMAX = ("weights = softmax(scores, axis=-1)",) * 2
_ROWS = ("weights = where(seen.any(axis=-1, keepdims=True), weights, 0)",) * 2
_BLIND = ("a query that sees no key", "看不到任何键的查询")


def _as_wide(inputs: Inputs) -> bool:
    """Are keys as wide as values, so that they could be taken for them?"""
    return inputs.v is not None and inputs.k.shape[-1] == inputs.v.shape[-1]


SOFTMAX = (
    Mistake(
        "softmax over queries",
        always({"axis": "queries"}),
        (
            "the softmax runs over the queries, not over each query's keys: each key's weights sum to 1",
            "softmax 沿查询方向计算，而不是对每个查询的各个键计算：每个键的权重之和为 1",
        ),
        _SOFTMAX,
        ("scores that are not symmetric", "不对称的得分"),
    ),
    Mistake(
        "softmax over the whole matrix",
        always({"axis": "matrix"}),
        (
            "the softmax runs over the whole matrix, not over each query's keys: all weights together sum to 1",
            "softmax 对整个矩阵计算，而不是对每个查询的各个键计算：全部权重之和为 1",
        ),
        _SOFTMAX,
        ("more than one query", "不止一个查询"),
    ),
    Mistake(
        "softmax over heads",
        when(several_heads, {"axis": "heads"}),
        (
            "the softmax runs over the heads: a query's weights for one key sum to 1 over all heads",
            "softmax 沿头的方向计算：同一查询对同一个键的权重，在各个头上相加为 1",
        ),
        ("weights = softmax(scores, axis=-1), not axis=1", "weights = softmax(scores, axis=-1)，而不是 axis=1"),
        ("more than one head", "不止一个头"),
    ),
    Mistake(
        "no softmax",
        lambda inputs: [{"axis": "none"}, *when(hides, {"axis": "none, 0 where hidden"})(inputs)],
        ("there is no softmax: the scores themselves are the weights", "没有 softmax：直接把得分当作权重"),
        _SOFTMAX,
        ("any scores", "任意得分"),
    ),
    Mistake(
        "softmax without its maximum",
        _overflows,
        (
            "the softmax does not subtract each query's largest score, and exp leaves the range of {overflow}",
            "softmax 没有减去每个查询的最大得分，exp 超出了 {overflow} 的范围",
        ),
        ("weights = exp(scores - scores.max(axis=-1, keepdims=True))",) * 2,
        ("large scores: above 88 in float32, 11 in float16", "很大的得分：float32 超过 88，float16 超过 11"),
    ),
    Mistake(
        "sinks missing",
        when(lambda inputs: inputs.problem.sinks is not None, {"sinks": "missing"}),
        ("the sinks are left out of the softmax's denominator", "softmax 的分母中漏掉了汇点"),
        ("total = exp(scores).sum(axis=-1) + exp(sinks)",) * 2,
        ("sinks above -∞", "不为 -∞ 的汇点"),
        rule="sinks",
    ),
    Mistake(
        "empty rows are NaN",
        _empties("nan"),
        ("queries that see no key give NaN, not 0", "看不到任何键的查询得到 NaN，而不是 0"),
        _ROWS,
        _BLIND,
    ),
    Mistake(
        "empty rows are averaged",
        _empties("mean"),
        (
            "queries that see no key give the mean of all values, not 0 (a mask of finfo.min does that)",
            "看不到任何键的查询得到所有值的平均，而不是 0（用 finfo.min 作掩码会这样）",
        ),
        _ROWS,
        _BLIND,
    ),
    Mistake(
        "weights transposed",
        when(square, {"turned": True}),
        ("it is Aᵀ·V: the weights are transposed", "算的是 Aᵀ·V：权重被转置了"),
        ("out = weights @ v",) * 2,
        ("weights that are not symmetric", "不对称的权重"),
    ),
    Mistake(
        "keys instead of values",
        when(_as_wide, {"values": "k"}),
        ("it is A·K: keys in place of values", "算的是 A·K：把键当成了值"),
        ("out = weights @ v",) * 2,
        ("values that differ from the keys", "与键不同的值"),
    ),
    Mistake(
        "queries instead of values",
        when(lambda inputs: square(inputs) and _as_wide(inputs), {"values": "q"}),
        ("it is A·Q: queries in place of values", "算的是 A·Q：把查询当成了值"),
        ("out = weights @ v",) * 2,
        ("values that differ from the queries", "与查询不同的值"),
    ),
)
