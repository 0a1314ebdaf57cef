"""What `diagnose` says about wrong numbers that nothing explains, and about what keeps it from being sure."""

AXES = {
    "batch": ("batch entry", "batch entries", "批次条目"),
    "head": ("head", "heads", "头"),
    "query": ("query", "queries", "查询"),
    "column": ("column", "columns", "列"),
    "key": ("key", "keys", "键"),
}

KNOWN: dict[str, tuple[str, str]] = {
    # doubts
    "a pair": (
        "two mistakes together may happen to give the same numbers as one that is not in the catalogue",
        "两处错误合在一起，可能恰好与目录之外的某种错误结果相同",
    ),
    "only rounding": (
        "rounding cannot be repeated exactly: only the size of the differences and how they are spread point to it",
        "舍入误差无法精确重现，依据只有误差的大小和分布",
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
        "只有一个查询有误，别的错误在这里也可能给出同样的结果；换用查询更多的例子才能分辨",
    ),
    "few positions": (
        "only {count} queries are wrong: a case with more would tell",
        "只有 {count} 个查询有误；换用查询更多的例子才能分辨",
    ),
    "a size": (
        "the only evidence is how many keys or queries come last, or the lengths of a few batch entries, or the "
        "mistake needs blocks of an unusual size",
        "唯一的依据是末尾键或查询的个数，或少数几个批次条目的长度，或者需要不常见的块大小",
    ),
    "equal sides": (
        "the window is then as wide on the left as on the right, which one width for both sides would give too",
        "这样窗口左右两边恰好一样宽，两边误用同一个宽度也会如此",
    ),
    "no right side": (
        "the right side is one token wide: off by one, or left out as a whole, it gives the same",
        "窗口右边只有一个词元宽，差一位和整个漏掉，结果相同",
    ),
    "same tokens": (
        "all tokens of {names} are the same, which hides other mistakes: try random numbers",
        "{names} 的各个词元全都相同，会掩盖其他错误；请换用随机数",
    ),
    "small difference": (
        "chance could make an explanation fit: there are few numbers, or their differences are hardly larger than "
        "rounding",
        "数值太少，或者差异几乎不超过舍入误差，也可能只是碰巧吻合",
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
        "所有数值都是 0。常见原因：内核没有运行，或写到了别处；结果没有拷回；掩码遮蔽了所有的键（掩码反了，或 True 与 "
        "False 弄反了）",
    ),
    "constant": (
        "every number is {value:.6g}: nothing of the inputs is left in it. Was the buffer only initialised?",
        "所有数值都是 {value:.6g}：其中看不到任何输入的影响。是否只是初始化了缓冲区？",
    ),
    # where
    "few wrong": ("wrong: {count} of {all} numbers", "{all} 个数值中只有 {count} 个有误"),
    "some nonfinite": (
        "NaN or infinite, and should not be: {numbers} in {in_rows}",
        "{rows} 行中有 {count} 个数值不该是 NaN 或无穷大",
    ),
    # which
    "is mean of v": (
        "every output is the mean of all values: the weights are uniform, so the scores are all the same, or lost",
        "每个输出都是所有值的平均：权重是均匀的，可见得分全都相同，或者丢失了",
    ),
    "is v itself": (
        "your numbers are v itself: every query sees its own key only",
        "您的结果就是 v：每个查询只看到自己",
    ),
    "is q itself": ("your numbers are q itself", "您的结果就是 q"),
    "is a multiple": (
        "your numbers are the right ones times {factor:.6g}",
        "您的结果是正确结果的 {factor:.6g} 倍",
    ),
    "is shifted": ("your numbers are the right ones plus {shift:.4g}", "您的结果是正确结果加上 {shift:.4g}"),
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
        "the difference follows the mean of all values (correlation {correlation:.2f}): the weights are too flat or "
        "too sharp, or have a wrong sum",
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
        "the difference grows with the query's position: from {first:.2g} to {last:.2g} (root mean square)",
        "越靠后的查询误差越大：从 {first:.2g} 到 {last:.2g}（均方根）",
    ),
    "shrinks": (
        "the difference shrinks with the query's position: from {first:.2g} to {last:.2g} (root mean square)",
        "越靠后的查询误差越小：从 {first:.2g} 到 {last:.2g}（均方根）",
    ),
    "as if unread": (
        "your numbers are those of code that never reads the last {keys}",
        "结果等于没有读最后 {count} 个键时的结果",
    ),
    "as if zeros": (
        "your numbers are those of code that adds {count} · exp(0) to each denominator, as {keys} of score 0 and "
        "value 0 would",
        "结果等于每行分母多加 {count} · exp(0) 时的结果，就像多了 {count} 个得分为 0、值为 0 的键",
    ),
    # weights
    "sums right": ("each query's weights have the right sum", "每个查询的权重之和是对的"),
    "sums wrong": (
        "the weights of a query sum to between {least:.4g} and {most:.4g}",
        "每个查询的权重之和在 {least:.4g} 与 {most:.4g} 之间",
    ),
    "zeros right": ("hidden keys have weight 0, as they should", "被遮蔽的键权重为 0，这是对的"),
    "zeros wrong": ("hidden keys whose weight is above 0: {count}", "有 {count} 个被遮蔽的键权重大于 0"),
    "negative weights": ("some weights are negative, down to {least:.4g}", "有的权重是负数，最小为 {least:.4g}"),
    # what to do
    "outside the values": (
        "larger or smaller than every value of their column: {outputs} in {in_rows}. No weighted mean can be that "
        "large or small, so look at what comes after the softmax, at the softmax's sum, or at which values are read",
        "{rows} 行中有 {count} 个输出超出了该列所有值的范围，加权平均不可能得到这样的数：请检查 softmax 之后的计算、"
        "softmax 的分母，或读取了哪些值",
    ),
    "two runs": (
        "the differences scatter as dropout of about {rate:.2g} % would make them, but other mistakes can do the same: "
        "run your code twice; if the results differ, call model.eval()",
        "误差的分布很像开着约 {rate:.2g}% 的 dropout，但别的错误也会如此：请把代码运行两次；若结果不同，请调用 "
        "model.eval()",
    ),
    "axes swapped": (
        "with all four arrays read as (batch, length, heads, d) your numbers are right: swap axes 1 and 2 of q, k, v "
        "and theirs, which are (batch, heads, length, d) here",
        "若把四个数组都看作（批次，长度，头，d），您的结果就是对的：这里要求（批次，头，长度，d），请交换 q、k、v 和 "
        "theirs 的第 1、2 轴",
    ),
    "too long": (
        "{how}: a softmax over the queries or over the whole matrix, and Aᵀ·V. They need every score of a head; "
        "with a few hundred tokens they are tried as well",
        "输入较长，{how}：沿查询方向或对整个矩阵的 softmax，以及 Aᵀ·V，因为它们要用到一个头的全部得分；"
        "请用几百个词元的例子再试一次",
    ),
    "ask for weights": (
        'to narrow it down, give the weights or the scores of your code: stage="weights", stage="scores"',
        '要缩小范围，请给出您代码中的权重或得分：stage="weights"、stage="scores"',
    ),
}


OTHERS = {"mean of v": ("the mean of all values", "所有值的平均"), "v itself": ("v", "v"), "q itself": ("q", "q")}
TRIED = {
    "alone": (
        "at this length these were tried alone, but not together with a second mistake",
        "以下错误只单独试过，未与其他错误组合",
    ),
    "not": ("at this length these were not tried", "以下错误没有试"),
}
MANNERS = {  # how theirs relate to other numbers
    "is": ("your numbers are the right ones {place}", "您的结果是{place}"),
    "mixes": (
        "your numbers are {own:.4g} times the right ones plus {share:.4g} times those {place}",
        "您的结果是正确结果的 {own:.4g} 倍，加上{place}的 {share:.4g} 倍",
    ),
    "goes with": (
        "the difference is about {factor:.3g} times the right numbers {place} (correlation {correlation:.2f})",
        "误差约为{place}的 {factor:.3g} 倍（相关系数 {correlation:.2f}）",
    ),
}
