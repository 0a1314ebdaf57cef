"""Mistakes about padding: the lengths of keys and queries."""

from clearhead.diagnosing.mistakes.base import Mistake, square, when
from clearhead.diagnosing.recipe import Inputs


def _padding(inputs: Inputs) -> bool:
    return inputs.problem.kv_lengths is not None


def _uneven(inputs: Inputs) -> bool:
    lengths = inputs.problem.kv_lengths
    return lengths is not None and bool((lengths != lengths[0]).any())


_KEYS = ("scores = where(j < kv_lengths[:, None, None, None], scores, -inf)",) * 2
_SHORT = ("a length below the number of keys", "小于键数的长度")

LENGTHS = (
    Mistake(
        "padding ignored",
        when(_padding, {"padding": "missing"}),
        ("the padding is ignored: queries see the keys beyond each length", "忽略了填充：查询看到了长度之外的键"),
        ("scores = where(j < kv_lengths[:, None, None, None], scores, -inf)",) * 2,
        ("a length below the number of keys", "小于键数的长度"),
        rule="kv_lengths",
    ),
    Mistake(
        "padding inverted",
        when(_padding, {"padding": "inverted"}),
        ("the padding mask is inverted: only padding is seen", "填充掩码反了：只看得到填充"),
        ("j < kv_lengths, not j >= kv_lengths", "用 j < kv_lengths 而不是 j >= kv_lengths"),
        ("a length below the number of keys", "小于键数的长度"),
        rule="kv_lengths",
    ),
    Mistake(
        "padding on queries",
        when(lambda inputs: _padding(inputs) and square(inputs), {"padding": "queries"}),
        (
            "the padding mask hides queries where it should hide keys",
            "填充掩码遮蔽了查询，而应当遮蔽键",
        ),
        ("mask[:, None, None, :] is for keys", "mask[:, None, None, :] 才对应键"),
        ("a length below the number of keys", "小于键数的长度"),
        rule="kv_lengths",
    ),
    Mistake(
        "query lengths ignored",
        when(lambda inputs: inputs.problem.query_lengths is not None, {"query_padding": "missing"}),
        ("queries beyond their length are computed: they should be 0", "超出长度的查询也被计算了：它们的输出应为 0"),
        ("out = where(i < query_lengths[:, None, None, None], out, 0)",) * 2,
        ("a length below the number of queries", "小于查询数的长度"),
        rule="query_lengths",
    ),
    Mistake(
        "padding on both axes",
        when(lambda inputs: _padding(inputs) and square(inputs), {"padding": "both"}),
        ("the padding hides queries as well as keys", "填充除了遮蔽键，还遮蔽了查询"),
        ("mask[:, None, None, :] is for keys, and that is enough", "mask[:, None, None, :] 对应键，这就够了"),
        _SHORT,
        rule="kv_lengths",
        seldom=True,
    ),
    Mistake(
        "padding on the left",
        when(_padding, {"padding": "left"}),
        (
            "the padding is taken to be on the left: the last keys are seen, as many as each length says",
            "误把填充当作在左边：看到的是末尾的键，个数等于各自的长度",
        ),
        _KEYS,
        _SHORT,
        rule="kv_lengths",
        seldom=True,
    ),
    Mistake(
        "padding off by one",
        when(_padding, {"padding_shift": 1}, {"padding_shift": -1}),
        ("the lengths of the keys are off by one ({padding_shift:+d})", "键的长度差了一位（{padding_shift:+d}）"),
        _KEYS,
        _SHORT,
        rule="kv_lengths",
        seldom=True,
    ),
    Mistake(
        "one length for all",
        when(_uneven, {"padding": "shortest"}, {"padding": "longest"}),
        ("one length serves for the whole batch: {padding}", "整个批次共用一个长度：{padding}"),
        _KEYS,
        ("lengths that differ", "各不相同的长度"),
        rule="kv_lengths",
        seldom=True,
    ),
    Mistake(
        "padding tiled over heads",
        when(lambda inputs: _uneven(inputs) and inputs.problem.heads > 1, {"padding": "tiled"}),
        (
            "the lengths are tiled over the heads: head h of entry b has that of entry (b·heads + h) % batch",
            "长度按头整体平铺：条目 b 的头 h 用了条目 (b·heads + h) % batch 的长度",
        ),
        (
            "mask[:, None, None, :], or mask.repeat_interleave(heads, dim=0) where heads are in the batch",
            "用 mask[:, None, None, :]；头并入批次时用 mask.repeat_interleave(heads, dim=0)",
        ),
        ("lengths that differ, and more than one head", "各不相同的长度，且不止一个头"),
        rule="kv_lengths",
        seldom=True,
    ),
)
