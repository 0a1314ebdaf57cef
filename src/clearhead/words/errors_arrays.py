"""Errors of arrays and rules in Chinese: the shapes of q, k, v and of layers, their dtypes, the rules' values."""

_SPANS = "spans=(query_spans, key_spans, table)"

CHINESE = {
    # core/problem.py
    "{name} has {count} axes: expected at least two, ({rows}, {columns}).": (
        "{name} 有 {count} 个轴：应至少有两个，即 ({rows}, {columns})。"
    ),
    "{name}[None, :] makes one row of a vector.": "{name}[None, :] 把向量变成一行。",
    "{name} is {shape} but q is {q}: all need the same number of axes.": (
        "{name} 是 {shape}，而 q 是 {q}：它们的轴数必须相同。"
    ),
    "q has d_k {q} but k has d_k {k}: the last axes must agree for q·kᵀ.": (
        "q 的 d_k 为 {q}，而 k 的 d_k 为 {k}：计算 q·kᵀ 时两者的最后一个轴必须相等。"
    ),
    "q is {q} and {name} is {shape}.": "q 是 {q}，{name} 是 {shape}。",
    "{name} has batch {batch} but q has batch {q}: they must be equal.": (
        "{name} 的 batch 为 {batch}，而 q 的 batch 为 {q}：两者必须相等。"
    ),
    "v has {values} keys but k has {keys}: each key needs its value.": (
        "v 有 {values} 个键，而 k 有 {keys} 个：每个键都要有对应的值。"
    ),
    "k is {k} and v is {v}.": "k 是 {k}，v 是 {v}。",
    "k has {keys} heads but q has {queries}: query heads must be a multiple of key heads.": (
        "k 有 {keys} 个头，而 q 有 {queries} 个：查询头数必须是键头数的倍数。"
    ),
    "v has {values} heads but k has {keys}: each key head needs its value head.": (
        "v 有 {values} 个头，而 k 有 {keys} 个：每个键头都要有对应的值头。"
    ),
    "q is {q}. If yours is (batch, length, heads, d), swap axes 1 and 2.": (
        "q 是 {q}。如果您的是 (batch, length, heads, d)，请交换轴 1 和轴 2。"
    ),
    "{name} is {dtype}: expected float64, float32, bfloat16 or float16.": (
        "{name} 是 {dtype}：应为 float64、float32、bfloat16 或 float16。"
    ),
    "{name}.astype(np.float32), or {name}.float() for a tensor.": (
        "{name}.astype(np.float32)；张量则用 {name}.float()。"
    ),
    "{name} is {dtype} but q is {other}: q, k and v must have one dtype.": (
        "{name} 是 {dtype}，而 q 是 {other}：q、k 和 v 的 dtype 必须相同。"
    ),
    # textbook/shapes.py, trace.py, trace_layer.py and trace_weights.py
    "convention is {value}: expected 'rows' (X·W) or 'columns' (W·X).": (
        "convention 为 {value}：应为 'rows'（X·W）或 'columns'（W·X）。"
    ),
    "{name} is {shape} but {input} has d_model {width}: they must meet.": (
        "{name} 是 {shape}，而 {input} 的 d_model 为 {width}：两者必须一致。"
    ),
    "it fits as its transpose: {name}.T, or convention='{other}' for all.": (
        "转置后即可匹配：{name}.T，或对全部使用 convention='{other}'。"
    ),
    "it fits as its transpose.": "转置后即可匹配。",
    "context has batch {context} but x has batch {x}: they must be equal.": (
        "context 的 batch 为 {context}，而 x 的 batch 为 {x}：两者必须相等。"
    ),
    "w_k makes {keys} key heads but num_heads is {heads}: query heads must be a multiple of key heads.": (
        "w_k 给出 {keys} 个键头，而 num_heads 为 {heads}：查询头数必须是键头数的倍数。"
    ),
    "w_o is {shape} but the heads are {heads}·{width} = {joined} wide.": (
        "w_o 是 {shape}，而各头合起来的宽度是 {heads}·{width} = {joined}。"
    ),
    "{name} is {width} wide, which {wanted} does not divide.": "{name} 的宽度是 {width}，不能被 {wanted} 整除。",
    "d_k {width}, the width of one query head": "d_k {width}（一个查询头的宽度）",
    "{count} key heads": "{count} 个键头",
    "{name} is (d_model, heads·width).": "{name} 是 (d_model, heads·width)。",
    "{name} has {count} axes: expected at least two.": "{name} 有 {count} 个轴：应至少有两个。",
    "{name} has shape {shape}: expected one number per output column, ({columns},).": (
        "{name} 的形状为 {shape}：每个输出列应有一个数，即 ({columns},)。"
    ),
    "{name} has shape {shape}: expected one number per output column, {columns}.": (
        "{name} 的形状为 {shape}：每个输出列应有一个数，即 {columns}。"
    ),
    "b_o is given but w_o is not: a bias of the output projection needs one.": (
        "给出了 b_o 却没有 w_o：有输出投影才有它的偏置。"
    ),
    "a page computes the weights from q and k, and here the weights themselves were given.": (
        "网页要由 q 和 k 计算权重，而这里给出的就是权重。"
    ),
    "print(trace), or clearhead trace without --html, shows the steps.": (
        "print(trace)，或不带 --html 的 clearhead trace，会显示各个步骤。"
    ),
    "{name} has {strings} strings for {count} keys: expected one for each.": (
        "{name} 有 {strings} 个字符串，而键有 {count} 个：每个键应有一个。"
    ),
    "{name} has {strings} strings for {count} queries: expected one for each.": (
        "{name} 有 {strings} 个字符串，而查询有 {count} 个：每个查询应有一个。"
    ),
    "{name} is {value}: expected a list of strings.": "{name} 为 {value}：应为字符串的列表。",
    "source_tokens is given, but tokens, which name the queries, are not.": (
        "给出了 source_tokens，却没有给出命名查询的 tokens。"
    ),
    "tokens cannot name {queries} queries and {keys} keys at once: they are not one text.": (
        "tokens 无法同时命名 {queries} 个查询和 {keys} 个键：它们不是同一段文本。"
    ),
    "tokens=[…] for the queries, source_tokens=[…] for the keys.": "查询用 tokens=[…]，键用 source_tokens=[…]。",
    "weights holds {odd}: a weight is a share, finite and not below 0.": (
        "weights 含有 {odd}：权重是份额，应为有限且不小于 0 的数。"
    ),
    "scores may be anything; the softmax makes shares of them.": "得分可以是任意数，softmax 会把它们变成份额。",
    "weights is {weights} and v is {v}: expected as many axes, at least two.": (
        "weights 是 {weights}，v 是 {v}：两者轴数应相同，且至少为两个。"
    ),
    "v is {shape} for 4 weights.": "权重有 4 个时，v 是 {shape}。",
    "weights is {weights} and v is {v}: each of the {count} weights of a query needs a value.": (
        "weights 是 {weights}，v 是 {v}：一个查询的 {count} 个权重各要有一个值。"
    ),
    "weights.swapaxes(-1, -2) would fit, or convention='columns'.": (
        "weights.swapaxes(-1, -2) 即可，或用 convention='columns'。"
    ),
    "weights is {weights} and v is {v}: batches must be equal, and query heads a multiple of the values' {axis}.": (
        "weights 是 {weights}，v 是 {v}：batch 必须相等，查询头数必须是值的 {axis} 的倍数。"
    ),
    # core/rules.py and core/rule_values.py
    "{given} is given but {other} is not: a segment needs both sides.": (
        "给出了 {given} 却没有 {other}：分段须两边都给出。"
    ),
    "{name} is {value}: expected a whole number from {least} up.": "{name} 为 {value}：应为不小于 {least} 的整数。",
    "{name} is {value}: expected a whole number from {least} to {most}.": (
        "{name} 为 {value}：应为 {least} 到 {most} 的整数。"
    ),
    "{name} is {value}: expected a whole number.": "{name} 为 {value}：应为整数。",
    "{name} {value} is outside 0..{last}.": "{name} {value} 超出 0..{last}。",
    "there is no {name}.": "没有 {name}。",
    "{name} is too large for a float: the largest is 1.8e308.": "{name} 超出浮点数的范围：最大为 1.8e308。",
    "{name} is {value}: expected a number.": "{name} 为 {value}：应为数。",
    "{name} is {value}: expected a finite number.": "{name} 为 {value}：应为有限的数。",
    "leave {name} out for its default.": "去掉 {name} 即使用默认值。",
    "{name} is {dtype}: expected numbers.": "{name} 是 {dtype}：应为数。",
    "softcap is {cap}: expected a positive number c, for c·tanh(s/c).": (
        "softcap 为 {cap}：应为正数 c，用于 c·tanh(s/c)。"
    ),
    "softcap=None turns it off.": "softcap=None 会关闭它。",
    "{name} is {value}: expected True or False.": "{name} 为 {value}：应为 True 或 False。",
    "window is {value}: expected (left, right), each a whole number of keys from 0 up, or None.": (
        "window 为 {value}：应为 (left, right)，各为不小于 0 的键数或 None。"
    ),
    "window=(255, 0) sees the last 256 keys, itself included.": "window=(255, 0) 看到包括自身在内的最近 256 个键。",
    "mask is {dtype}: expected bool, True = may attend.": "mask 是 {dtype}：应为 bool，True 表示可以关注。",
    "numbers to add to the scores go in `bias`; mask.astype(bool) makes 1/0 a mask.": (
        "要加到得分上的数放在 `bias` 中；mask.astype(bool) 把 1/0 变成掩码。"
    ),
    "bias is {dtype}: expected a float dtype.": "bias 是 {dtype}：应为浮点类型。",
    "True/False per position goes in `mask`.": "各位置的 True/False 放在 `mask` 中。",
    "{name} has shape {shape}, which does not broadcast to {axes}.": ("{name} 的形状为 {shape}，不能广播为 {axes}。"),
    "one {name} per batch is {name}[:, None, None, :] for keys alone.": (
        "若每个 batch 各有一个 {name}，只针对键，应写成 {name}[:, None, None, :]。"
    ),
    "{name} has shape {shape}: expected one number per query head, (heads {heads},).": (
        "{name} 的形状为 {shape}：每个查询头应有一个数，即 (heads {heads},)。"
    ),
    "{name} is {dtype}: expected a float dtype.": "{name} 是 {dtype}：应为浮点类型。",
    "{name} is {value}: expected finite numbers.": "{name} 为 {value}：应为有限的数。",
    "{name} goes up to {most}: expected whole numbers up to 2^53.": "{name} 最大为 {most}：应为不超过 2^53 的整数。",
    "{name} is {dtype}: expected whole numbers.": "{name} 是 {dtype}：应为整数。",
    "{name} has shape {shape}: expected a single number.": "{name} 的形状为 {shape}：应为单个数。",
    "{name} has shape {shape}: expected {axes}.": "{name} 的形状为 {shape}：应为 {axes}。",
    "{name} is {value}: each must lie between 0 and the number of {axis}, {most}.": (
        "{name} 为 {value}：每个数应在 0 到 {axis} 的个数 {most} 之间。"
    ),
    "causal and window need query_offset when queries ({queries}) and keys ({keys}) differ: peers disagree about it.": (
        "查询数（{queries}）与键数（{keys}）不同时，causal 和 window 需要 query_offset：各家库的做法不一致。"
    ),
    "query_offset=0 aligns the first query with the first key (PyTorch, JAX); query_offset={offset} aligns "
    "the last query with the last key (FlashAttention, a key-value cache).": (
        "query_offset=0 让第一个查询对齐第一个键（PyTorch、JAX）；query_offset={offset} 让最后一个查询对齐最后一个键"
        "（FlashAttention、键值缓存）。"
    ),
    "query_offset is {value}: expected positions between -2^53 and 2^53.": (
        "query_offset 为 {value}：应为 -2^53 到 2^53 之间的位置。"
    ),
    "rotary is {value}: expected the base of the angles, a positive number.": (
        "rotary 为 {value}：应为角度的底数，即一个正数。"
    ),
    # core/spans.py
    "spans is {value}: expected three arrays.": "spans 为 {value}：应为三个数组。",
    _SPANS + ": a label per query, a label per key, and what each pair of labels adds.": (
        _SPANS + "：每个查询一个标签，每个键一个标签，以及每对标签加上的数。"
    ),
    "spans[0], the query labels, is {dtype}: expected whole numbers.": ("spans[0]（查询标签）是 {dtype}：应为整数。"),
    "spans[0], the query labels, has shape {shape}: expected {axes}.": (
        "spans[0]（查询标签）的形状为 {shape}：应为 {axes}。"
    ),
    "spans[0], the query labels, has shape {shape}: expected {axes}, or {one} for every batch alike.": (
        "spans[0]（查询标签）的形状为 {shape}：应为 {axes}；各批次相同则为 {one}。"
    ),
    "spans[0], the query labels, goes up to {label}: the table has {labels} {most}, so each must be below {most}.": (
        "spans[0]（查询标签）最大为 {label}：表的 {labels} 为 {most}，因此每个标签都应小于 {most}。"
    ),
    "spans[1], the key labels, is {dtype}: expected whole numbers.": ("spans[1]（键标签）是 {dtype}：应为整数。"),
    "spans[1], the key labels, has shape {shape}: expected {axes}.": (
        "spans[1]（键标签）的形状为 {shape}：应为 {axes}。"
    ),
    "spans[1], the key labels, has shape {shape}: expected {axes}, or {one} for every batch alike.": (
        "spans[1]（键标签）的形状为 {shape}：应为 {axes}；各批次相同则为 {one}。"
    ),
    "spans[1], the key labels, goes up to {label}: the table has {labels} {most}, so each must be below {most}.": (
        "spans[1]（键标签）最大为 {label}：表的 {labels} 为 {most}，因此每个标签都应小于 {most}。"
    ),
    "a label below 0 adds nothing.": "小于 0 的标签不加任何数。",
    "spans[2], the table, is {dtype}: expected a float dtype.": "spans[2]（表）是 {dtype}：应为浮点类型。",
    "np.where(may_attend, 0.0, -np.inf) makes a table of True and False.": (
        "np.where(may_attend, 0.0, -np.inf) 把 True 和 False 变成表。"
    ),
    "spans[2], the table, has shape {shape}: expected (query_spans, key_spans), or one per head.": (
        "spans[2]（表）的形状为 {shape}：应为 (query_spans, key_spans)，或每个头一个。"
    ),
    "spans[2], the table, holds NaN or +inf: expected finite numbers, or -inf, which forbids.": (
        "spans[2]（表）含有 NaN 或 +inf：应为有限的数，或表示禁止的 -inf。"
    ),
    "spans[2], the table, has shape {shape}, which does not broadcast to {axes}.": (
        "spans[2]（表）的形状为 {shape}，不能广播为 {axes}。"
    ),
    # core/arrays.py: what a file's values can be
    "{name} is a {type}: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.": (
        "{name} 是 {type}：应为 NumPy 数组、PyTorch 张量或支持 DLPack 的数组。"
    ),
    "np.asarray({name}, dtype=np.float64) makes one from numbers in a list.": (
        "np.asarray({name}, dtype=np.float64) 可由列表中的数生成数组。"
    ),
    "{name} is a ragged list: its rows differ in length.": "{name} 是参差不齐的列表：各行长度不同。",
    "{name} has layout {layout}: expected a dense tensor.": "{name} 的布局是 {layout}：应为稠密张量。",
    "{name}.to_dense() makes one.": "{name}.to_dense() 可得到稠密张量。",
    "{name} is a nested tensor: expected a dense one.": "{name} 是嵌套张量：应为稠密张量。",
    "{name} is {dtype}, which NumPy does not have.": "{name} 是 NumPy 没有的 {dtype}。",
    "{name}.float() converts it.": "请用 {name}.float() 转换。",
    # core/room.py
    "{wanted} would take {size}, and {free} are free.": "{wanted}需要 {size}，而可用的只有 {free}。",
    "every step of {weights} weights in float64": "以 float64 存放 {weights} 个权重的每一步",
    "fewer tokens, or ch.AttentionMatrix(q, k), which stores no weights.": (
        "减少词元，或用不存储权重的 ch.AttentionMatrix(q, k)。"
    ),
    "{name} in float64": "以 float64 存放 {name} ",
    "give fewer tokens or columns.": "请减少词元或列。",
    "give fewer tokens.": "请减少词元。",
    "fewer labels make a smaller table.": "减少标签，表就会变小。",
    "the queries and keys": "查询和键",
    "give smaller widths.": "请给出较小的宽度。",
    # shown(value) in errors.py
    "a {type} of shape {shape}": "形状为 {shape} 的 {type}",
    "an {type} of shape {shape}": "形状为 {shape} 的 {type}",
}
