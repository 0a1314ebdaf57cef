"""Mistakes about which keys a query sees, and about how a mask acts."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, hides, square, when
from clearhead.diagnosing.recipe import Change, Inputs


def _causal(inputs: Inputs) -> bool:
    return inputs.problem.causal


def _corners(inputs: Inputs) -> Iterable[Change]:
    p = inputs.problem
    if not p.causal and p.window == (None, None):
        return []
    corners = (("first corner", 0), ("last corner", p.keys - p.queries))
    return [{"causal": name} for name, offset in corners if (p.query_offset != offset).any()]


def _windows(inputs: Inputs) -> Iterable[Change]:
    left, right = inputs.problem.window
    sides: list[Change] = []
    if left is not None:
        sides += [{"window": (1, 0)}, *([{"window": (-1, 0)}] if left else [])]
    if right is not None and not (inputs.problem.causal and right == 0):
        sides += [{"window": (0, 1)}, *([{"window": (0, -1)}] if right else [])]
    if left and right:
        sides += [{"window": (1, 1)}, {"window": (-1, -1)}]
    return sides


def _fills(inputs: Inputs) -> Iterable[Change]:
    """A finite number in hidden places, which is fitted to theirs."""
    return [{"masking": kind, "fill": None} for kind in ("fill", "add")] if hides(inputs) else []


def _all_masks(inputs: Inputs) -> Iterable[Change]:
    """All rules missing at once, where there are at least three."""
    p = inputs.problem
    rules: dict[str, tuple[bool, object]] = {
        "causal": (p.causal, "missing"),
        "window": (p.window != (None, None), None),
        "mask": (p.mask is not None, "missing"),
        "padding": (p.kv_lengths is not None, "missing"),
        "query_padding": (p.query_lengths is not None, "missing"),
        "segments": (p.query_segments is not None, "missing"),
    }
    change = {field: value for field, (active, value) in rules.items() if active}
    return [change] if len(change) > 2 else []


def _mask(inputs: Inputs) -> bool:
    return inputs.problem.mask is not None


def _padding(inputs: Inputs) -> bool:
    return inputs.problem.kv_lengths is not None


_MORE = ("more than one token", "不止一个词元")
_HIDDEN = ("a key that is hidden from some query", "对某个查询被遮蔽的键")
_TRIL = ("scores = where(j <= i + offset, scores, -inf)",) * 2
_WHERE = (
    "scores = where(mask, scores, -inf), before the softmax",
    "scores = where(mask, scores, -inf)，在 softmax 之前",
)
_WINDOW = (
    "i + offset - left <= j <= i + offset + right, both ends included",
    "i + offset - left <= j <= i + offset + right，两端都含",
)

MASKS = (
    Mistake(
        "causal mask missing",
        when(_causal, {"causal": "missing"}),
        ("the causal mask is missing: queries see later keys", "缺少因果掩码：查询看到了后面的键"),
        _TRIL,
        _MORE,
        rule="causal",
    ),
    Mistake(
        "causal mask inverted",
        when(_causal, {"causal": "inverted"}, {"causal": "upper"}),
        ("the causal mask is inverted: queries see the later keys only", "因果掩码反了：查询只看到后面的键"),
        ("tril, not triu; and know whether True means may attend", "用 tril 而不是 triu；并弄清 True 是否表示可见"),
        _MORE,
        rule="causal",
    ),
    Mistake(
        "causal mask strict",
        when(_causal, {"causal": "strict"}),
        ("the causal mask is strict: a query does not see its own position", "因果掩码过严：查询看不到自己的位置"),
        ("j <= i, not j < i: the diagonal is seen", "用 j <= i 而不是 j < i：对角线可见"),
        _MORE,
        rule="causal",
    ),
    Mistake(
        "causal mask in the other corner",
        _corners,
        (
            "the causal mask is aligned to the {causal}: with n ≠ m the first query belongs elsewhere",
            "因果掩码对齐到了另一角（{causal}）：n ≠ m 时第一个查询的位置不同",
        ),
        (
            "j <= i + offset: offset 0 is the first corner, m - n the last",
            "j <= i + offset：offset 为 0 是左上角，m - n 是右下角",
        ),
        ("n ≠ m", "n ≠ m"),
        rule="query_offset",
    ),
    Mistake(
        "mask ignored",
        when(_mask, {"mask": "missing"}),
        ("the mask is ignored", "忽略了掩码"),
        _WHERE,
        _HIDDEN,
        rule="mask",
    ),
    Mistake(
        "mask inverted",
        when(_mask, {"mask": "inverted"}),
        (
            "the mask is inverted: what may attend is hidden, and the other way round",
            "掩码反了：该看到的被遮蔽，该遮蔽的却看得到",
        ),
        (
            "mask = ~mask (True means masked in nn.MultiheadAttention, may attend in scaled_dot_product_attention)",
            "mask = ~mask（nn.MultiheadAttention 中 True 表示遮蔽，scaled_dot_product_attention 中表示可见）",
        ),
        _HIDDEN,
        rule="mask",
    ),
    Mistake(
        "mask transposed",
        when(lambda inputs: _mask(inputs) and square(inputs), {"mask": "transposed"}),
        (
            "the mask acts on queries where it should on keys: it is transposed",
            "掩码本应作用于键，却作用于查询：它被转置了",
        ),
        ("mask[:, None, None, :] is for keys", "mask[:, None, None, :] 才对应键"),
        ("a mask that is not symmetric", "不对称的掩码"),
        rule="mask",
    ),
    Mistake(
        "padding ignored",
        when(_padding, {"padding": "missing"}),
        ("the padding is ignored: queries see the keys behind each length", "忽略了填充：查询看到了长度之外的键"),
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
        ("queries behind their length are computed: they should be 0", "超出长度的查询也被计算了：它们的输出应为 0"),
        ("out = where(i < query_lengths[:, None, None, None], out, 0)",) * 2,
        ("a length below the number of queries", "小于查询数的长度"),
        rule="query_lengths",
    ),
    Mistake(
        "segments ignored",
        when(lambda inputs: inputs.problem.query_segments is not None, {"segments": "missing"}),
        ("the segments are ignored: packed sequences see each other", "忽略了分段：打包在一起的序列互相可见"),
        ("scores = where(query_segments == kv_segments, scores, -inf)",) * 2,
        ("two segments", "两个分段"),
        rule="query_segments",
    ),
    Mistake(
        "window missing",
        when(lambda inputs: inputs.problem.window != (None, None), {"window": None}),
        ("the window is missing: queries see keys far away", "缺少窗口：查询看到了远处的键"),
        _WINDOW,
        ("more keys than the window holds", "超过窗口宽度的键"),
        rule="window",
    ),
    Mistake(
        "window off by one",
        _windows,
        ("the window is off by one: (left, right) is too wide by {window}", "窗口差了一位：(左, 右) 多了 {window}"),
        _WINDOW,
        ("more keys than the window holds", "超过窗口宽度的键"),
        rule="window",
    ),
    Mistake(
        "mask after softmax",
        when(hides, {"masking": "after"}),
        (
            "the mask is applied after the softmax: a query's weights no longer sum to 1",
            "softmax 之后才遮蔽：每个查询的权重之和不再为 1",
        ),
        _WHERE,
        _HIDDEN,
    ),
    Mistake(
        "mask after softmax, renormalised",
        when(lambda inputs: hides(inputs) and inputs.problem.sinks is not None, {"masking": "renormalised"}),
        (
            "the mask is applied after the softmax, and each query's weights are divided by their sum again",
            "softmax 之后才遮蔽，每个查询的权重再除以它们的和",
        ),
        _WHERE,
        (
            "sinks: without them this is the same as masking before, rounding apart",
            "汇点；没有汇点时与先遮蔽相同（舍入误差除外）",
        ),
        alone=True,
    ),
    Mistake(
        "mask added as 0/1",
        when(hides, {"masking": "one seen"}, {"masking": "one hidden"}),
        (
            "the mask is added to the scores as 0 and 1 ({masking}), not as 0 and -∞",
            "掩码以 0 和 1 加到得分上（{masking}），而不是 0 和 -∞",
        ),
        _WHERE,
        _HIDDEN,
    ),
    Mistake(
        "mask fills with a finite number",
        _fills,
        (
            "hidden scores become a finite number, {fill} ({masking}), not -∞: hidden keys keep some weight",
            "被遮蔽的得分成了有限的数 {fill}（{masking}），而不是 -∞：被遮蔽的键仍有权重",
        ),
        _WHERE,
        _HIDDEN,
    ),
    Mistake(
        "all masks ignored",
        _all_masks,
        ("no mask acts at all: every query sees every key", "没有任何掩码起作用：每个查询都看到所有的键"),
        _WHERE,
        _HIDDEN,
    ),
)
