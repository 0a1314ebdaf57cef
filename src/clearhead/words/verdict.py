"""What `diagnose` answers: the verdict, how sure it is, and the values that its sentences name."""

VERDICT: dict[str, tuple[str, str]] = {
    "right": (
        "your numbers are right: they differ by {difference:.2g} at most, where rounding allows {tolerance:.2g}",
        "您的结果正确：最多相差 {difference:.2g}，在舍入误差允许的 {tolerance:.2g} 之内",
    ),
    "right, exactly": ("your numbers are right, to the last digit", "您的结果正确，一位不差"),
    "mistake": ("your code has a mistake:", "您的代码有一处错误："),
    "mistakes": ("your code has two mistakes:", "您的代码有两处错误："),
    "ambiguous": (
        "your numbers are wrong, and {count} explanations fit them equally well:",
        "您的结果有误，有 {count} 种解释都同样吻合：",
    ),
    "unexplained": (
        "your numbers are wrong, by up to {difference:.4g}, and none of the known mistakes, alone or in pairs, "
        "explains them",
        "您的结果有误，最多相差 {difference:.4g}；已知的错误，无论单独还是两两组合，都解释不了",
    ),
    "and": ("and ", "并且"),
    "or": (" or ", "，或者"),
    "also": ("; ", "；"),
    "between": (", ", "、"),
    "change": ("    the line to change: {mend}", "    应改为：{mend}"),
    "sure": (
        "how sure: sure. This gives your numbers to within {residual:.2g}, where rounding allows {tolerance:.2g}; "
        "the right result is up to {difference:.4g} away from yours",
        "把握：确定。这样算出的结果与您的仅相差 {residual:.2g}（舍入误差允许 {tolerance:.2g}）；"
        "而正确结果与您的最多相差 {difference:.4g}",
    ),
    "likely": (
        "how sure: likely. This comes within {residual:.2g} of your numbers; the right ones are up to "
        "{difference:.4g} away",
        "把握：很可能。这样算出的结果与您的相差 {residual:.2g}；正确结果与您的最多相差 {difference:.4g}",
    ),
    "sure, exactly": (
        "how sure: sure. This gives your numbers exactly; the right result is up to {difference:.4g} away from yours",
        "把握：确定。这样算出的结果与您的完全相同；而正确结果与您的最多相差 {difference:.4g}",
    ),
    "likely, exactly": (
        "how sure: likely. This gives your numbers exactly; the right ones are up to {difference:.4g} away",
        "把握：很可能。这样算出的结果与您的完全相同；正确结果与您的最多相差 {difference:.4g}",
    ),
    "no fit": ("how sure: likely", "把握：很可能"),
    "because": ("    not sure, because {why}", "    之所以不能确定：{why}"),
    "known": ("what is known:", "已知的情况："),
    "tell": (
        "    to tell it from the others, try an input with {needs}",
        "    要与其他解释区分，请换用这样的输入：{needs}",
    ),
    "columns": (
        "your tokens are columns; the lines of code above have them as rows, so transpose each matrix: Q·Kᵀ there is "
        "the transpose of your Kᵀ·Q",
        "您的词元按列排列，而以上代码按行书写，每个矩阵都要转置：其中的 Q·Kᵀ 就是您的 Kᵀ·Q 的转置",
    ),
    "less well": ("fits too, but less well: {names}", "也说得通，但吻合得稍差：{names}"),
    "first": (
        "the first difference: batch {batch}, head {head}, query {query}, column {column}: "
        "yours {theirs:.6g}, right {right:.6g}",
        "第一处不同：批次 {batch}，头 {head}，查询 {query}，列 {column}：您的是 {theirs:.6g}，应为 {right:.6g}",
    ),
    "first joined": (
        "the first difference: batch {batch}, query {query}, column {column}: yours {theirs:.6g}, right {right:.6g}",
        "第一处不同：批次 {batch}，查询 {query}，列 {column}：您的是 {theirs:.6g}，应为 {right:.6g}",
    ),
    "sampled": (
        "only a sample was looked at: {queries:,} of {all_queries:,} queries{entries}. To have every query looked at, "
        "diagnose one batch entry and one head, or fewer tokens: at most {budget:,} weights, queries · keys · heads",
        "只抽查了一部分：{all_queries:,} 个查询中的 {queries:,} 个{entries}。若要逐个检查，请只给一个批次条目、一个头，"
        "或缩短序列：权重（查询 × 键 × 头）最多 {budget:,} 个",
    ),
    "sampled entries": (
        ", in {batches:,} of {all_batches:,} batch entries",
        "，{all_batches:,} 个批次条目中的 {batches:,} 个",
    ),
    "nonfinite": (
        "look at the inputs first: {name}[{place}] is {value}; numbers in {name} that are NaN or infinite: {many}",
        "请先检查输入：{name}[{place}] 为 {value}；{name} 中 NaN 或无穷大共 {many} 个",
    ),
    "unseen": (
        "with these inputs this mistake would not show: {did}; to show it takes {needs}",
        "用这组输入看不出这种错误：{did}；要看出来，需要{needs}",
    ),
}


VALUES: dict[str, tuple[str, str]] = {
    "per head": ("each head with its own block of W^O", "每个头只乘 W^O 的对应块"),
    "on values": ("on the values, before attention", "计算注意力之前就乘到值上"),
    "first corner": ("first corner, query 0 at key 0", "左上角，查询 0 对键 0"),
    "last corner": ("last corner, the last query at the last key", "右下角，最后的查询对最后的键"),
    "one seen": ("1 where seen, 0 where hidden", "可见处为 1，被遮蔽处为 0"),
    "one hidden": ("0 where seen, 1 where hidden", "可见处为 0，被遮蔽处为 1"),
    "fill": ("put in their place", "替换了原得分"),
    "add": ("added to them", "加到了原得分上"),
    "rescale": ("what was summed before", "已累加的部分"),
    "rescale values": ("the sum of values", "值的累加"),
    "rescale sum": ("the sum of powers", "指数之和"),
    "last": ("sums are", "各个累加值"),
    "last values": ("sum of values is", "值的累加"),
    "skipped": ("they are skipped", "它们被跳过"),
    "zeros": ("the padding behind them counts as keys with score 0", "其后的填充被当作得分为 0 的键"),
    "zero": ("0", " 0"),
    "unknown": ("whatever was in memory", "内存中原来的内容"),
}
