"""The sentences for what is known about wrong numbers, and for what keeps an explanation from being sure."""

from clearhead.diagnosing.reason import Reason
from clearhead.words import Language, filled

_AXES = {
    "batch": ("batch entry", "batch entries", "批次条目"),
    "head": ("head", "heads", "头"),
    "query": ("query", "queries", "查询"),
    "column": ("column", "columns", "列"),
    "key": ("key", "keys", "键"),
}

_SAID: dict[str, tuple[str, str]] = {
    # doubts
    "a pair": (
        "two mistakes together may imitate a third that is not in the catalogue",
        "两处错误合在一起，可能恰好与目录之外的另一种错误结果相同",
    ),
    "only rounding": (
        "rounding leaves no exact numbers: the size and the form of the differences speak for it",
        "舍入不会留下精确的数值：依据是误差的大小和形态",
    ),
    "dropped": (
        "dropout is random; the evidence: of {solved} weights that could be solved for, {zeros} are 0, and all others "
        "are {factor:.4g} times the right ones. Run your code twice to see the results differ",
        "dropout 是随机的；依据：能反解出的 {solved} 个权重中，{zeros} 个为 0，其余全是正确值的 {factor:.4g} 倍。"
        "把代码运行两次，会看到结果不同",
    ),
    "one position": (
        "only one query is wrong, and other mistakes could give the same numbers there: a case with more queries would "
        "tell",
        "只有一个查询有误，别的错误在这里也可能给出同样的结果：换用查询更多的例子才能分辨",
    ),
    "few positions": (
        "only {count} queries are wrong: a case with more would tell",
        "只有 {count} 个查询有误：换用查询更多的例子才能分辨",
    ),
    "a size": (
        "all that shows it is how many keys or queries come last, or the lengths of few batch entries, or it takes a "
        "block of an unusual size",
        "唯一的依据是末尾键或查询的个数，或少数几个批次条目的长度，或者需要不常见的块大小",
    ),
    "same tokens": (
        "all tokens of {names} are the same, which hides other mistakes: try random numbers",
        "{names} 的各个词元全都相同，会掩盖其他错误：请换用随机数",
    ),
    "small difference": (
        "the difference is hardly larger than rounding: chance could make an explanation fit",
        "差异几乎不超过舍入误差：可能只是碰巧吻合",
    ),
    "rivals": (
        "with blocks of an unusual size, another mistake would give these numbers too",
        "若块大小不常见，另一种错误也会给出这些数值",
    ),
    # outputs that say by themselves what to look for
    "all NaN": (
        "every number is NaN, so nothing can be compared. Usual reasons: NaN or infinity in the inputs, rows whose "
        "keys are all hidden (-inf minus -inf, 0/0), exp without subtracting the maximum, memory that was never "
        "written. Look at the first step that has a NaN",
        "所有数值都是 NaN，无从比较。常见原因：输入中有 NaN 或无穷大；某些行的键全被遮蔽（-inf 减 -inf，0/0）；exp 之前"
        "没有减去最大值；内存从未写入。请找出最早出现 NaN 的那一步",
    ),
    "no finite number": (
        "no number is finite, so nothing can be compared. Look at the first step that overflows: exp without "
        "subtracting the maximum, or a division by 0",
        "没有一个有限的数值，无从比较。请找出最早溢出的那一步：exp 之前没有减去最大值，或除以了 0",
    ),
    "all zero": (
        "every number is 0. Usual reasons: the kernel did not run or wrote elsewhere, the output was never copied "
        "back, a mask that hides every key (inverted, or True for False)",
        "所有数值都是 0。常见原因：kernel 没有运行或写到了别处；结果没有拷回；掩码遮蔽了所有的键（掩码反了，或 True 与 "
        "False 弄反了）",
    ),
    "constant": (
        "every number is {value:.6g}: nothing of the inputs is left in it. Was the buffer only initialised?",
        "所有数值都是 {value:.6g}：其中看不到任何输入的影响。是否只是初始化了缓冲区？",
    ),
    # where
    "few wrong": ("only {count} of {all} numbers are wrong", "{all} 个数值中只有 {count} 个有误"),
    "some nonfinite": (
        "{count} numbers in {rows} rows are NaN or infinite and should not be",
        "{rows} 行中有 {count} 个数值是 NaN 或无穷大，而它们本不该如此",
    ),
    # which
    "is mean of v": (
        "every output is the mean of all values: the weights are uniform, so the scores are all the same, or lost",
        "每个输出都是所有值的平均：权重是均匀的，可见得分全都相同，或者丢失了",
    ),
    "is v itself": (
        "your numbers are v itself: every query sees its own key only",
        "你的结果就是 v：每个查询只看到自己",
    ),
    "is q itself": ("your numbers are q itself", "你的结果就是 q"),
    "is a multiple": (
        "your numbers are the right ones times {factor:.6g}",
        "你的结果是正确结果的 {factor:.6g} 倍",
    ),
    "is shifted": ("your numbers are the right ones plus {shift:.4g}", "你的结果是正确结果加上 {shift:.4g}"),
    "one row for all": (
        "all queries have the same output: the weights do not depend on the query",
        "所有查询的输出都相同：权重与查询无关",
    ),
    "goes with output": (
        "the difference is about {factor:.3g} times the right output (correlation {correlation:.2f}): look for a "
        "factor",
        "误差约为正确输出的 {factor:.3g} 倍（相关系数 {correlation:.2f}）：请找找多余或缺少的系数",
    ),
    "goes with mean of v": (
        "the difference goes with the mean of all values (correlation {correlation:.2f}): the weights are flatter or "
        "sharper, or have another sum",
        "误差与所有值的平均相关（相关系数 {correlation:.2f}）：权重过于平缓或过于集中，或者总和不对",
    ),
    "goes with v itself": (
        "the difference is about {factor:.3g} times each token's own value (correlation {correlation:.2f}): a "
        "residual?",
        "误差约为各词元自身的值的 {factor:.3g} 倍（相关系数 {correlation:.2f}）：是不是加了残差？",
    ),
    "goes with q itself": (
        "the difference is about {factor:.3g} times each token's query (correlation {correlation:.2f}): a residual?",
        "误差约为各词元的查询的 {factor:.3g} 倍（相关系数 {correlation:.2f}）：是不是加了残差？",
    ),
    "small noise": (
        "the difference looks like noise: {size:.1g} of the output's size, without a mean, unrelated to the output; "
        "two runs of your code would show whether it is random",
        "误差看起来像噪声：约为输出大小的 {size:.1g}，均值为零，与输出无关；把代码运行两次，就能看出它是否随机",
    ),
    "grows": (
        "the difference grows with the position: {first:.2g} at first, {last:.2g} at last (root mean square)",
        "误差随位置增大：开头为 {first:.2g}，末尾为 {last:.2g}（均方根）",
    ),
    "shrinks": (
        "the difference shrinks with the position: {first:.2g} at first, {last:.2g} at last (root mean square)",
        "误差随位置减小：开头为 {first:.2g}，末尾为 {last:.2g}（均方根）",
    ),
    "as if unread": (
        "it is as if no row read the last keys ({count} of them)",
        "结果就像每一行都没有读到最后的键（{count} 个）",
    ),
    "as if zeros": (
        "it is as if every row had more keys, of score 0 and value 0: {count} · exp(0) is added to the denominator",
        "结果就像每一行多出了得分为 0、值为 0 的键：分母里多加了 {count} · exp(0)",
    ),
    # weights
    "sums right": ("each query's weights have the right sum", "每个查询的权重之和是对的"),
    "sums wrong": (
        "the weights of a query sum to between {least:.4g} and {most:.4g}",
        "每个查询的权重之和在 {least:.4g} 与 {most:.4g} 之间",
    ),
    "zeros right": ("hidden keys have weight 0, as they should", "被遮蔽的键权重为 0，这是对的"),
    "zeros wrong": ("{count} hidden keys have a weight above 0", "有 {count} 个被遮蔽的键权重大于 0"),
    "negative weights": ("some weights are negative, down to {least:.4g}", "有的权重是负数，最小为 {least:.4g}"),
    # what to do
    "outside the values": (
        "{count} outputs in {rows} rows lie beyond all values of their column: no weights between 0 and 1 that "
        "sum to 1 give that, so look after the softmax, at its sum, or at which values are read",
        "{rows} 行中有 {count} 个输出超出了该列所有值的范围：介于 0 与 1、总和为 1 的权重得不到它，请检查 softmax 之后"
        "的计算、softmax 的分母，或读取了哪些值",
    ),
    "two runs": (
        "the differences scatter as dropout of about {rate:.2g} % would make them, but other mistakes do so too: run "
        "your code twice; if the results differ, call model.eval()",
        "误差的分布很像开着约 {rate:.2g}% 的 dropout，但别的错误也会如此：请把代码运行两次；若结果不同，请调用 "
        "model.eval()",
    ),
    "axes swapped": (
        "with all four arrays read as (batch, length, heads, d) your numbers are right: swap axes 1 and 2 of q, k, v "
        "and theirs, which are (batch, heads, length, d) here",
        "若把四个数组都看作 (批次, 长度, 头, d)，你的结果就是对的：这里要求 (批次, 头, 长度, d)，请交换 q、k、v 和 "
        "theirs 的第 1、2 轴",
    ),
    "too long": (
        "at this length, a softmax over queries or over the whole matrix and Aᵀ·V were tried {how}: they need every "
        "score of a head. Shorten the case to some hundred tokens to have them tried",
        "在这个长度上，沿查询方向或对整个矩阵的 softmax 以及 Aᵀ·V {how}，因为它们需要一个头的全部得分；"
        "请把例子缩短到几百个词元再试",
    ),
    "ask for weights": (
        'to narrow it down, give the weights or the scores of your code: stage="weights", stage="scores"',
        '要缩小范围，请给出你代码中的权重或得分：stage="weights"、stage="scores"',
    ),
}


_OTHERS = {"mean of v": ("the mean of all values", "所有值的平均"), "v itself": ("v", "v"), "q itself": ("q", "q")}
_HOW = {"alone": ("alone, not in pairs", "只单独试过，没有两两组合"), "not": ("not at all", "没有试")}
_MANNERS = {  # how theirs relate to other numbers
    "is": ("your numbers are the right ones {place}", "你的结果是{place}"),
    "mixes": (
        "your numbers are {own:.4g} times the right ones plus {share:.4g} times those {place}",
        "你的结果是正确结果的 {own:.4g} 倍，加上{place}的 {share:.4g} 倍",
    ),
    "goes with": (
        "the difference is about {factor:.3g} times the right numbers {place} (correlation {correlation:.2f})",
        "误差约为{place}的 {factor:.3g} 倍（相关系数 {correlation:.2f}）",
    ),
}


def said(reason: Reason, language: Language) -> str:
    """The sentence, "en" or "zh"."""
    chinese = language == "zh"
    values = dict(reason.values)
    if isinstance(values.get("names"), list):
        values["names"] = ("、" if chinese else ", ").join(values["names"])
    if reason.key in _SAID and "how" not in values:
        return filled(_SAID[reason.key][chinese], **values)
    if reason.key.startswith("mixes ") and reason.key[6:] in _OTHERS:
        return filled(
            (
                "your numbers are {own:.4g} times the right ones plus {share:.4g} times {other}",
                "你的结果是正确结果的 {own:.4g} 倍，加上 {other} 的 {share:.4g} 倍",
            )[chinese],
            **values,
            other=_OTHERS[reason.key[6:]][chinese],
        )
    if "how" in values:
        values["how"] = _HOW[values["how"]][chinese]
        return filled(_SAID[reason.key][chinese], **values)
    what, _, axis = reason.key.rpartition(" ")
    one, many, zh = _AXES[axis]
    by = {1: ("next", "后一个"), -1: ("previous", "前一个")}.get(values.get("by", 0), ("", ""))
    if what == "right":
        words = (f"right {many}: {{right}}; wrong: {{wrong}}", f"正确的{zh}：{{right}}；有误的：{{wrong}}")
        return filled(words[chinese], **values)
    manner, _, moved = what.rpartition(" ")
    places = {
        "next": (f"of the {by[0]} {one}", f"{by[1]}{zh}的正确输出"),
        "reversed": (f"with the {many} in reverse order", f"{zh}顺序颠倒后的正确输出"),
        "first": (f"of the first {one}", f"第一个{zh}的正确输出"),
        "mean": (f"averaged over the {many}", f"正确输出沿{zh}的平均"),
        "values": (f"made with the values of the {by[0]} {one}", f"用{by[1]}{zh}的值算出的输出"),
    }[moved]
    words = _MANNERS[manner]
    return filled(words[chinese], **values, place=places[chinese])
