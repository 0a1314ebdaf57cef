"""Mistakes in the softmax and in what its weights are multiplied by."""

from collections.abc import Iterable

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants, always, hides, several_heads, square, when
from clearhead.diagnosing.mistakes.scores import scaled
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
_SINKS = ("total = exp(scores).sum(axis=-1) + exp(sinks)[:, None]",) * 2
_ROWS = ("weights = where(seen.any(axis=-1, keepdims=True), weights, 0)",) * 2
_BLIND = ("a query that sees no key", "看不到任何键的查询")


def _as_wide(inputs: Inputs) -> bool:
    """Are keys as wide as values, so that they could be taken for them?"""
    return inputs.v is not None and inputs.k.shape[-1] == inputs.v.shape[-1]


def _sinks(inputs: Inputs) -> bool:
    return inputs.problem.sinks is not None


def _small_whole(inputs: Inputs) -> bool:
    """Several heads or batch entries, whose whole array of weights is small enough to be computed?"""
    p = inputs.problem
    return p.heads * p.batch > 1 and p.batch * p.heads * p.queries * p.keys <= 2**21


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
        ("weights = exp(scores - scores.max(axis=-1, keepdims=True));  weights /= weights.sum(axis=-1, keepdims=True)",)
        * 2,
        ("large scores: above 88 in float32, 11 in float16", "很大的得分：float32 超过 88，float16 超过 11"),
    ),
    Mistake(
        "sinks missing",
        when(_sinks, {"sinks": "missing"}),
        ("the sinks are left out of the softmax's denominator", "softmax 的分母中漏掉了 attention sink（汇点）"),
        _SINKS,
        ("sinks above -∞", "不为 -∞ 的 sinks"),
        rule="sinks",
    ),
    Mistake(
        "sinks unshifted",
        when(_sinks, {"sinks": "unshifted"}),
        (
            "exp(sinks) is added to powers from which each row's maximum was subtracted, but not from the sinks",
            "每行的指数都减去了行最大值，加进分母的 exp(sinks) 却没有减",
        ),
        ("total = exp(scores - peak).sum(axis=-1) + exp(sinks[:, None] - peak[..., 0])",) * 2,
        ("scores other than 0", "不为 0 的得分"),
        rule="sinks",
        seldom=True,
    ),
    Mistake(
        "sinks scaled",
        when(lambda inputs: _sinks(inputs) and scaled(inputs), {"sinks": "scaled"}),
        ("the sinks are multiplied by the scale, as scores are", "sinks 像得分一样乘了缩放系数"),
        _SINKS,
        ("sinks other than 0, and d_k > 1", "不为 0 的 sinks，且 d_k > 1"),
        rule="sinks",
        seldom=True,
    ),
    Mistake(
        "sinks of another head",
        when(lambda inputs: _sinks(inputs) and several_heads(inputs), {"sinks": "first head"}, {"sinks": "next head"}),
        ("a head has another head's sink: {sinks}", "各个头用了别的头的汇点：{sinks}"),
        _SINKS,
        ("sinks that differ", "各不相同的 sinks"),
        rule="sinks",
        seldom=True,
    ),
    Mistake(
        "softmax twice",
        lambda inputs: [{"softmax": "twice"}, *when(hides, {"softmax": "twice, hidden keys too"})(inputs)],
        ("the softmax is taken twice: of the scores, and of the weights again", "做了两次 softmax：先对得分，再对权重"),
        ("weights = softmax(scores, axis=-1), once", "weights = softmax(scores, axis=-1)，只做一次"),
        ("any scores", "任意得分"),
        seldom=True,
    ),
    Mistake(
        "softmax without its sum",
        always({"softmax": "no sum"}, {"softmax": "no sum, no maximum"}),
        ("the powers {softmax} are not divided by their sum", "指数 {softmax} 没有除以它们的和"),
        (
            "weights = powers / powers.sum(axis=-1, keepdims=True); in a kernel, acc / l at the end",
            "weights = powers / powers.sum(axis=-1, keepdims=True)；在内核里则是最后的 acc / l",
        ),
        ("any scores", "任意得分"),
        seldom=True,
    ),
    Mistake(
        "keepdims missing",
        when(square, {"softmax": "unkept sum"}, {"softmax": "unkept sum and maximum"}),
        (
            "{softmax} of the rows lie along the keys (keepdims is missing): the power of key j is divided by the sum "
            "of row j",
            "各行的{softmax}排到了键的方向（漏了 keepdims）：键 j 的指数除以了第 j 行的和",
        ),
        ("powers.sum(axis=-1, keepdims=True), and max alike", "powers.sum(axis=-1, keepdims=True)，max 亦然"),
        ("more than one query", "不止一个查询"),
        seldom=True,
    ),
    Mistake(
        "softmax over the batch",
        when(lambda inputs: inputs.problem.batch > 1, {"axis": "batch"}),
        (
            "the softmax runs over the batch: the weights at one place sum to 1 over all entries",
            "softmax 沿批次方向计算：同一位置的权重在各批次条目上相加为 1",
        ),
        ("weights = softmax(scores, axis=-1), not axis=0", "weights = softmax(scores, axis=-1)，而不是 axis=0"),
        ("more than one batch entry", "不止一个批次条目"),
        seldom=True,
    ),
    Mistake(
        "softmax over everything",
        when(_small_whole, {"axis": "all"}),
        (
            "the softmax runs over the whole array, batch and heads included: all weights together sum to 1",
            "softmax 对整个数组（连同批次和头）计算：全部权重之和为 1",
        ),
        _SOFTMAX,
        ("more than one head or batch entry", "不止一个头或批次条目"),
        seldom=True,
    ),
    Mistake(
        "one more in the denominator",
        always({"softmax": "one more"}, {"softmax": "one more, shifted"}),
        (
            "the powers are divided by {softmax}: a row's weights sum to less than 1",
            "指数除以了 {softmax}：每行的权重之和小于 1",
        ),
        ("weights = powers / powers.sum(axis=-1, keepdims=True)",) * 2,
        ("scores that are not large", "不太大的得分"),
        seldom=True,
    ),
    Mistake(
        "sigmoid in place of the softmax",
        always({"softmax": "sigmoid"}),
        ("each weight is the sigmoid of its score: there is no softmax", "每个权重是得分的 sigmoid：没有 softmax"),
        _SOFTMAX,
        ("any scores", "任意得分"),
        seldom=True,
    ),
    Mistake(
        "logarithm of the softmax",
        lambda inputs: [] if hides(inputs) else [{"softmax": "logarithm"}],
        ("the weights are the logarithm of the softmax (log_softmax)", "权重取成了 softmax 的对数（log_softmax）"),
        _SOFTMAX,
        ("any scores", "任意得分"),
        seldom=True,
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
        ("the weights are transposed: it is Aᵀ·V", "权重被转置了：算的是 Aᵀ·V"),
        ("out = weights @ v, with weights (…, queries, keys)", "out = weights @ v，其中 weights 为 (…, queries, keys)"),
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
