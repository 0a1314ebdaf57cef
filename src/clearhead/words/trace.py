"""Shapes, the scale, traces of one's own numbers, and their checks."""

WORDS: dict[str, tuple[str, str]] = {
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
        "三个轴按（头 {heads}，词元，宽度）理解，各头独立计算；若是一批 {heads} 段文本，应为"
        "（批次，头，词元，宽度），即 q[:, None]；整层的（批次，词元，d_model）请用 ch.trace_layer",
    ),
    "batch of": ("batch {batch} of {batches}", "批次条目 {batch}（共 {batches} 个）"),
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
        "以上是批次条目 {batch}（共 {batches} 个，编号从 0 起）；--batch N 看其他条目",
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
