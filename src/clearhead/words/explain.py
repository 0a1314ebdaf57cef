"""A text explained: the answer, what heads do, and the run with edits."""

WORDS: dict[str, tuple[str, str]] = {
    # explain
    "model": (
        "model {name}: {layers} layers, {heads} heads, d_model {d_model}",
        "模型 {name}：{layers} 层，{heads} 个头，d_model {d_model}",
    ),
    "illustration": (
        "a tiny model trained on nursery rhymes, for illustration",
        "用英语童谣训练的小模型，仅供演示",
    ),
    "window": (
        "window {number} of {windows}: tokens {first} to {last} of {tokens}, counted from 0",
        "第 {number} 个窗口，共 {windows} 个：全文 {tokens} 个词元中的第 {first} 至 {last} 个（从 0 数起）",
    ),
    "tokens": ("tokens", "词元"),
    "split": (
        "the model's tokenizer has not learned {character} and splits it into its bytes: {first} is byte 1 of "
        "{parts} ({characters} such characters in all)",
        "模型的分词器没有学过“{character}”，只能把它拆成字节：{first} 是 {parts} 个字节中的第 1 个"
        "（这样的字符共 {characters} 种）",
    ),
    "attends most": (
        "{token} attends most to {most}: {share} (head {head} of layer {layer})",
        "{token} 最关注 {most}：{share}（第 {layer} 层第 {head} 个头）",
    ),
    "attends most to itself": (
        "{token} attends most to itself: {share} (head {head} of layer {layer})",
        "{token} 最关注自身：{share}（第 {layer} 层第 {head} 个头）",
    ),
    "attends to nothing": (
        "{token} may attend to no token (head {head} of layer {layer})",
        "{token} 不可关注任何词元（第 {layer} 层第 {head} 个头）",
    ),
    "sink takes": ("its sink takes {share} of the weight", "汇点占去权重的 {share}"),
    "left out": ("… {lines} lines with {share} of the weight", "… 略去 {lines} 行，共占权重的 {share}"),
    "legend marks": (
        "{low:.2g} {ramp} {high:.3g} on a square-root scale; unmarked: less, or masked",
        "{low:.2g} {ramp} {high:.3g}，平方根刻度；无标记：权重更小，或被遮蔽",
    ),
    "next": ("most likely next", "最可能的下一个词元"),
    "next after": ("most likely after {token}", "{token} 之后最可能的词元"),
    "what heads do": (
        "over the whole text: this head, then the clearest of each kind",
        "就整段文本而言：先列出这个头，再列出各类中最典型的头",
    ),
    "head caption": ("layer {layer} head {head}: {caption}", "第 {layer} 层第 {head} 个头：{caption}"),
    "more such heads": (" ({count} more)", "（另有 {count} 个）"),
    "layer": ("layer {layer}, step by step (all {heads} heads)", "第 {layer} 层，逐步计算（共 {heads} 个头）"),
    "head": ("head {head} of layer {layer}: A", "第 {layer} 层第 {head} 个头：A"),
    "sharpest": (
        "chosen as the sharpest for token {token}: entropy {entropy:.3g} of at most {most:.3g} nats",
        "自动选择：对词元 {token} 最集中的头，熵为 {entropy:.3g} 奈特（最大可能为 {most:.3g}）",
    ),
    "entropy": (
        "token {token}'s row: entropy {entropy:.3g} of at most {most:.3g} nats",
        "词元 {token} 所在的行：熵为 {entropy:.3g} 奈特（最大可能为 {most:.3g}）",
    ),
    "axes": ("rows: queries, columns: keys", "行：查询，列：键"),
    "axes columns": ("rows: keys, columns: queries", "行：键，列：查询"),
    "also": ("; ", "；"),
    "legend": (
        "min {low:.3g}  max {high:.3g}  colour by the square root of the weight",
        "最小 {low:.3g}  最大 {high:.3g}  颜色深浅取权重的平方根",
    ),
    "legend plain": ("min {low:.3g}  max {high:.3g}", "最小 {low:.3g}  最大 {high:.3g}"),
    "legend ramp": (
        "min {low:.3g}  max {high:.3g}  «{ramp}» by the square root of the weight",
        "最小 {low:.3g}  最大 {high:.3g}  «{ramp}» 取权重的平方根",
    ),
    "pooled": (
        "each cell is the mean over {rows:.3g} × {cols:.3g} weights",
        "每格是 {rows:.3g} × {cols:.3g} 个权重的平均值",
    ),
    "masked cell": ("· masked", "· 被遮蔽"),
    "masked pixel": ("grey: masked", "灰色：被遮蔽"),
    "nan cell": ("? NaN", "? NaN"),
    "nan pixel": ("red: NaN", "红色：NaN"),
    "rows sum": ("rows sum to 1 (largest deviation {deviation:.1g})", "每行之和为 1（最大偏差 {deviation:.1g}）"),
    "rows sum sinks": (
        "rows sum to {low:.3g} … {high:.3g}, their sinks take the rest",
        "每行之和为 {low:.3g} … {high:.3g}，其余归汇点",
    ),
    "rows sum off": (
        "rows sum to {low:.3g} … {high:.3g}, not to 1: rounded, or not from a softmax",
        "每行之和为 {low:.3g} … {high:.3g}，并非 1：经过舍入，或不是 softmax 的结果",
    ),
    "columns sum": ("columns sum to 1 (largest deviation {deviation:.1g})", "每列之和为 1（最大偏差 {deviation:.1g}）"),
    "columns sum sinks": (
        "columns sum to {low:.3g} … {high:.3g}, their sinks take the rest",
        "每列之和为 {low:.3g} … {high:.3g}，其余归汇点",
    ),
    "columns sum off": (
        "columns sum to {low:.3g} … {high:.3g}, not to 1: rounded, or not from a softmax",
        "每列之和为 {low:.3g} … {high:.3g}，并非 1：经过舍入，或不是 softmax 的结果",
    ),
    "how": (
        "how {token} came to be: o = Σ a·v, strongest first",
        "{token} 的输出是怎么来的：o = Σ a·v，从强到弱",
    ),
    "key": ("key", "键"),
    "weight": ("weight a", "权重 a"),
    "contribution": ("a·v, first {count} of {width}", "a·v，{width} 维中的前 {count} 维"),
    "more": ("{count} more", "其余 {count} 个"),
    "generated": (
        "the model generated the last {count}, each time the likeliest token",
        "最后 {count} 个词元由模型生成，每次取最可能的一个",
    ),
    "agree": (
        "this token alone against the whole matrix: largest difference {difference:.1g}",
        "单独计算这个词元与按矩阵计算相比：最大差值 {difference:.1g}",
    ),
    "check": (
        "step by step against the {engine} engine: largest difference {difference:.1g}",
        "逐步计算与 {engine} 引擎相比：最大差值 {difference:.1g}",
    ),
    # what a head does
    "caption previous": (
        "previous-token head, {previous}% on the token before",
        "前一词元头，{previous}% 的权重在前一个词元上",
    ),
    "caption own": ("self head, {own}% on the token itself", "自身头，{own}% 的权重在词元自身上"),
    "caption sink": ("sink head, {sink}% on the first token", "汇点头，{sink}% 的权重在第一个词元上"),
    "caption local": (
        "local head, mean distance {distance} tokens",
        "局部头，平均距离 {distance} 个词元",
    ),
    "caption broad": (
        "broad head, nearly even weights: entropy {entropy} of {even} nats",
        "分散头，权重接近均匀（熵 {entropy} 奈特，完全均匀时为 {even}）",
    ),
    "caption mixed": (
        "mixed, mean distance {distance} tokens",
        "混合头，平均距离 {distance} 个词元",
    ),
    "caption mixed without distance": (
        "mixed, entropy {entropy} of {even} nats",
        "混合头（熵 {entropy} 奈特，完全均匀时为 {even}）",
    ),
    # explain with edits
    "edits": ("edits", "改动"),
    "moved next": ("next tokens, those that moved most first", "下一个词元，变化最大的在前"),
    "moved heads": (
        "heads whose output for token {token} moved most (|o| is its length)",
        "对词元 {token} 的输出变化最大的头（|o| 是输出的长度）",
    ),
    "moved head": ("layer {layer}, head {head}", "第 {layer} 层第 {head} 个头"),
    "no head moved": ("no head's output for token {token} moved", "所有头对词元 {token} 的输出都没有变化"),
    "before": ("before", "改动前"),
    "after": ("after", "改动后"),
    "change": ("change", "变化"),
    "points": ("change in points", "变化（百分点）"),
    "moved by": ("moved by", "变化量"),
    "matrices": ("head {head} of layer {layer}: A before and after", "第 {layer} 层第 {head} 个头：改动前后的 A"),
    "moved furthest": (
        "chosen since, of the edited heads, its output for token {token} moved furthest",
        "自动选择：在改动涉及的头中，它对词元 {token} 的输出变化最大",
    ),
    "row": ("token {token}'s row of A, the keys that changed most first", "词元 {token} 在 A 中的行，变化最大的键在前"),
    "times": (
        "the edits multiply this head's output by {factor:.4g} after A·V",
        "算出 A·V 之后，改动把这个头的输出乘以 {factor:.4g}",
    ),
    "unchanged": (
        "the edits do not change these weights",
        "改动没有改变这些权重",
    ),
    "masked weight": ("masked", "被遮蔽"),
}
