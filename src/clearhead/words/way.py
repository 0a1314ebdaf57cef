"""The way from a text to a logit: the residual stream, what reads it and what is added to it."""

WORDS: dict[str, tuple[str, str]] = {
    "way": (
        "the way to {next} after {token}: what each part of the model adds to its logit",
        "从文本到 {token} 之后的 {next}：模型各部分为它的 logit 加上多少",
    ),
    "way heading": ("The way to the logit", "从文本到 logit"),
    "way title": ("The way to {next} after {token}", "从文本到 {token} 之后的 {next}"),
    "way title minus": (
        "The way to {next} minus that to {other}, after {token}",
        "{token} 之后：通向 {next} 的各项减去通向 {other} 的各项",
    ),
    "way stream": (
        "residual stream: {tokens} tokens × d_model {d_model}; here {token}",
        "残差流：{tokens} 个词元 × {d_model} 维；此处为 {token}",
    ),
    "way adds": ("adds", "加上"),
    "way sums": ("sum", "累计"),
    "way minus": ("minus {token}", "减 {token}"),
    "way of": ("the way to", "目标词元"),
    "way less": ("minus that to", "减去"),
    "way nothing": ("nothing", "不减"),
    "way layer": ("layer {layer}", "第 {layer} 层"),
    "way token": ("the token's embedding", "词元嵌入"),
    "way position": ("the position's embedding", "位置嵌入"),
    "way embeddings": ("the embedding", "嵌入"),
    "way centred norm": (
        "layer norm {d_model}, ‖x‖ {before} → {after}, σ {sigma}",
        "层归一化 {d_model}，‖x‖ {before} → {after}，σ {sigma}",
    ),
    "way plain norm": (
        "RMS norm {d_model}, ‖x‖ {before} → {after}, σ {sigma}",
        "RMS 归一化 {d_model}，‖x‖ {before} → {after}，σ {sigma}",
    ),
    "way norm zero": ("{norm}; adds 0", "{norm}；加上 0"),
    "way attention": ("attention, {heads} heads of {d_k}", "注意力，{heads} 个头，各 {d_k} 维"),
    "way attention alone": ("attention", "注意力"),
    "way bias": ("its bias", "其偏置"),
    "way most": ("head {first} {adds}, head {second} {more}", "头 {first} {adds}，头 {second} {more}"),
    "way most one": ("head {first} {adds}", "头 {first} {adds}"),
    "way mlp": ("MLP, {d_model} → {d_mlp} → {d_model}", "MLP，{d_model} → {d_mlp} → {d_model}"),
    "way mlp alone": ("MLP, {d_model} → {d_model}", "MLP，{d_model} → {d_model}"),
    "way norm": (
        "last norm {d_model}, ‖x‖ {before} → {after}",
        "最后的归一化 {d_model}，‖x‖ {before} → {after}",
    ),
    "way unembedding": ("unembedding, {d_model} → {vocabulary}", "输出层，{d_model} → {vocabulary}"),
    "way logit": ("logit of {next}", "{next} 的 logit"),
    "way note": (
        "with this run's σ of the last norm, {sigma:.4g}, the sum is within {difference:.1g} of the model's logit",
        "最后一次归一化的 σ 取本次运行的值 {sigma:.4g}，各项之和与模型的 logit 仅相差 {difference:.1g}",
    ),
    "way meaning": (
        "a part's number is what it wrote, not what the logit would be without it",
        "每个数是该部分写入的量，并不等于去掉它之后 logit 的变化",
    ),
    "way lens": (
        "sum: the logit if nothing more were added, with this σ (the logit lens)",
        "累计：若不再加入后面各项，以同一 σ 得到的 logit（logit lens）",
    ),
    "way zero": (
        "a norm inside a layer adds 0: it writes nothing, but changes what the next part reads",
        "层内的归一化贡献为 0：它不向残差流写入，只改变后续部分读到的内容",
    ),
    "way last": (
        "the last norm and the unembedding add only biases; 1/σ is in every number",
        "最后一次归一化与输出层只加上各自的偏置；每个数都已除以 σ",
    ),
    "way constant": (
        "adding one number to every logit changes no probability, so only differences of logits mean something",
        "所有 logit 加上同一个数，概率不变；因此只有 logit 之差才有意义",
    ),
    "way cap": (
        "these logits are those before the cap: the model's own are {cap}·tanh(logit/{cap})",
        "这里是限幅之前的 logit；模型最终的 logit 为 {cap}·tanh(logit/{cap})",
    ),
    "no way parts": (
        "no way to the logit: its layers' attention and MLP cannot be told apart",
        "无法列出通向 logit 的各项：分不清各层的注意力与 MLP 各写入了什么",
    ),
    "no way sum": (
        "no way to the logit: layer {layer} does more than add its attention and its MLP",
        "无法列出通向 logit 的各项：第 {layer} 层不只是加上注意力与 MLP 的输出",
    ),
    "no way norm": (
        "no way to the logit: before the unembedding stands no norm of a known form",
        "无法列出通向 logit 的各项：输出层之前没有已知形式的归一化",
    ),
    "no way logits": (
        "no way to the logit: its logits are changed after the unembedding",
        "无法列出通向 logit 的各项：输出层之后 logit 又被改变",
    ),
}
