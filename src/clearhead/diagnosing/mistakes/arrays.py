"""Mistakes about which arrays meet: queries, keys and values mixed up, wrong axes, the cache, what a layer reads."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, decoding, several_heads, square, when, with_context
from clearhead.diagnosing.recipe import Change, Inputs


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's matrices, or of q, k and v, which decide what can be taken for what."""
    if inputs.layer is not None:
        return {name: inputs.layer.w[name].shape for name in "qkv"}
    return {name: x.shape for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)) if x is not None}


def _alike(names: str, inputs: Inputs) -> bool:
    shapes = _shapes(inputs)
    return inputs.weights is None and len({shapes.get(name) for name in names}) == 1


def _orders(inputs: Inputs) -> Iterable[Change]:
    orders = ("kvq", "vqk", "vkq", *(["kqv"] if with_context(inputs) else []))
    return [{"order": order} for order in orders] if _alike("qkv", inputs) else []


def _packed(inputs: Inputs) -> bool:
    return inputs.layer is not None and several_heads(inputs) and _alike("qkv", inputs) and not with_context(inputs)


def _same_heads(inputs: Inputs) -> bool:
    return square(inputs) and inputs.k.shape[1] == inputs.problem.heads


def _contexts(inputs: Inputs) -> Iterable[Change]:
    return [{"source": "x only"}, {"source": "swapped"}] if with_context(inputs) and square(inputs) else []


def _as_wide(inputs: Inputs) -> bool:
    """Is the output as wide as what enters?"""
    if inputs.layer is not None:
        return inputs.merged and inputs.theirs.shape[-1] == inputs.layer.x.shape[-1]
    return inputs.v is not None and inputs.v.shape[-1] == inputs.problem.d_k


_PACK = (
    "q, k, v = x @ w_qkv split in the order and layout in which it was packed",
    "按打包时的顺序和布局拆分 x @ w_qkv 得到 q、k、v",
)
_AXES = (
    "q, k and v are (batch, heads, n, d) at q @ k.swapaxes(-1, -2): one transpose too many, too few, or batch_first",
    "计算 q @ k.swapaxes(-1, -2) 时 q、k、v 应为 (batch, heads, n, d)：检查是否多了或少了一次转置，或 batch_first 不对",
)
_CACHE = (
    "write the new keys and values at the cache's length, then attend, then add to the length",
    "先把新的键和值写到缓存当前长度处，再计算注意力，最后增加长度",
)
_STEP = ("more keys than queries, as with a cache", "键比查询多，如使用缓存时")

ARRAYS = (
    Mistake(
        "k and v swapped",
        when(lambda inputs: _alike("kv", inputs), {"order": "qvk"}),
        ("keys and values are swapped", "键与值弄反了"),
        (
            "attention(q, k, v): keys before values, in the call and where they are packed",
            "attention(q, k, v)：调用和打包时都是键在前、值在后",
        ),
        ("values that differ from the keys", "与键不同的值"),
        seldom=True,
    ),
    Mistake(
        "packed in another order",
        _orders,
        ("queries, keys and values are taken in another order: {order}", "查询、键、值的顺序弄错了：{order}"),
        _PACK,
        ("queries, keys and values that differ", "各不相同的查询、键和值"),
        seldom=True,
    ),
    Mistake(
        "packed in another layout",
        when(
            _packed,
            *(
                {"packing": kind}
                for kind in ("read per head", "read interleaved", "packed per head", "packed interleaved")
            ),
        ),
        ("the packed projections are split in another layout: {packing}", "打包的投影按另一种布局拆分了：{packing}"),
        _PACK,
        ("more than one head", "不止一个头"),
        seldom=True,
    ),
    Mistake(
        "queries in place of keys",
        when(square, {"keys": "q"}),
        ("it is Q·Qᵀ: queries in place of keys", "算的是 Q·Qᵀ：把查询当成了键"),
        ("scores = q @ k.swapaxes(-1, -2)",) * 2,
        ("queries that differ from the keys", "与键不同的查询"),
        seldom=True,
    ),
    Mistake(
        "keys in place of queries",
        when(square, {"queries": "k"}),
        ("it is K·Kᵀ: keys in place of queries", "算的是 K·Kᵀ：把键当成了查询"),
        ("scores = q @ k.swapaxes(-1, -2)",) * 2,
        ("queries that differ from the keys", "与键不同的查询"),
        seldom=True,
    ),
    Mistake(
        "values in place of keys",
        when(lambda inputs: inputs.v is not None and inputs.v.shape[-1] == inputs.problem.d_k, {"keys": "v"}),
        ("it is Q·Vᵀ: values in place of keys", "算的是 Q·Vᵀ：把值当成了键"),
        ("scores = q @ k.swapaxes(-1, -2)",) * 2,
        ("values that differ from the keys", "与键不同的值"),
        seldom=True,
    ),
    Mistake(
        "attention over heads",
        lambda inputs: (
            [
                {"across": "heads"},
                *when(lambda inputs: inputs.problem.causal, {"across": "heads", "causal": "missing"})(inputs),
            ]
            if _same_heads(inputs) and several_heads(inputs)
            else []
        ),
        (
            "the heads of each token attend to each other, not the tokens: the axes of heads and tokens are swapped",
            "相互关注的是同一词元的各个头，而不是各个词元：头与词元两轴弄反了",
        ),
        _AXES,
        ("more than one head and more than one token", "不止一个头且不止一个词元"),
        seldom=True,
    ),
    Mistake(
        "attention over the batch",
        lambda inputs: (
            [
                {"across": "batch"},
                *when(lambda inputs: inputs.problem.causal, {"across": "batch", "causal": "missing"})(inputs),
            ]
            if _same_heads(inputs) and inputs.problem.batch > 1
            else []
        ),
        (
            "the batch entries attend to each other, not the tokens: the axes of batch and tokens are swapped",
            "相互关注的是各个批次条目，而不是各个词元：批次与词元两轴弄反了",
        ),
        _AXES,
        ("more than one batch entry and more than one token", "不止一个批次条目且不止一个词元"),
        seldom=True,
    ),
    Mistake(
        "context ignored or swapped",
        _contexts,
        ("the layer reads the wrong tokens: {source}", "层读取的词元不对：{source}"),
        ("q = x @ w_q;  k, v = context @ w_k, context @ w_v",) * 2,
        ("a context other than x", "与 x 不同的 context"),
        seldom=True,
    ),
    Mistake(
        "residual included",
        when(_as_wide, {"added": "residual"}),
        (
            "the residual is included: the layer's input (or q) is added to the output",
            "结果中带有残差：输出又加上了层的输入（或 q）",
        ),
        ("compare the attention's own output, before x + …", "请对比注意力自身的输出，即 x + … 之前"),
        ("an input other than 0", "不为 0 的输入"),
        seldom=True,
    ),
    Mistake(
        "layer norm included",
        lambda inputs: [
            {"added": "norm"},
            *when(_as_wide, {"added": "norm of sum"})(inputs),
            *([{"source": "normalised"}] if inputs.layer is not None else []),
        ],
        ("a layer norm is included: {added}{source}", "结果中带有层归一化：{added}{source}"),
        (
            "compare the attention alone: what enters it, and what leaves it before the norm",
            "只对比注意力本身：进入它的输入，以及归一化之前的输出",
        ),
        ("tokens that are not normalised", "未归一化的词元"),
        seldom=True,
    ),
    Mistake(
        "newest slot of the cache empty",
        when(decoding, *({"cache": kind} for kind in ("newest empty", "newest keys empty", "newest values empty"))),
        ("the newest slots of the cache were never written: {cache}", "缓存中最新的位置没有写入：{cache}"),
        _CACHE,
        _STEP,
        seldom=True,
    ),
    Mistake(
        "newest slot of the cache early",
        when(decoding, {"cache": "newest early"}),
        (
            "the new keys and values are written one slot early: the last old one is lost, and the last slot is 0",
            "新的键和值写早了一个位置：最后一个旧的被覆盖，最后的位置是 0",
        ),
        _CACHE,
        _STEP,
        seldom=True,
    ),
    Mistake(
        "newest keys twice",
        when(decoding, {"cache": "newest twice"}),
        ("the new keys and values are in the cache twice, and count twice", "新的键和值在缓存中有两份，被算了两次"),
        _CACHE,
        _STEP,
        seldom=True,
    ),
    Mistake(
        "cache of another beam",
        when(lambda inputs: decoding(inputs) and inputs.problem.batch > 1, {"cache": "another batch"}),
        (
            "the old keys and values are those of another batch entry (as when beams are not reordered)",
            "旧的键和值属于别的批次条目（例如束搜索后没有重排缓存）",
        ),
        ("cache = cache[beam_indices], before the next step", "下一步之前执行 cache = cache[beam_indices]"),
        ("batch entries that differ", "各不相同的批次条目"),
        seldom=True,
    ),
    Mistake(
        "old keys ignored",
        when(decoding, {"cache": "ignored"}),
        ("the cache is ignored: queries see the new keys only", "忽略了缓存：查询只看到新的键"),
        ("k = concat([cache_k, k], axis=2), and v alike", "k = concat([cache_k, k], axis=2)，v 亦然"),
        _STEP,
        seldom=True,
    ),
)
