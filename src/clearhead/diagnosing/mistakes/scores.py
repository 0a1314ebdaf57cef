"""Mistakes in the scores and logits: the product, the scale, the cap, the bias."""

from collections.abc import Iterable

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants, hides, square, when
from clearhead.diagnosing.recipe import STAGES, Change, Inputs


def _scale(*others: "float | str") -> Variants:
    """Other scales, where they differ from the right one: a number, or the width whose square root divides."""

    def variants(inputs: Inputs) -> Iterable[Change]:
        right = inputs.problem.scale
        scales = {number for other in others for number in _numbers(inputs, other)}
        return [{"scale": x} for x in sorted(scales) if (abs(x - right) > 1e-9 * abs(right)).any()]

    return variants


def _spans(change: str) -> Variants:
    """The change, where the inputs have spans that show it."""

    def variants(inputs: Inputs) -> Iterable[Change]:
        p = inputs.problem
        if p.query_spans is None or p.key_spans is None or p.span_table is None:
            return []
        shows = {
            "missing": True,
            "transposed": p.span_table.shape[-2] == p.span_table.shape[-1],
            "wrapped": bool((p.query_spans < 0).any() or (p.key_spans < 0).any()) and p.span_table.size > 0,
        }
        return [{"spans": change}] if shows[change] else []

    return variants


def _scaled(inputs: Inputs) -> bool:
    return bool((inputs.problem.scale != 1).any())


def _numbers(inputs: Inputs, other: "float | str") -> Iterable[float]:
    p = inputs.problem
    if isinstance(other, float):
        return (other,)
    widths = {
        "d_k": [p.d_k],
        "d_v": [] if inputs.v is None else [inputs.v.shape[-1]],
        "d_model": [p.heads * p.d_k] + ([] if inputs.layer is None else [inputs.layer.x.shape[-1]]),
    }
    if other in widths:
        return [width**-0.5 for width in widths[other] if width and (other == "d_k" or width != p.d_k)]
    own = p.scale[:1] if len(np.unique(p.scale)) == 1 else p.scale[:0]  # one number for all heads
    return {"1/d_k": [1 / p.d_k], "twice": [*own**2], "inverse": [*1 / own[own != 0]]}[other]


def _steps(inputs: Inputs) -> Iterable[Change]:
    """The later steps up to the weights that change the numbers."""
    p = inputs.problem
    works = {
        "scaled": _scaled(inputs),
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
_SCALE = ("scores = q @ k.swapaxes(-1, -2) * d_k ** -0.5",) * 2

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
        "another step",
        _steps,
        ("these are the numbers of a later step, {step}", "这是后面一步 {step} 的数值"),
        (
            'ask with stage="{step}", or hand on the step that was meant',
            '改用 stage="{step}"，或给出原本要检查的那一步',
        ),
        ("rules that make the two steps differ", "使两步不同的规则"),
    ),
    Mistake(
        "softcap missing",
        when(lambda inputs: inputs.problem.softcap is not None, {"softcap": "missing"}),
        ("the scores are not capped: c·tanh(s/c) is missing", "没有限制得分的大小：漏了 c·tanh(s/c)"),
        ("scores = softcap * tanh(scores / softcap)",) * 2,
        ("scores that are not small beside the cap", "与上限相比不算太小的得分"),
        rule="softcap",
    ),
    Mistake(
        "softcap after mask",
        when(lambda inputs: inputs.problem.softcap is not None and hides(inputs), {"softcap": "after mask"}),
        (
            "the cap acts after the mask: -∞ becomes -c, and hidden keys keep some weight",
            "先遮蔽再限制得分：-∞ 变成了 -c，被遮蔽的键仍有权重",
        ),
        ("cap the scores first, mask them then", "先限制得分，再遮蔽"),
        ("a key that is hidden, and a small cap", "有被遮蔽的键，且上限较小"),
        rule="softcap",
    ),
    Mistake(
        "bias missing",
        when(lambda inputs: inputs.problem.bias is not None, {"bias": "missing"}),
        ("the bias is not added to the scores", "没有把偏置加到得分上"),
        ("scores = scores + bias",) * 2,
        ("a bias that differs from key to key", "对各个键不同的偏置"),
        rule="bias",
    ),
    Mistake(
        "bias scaled",
        when(
            lambda inputs: inputs.problem.bias is not None and _scaled(inputs),
            {"bias": "scaled"},
        ),
        ("the bias is added before the scale, which shrinks it too", "缩放之前就加了偏置，偏置也被缩小了"),
        ("scores = q @ k.swapaxes(-1, -2) * scale + bias",) * 2,
        ("a bias that differs from key to key, and d_k > 1", "对各个键不同的偏置，且 d_k > 1"),
        rule="bias",
    ),
    Mistake(
        "ALiBi missing",
        when(lambda inputs: inputs.problem.alibi_slopes is not None, {"alibi": "missing"}),
        ("ALiBi's slopes are left out", "漏掉了 ALiBi 的斜率"),
        ("scores = scores - slopes[:, None, None] * abs(i - j)",) * 2,
        ("more than one key", "不止一个键"),
        rule="alibi_slopes",
    ),
    Mistake(
        "ALiBi added",
        when(lambda inputs: inputs.problem.alibi_slopes is not None, {"alibi": "added"}),
        ("ALiBi's slopes are added, not subtracted: far keys gain", "ALiBi 的斜率是加而不是减：远处的键反而加分"),
        ("scores = scores - slopes[:, None, None] * abs(i - j)",) * 2,
        ("more than one key", "不止一个键"),
        rule="alibi_slopes",
    ),
    Mistake(
        "spans missing",
        _spans("missing"),
        ("the table of spans is not added to the scores", "没有把片段对应的数加到得分上"),
        ("scores = scores + table[query_spans][:, key_spans]",) * 2,
        ("spans whose pairs differ in the table", "表中各对片段的数不全相同"),
        rule="spans",
    ),
    Mistake(
        "spans transposed",
        _spans("transposed"),
        (
            "the table of spans is read with the key's label first: table[key, query]",
            "查表时把键的标签放在了前面：table[键, 查询]",
        ),
        ("scores = scores + table[query_spans][:, key_spans]",) * 2,
        ("a table that is not symmetric", "不对称的表"),
        rule="spans",
    ),
    Mistake(
        "spans wrapped",
        _spans("wrapped"),
        (
            "a label below 0 reads the table's last row or column, where it should add nothing",
            "小于 0 的标签读到了表的最后一行或最后一列，而它本不应加任何数",
        ),
        ("scores = scores + where(labelled, table[query_spans][:, key_spans], 0)",) * 2,
        ("a token whose label is below 0", "有标签小于 0 的词元"),
        rule="spans",
    ),
)
