"""Mistakes in what is done to the scores: the cap, the bias, ALiBi, the table of spans."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, Variants, forbids, hides, several_heads, square, when
from clearhead.diagnosing.mistakes.scores import scaled
from clearhead.diagnosing.recipe import Change, Inputs


def _capped(inputs: Inputs) -> bool:
    return inputs.problem.softcap is not None


def _biased(inputs: Inputs) -> bool:
    return inputs.problem.bias is not None


def _finite_bias(inputs: Inputs) -> bool:
    return _biased(inputs) and not forbids(inputs)


def _alibi(inputs: Inputs) -> bool:
    return inputs.problem.alibi_slopes is not None


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


_SLOPES = ("reversed", "all alike", "next head", "square root", "squared")
_UNEVEN_BIAS = ("a bias that differs from key to key", "随键而变的偏置")

BIASES = (
    Mistake(
        "softcap missing",
        when(_capped, {"softcap": "missing"}),
        ("the scores are not capped: c·tanh(s/c) is missing", "没有限制得分的大小：漏了 c·tanh(s/c)"),
        ("scores = softcap * tanh(scores / softcap)",) * 2,
        ("scores that are not small beside the cap", "与上限相比不算太小的得分"),
        rule="softcap",
    ),
    Mistake(
        "softcap after mask",
        when(lambda inputs: _capped(inputs) and hides(inputs), {"softcap": "after mask"}),
        (
            "the cap is applied after the mask: -∞ becomes -c, and hidden keys keep some weight",
            "先遮蔽再限制得分：-∞ 变成了 -c，被遮蔽的键仍有权重",
        ),
        ("cap the scores first, mask them then", "先限制得分，再遮蔽"),
        ("a key that is hidden, and a small cap", "有被遮蔽的键，且上限较小"),
        rule="softcap",
    ),
    Mistake(
        "bias missing",
        when(_biased, {"bias": "missing"}),
        ("the bias or float mask is not added to the scores", "没有把偏置（或浮点掩码）加到得分上"),
        ("scores = scores + bias",) * 2,
        ("a bias that differs from key to key", "随键而变的偏置"),
        rule="bias",
    ),
    Mistake(
        "bias scaled",
        when(
            lambda inputs: _biased(inputs) and scaled(inputs),
            {"bias": "scaled"},
        ),
        ("the bias is added before the scale, which shrinks it too", "缩放之前就加了偏置，偏置也被缩小了"),
        ("scores = q @ k.swapaxes(-1, -2) * scale + bias",) * 2,
        ("a bias that differs from key to key, and d_k > 1", "随键而变的偏置，且 d_k > 1"),
        rule="bias",
    ),
    Mistake(
        "ALiBi missing",
        when(_alibi, {"alibi": "missing"}),
        ("ALiBi's slopes are left out", "漏掉了 ALiBi 的斜率"),
        ("scores = scores - slopes[:, None, None] * abs(i - j)",) * 2,
        ("more than one key", "不止一个键"),
        rule="alibi_slopes",
    ),
    Mistake(
        "ALiBi added",
        when(_alibi, {"alibi": "added"}),
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
        ("a token whose label is below 0", "标签小于 0 的词元"),
        rule="spans",
    ),
    Mistake(
        "bias negated",
        when(_finite_bias, {"bias": "negated"}),
        ("the bias is subtracted, not added", "偏置是减而不是加"),
        ("scores = scores + bias",) * 2,
        _UNEVEN_BIAS,
        rule="bias",
        seldom=True,
    ),
    Mistake(
        "bias transposed",
        when(lambda inputs: _biased(inputs) and square(inputs), {"bias": "transposed"}),
        (
            "the bias or float mask is transposed: it is read as bias[key, query]",
            "偏置（或浮点掩码）被转置了：读成了 bias[键, 查询]",
        ),
        (
            "bias[i, j] is for query i and key j: bias.swapaxes(-1, -2)",
            "bias[i, j] 对应查询 i 和键 j：用 bias.swapaxes(-1, -2)",
        ),
        ("a bias that is not symmetric", "不对称的偏置"),
        rule="bias",
        seldom=True,
    ),
    Mistake(
        "bias twice",
        when(_biased, {"bias": "twice"}),
        ("the bias is added twice", "偏置加了两次"),
        ("scores = scores + bias, once", "scores = scores + bias，只加一次"),
        _UNEVEN_BIAS,
        rule="bias",
        seldom=True,
    ),
    Mistake(
        "bias of another head",
        when(lambda inputs: _biased(inputs) and several_heads(inputs), {"bias": "first head"}, {"bias": "next head"}),
        ("a head reads another head's bias: {bias}", "各个头读了别的头的偏置：{bias}"),
        (
            "bias has the axes (heads, queries, keys): scores + bias[None]",
            "bias 的轴是 (heads, queries, keys)：scores + bias[None]",
        ),
        ("a bias that differs from head to head", "随头而变的偏置"),
        rule="bias",
        seldom=True,
    ),
    Mistake(
        "ALiBi before the scale",
        when(lambda inputs: _alibi(inputs) and scaled(inputs), {"alibi": "scaled"}),
        ("ALiBi is subtracted before the scale, which shrinks it too", "缩放之前就减了 ALiBi，它也被缩小了"),
        ("scores = scores * scale - slopes[:, None, None] * abs(i - j)",) * 2,
        ("more than one key, and d_k > 1", "不止一个键，且 d_k > 1"),
        rule="alibi_slopes",
        seldom=True,
    ),
    Mistake(
        "other ALiBi slopes",
        lambda inputs: [{"alibi_slopes": kind} for kind in _SLOPES] if _alibi(inputs) else [],
        ("the slopes of ALiBi are not those of the heads: {alibi_slopes}", "ALiBi 的斜率与各个头不符：{alibi_slopes}"),
        (
            "slopes = 2 ** (-8 * arange(1, heads + 1) / heads), in the order of the heads",
            "slopes = 2 ** (-8 * arange(1, heads + 1) / heads)，按头的顺序",
        ),
        ("slopes that differ from head to head", "随头而变的斜率"),
        rule="alibi_slopes",
        seldom=True,
    ),
    Mistake(
        "ALiBi by a factor",
        lambda _: [],
        (
            "the slopes of ALiBi are all {alibi_factor} times the right ones",
            "ALiBi 的斜率都是正确值的 {alibi_factor} 倍",
        ),
        (
            "slopes = 2 ** (-8 * arange(1, heads + 1) / heads): the first head is 1, not 0",
            "slopes = 2 ** (-8 * arange(1, heads + 1) / heads)：从 1 而不是 0 数起",
        ),
        ("more than one key", "不止一个键"),
        rule="alibi_slopes",
        alone=True,
        rare=when(_alibi, {"alibi_factor": None}),
    ),
    Mistake(
        "softcap in another place",
        lambda inputs: [
            *when(lambda inputs: _capped(inputs) and scaled(inputs), {"softcap": "before scale"})(inputs),
            *when(lambda inputs: _capped(inputs) and (_biased(inputs) or _alibi(inputs)), {"softcap": "after bias"})(
                inputs
            ),
        ],
        ("the cap is applied at the wrong step: {softcap}", "限制得分的步骤不对：{softcap}"),
        ("scale the scores, cap them, then add a bias and mask", "先缩放得分，再限制，然后才加偏置、遮蔽"),
        ("scores that are not small beside the cap", "与上限相比不算太小的得分"),
        rule="softcap",
        seldom=True,
    ),
    Mistake(
        "softcap in another form",
        when(_capped, {"softcap": "not multiplied"}, {"softcap": "clipped"}),
        ("the cap is not c·tanh(s/c): {softcap}", "限制得分用的不是 c·tanh(s/c)：{softcap}"),
        ("scores = softcap * tanh(scores / softcap)",) * 2,
        ("scores that are not small beside the cap", "与上限相比不算太小的得分"),
        rule="softcap",
        seldom=True,
    ),
)
