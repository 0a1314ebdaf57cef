"""What each step of attention does."""

WORDS: dict[str, tuple[str, str]] = {
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
}
