"""Why one token and not another, in the terminal and on the page."""

WORDS: dict[str, tuple[str, str]] = {
    # explain --why
    "why": (
        "{token} rather than {against}: its logit leads by {lead} ({share} against {other})",
        "为什么是 {token} 而不是 {against}：它的 logit 领先 {lead}（概率 {share} 对 {other}）",
    ),
    "why not": (
        "{against} rather than {token}, whose logit is {lead} behind ({share} against {other})",
        "为什么是 {against} 而不是 {token}：后者的 logit 落后 {lead}（概率 {share} 对 {other}）",
    ),
    "why edge": (
        "helped most: {edge} in head {head} of layer {layer}; {left} without it",
        "最有利的边：第 {layer} 层第 {head} 个头里 {edge}；没有它则为 {left}",
    ),
    "why tokens": (
        "the text: what {token}'s lead changes by without the edges to a token",
        "原文：去掉指向某个词元的边，{token} 的领先值变化多少",
    ),
    "why strongest tokens": (
        "the strongest {count} of {tokens} tokens",
        "共 {tokens} 个词元，只列出影响最大的 {count} 个",
    ),
    "why signs": (
        "- attending to it helped {token}, + it helped {against}; estimates, added up",
        "- 关注它有利于 {token}，+ 关注它有利于 {against}；为各条边估计值之和",
    ),
    "why edges": (
        "the edges that did most: what the lead changes by when one of them is cut",
        "影响最大的边：切断其中一条，领先值变化多少",
    ),
    "why no edges": ("no edge changes the lead", "没有哪条边影响领先值"),
    "why head": ("head", "头"),
    "why ends": ("query → key", "查询 → 键"),
    "why estimate": ("estimate", "估计"),
    "why truth": ("run again", "重新运行"),
    "why helped": ("helped", "有利于"),
    "why notation": (
        "{layer}.{head} is head {head} of layer {layer}; run again: what the model does with that edge cut",
        "{layer}.{head} 指第 {layer} 层第 {head} 个头；重新运行：切断这条边后再运行模型，得到真实的变化",
    ),
    "why agreement": (
        "estimate and truth of these {count} edges: rank correlation {agreement:.2g}",
        "这 {count} 条边的估计值与真实值的秩相关系数为 {agreement:.2g}",
    ),
    "why heads": (
        "heads: what the lead changes by when one of them is off",
        "头：关闭其中一个，领先值变化多少",
    ),
    "why weights": (
        "weights alone would have named: the largest of {query}'s row in all heads",
        "只看权重会认为：{query} 在所有头中权重最大的键",
    ),
    "why rank": ("rank by that, of {count}", "按此排名（共 {count}）"),
    # explain --why --html
    "why title": ("Why {token} and not {against}", "为什么是 {token}，而不是 {against}"),
    "why lead": (
        "The logit of {token} is {logit} and that of {against} is {other}: a lead of {lead}. Their probabilities are "
        "{share} and {other_share}.",
        "{token} 的 logit 为 {logit}，{against} 为 {other}，领先 {lead}；两者的概率分别为 {share} 和 {other_share}。",
    ),
    "why behind": (
        "The logit of {token} is {logit} and that of {against} is {other}: it is {lead} behind. Their probabilities "
        "are {share} and {other_share}.",
        "{token} 的 logit 为 {logit}，{against} 为 {other}，落后 {lead}；两者的概率分别为 {share} 和 {other_share}。",
    ),
    "why open": (
        "Choose an edge or a head, and the steps below show its weights.",
        "点选一条边或一个头，下方的步骤就会显示相应的权重。",
    ),
    "why place": ("rank of {count}", "排名（共 {count}）"),
    "why direction": ("query ← key", "查询 ← 键"),
    "why minus": ("− attending to it helped {token}", "− 关注它有利于 {token}"),
    "why plus": ("+ attending to it helped {against}", "+ 关注它有利于 {against}"),
    "why sum": (
        "Estimates, added up over all edges to the token; colours by the square root.",
        "数值为指向该词元的各条边的估计值之和；颜色按平方根取值。",
    ),
    "why exact": (
        "An estimate is exact at the head's output and first order beyond it; the truth comes from running the model "
        "again without that edge or head.",
        "估计值在该头的输出处是精确的，再往后只精确到一阶；真实值来自去掉这条边或这个头之后重新运行模型。",
    ),
}
