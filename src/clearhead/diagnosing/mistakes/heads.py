"""Mistakes in projections and heads."""

from collections.abc import Callable, Iterable
from itertools import combinations

from clearhead.diagnosing.mistakes.base import Mistake, Variants, several_heads, when
from clearhead.diagnosing.recipe import Change, Inputs


def _some(field: str, value: str, named: Callable[[Inputs], list[str]], *, rare: bool = False) -> Variants:
    """A change for each name alone, for q, k and v, and for all together; or the rare ones, for the other subsets."""

    def variants(inputs: Inputs) -> Iterable[Change]:
        names = named(inputs)
        projections = tuple(name for name in names if name != "o")
        for many in range(1, len(names) + 1):
            for some in combinations(names, many):
                if (many in (1, len(names)) or some == projections) != rare:
                    yield {f"{field}_{name}": value for name in some}

    return variants


def _square_w(inputs: Inputs) -> list[str]:
    w = {} if inputs.layer is None else inputs.layer.w
    return [name for name, matrix in w.items() if matrix.shape[0] == matrix.shape[1]]


def _with_b(inputs: Inputs) -> list[str]:
    return [] if inputs.layer is None else list(inputs.layer.b)


def _keeps_width(inputs: Inputs) -> bool:
    """Is W^O square, so that leaving it out goes unnoticed?"""
    return inputs.layer is not None and "o" in inputs.layer.w and len(set(inputs.layer.w["o"].shape)) == 1


def _per_value(inputs: Inputs) -> bool:
    return _keeps_width(inputs) and inputs.k.shape[1] == inputs.problem.heads


def _joins(inputs: Inputs) -> bool:
    return inputs.merged and several_heads(inputs)


def _grouped(inputs: Inputs) -> bool:
    return inputs.k.shape[1] not in (1, inputs.problem.heads)


def _unsplit(inputs: Inputs) -> Iterable[Change]:
    p = inputs.problem
    if not several_heads(inputs) or inputs.k.shape[1] != p.heads:
        return []
    whole: Change = {"split": "one", "product": "q·kᵀ"}  # no other product fits the width
    return [whole, {**whole, "scale": (p.heads * p.d_k) ** -0.5}]


_SPLIT = ("q = (x @ w_q).reshape(batch, n, heads, d_k).swapaxes(1, 2), and k and v alike",) * 2
_SPLIT_ZH = (_SPLIT[0], "q = (x @ w_q).reshape(batch, n, heads, d_k).swapaxes(1, 2)，k 和 v 亦然")
_MERGE = ("out = heads.swapaxes(1, 2).reshape(batch, n, heads * d_v)",) * 2

HEADS = (
    Mistake(
        "W transposed",
        _some("w", "transposed", _square_w),
        ("a weight matrix is used as its transpose: W of {letters}", "误用了权重矩阵的转置：{letters} 的 W"),
        (
            "x @ w, not x @ w.T (PyTorch's nn.Linear stores its weight as (d_out, d_in): transpose it once)",
            "用 x @ w 而不是 x @ w.T（PyTorch 的 nn.Linear 按 (d_out, d_in) 存放权重：转置一次即可）",
        ),
        ("a matrix that is not symmetric", "不对称的矩阵"),
        rare=_some("w", "transposed", _square_w, rare=True),
    ),
    Mistake(
        "projection bias left out",
        _some("b", "missing", _with_b),
        ("a projection's bias is left out: b of {letters}", "漏加了投影的偏置：{letters} 的 b"),
        ("q = x @ w_q + b_q, and k, v and the output alike", "q = x @ w_q + b_q，k、v 和输出亦然"),
        ("biases other than 0", "不为 0 的偏置"),
        rule="b_q, b_k, b_v, b_o",
        rare=_some("b", "missing", _with_b, rare=True),
    ),
    Mistake(
        "output projection left out",
        when(_keeps_width, {"w_o": "missing"}),
        (
            "the output projection W^O is left out: these are the heads side by side",
            "漏掉了输出投影 W^O：这只是各个头的拼接",
        ),
        ("out = concat(heads) @ w_o + b_o",) * 2,
        ("a W^O other than the identity", "不是单位矩阵的 W^O"),
    ),
    Mistake(
        "output projection before joining",
        lambda inputs: [
            *when(_keeps_width, {"w_o": "per head"})(inputs),
            *when(_per_value, {"w_o": "on values"})(inputs),
        ],
        (
            "W^O is applied before the heads are joined, so that heads do not mix as they should ({w_o})",
            "拼接各个头之前就乘了 W^O，各个头没有正确混合（{w_o}）",
        ),
        ("out = concat(heads) @ w_o: join first, project then", "out = concat(heads) @ w_o：先拼接，再投影"),
        ("more than one head", "不止一个头"),
    ),
    Mistake(
        "heads split without the transpose",
        when(several_heads, {"split": "flat"}),
        (
            "the heads are split by a reshape to (heads, n, d_k) without the transpose: a head holds whole tokens, "
            "not a slice of each",
            "拆分多头时直接 reshape 成 (heads, n, d_k) 而没有转置：每个头拿到的是几个完整的词元，而不是每个词元的一段",
        ),
        _SPLIT_ZH,
        ("more than one head and more than one token", "不止一个头且不止一个词元"),
    ),
    Mistake(
        "heads interleaved",
        when(several_heads, {"split": "interleaved"}),
        (
            "the heads are taken interleaved: head h reads columns h, h + H, h + 2H, …, not a run of d_k",
            "各个头交错取列：头 h 取的是第 h、h + H、h + 2H、…列，而不是连续的 d_k 列",
        ),
        _SPLIT_ZH,
        ("more than one head and d_k > 1", "不止一个头且 d_k > 1"),
    ),
    Mistake(
        "heads merged without the transpose",
        when(_joins, {"merge": "flat"}),
        (
            "the heads are joined by a reshape to (n, heads·d_v) without the transpose: tokens are mixed up",
            "合并多头时直接 reshape 成 (n, heads·d_v) 而没有转置：不同的词元混在了一起",
        ),
        _MERGE,
        ("more than one head and more than one token", "不止一个头且不止一个词元"),
    ),
    Mistake(
        "heads merged interleaved",
        when(_joins, {"merge": "interleaved"}),
        (
            "the heads are joined interleaved: column 0 of every head, then column 1 of every head, …",
            "各个头交错合并：先是各个头的第 0 列，再是各个头的第 1 列，依此类推",
        ),
        _MERGE,
        ("more than one head and d_v > 1", "不止一个头且 d_v > 1"),
    ),
    Mistake(
        "grouped keys tiled",
        when(_grouped, {"groups": "tile"}),
        (
            "grouped keys are tiled, not repeated: query head h reads key head h % kv_heads, not h // group",
            "分组的键被整体平铺，而没有逐个重复：查询头 h 用的是键头 h % kv_heads，而不是 h // group",
        ),
        ("k = np.repeat(k, group, axis=1), and v alike", "k = np.repeat(k, group, axis=1)，v 亦然"),
        ("more than one key head, and more query heads", "不止一个键头，且查询头更多"),
    ),
    Mistake(
        "heads never split",
        _unsplit,
        (
            "the heads are never split: every head has the scores of the whole width of queries and keys",
            "根本没有拆分多头：每个头的得分都用了查询和键的整个宽度",
        ),
        _SPLIT_ZH,
        ("more than one head", "不止一个头"),
        seldom=True,
    ),
    Mistake(
        "one head for all",
        when(several_heads, {"heads": "first"}),
        ("every head gives the result of head 0", "每个头给出的都是头 0 的结果"),
        ("loop over all heads: out[:, h], not out[:, 0]", "遍历所有的头：out[:, h]，而不是 out[:, 0]"),
        ("heads that differ", "各不相同的头"),
        seldom=True,
    ),
    Mistake(
        "mean of the heads",
        when(several_heads, {"heads": "mean"}),
        (
            "the heads are averaged, and each has the mean (as average_attn_weights=True does with weights)",
            "对各个头取了平均，每个头都是平均值（average_attn_weights=True 对权重就是这样）",
        ),
        ("keep the axis of heads: average_attn_weights=False", "保留头这一维：average_attn_weights=False"),
        ("heads that differ", "各不相同的头"),
        seldom=True,
    ),
    Mistake(
        "first key group only",
        when(_grouped, {"groups": "first"}),
        (
            "all query heads read key head 0: the other key heads are never used",
            "所有查询头都用了键头 0，其他键头从未用到",
        ),
        ("k = np.repeat(k, group, axis=1), and v alike", "k = np.repeat(k, group, axis=1)，v 亦然"),
        ("more than one key head, and more query heads", "不止一个键头，且查询头更多"),
        seldom=True,
    ),
)
