"""Mistakes in the scores and logits: the product, the scale, the cap, the bias."""

from collections.abc import Iterable

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants, always, hides, square, when
from clearhead.diagnosing.recipe import STAGES, Change, Inputs


def _scale(*others: "float | str") -> Variants:
    """Other scales, where they differ from the right one: a number, or the width whose square root divides."""

    def variants(inputs: Inputs) -> Iterable[Change]:
        right = inputs.problem.scale
        scales = {number for other in others for number in _numbers(inputs, other)}
        return [{"scale": x} for x in sorted(scales) if (abs(x - right) > 1e-9 * abs(right)).any()]

    return variants


def scaled(inputs: Inputs) -> bool:
    """Does the scale change the scores?"""
    return bool((inputs.problem.scale != 1).any())


def _numbers(inputs: Inputs, other: "float | str") -> Iterable[float]:
    p = inputs.problem
    if isinstance(other, float):
        return (other,)
    widths = {
        "d_k": [p.d_k],
        "d_v": [] if inputs.v is None else [inputs.v.shape[-1]],
        "d_model": [p.heads * p.d_k] + ([] if inputs.layer is None else [inputs.layer.x.shape[-1]]),
        "length": sorted({p.queries, p.keys} - {1}),
        "heads": sorted({p.heads, p.kv_heads} - {1}),
    }
    if other in widths:
        return [width**-0.5 for width in widths[other] if width and (other == "d_k" or width != p.d_k)]
    own = p.scale[:1] if len(np.unique(p.scale)) == 1 else p.scale[:0]  # one number for all heads
    return {
        "1/d_k": [1 / p.d_k],
        "1/2d_k": [0.5 / p.d_k],
        "twice": [*own**2],
        "inverse": [*1 / own[own != 0]],
        "log2 e": [*own * np.log2(np.e)],
    }[other]


def _steps(inputs: Inputs) -> Iterable[Change]:
    """The later steps up to the weights that change the numbers."""
    p = inputs.problem
    works = {
        "scaled": scaled(inputs),
        "capped": p.softcap is not None,
        "biased": any(x is not None for x in (p.bias, p.alibi_slopes, p.span_table)),
        "masked": hides(inputs),
        "weights": True,
    }
    if inputs.stage not in STAGES[:5]:
        return []
    later = STAGES[STAGES.index(inputs.stage) + 1 : 6]  # an earlier step means a missing rule, which has its own entry
    return [{"step": step} for step in later if works[step]]


_SCORES = ("scores = q @ k.swapaxes(-1, -2)",) * 2
_SCALE = (
    "scores = q @ k.swapaxes(-1, -2) * scale, where scale = d_k ** -0.5 unless another one is asked for",
    "scores = q @ k.swapaxes(-1, -2) * scale，未另行指定时 scale = d_k ** -0.5",
)

SCORES = (
    Mistake(
        "transpose missing",
        when(lambda inputs: inputs.problem.keys == inputs.problem.d_k, {"product": "q·k"}),
        ("it is Q·K, not Q·Kᵀ: K is not transposed", "算的是 Q·K 而不是 Q·Kᵀ：K 没有转置"),
        _SCORES,
        ("a K that is not symmetric", "不对称的 K"),
    ),
    Mistake(
        "q and k swapped",
        when(square, {"product": "k·qᵀ"}),
        ("it is K·Qᵀ: queries and keys are swapped", "算的是 K·Qᵀ：查询与键弄反了"),
        _SCORES,
        ("queries that differ from the keys", "与键不同的查询"),
    ),
    Mistake(
        "no scale",
        _scale(1.0),
        ("the scores are not scaled: the division by √d_k is missing", "得分没有缩放：没有除以 √d_k"),
        _SCALE,
        ("d_k > 1", "d_k > 1"),
    ),
    Mistake(
        "scale 1/d_k",
        _scale("1/d_k"),
        ("the scores are divided by d_k: the square root is missing", "得分除以了 d_k：漏了平方根"),
        _SCALE,
        ("d_k > 1 and a scale of your own, as scale=0.1", "d_k > 1，并自行给定缩放系数，如 scale=0.1"),
    ),
    Mistake(
        "scale twice",
        _scale("twice"),
        (
            "the scale is applied twice: to the queries or keys, and to the scores again",
            "缩放了两次：先乘在查询或键上，又乘在得分上",
        ),
        ("scale either q or the scores, not both", "只缩放 q 或只缩放得分，不要两次"),
        ("d_k > 1 and a scale of your own, as scale=0.1", "d_k > 1，并自行给定缩放系数，如 scale=0.1"),
    ),
    Mistake(
        "scale of d_model",
        _scale("d_model"),
        (
            "the scores are divided by √d_model, the width of all heads, not by √d_k, the width of one",
            "得分除以了所有头的总宽度 √d_model，而不是单个头的宽度 √d_k",
        ),
        _SCALE,
        ("more than one head", "不止一个头"),
    ),
    Mistake(
        "scale of d_v",
        _scale("d_v"),
        ("the scores are divided by √d_v, not by √d_k", "得分除以了 √d_v，而不是 √d_k"),
        _SCALE,
        ("d_v ≠ d_k", "d_v ≠ d_k"),
    ),
    Mistake(
        "scale inverted",
        _scale("inverse"),
        ("the scores are multiplied by √d_k where they should be divided", "得分乘以了 √d_k，而应当是除以"),
        _SCALE,
        ("d_k > 1", "d_k > 1"),
    ),
    Mistake(
        "scale ignored",
        _scale("d_k"),
        (
            "the scale that was asked for is ignored: it is 1/√d_k, the default",
            "忽略了给定的缩放系数：用的是默认的 1/√d_k",
        ),
        ("pass scale on to where the scores are scaled", "把 scale 传到缩放得分的地方"),
        ("a scale other than 1/√d_k", "不等于 1/√d_k 的缩放系数"),
        rule="scale",
    ),
    Mistake(
        "scale of the length",
        _scale("length"),
        (
            "the scores are divided by the square root of the number of tokens, not of d_k",
            "得分除以了词元数的平方根，而不是 √d_k",
        ),
        _SCALE,
        ("a number of tokens other than d_k", "不等于 d_k 的词元数"),
        seldom=True,
    ),
    Mistake(
        "scale of the heads",
        _scale("heads"),
        ("the scores are divided by √heads, not by √d_k", "得分除以了头数的平方根，而不是 √d_k"),
        _SCALE,
        ("a number of heads other than d_k", "不等于 d_k 的头数"),
        seldom=True,
    ),
    Mistake(
        "scale (d_k ** -1) / 2",
        _scale("1/2d_k"),
        (
            "the scores are divided by 2·d_k: d_k ** -1/2 is (d_k ** -1) / 2, not d_k ** -0.5",
            "得分除以了 2·d_k：d_k ** -1/2 等于 (d_k ** -1) / 2，而不是 d_k ** -0.5",
        ),
        _SCALE,
        ("d_k other than 4", "d_k 不等于 4"),
        seldom=True,
    ),
    Mistake(
        "exp2 without log2 e",
        always({"powers": "2"}),
        (
            "the softmax uses powers of 2 (exp2), and the logits were not multiplied by log2 e first",
            "softmax 用了 2 的幂（exp2），而 logits 没有先乘 log2 e",
        ),
        (
            "weights = exp2((scores - scores.max(-1, keepdims=True)) * 1.4426950408889634), divided by its sum",
            "weights = exp2((scores - scores.max(-1, keepdims=True)) * 1.4426950408889634)，再除以它们的和",
        ),
        ("any scores", "任意得分"),
        seldom=True,
    ),
    Mistake(
        "log2 e with exp",
        _scale("log2 e"),
        (
            "the scale includes the factor log2 e, which a softmax by exp2 needs, but this softmax uses exp",
            "缩放系数里带着 exp2 版 softmax 的因子 log2 e，而 softmax 用的却是 exp",
        ),
        (
            "exp2(scale * log2_e * scores) or exp(scale * scores), not a mixture",
            "用 exp2(scale * log2_e * scores) 或 exp(scale * scores)，不要混用",
        ),
        ("any scores", "任意得分"),
        seldom=True,
    ),
    Mistake(
        "scale after the softmax",
        when(scaled, {"scaling": "weights"}),
        (
            "the scale multiplies the weights, after the softmax, not the scores before it",
            "缩放系数乘在了 softmax 之后的权重上，而不是之前的得分上",
        ),
        (
            "weights = softmax(scores * scale), not softmax(scores) * scale",
            "用 weights = softmax(scores * scale)，而不是 softmax(scores) * scale",
        ),
        ("d_k > 1", "d_k > 1"),
        seldom=True,
    ),
    Mistake(
        "another scale",
        lambda _: [],
        (
            "the scores are scaled by another number: {scale_factor} times the right scale",
            "得分乘以了另一个缩放系数：是正确系数的 {scale_factor} 倍",
        ),
        _SCALE,
        ("scores that differ from each other", "各不相同的得分"),
        alone=True,
        rare=when(lambda inputs: scaled(inputs) or bool(inputs.problem.scale.all()), {"scale_factor": None}),
    ),
    Mistake(
        "cosine in place of the product",
        always({"product": "cosine"}, {"product": "cosine", "scale": 1.0}),
        (
            "the scores are cosines: queries and keys are divided by their lengths",
            "得分是余弦：查询和键都除以了各自的长度",
        ),
        _SCORES,
        ("queries and keys whose length is not 1", "长度不为 1 的查询和键"),
        seldom=True,
    ),
    Mistake(
        "another step",
        _steps,
        ("these are the numbers of a later step, {step}", "这是后面一步 {step} 的数值"),
        (
            'ask with stage="{step}", or hand on the step that was meant',
            '改用 stage="{step}"，或给出原本要检查的那一步',
        ),
        ("rules that make the two steps differ", "使两步不同的规则"),
    ),
)
