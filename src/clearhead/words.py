"""Every sentence the reports say, in English and in Chinese, in one place."""

from string import Formatter
from typing import Any, Literal

from clearhead.digits import significant

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


_WORDS: dict[str, tuple[str, str]] = {
    # what each step does
    "x": ("each token's vector: what enters the layer", "每个词元的向量，即本层的输入"),
    "x normalised": (
        "each token's vector after layer normalisation: what attention reads",
        "层归一化之后每个词元的向量，即注意力的输入",
    ),
    "x columns": ("each column is a token's vector: what enters the layer", "每一列是一个词元的向量，即本层的输入"),
    "context": ("the other sequence: keys and values come from it", "另一个序列，键和值由它计算"),
    "q": ("queries: what each token looks for", "查询：每个词元在找什么"),
    "k": ("keys: how each token can be found", "键：每个词元凭什么被找到"),
    "v": ("values: what each token passes on", "值：每个词元传递什么"),
    "scores": ("how well each query matches each key: their dot product", "查询与键的匹配程度：两者的点积"),
    "scores columns": (
        "how well each key matches each query: entry (j, i) is k_j·q_i",
        "键与查询的匹配程度：元素 (j, i) 是 k_j·q_i",
    ),
    "scaled": (
        "divided by √d_k, so that the softmax does not put everything on one key",
        "除以 √d_k，避免 softmax 把权重全部压在一个键上",
    ),
    "scaled by": (
        "scaled, so that the softmax does not put everything on one key",
        "缩放得分，避免 softmax 把权重全部压在一个键上",
    ),
    "capped": ("large scores limited by tanh", "用 tanh 限制过大的得分"),
    "biased": ("a bias added to the scores, such as one for positions", "给得分加上偏置，例如位置偏置"),
    "biased by spans": (
        "a number added to the scores for each pair of a query's and a key's span; -∞ forbids",
        "按查询和键所属的片段，给每一对得分加上一个数；-∞ 表示不可关注",
    ),
    "masked": ("what a query may not attend to becomes -∞", "查询不可关注的位置变为 -∞"),
    "weights": ("no weight is negative, and each query's weights sum to 1", "每个查询的权重非负，总和为 1"),
    "weights columns": (
        "no weight is negative, and each column, the weights of one query, sums to 1",
        "权重非负；每一列是一个查询的权重，总和为 1",
    ),
    "weights with sink columns": (
        "no weight is negative; each column, the weights of one query, and its sink's share sum to 1",
        "权重非负；每一列是一个查询的权重，它们与汇点所占份额之和为 1",
    ),
    "weights given columns": (
        "the weights, as given: each column says how much of each value a query takes",
        "权重（直接给出）：每一列表示一个查询从各个值中取多少",
    ),
    "weights with sink": (
        "no weight is negative; each query's weights and its sink's share sum to 1",
        "权重非负；每个查询的权重与汇点所占份额之和为 1",
    ),
    "weights given": (
        "the weights, as given: how much of each value a query takes",
        "权重（直接给出）：每个查询从各个值中取多少",
    ),
    "heads": ("each head: weighted means of the values", "每个头：值的加权平均"),
    "concat": ("the heads side by side", "各个头并排拼接"),
    "concat columns": ("the heads one above the other", "各个头上下叠放"),
    "output": ("each output is a weighted mean of the values", "每个输出都是值的加权平均"),
    "layer output": ("the heads mixed by W^O: the layer's output", "用 W^O 混合各个头，得到本层的输出"),
    "layer output joined": (
        "the heads side by side (concatenated): there is no W^O to mix them",
        "各个头并排拼接即为输出：没有 W^O 来混合它们",
    ),
    "layer output joined columns": (
        "the heads one above the other (concatenated): there is no W^O to mix them",
        "各个头上下叠放即为输出：没有 W^O 来混合它们",
    ),
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
    # explain: the way to a logit
    "way": (
        "the way to {next} after {token}: what each part of the model adds to its logit",
        "从文本到 {token} 之后的 {next}：模型各部分为它的 logit 加上多少",
    ),
    "way embeddings": ("embeddings", "嵌入"),
    "way token": ("the token's vector", "词元的向量"),
    "way position": ("the position's vector", "位置的向量"),
    "way layer": ("layer {layer}", "第 {layer} 层"),
    "way attention": ("attention, {heads} heads of {d_k}", "注意力，{heads} 个头，各 {d_k} 维"),
    "way most": ("head {first} {adds}, head {second} {more}", "头 {first} {adds}，头 {second} {more}"),
    "way most one": ("head {first} {adds}", "头 {first} {adds}"),
    "way mlp": ("MLP, {d_model} to {d_mlp} to {d_model}", "MLP，{d_model} → {d_mlp} → {d_model}"),
    "way norm": ("last norm", "末层归一化"),
    "way norm bias": ("its bias", "其偏置"),
    "way sum": ("Σ, largest of {vocabulary} logits", "Σ，{vocabulary} 个 logit 中最大"),
    "way note": (
        "the last layer norm's σ is this run's, {sigma:.4g}; {difference:.1g} off from the model",
        "末层归一化的 σ 取本次运行的值 {sigma:.4g}；各项之和与模型仅相差 {difference:.1g}",
    ),
    "way meaning": (
        "a part's number is what it wrote, not what the logit would be without it",
        "每个数是该部分写入的量，并不等于去掉它之后 logit 的变化",
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
        "local head, {distance} tokens away on average",
        "局部头，平均关注距离为 {distance} 个词元",
    ),
    "caption broad": (
        "broad head, nearly even weights: entropy {entropy} of {even} nats",
        "分散头，权重接近均匀（熵 {entropy} 奈特，完全均匀时为 {even}）",
    ),
    "caption mixed": (
        "no simple pattern, {distance} tokens away on average",
        "无明显规律，平均关注距离为 {distance} 个词元",
    ),
    "caption mixed without distance": (
        "no simple pattern, entropy {entropy} of {even} nats",
        "无明显规律（熵 {entropy} 奈特，完全均匀时为 {even}）",
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
    # shapes
    "work": ("{work} multiply-adds", "{work} 次乘加"),
    "parameters": ("{count} parameters", "{count} 个参数"),
    "parameters in all": ("parameters in all: {count}", "参数总数：{count}"),
    "work in all": ("multiply-adds in all: {work}", "乘加总数：{work}"),
    "bytes of weights": ("A in float32, if it is stored: {size} bytes", "若存下 float32 的 A：{size} 字节"),
    # scale
    "why scale": ("why scores are divided by √d_k", "得分为什么要除以 √d_k"),
    "variance grows": (
        "q and k: independent numbers with mean 0 and variance 1. q·k is a sum of d_k products, so its variance is "
        "d_k; that of q·k/√d_k is 1, whatever d_k is",
        "q 和 k 的各分量相互独立，均值为 0，方差为 1。q·k 是 d_k 个乘积之和，方差为 d_k；"
        "除以 √d_k 之后，无论 d_k 多大，方差都是 1",
    ),
    "variance of": ("variance of", "方差"),
    "not divided": ("softmax(q·k)", "softmax(q·k)"),
    "divided": ("softmax(q·k/√d_k)", "softmax(q·k/√d_k)"),
    "slope vanishes": (
        "max a: a query's largest weight; a(1-a): what it changes by with its own score, the derivative ∂a/∂s, at most "
        "1/4; means over {queries} queries with {keys} keys each. Where a is near 1, the softmax is saturated: the "
        "derivative is near 0, and training can hardly change q and k any more",
        "max a：查询的最大权重；a(1-a)：它随自身得分的变化，即导数 ∂a/∂s，最大为 1/4；为 {queries} 个查询（各有 {keys} "
        "个键）的平均值。a 接近 1 时 softmax 饱和：导数接近 0，训练几乎无法再改变 q 和 k",
    ),
    "saturation": (
        "one query's scores 2, 1, 0, multiplied by more and more",
        "一个查询的得分 2、1、0，乘以越来越大的倍数",
    ),
    "factor": ("times", "倍数"),
    # trace, one head against several
    "beside": (
        "one head against several: the same matrices, their columns split into h heads",
        "单头与多头对比：同样的矩阵，把列拆分给 h 个头",
    ),
    "parameters beside": ("parameters", "参数"),
    "work beside": ("multiply-adds", "乘加次数"),
    "scores beside": ("weights a", "权重 a 的个数"),
    "entropy beside": ("entropy of a query, nats", "每个查询的熵（奈特）"),
    "difference beside": ("U differs by up to", "U 的最大差值"),
    "beside says": (
        "every head has a softmax of its own over all keys, but sees only its share of the columns; entropy: the mean "
        "over queries, lowest and highest head; U is compared with that of the first h",
        "每个头对所有键各做一次 softmax，但只看到自己那一份列；熵：对各查询取平均，列出最低和最高的头；"
        "U 与第一个 h 的结果相比",
    ),
    "output beside": ("U with h = {heads}", "h = {heads} 时的 U"),
    # trace
    "three axes": (
        "three axes are read as (heads {heads}, tokens, width), each head attending on its own; a batch of {heads} "
        "texts is (batch, heads, tokens, width), so q[:, None], and a whole layer's (batch, tokens, d_model) is for "
        "ch.trace_layer",
        "三个轴按（头 {heads}，词元，宽度）理解，各头独立计算；若是 {heads} 条文本的批次，应为"
        "（批次，头，词元，宽度），即 q[:, None]；整层的（批次，词元，d_model）请用 ch.trace_layer",
    ),
    "batch of": ("batch {batch} of {batches}", "批次 {batch}（共 {batches} 个）"),
    "head of": ("head {head} of {heads}", "头 {head}（共 {heads} 个）"),
    "key head of": ("key head {head} of {heads}", "键头 {head}（共 {heads} 个）"),
    "geometry": (
        "query {query}: each score is two lengths and an angle, q·k = ‖q‖·‖k‖·cos θ",
        "查询 {query}：得分由两个长度和一个夹角决定，q·k = ‖q‖·‖k‖·cos θ",
    ),
    "norm": ("‖q‖ = {norm:.5g}; --query N shows another query", "‖q‖ = {norm:.5g}；--query N 看其他查询"),
    "others heads": (
        "this is head {head} of {heads}, counted from 0; --head N shows another, --json FILE writes all",
        "以上是头 {head}（共 {heads} 个，编号从 0 起）；--head N 看其他头，--json FILE 写出全部",
    ),
    "others batches": (
        "this is batch entry {batch} of {batches}, counted from 0; --batch N shows another",
        "以上是批次 {batch}（共 {batches} 个，编号从 0 起）；--batch N 看其他批次",
    ),
    "cut": (
        "the first {rows} × {cols} of {all_rows} × {all_cols}",
        "共 {all_rows} × {all_cols}，只列出前 {rows} × {cols}",
    ),
    "claim right": ("✓ claimed {name}: right", "✓ 文件给出的 {name}：正确"),
    "claim wrong": (
        "✗ claimed {name}: wrong, by up to {difference:.4g}",
        "✗ 文件给出的 {name}：有误，最多相差 {difference:.4g}",
    ),
    "worst": (
        "furthest off at row {row}, column {column}: claimed {claimed:.6g}, right {right:.6g}",
        "行 {row}，列 {column} 处相差最大：文件给出 {claimed:.6g}，应为 {right:.6g}",
    ),
    "claimed": ("claimed:", "文件给出的："),
    "right": ("right:", "正确的："),
    "from own": ("what the claimed {source} would give:", "由文件给出的 {source} 应得到："),
    "follows": (
        "it does follow from the claimed {source}: the mistake was made there",
        "它确实由文件给出的 {source} 得出，错误出在那一步",
    ),
    "also off": (
        "nor does it follow from the claimed {source}: off by up to {difference:.4g}",
        "由文件给出的 {source} 也得不出它：最多相差 {difference:.4g}",
    ),
    "first wrong": (
        "the first wrong step is {name}, by up to {difference:.4g}",
        "最先出错的步骤是 {name}，最多相差 {difference:.4g}",
    ),
    "also wrong": (
        "{name}: wrong too, and off by up to {difference:.4g} from what the claimed {source} would give",
        "{name}：同样有误，与由文件给出的 {source} 应得的结果最多相差 {difference:.4g}",
    ),
    "follows on": ("{name}: wrong only because {source} is wrong", "{name}：只因 {source} 有误才错"),
    "wrong too": ("{name}: wrong too, by up to {difference:.4g}", "{name}：同样有误，最多相差 {difference:.4g}"),
    "all right": ("every claimed step is right: {names}", "文件给出的每一步都正确：{names}"),
    "no claims": ("the file claims no values, so there is nothing to check", "文件没有给出中间结果，无需核对"),
    "and": ("; and ", "；并且"),
    "because": (": ", "："),
}


IN_FORMULAS = {
    ", -∞ where forbidden": "，不可关注处为 -∞",
    ", each row": "，逐行",
    ", each column": "，逐列",
    "sink": "汇点",
}


def formula(language: Language, text: str) -> str:
    """A step's formula; the few words in it in the language asked for."""
    if language == "zh":
        for english, chinese in IN_FORMULAS.items():
            text = text.replace(english, chinese)
    return text


def say(language: Language, key: str, **values: object) -> str:
    """One sentence in the language asked for."""
    return filled(_WORDS[key][language == "zh"], **values)


def in_columns(key: str) -> str:
    """The key of the sentence where tokens are columns: another one where the sentence depends on it."""
    return other if (other := f"{key} columns") in _WORDS else key


def filled(sentence: str, **values: object) -> str:
    """A sentence with its values in place; {x:.3g} prints three significant digits, as everywhere in the reports."""
    return _FILL.format(sentence, **values)


class _Fill(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, float) and format_spec.endswith("g"):
            return significant(value, int(format_spec.strip(".g")))
        return super().format_field(value, format_spec)


_FILL = _Fill()
