"""Every sentence the reports say, in English and in Chinese, in one place."""

from typing import Literal

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

_WORDS: dict[str, tuple[str, str]] = {
    # what each step does
    "x": ("each token's vector: what enters the layer", "每个词元的向量，即本层的输入"),
    "x normalised": (
        "each token's vector, layer-normalised: what enters the layer",
        "每个词元的向量（已做层归一化），即本层的输入",
    ),
    "context": ("the other sequence, which keys and values come from", "另一个序列，键和值由它而来"),
    "q": ("queries: what each token looks for", "查询：每个词元在找什么"),
    "k": ("keys: what each token can be found by", "键：每个词元凭什么被找到"),
    "v": ("values: what each token hands on", "值：每个词元传递什么"),
    "scores": ("how well each query matches each key: their dot product", "每个查询与每个键的匹配程度：点积"),
    "scaled": ("kept small, so that the softmax stays soft", "缩小数值，使 softmax 不至于过尖"),
    "capped": ("scores bent below a cap", "用双曲正切限制分数的大小"),
    "biased": ("position or other knowledge added to the scores", "把位置等信息加到分数上"),
    "masked": ("what may not be seen becomes -∞", "不允许看到的位置变为 -∞"),
    "weights": ("every query's weights are positive and sum to 1", "每个查询的权重为正且总和为 1"),
    "heads": ("each head: a weighted mean of value rows", "每个头：值行的加权平均"),
    "concat": ("the heads side by side", "把各个头并排拼接"),
    "output": ("a weighted mean of value rows", "值行的加权平均"),
    "layer output": ("W^O mixes the heads: what the layer gives each token", "W^O 混合各头：本层给每个词元的输出"),
    "layer output joined": (
        "the heads side by side are the output: no W^O mixes them",
        "各头并排即为本层的输出：没有 W^O 来混合",
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
    "next": ("most likely next", "最可能的下一个词元"),
    "layer": ("layer {layer}, step by step (all {heads} heads)", "第 {layer} 层，逐步计算（共 {heads} 个头）"),
    "head": ("head {head} of layer {layer}: A", "第 {layer} 层第 {head} 个头：A"),
    "sharpest": (
        "chosen for token {token}: entropy {entropy:.2f} of at most {most:.2f} nats, the sharpest",
        "为词元 {token} 自动选择：熵 {entropy:.2f}（最大 {most:.2f}）奈特，最集中",
    ),
    "entropy": (
        "token {token}'s row: entropy {entropy:.2f} of at most {most:.2f} nats",
        "词元 {token} 的行：熵 {entropy:.2f}（最大 {most:.2f}）奈特",
    ),
    "axes": ("rows: queries, columns: keys", "行：查询，列：键"),
    "axes columns": ("rows: keys, columns: queries", "行：键，列：查询"),
    "legend": (
        "min {low:.3g}  max {high:.3g}  colour by the square root of the weight",
        "最小 {low:.3g}  最大 {high:.3g}  颜色按权重的平方根",
    ),
    "legend plain": ("min {low:.3g}  max {high:.3g}", "最小 {low:.3g}  最大 {high:.3g}"),
    "legend ramp": (
        "min {low:.3g}  max {high:.3g}  «{ramp}» by the square root of the weight",
        "最小 {low:.3g}  最大 {high:.3g}  «{ramp}» 按权重的平方根",
    ),
    "pooled": (
        "each cell is the mean over {rows:.3g} × {cols:.3g} weights",
        "每格是 {rows:.3g} × {cols:.3g} 个权重的平均",
    ),
    "masked cell": ("· masked", "· 被遮蔽"),
    "masked pixel": ("grey: masked", "灰色：被遮蔽"),
    "rows sum": ("rows sum to 1 (largest deviation {deviation:.1g})", "每行之和为 1（最大偏差 {deviation:.1g}）"),
    "how": (
        "how {token} came to be: o = Σ a·v, strongest first",
        "{token} 的输出如何得来：o = Σ a·v，最强者在前",
    ),
    "key": ("key", "键"),
    "weight": ("weight a", "权重 a"),
    "contribution": ("a·v, first {count} of {width}", "a·v，前 {count}/{width} 维"),
    "more": ("{count} more", "其余 {count} 个"),
    "agree": (
        "one token alone and the whole matrix agree: largest difference {difference:.1g}",
        "单个词元的算法与矩阵算法一致：最大差 {difference:.1g}",
    ),
    "check": (
        "the textbook and the {engine} engine agree: largest difference {difference:.1g}",
        "教科书算法与 {engine} 引擎一致：最大差 {difference:.1g}",
    ),
    # trace
    "three axes": (
        "three axes are read as (heads {heads}, tokens, width), each head attending on its own; a batch of {heads} "
        "texts is (batch, heads, tokens, width), so q[:, None], and a whole layer's (batch, tokens, d_model) is for "
        "ch.trace_layer",
        "三个轴按（头 {heads}，词元，宽度）理解，各头独立计算；若是 {heads} 条文本的批次，应为"
        "（批次，头，词元，宽度），即 q[:, None]；整层的（批次，词元，d_model）请用 ch.trace_layer",
    ),
    "head of": (
        "head {head} of {heads}; --json FILE writes all",
        "第 {head} 个头（共 {heads} 个）；--json FILE 写出全部",
    ),
    "cut": ("the first {rows} × {cols} of {all_rows} × {all_cols}", "前 {rows} × {cols}，共 {all_rows} × {all_cols}"),
    "claim right": ("✓ claimed {name}: right", "✓ 所声称的 {name}：正确"),
    "claim wrong": (
        "✗ claimed {name}: wrong, by up to {difference:.4g}",
        "✗ 所声称的 {name}：有误，最大相差 {difference:.4g}",
    ),
    "claimed": ("claimed", "声称"),
    "right": ("right", "正确"),
    "from own": ("from its own {source}", "由它自己的 {source} 应得"),
    "follows": (
        "  it does follow from the claimed {source}, so the mistake is made there",
        "  它确由所声称的 {source} 得出，错误出在那里",
    ),
    "also off": (
        "  and not even its own {source} give it: off by up to {difference:.4g}",
        "  它也不能由自己的 {source} 得出：最大相差 {difference:.4g}",
    ),
    "first wrong": (
        "the first wrong step is {name}, by up to {difference:.4g}",
        "第一个出错的步骤是 {name}，最大相差 {difference:.4g}",
    ),
    "also wrong": (
        "{name}: wrong too, and off from its own {source} by up to {difference:.4g}",
        "{name}：同样有误，且与它自己的 {source} 相差最大 {difference:.4g}",
    ),
    "follows on": ("{name}: wrong only because {source} is", "{name}：仅因 {source} 有误而错"),
    "wrong too": ("{name}: wrong too, by up to {difference:.4g}", "{name}：同样有误，最大相差 {difference:.4g}"),
    "all right": ("every claimed step is right: {names}", "所声称的每一步都正确：{names}"),
    "no claims": ("the file claims no values, so there is nothing to check", "文件没有声称任何数值，无需核对"),
    "both": ("; and ", "；并且"),
}


IN_FORMULAS = {
    ", -∞ where forbidden": "，禁止处为 -∞",
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
    return _WORDS[key][language == "zh"].format(**values)
