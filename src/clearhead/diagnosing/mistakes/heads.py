"""Mistakes in projections, heads and rotary positions."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, several_heads, when
from clearhead.diagnosing.recipe import Change, Inputs


def _each(field: str, value: str, names: list[str]) -> Iterable[Change]:
    """A change for each name alone, and one for all together."""
    alone: list[Change] = [{f"{field}_{name}": value} for name in names]
    return [*alone, {f"{field}_{name}": value for name in names}] if len(names) > 1 else alone


def _transposed(inputs: Inputs) -> Iterable[Change]:
    w = {} if inputs.layer is None else inputs.layer.w
    return _each("w", "transposed", [name for name, matrix in w.items() if matrix.shape[0] == matrix.shape[1]])


def _unbiased(inputs: Inputs) -> Iterable[Change]:
    return _each("b", "missing", [] if inputs.layer is None else list(inputs.layer.b))


def _keeps_width(inputs: Inputs) -> bool:
    """Is W^O square, so that leaving it out goes unnoticed?"""
    return inputs.layer is not None and "o" in inputs.layer.w and len(set(inputs.layer.w["o"].shape)) == 1


def _per_value(inputs: Inputs) -> bool:
    return _keeps_width(inputs) and inputs.k.shape[1] == inputs.problem.heads


def _joins(inputs: Inputs) -> bool:
    return inputs.merged and several_heads(inputs)


def _grouped(inputs: Inputs) -> bool:
    return inputs.k.shape[1] not in (1, inputs.problem.heads)


def _rotary(inputs: Inputs) -> bool:
    return inputs.rotary is not None


_SPLIT = ("q = (x @ w_q).reshape(batch, n, heads, d_k).swapaxes(1, 2), and k and v alike",) * 2
_SPLIT_ZH = (_SPLIT[0], "q = (x @ w_q).reshape(batch, n, heads, d_k).swapaxes(1, 2)，k 和 v 亦然")
_MERGE = ("out = heads.swapaxes(1, 2).reshape(batch, n, heads * d_v)",) * 2

HEADS = (
    Mistake(
        "W transposed",
        _transposed,
        ("a weight matrix is used as its transpose: W of {letters}", "误用了权重矩阵的转置：{letters} 的 W"),
        (
            "x @ w, not x @ w.T (PyTorch's nn.Linear stores its weight as (d_out, d_in): transpose it once)",
            "用 x @ w 而不是 x @ w.T（PyTorch 的 nn.Linear 按 (d_out, d_in) 存放权重：转置一次即可）",
        ),
        ("a matrix that is not symmetric", "不对称的矩阵"),
    ),
    Mistake(
        "projection bias left out",
        _unbiased,
        ("a projection's bias is left out: b of {letters}", "漏加了投影的偏置：{letters} 的 b"),
        ("q = x @ w_q + b_q, and k, v and the output alike", "q = x @ w_q + b_q，k、v 和输出亦然"),
        ("biases other than 0", "不为 0 的偏置"),
        rule="b_q, b_k, b_v, b_o",
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
        "rotary missing",
        when(_rotary, {"rotary": "missing"}),
        ("queries and keys are not rotated to their positions", "查询和键没有按位置旋转"),
        ("q, k = rotate(q), rotate(k)",) * 2,
        ("more than one token", "不止一个词元"),
        rule="rotary",
    ),
    Mistake(
        "rotary pairing",
        when(_rotary, {"rotary": "pairing"}),
        (
            "rotary positions turn the wrong pairs: (2i, 2i + 1) where (i, i + d/2) is meant, or the other way round",
            "旋转位置编码的维度配对错了：应为 (i, i + d/2) 却用了 (2i, 2i + 1)，或正好相反",
        ),
        ("use the other rotate function, or permute W^Q and W^K once", "改用另一种旋转方式，或把 W^Q、W^K 重排一次"),
        ("d_k > 2 and more than one token", "d_k > 2 且不止一个词元"),
        rule="rotary",
    ),
    Mistake(
        "rotary off by one",
        when(_rotary, {"rotary_shift": 1}, {"rotary_shift": -1}),
        (
            "queries and keys are rotated to positions that are off by one from each other (queries {rotary_shift:+d})",
            "旋转时查询和键的位置错开了一位（查询 {rotary_shift:+d}）",
        ),
        (
            "count both from the same 0: with a cache, the query's position is its length before",
            "两者都从同一个 0 数起：用缓存时，查询的位置是此前的长度",
        ),
        ("keys that differ", "彼此不同的键"),
        rule="rotary",
    ),
    Mistake(
        "rotary on values",
        when(_rotary, {"rotary_values": True}),
        ("the values are rotated too: only queries and keys should be", "值也被旋转了：只应旋转查询和键"),
        ("q, k = rotate(q), rotate(k); leave v alone", "q, k = rotate(q), rotate(k)；v 保持不变"),
        ("a token beyond position 0", "位置 0 之后的词元"),
        rule="rotary",
    ),
)
