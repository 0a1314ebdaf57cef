"""How W_Q, W_K and W_V are learned, and the pages of `clearhead learn` and `clearhead scale`."""

WORDS: dict[str, tuple[str, str]] = {
    "learn": ("how W_Q, W_K and W_V are learned", "W_Q、W_K、W_V 是怎样学出来的"),
    "learn says": (
        "A very small model ({layers} layer, {heads} heads, d = {d_model}, d_k = {d_k}) learns {rhymes} nursery rhymes "
        "in {steps} training steps. At first its weights are random and nearly 0, so every token gets the same weight. "
        "“{text}” goes on with “{right}”; another rhyme goes on differently after “sat on a”, so the last token has to "
        "learn to look back.",
        "一个很小的模型（{layers} 层，{heads} 个头，d = {d_model}，d_k = {d_k}）用 {steps} 步训练学会 {rhymes} 首童谣。"
        "起初权重是接近 0 的随机数，所以每个词元得到的权重都一样。“{text}”的下一个词元是“{right}”，而另一首童谣在"
        "“sat on a”之后接的是别的词，因此最后一个词元必须学会往回看。",
    ),
    "learn step": ("training step", "训练步数"),
    "learn loss": ("loss", "损失"),
    "learn loss says": (
        "the mean of −ln(probability of the right next token) over the {rhymes} rhymes",
        "{rhymes} 首童谣中正确的下一个词元的 −ln(概率) 的平均值",
    ),
    "learn next": ("most likely after “{text}”", "“{text}”之后最可能的词元"),
    "learn gradient": (
        "length of the loss's gradient by each matrix",
        "损失对各矩阵的梯度的长度",
    ),
    "learn matrices": (
        "the weights; each matrix has {heads} heads, side by side",
        "权重矩阵；每个矩阵由 {heads} 个头并排组成",
    ),
    "learn range": (
        "colours from −{most:.3g} to {most:.3g}, the same for all matrices and steps",
        "颜色范围为 −{most:.3g} 到 {most:.3g}，所有矩阵、所有步都相同",
    ),
    "learn head": ("head {head}: scores and weights of “{text}”", "头 {head}：“{text}”的得分与权重"),
    "learn attention": ("weights of the last token, “{token}”, on each token", "最后一个词元“{token}”对各词元的权重"),
    "learn column": ("head {head}", "头 {head}"),
    "learn check": (
        "Attention and probabilities are computed by clearhead from the recorded weights; they differ from "
        "PyTorch's by at most {difference:.1g}.",
        "注意力权重和概率由 clearhead 根据记录下来的矩阵算出，与 PyTorch 的结果最多相差 {difference:.1g}。",
    ),
    "slider play": ("Play", "播放"),
    "slider pause": ("Pause", "暂停"),
    "slider forward": ("Next", "下一步"),
    "learn page": (
        "how the weights of queries, keys and values are learned",
        "查询、键、值的权重矩阵是怎样学出来的",
    ),
    "learn loss title": (
        "Loss by training step: the mean of −ln(probability of the right next token)",
        "各训练步的损失：正确的下一个词元的 −ln(概率) 的平均值",
    ),
    "learn now": ("Step {step}: loss {loss:.3g}", "第 {step} 步：损失 {loss:.3g}"),
    "learn matrices page": (
        "the weights, {heads} heads side by side; colours from −{most:.3g} to {most:.3g} for all matrices and steps",
        "权重矩阵，{heads} 个头并排；颜色范围 −{most:.3g} 到 {most:.3g}，所有矩阵、所有步都相同",
    ),
    "learn others": (
        "--step N shows another step, --html FILE writes the page with a slider",
        "--step N 看其他步，--html FILE 写出带滑块的网页",
    ),
    "learn signs": (
        "; above 1/2 of the range #, above 1/8 +, below −1/8 -, below −1/2 =",
        "；高于范围的 1/2 为 #，高于 1/8 为 +，低于 −1/8 为 -，低于 −1/2 为 =",
    ),
    # the page of why scores are divided by √d_k
    "scale title": ("Why scores are divided by √dₖ", "得分为什么要除以 √dₖ"),
    "scale says": (
        "The numbers of q and k are independent, with mean 0 and variance 1. q·k is a sum of dₖ products, so its "
        "variance is about dₖ; that of q·k/√dₖ is about 1, whatever dₖ is. Move the slider and compare.",
        "q 和 k 的各分量相互独立，均值为 0，方差为 1。q·k 是 dₖ 个乘积之和，方差约为 dₖ；除以 √dₖ 之后，"
        "无论 dₖ 多大，方差都约为 1。拖动滑块对比。",
    ),
    "scale scores": ("Scores: how they spread, from −{edge} to {edge}", "得分的分布，范围 −{edge} 到 {edge}"),
    "scale variance": ("variance", "方差"),
    "scale weights": (
        "Softmax: a query's weights, the largest first; full height is 1",
        "softmax：一个查询的各权重，从大到小；满高为 1",
    ),
    "scale largest": ("largest weight a", "最大权重 a"),
    "scale slopes": (
        "Gradient a(1−a) of each of these weights; full height is 1/4",
        "这些权重各自的梯度 a(1−a)；满高为 1/4",
    ),
    "scale slope": ("a(1−a) of the largest weight", "最大权重的 a(1−a)"),
    "scale means": (
        "Means over {queries} random queries with {keys} keys each. a(1−a) is what a weight changes by with its own "
        "score, the derivative ∂a/∂s; it is 1/4 at most. Where the largest weight is near 1, the softmax is saturated: "
        "all these gradients are near 0, and training can hardly change q and k any more.",
        "为 {queries} 个随机查询（各有 {keys} 个键）的平均值。a(1−a) 是权重随自身得分的变化，即导数 ∂a/∂s，最大为 1/4。"
        "最大权重接近 1 时 softmax 饱和：这些梯度都接近 0，训练几乎无法再改变 q 和 k。",
    ),
}
