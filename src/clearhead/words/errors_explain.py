"""Errors of `explain` and `view` in Chinese: models, texts, tokens, edits, and the page of a long text."""

CHINESE = {
    # explaining/checkpoint.py
    "{name} is not a directory here, the cache {cache} has no config.json with safetensors of it, "
    "and {variable} does not allow downloading it.": (
        "这里没有目录 {name}，缓存 {cache} 中也没有它的 config.json 和 safetensors，而 {variable} 不允许下载。"
    ),
    "{name} is not a directory here, the cache {cache} has no config.json with safetensors of it, "
    "and {host} cannot be reached to download it.": (
        "这里没有目录 {name}，缓存 {cache} 中也没有它的 config.json 和 safetensors，而且连接不上 {host}，无法下载。"
    ),
    "{name} is not a directory here, the cache {cache} has no config.json with safetensors of it, "
    "and {host} has no such model, or only for its owner.": (
        "这里没有目录 {name}，缓存 {cache} 中也没有它的 config.json 和 safetensors，"
        "{host} 上也没有这个模型，或者只有所有者能用。"
    ),
    "{name} is not a directory here, the cache {cache} has no config.json with safetensors of it, "
    "and it cannot be downloaded: {reason}": (
        "这里没有目录 {name}，缓存 {cache} 中也没有它的 config.json 和 safetensors，而且无法下载：{reason}"
    ),
    "{name} is not a directory here, and no model can have that name.": (
        "这里没有目录 {name}，也不可能有叫这个名称的模型。"
    ),
    "give --model the directory of a model, or owner/name as on huggingface.co.": (
        "请让 --model 为模型所在的目录，或 huggingface.co 上的“所有者/名称”。"
    ),
    "config.json says {key} {count}, but the weights have {tensors} tensors in all.": (
        "config.json 中 {key} 为 {count}，但权重总共只有 {tensors} 个张量。"
    ),
    "do config.json and the weights belong together?": "config.json 与权重是否配套？",
    "config.json makes a model of {parameters} parameters, but the weights have {stored} bytes.": (
        "按 config.json，模型有 {parameters} 个参数，但权重只有 {stored} 字节。"
    ),
    "the weights lack {lacking} and {count} more.": "权重中缺少 {lacking} 等，另缺 {count} 个。",
    "the weights lack {lacking}.": "权重中缺少 {lacking}。",
    # explaining/gpt2.py
    "the tokenizer gives id {token} but the model's vocabulary has {vocabulary} tokens.": (
        "分词器给出了编号 {token}，但模型的词表只有 {vocabulary} 个词元。"
    ),
    "the text has {tokens} tokens but the model has {positions} positions.": (
        "文本有 {tokens} 个词元，但模型只有 {positions} 个位置。"
    ),
    "clearhead explain --file FILE --windows shows it in windows. Models with more positions, for --model: "
    "openai-community/gpt2 has 1,024, HuggingFaceTB/SmolLM2-135M 8,192, Qwen/Qwen3-0.6B 40,960.": (
        "clearhead explain --file FILE --windows 会按窗口显示。--model 可用的、位置更多的模型："
        "openai-community/gpt2 1,024，HuggingFaceTB/SmolLM2-135M 8,192，Qwen/Qwen3-0.6B 40,960。"
    ),
    "{place} is not a directory.": "{place} 不是目录。",
    "a GPT-2 directory holds config.json, model.safetensors, tokenizer.json.": (
        "GPT-2 的目录中有 config.json、model.safetensors 和 tokenizer.json。"
    ),
    "the weights lack `{source}`, which a GPT-2 has.": "权重中缺少 GPT-2 应有的 `{source}`。",
    "is this a GPT-2 checkpoint?": "这是 GPT-2 的权重吗？",
    "`{source}` has shape {stored}, but config.json makes it {shape}.": (
        "`{source}` 的形状为 {stored}，但按 config.json 应为 {shape}。"
    ),
    "{path} is for model_type {kind}, not 'gpt2'.": "{path} 的 model_type 是 {kind}，而不是 'gpt2'。",
    "only the GPT-2 layout loads here; its config says model_type gpt2.": (
        "这里只能读取 GPT-2 格式，其配置中 model_type 为 gpt2。"
    ),
    "n_embd {width} is not a multiple of n_head {heads}.": "n_embd {width} 不是 n_head {heads} 的倍数。",
    "activation_function {activation} is unknown: expected one of {known}.": (
        "未知的 activation_function {activation}：应为 {known} 之一。"
    ),
    "add_cross_attention is set, and only decoders without it load here.": (
        "设置了 add_cross_attention，而这里只能读取没有交叉注意力的解码器。"
    ),
    "layer_norm_epsilon is {epsilon}: expected a number from 0 to 1.": (
        "layer_norm_epsilon 为 {epsilon}：应为 0 到 1 之间的数。"
    ),
    "{index} has no weight_map of tensor names to files.": "{index} 中没有把张量名对应到文件的 weight_map。",
    "{place} has no model.safetensors.": "{place} 中没有 model.safetensors。",
    "{pickle} is a pickle, which can run code: convert it to safetensors.": (
        "{pickle} 是 pickle 文件，可能执行代码：请转换为 safetensors。"
    ),
    "{place} has no tokenizer.json, and no vocab.json with merges.txt.": (
        "{place} 中没有 tokenizer.json，也没有 vocab.json 和 merges.txt。"
    ),
    "the tokenizer cannot be read: {reason}.": "无法读取分词器：{reason}。",
    # explaining/hub.py
    "{name} predicts no next token, so it cannot continue the text.": "{name} 不预测下一个词元，因此无法续写。",
    "leave generate out.": "请去掉 --generate。",
    "{name} attends in {layers} …, and explain edits layers that each run once.": (
        "{name} 的注意力在 {layers} …… 中计算，而 explain 只能改动各运行一次的层。"
    ),
    "ch.change edits such models.": "这类模型请用 ch.change 改动。",
    "layer {name}: {path} computes several attentions in one call, and explain shows one.": (
        "层 {name}：{path} 一次调用计算多个注意力，而 explain 只显示一个。"
    ),
    "ch.watch shows each of them.": "ch.watch 会逐个显示。",
    "the model's name is empty.": "模型名为空。",
    "leave --model out for the one that ships with clearhead.": "去掉 --model 即使用 clearhead 附带的模型。",
    "{name} is not a GPT-2 directory, and other models need PyTorch and Transformers: "
    "there is no {missing} and no {other}.": (
        "{name} 不是 GPT-2 的目录，而其他模型需要 PyTorch 和 Transformers：这里没有 {missing} 和 {other}。"
    ),
    "{name} is not a GPT-2 directory, and other models need PyTorch and Transformers: there is no {missing}.": (
        "{name} 不是 GPT-2 的目录，而其他模型需要 PyTorch 和 Transformers：这里没有 {missing}。"
    ),
    "Transformers cannot load it: {reason}": "Transformers 无法加载它：{reason}",
    "its tokenizer does not say where its tokens stand in the text.": ("它的分词器不说明各词元在文本中的位置。"),
    "use a fast one.": "请用快速（fast）分词器。",
    "{name} is an encoder with a decoder: one text does not say what the decoder reads.": (
        "{name} 由编码器和解码器组成：只给一段文本，无法确定解码器读什么。"
    ),
    "its config has no {size}: expected a model of text.": "配置中没有 {size}：应为文本模型。",
    # explaining/running.py, texts.py, explain.py, windows.py and generating.py
    "layer {number} gives NaN or infinity: its weights are damaged, or too large.": (
        "第 {number} 层给出了 NaN 或无穷大：权重已损坏，或过大。"
    ),
    "its logits are NaN or infinite: its weights are damaged, or too large.": (
        "logit 为 NaN 或无穷大：权重已损坏，或过大。"
    ),
    "its derivatives are NaN or infinite: its weights are damaged, or too large.": (
        "导数为 NaN 或无穷大：权重已损坏，或过大。"
    ),
    "{name} is not UTF-8: character {place} is byte {byte}.": "{name} 不是 UTF-8：第 {place} 个字符是字节 {byte}。",
    "{name} is not UTF-8: character {place} is a lone surrogate.": (
        "{name} 不是 UTF-8：第 {place} 个字符是单独的代理项。"
    ),
    "save it as UTF-8.": "请存为 UTF-8。",
    "token {token} is neither a position 0..{last} nor a word of the text.": (
        "词元 {token} 既不是 0..{last} 中的位置，也不是文本中的词。"
    ),
    "the tokens are: {tokens}": "词元为：{tokens}",
    "layer {value} is outside 0..{last}: the model has {count} layers.": (
        "第 {value} 层超出 0..{last}：模型有 {count} 层。"
    ),
    "head {value} is outside 0..{last}: the model has {count} heads.": (
        "头 {value} 超出 0..{last}：模型有 {count} 个头。"
    ),
    "generate and edits are given together: edits are of the text alone.": (
        "续写和改动不能同时给出：改动只针对文本本身。"
    ),
    "one of them.": "只给其中一个。",
    "{path} is not a recording of a training run: {reason}.": "{path} 不是训练过程的记录：{reason}。",
    "training/record.py writes one.": "training/record.py 会写出这样的文件。",
    # explaining/why.py and derivatives.py
    "{name} runs in PyTorch, and why is for GPT-2 checkpoints, which run in NumPy.": (
        "{name} 在 PyTorch 中运行，而 --why 只用于在 NumPy 中运行的 GPT-2 模型。"
    ),
    "ch.watch(model, causes=True) finds causes in PyTorch's models.": (
        "PyTorch 模型请用 ch.watch(model, causes=True) 查找原因。"
    ),
    "{name} {token} is not one token: the model's vocabulary cuts it into {parts}.": (
        "{name} {token} 不是一个词元：模型的词表把它切成 {parts}。"
    ),
    "name one token, such as the first of these.": "请指定一个词元，例如其中的第一个。",
    "the model gives no next token, so there is no logit to explain.": "模型不预测下一个词元，没有可以解释的 logit。",
    "a decoder has one.": "解码器才有。",
    "the vocabulary has one token: there is none to compare it with.": "词表中只有一个词元：没有可对比的词元。",
    "token and against are both {token}: their difference is always 0.": (
        "--why 和 --against 都是词元 {token}：两者之差恒为 0。"
    ),
    "no derivative is taken through this edit.": "不支持对这种改动求导。",
    "cut, boost, tempered, scaled and off(to='zero') have one.": (
        "支持的有 cut、boost、tempered、scaled 和 off(to='zero')。"
    ),
    # explaining/edit_checks.py and changing
    "explain shows cut, boost, share, tempered, scaled and off(to='zero').": (
        "explain 只显示 cut、boost、share、tempered、scaled 和 off(to='zero')。"
    ),
    "ch.change runs it.": "请用 ch.change 运行。",
    "positions are 0 to {last}.": "位置为 0 到 {last}。",
    "layers are 0 to {last}.": "层为 0 到 {last}。",
    "its queries are none of the text's {tokens} tokens.": "其中的查询都不在文本的 {tokens} 个词元之内。",
    "its keys are none of the text's {tokens} tokens.": "其中的键都不在文本的 {tokens} 个词元之内。",
    "it changes nothing, since these queries do not see these keys.": (
        "没有改变任何东西，因为这些查询本来就看不到这些键。"
    ),
    "where attention is causal, a query sees itself and what is before it: later>earlier.": (
        "在因果注意力中，查询只看到自身和它之前的词元，应写成“后>前”。"
    ),
    "there is no layer {layer} in model {model}.": "模型 {model} 没有第 {layer} 层。",
    "there is no head {head} in model {model}, which has {count}.": (
        "模型 {model} 没有头 {head}，它每层有 {count} 个头。"
    ),
    "it names no layer and no head: every head would be off.": "没有指明层和头：这会关闭所有的头。",
    "expected QUERIES>KEYS.": "应为“查询>键”。",
    "expected KEYS=NUMBER.": "应为“键=数”。",
    "expected LAYER.HEAD.": "应为“层.头”。",
    "expected LAYER.HEAD after @.": "@ 之后应为“层.头”。",
    '--cut "on>sat": the query on does not see the key sat; "on>sat@0.3" in head 3 of layer 0.': (
        '--cut "on>sat" 让查询 on 看不到键 sat；"on>sat@0.3" 只在第 0 层第 3 个头中。'
    ),
    '--boost "sat=2" adds 2 to the logits of the key sat; "on>sat=2@0.3" for one query in head 3 of layer 0.': (
        '--boost "sat=2" 给键 sat 的 logit 加 2；"on>sat=2@0.3" 只对查询 on，且只在第 0 层第 3 个头中。'
    ),
    "--off 0.3 is head 3 of layer 0; 0.3,1.2 two heads; 0 a whole layer; .3 head 3 of every layer.": (
        "--off 0.3 是第 0 层第 3 个头；0.3,1.2 是两个头；0 是整个一层；.3 是每一层的第 3 个头。"
    ),
    "cut has neither queries nor keys: no weight would be left.": "cut 既没有查询也没有键：这会切断所有的权重。",
    "boost has no keys: expected those that get more.": "boost 没有键：应指明给哪些键增加。",
    "{name} is {value}: it chooses nothing.": "{name} 为 {value}：没有选中任何内容。",
    "heads holds {head}: expected {wanted}.": "heads 含有 {head}：应为{wanted}。",
    "a list of whole numbers from 0 up, or a dictionary of layer to such a list": (
        "由不小于 0 的整数组成的列表，或从层到这种列表的字典"
    ),
    "{name} has position {place}, and the text has {length} tokens.": (
        "{name} 指定了位置 {place}，而文本有 {length} 个词元。"
    ),
    "{name} is the word {word}, and the text has no such word.": "{name} 指定了词 {word}，而文本中没有这个词。",
    "Words are found whole, and by upper and lower case.": "按整个词查找，区分大小写。",
    "did you mean {near}? Words are found whole, and by upper and lower case.": (
        "是否想写 {near}？按整个词查找，区分大小写。"
    ),
    "{name} is the word {word}, and the text has it {times} times.": (
        "{name} 指定了词 {word}，而它在文本中出现了 {times} 次。"
    ),
    "{first} is the first, {all} all of them.": "{first} 是第一个，{all} 是全部。",
    "{name} is {numbered}, and the text has {word} once.": "{name} 为 {numbered}，而文本中 {word} 只出现了 1 次。",
    "{name} is {numbered}, and the text has {word} {times} times.": (
        "{name} 为 {numbered}，而文本中 {word} 只出现了 {times} 次。"
    ),
    # view, and what it reads
    "{path} has format {format}, and this version reads {own}: it was written by clearhead {version}.": (
        "{path} 的格式为 {format}，而本版本读取 {own}：它由 clearhead {version} 写出。"
    ),
    "{path} was not written by seen.save.": "{path} 不是由 seen.save 写出的。",
    "{path} is not a whole record of ch.watch": "{path} 不是 ch.watch 的完整记录",
    "{path} is not a whole record of ch.watch: {reason}": "{path} 不是 ch.watch 的完整记录：{reason}",
    "two layers have one name": "有两层同名",
    "a layer has only one of q and k": "有一层只有 q 和 k 中的一个",
    "layer {layer} has a derivative of shape {shape}": "层 {layer} 的导数形状为 {shape}",
    "layer {layer} has a matrix of shape {shape}": "层 {layer} 的矩阵形状为 {shape}",
    "layer {layer} has {name} of shape {shape}": "层 {layer} 的 {name} 形状为 {shape}",
    "no attention was seen: there is nothing to show.": "没有记录到注意力：没有可显示的内容。",
    "layer {layer} has no weights: its matrix is {shape}.": "层 {layer} 没有权重：它的矩阵是 {shape}。",
    "dtype is {value}: a page holds {names}.": "dtype 为 {value}：网页可存储 {names}。",
    "exact: there is no layer {layer}.": "exact：没有层 {layer}。",
    "seen are: {layers}": "记录到的有：{layers}",
    "exact: layer {layer} has no head {head}: seen are {kept}.": "exact：层 {layer} 没有头 {head}：记录到的有 {kept}。",
    "layer {layer} has numbers too large for {dtype}.": "层 {layer} 中有的数超出 {dtype} 的范围。",
    "the page would have about {size} MB with {count} exact heads, and above {most} MB browsers are slow to open it.": (
        "有 {count} 个精确的头时，网页约 {size} MB；超过 {most} MB，浏览器打开会很慢。"
    ),
    "{exact} chooses (layer, head) pairs: about {fit} fit; dtype='bfloat16' halves it; "
    "`clearhead view` serves any number.": (
        "{exact} 选定若干（层，头）：约可容纳 {fit} 个；dtype='bfloat16' 可减半；`clearhead view` 不限个数。"
    ),
    "{exact} chooses (layer, head) pairs: about {fit} fit; `clearhead view` serves any number.": (
        "{exact} 选定若干（层，头）：约可容纳 {fit} 个；`clearhead view` 不限个数。"
    ),
    "{file} is no name for a page, which is HTML.": "{file} 不能用作网页的文件名，网页是 HTML。",
}
