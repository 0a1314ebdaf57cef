"""Mistakes about which keys a query sees, and about how a mask acts."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, hides, square, when
from clearhead.diagnosing.recipe import Change, Inputs
from clearhead.diagnosing.recipe_visibility import rules


def _alone(inputs: Inputs) -> bool:
    """Is it the causal mask that hides later keys, and not the window as well?"""
    right = inputs.problem.window[1]
    return _causal(inputs) and (right is None or right > 0)


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


def _one_sided(inputs: Inputs) -> bool:
    left, right = inputs.problem.window
    return left is not None and (inputs.problem.causal or right != left)


def _two_sided(inputs: Inputs) -> bool:
    return inputs.problem.window[1] != 0 and inputs.problem.window != (None, None) and not inputs.problem.causal


def _chunks(inputs: Inputs) -> Iterable[Change]:
    """Chunks as wide as the window, or as one of its sides."""
    left, right = inputs.problem.window
    if left is None:
        return []
    sizes = {left, left + 1, left + 1 + (right or 0)} - {0}
    return [{"window": "missing", "chunk": size} for size in sorted(sizes) if size < inputs.problem.keys]


def _per_batch(inputs: Inputs) -> bool:
    """Has the mask an axis for the batch, and none for heads?"""
    mask = inputs.problem.mask
    return (
        mask is not None
        and inputs.problem.heads > 1
        and inputs.problem.batch > 1
        and mask.strides[0] != 0
        and mask.strides[1] == 0
    )


def _fills(inputs: Inputs) -> Iterable[Change]:
    """A finite number in hidden places, which is fitted to theirs."""
    return [{"masking": kind, "fill": None} for kind in ("fill", "add")] if hides(inputs) else []


def _all_masks(inputs: Inputs) -> Iterable[Change]:
    """All rules missing at once, where there are at least three."""
    p = inputs.problem
    rules: dict[str, tuple[bool, object]] = {
        "causal": (p.causal, "missing"),
        "window": (p.window != (None, None), "missing"),
        "mask": (p.mask is not None, "missing"),
        "padding": (p.kv_lengths is not None, "missing"),
        "query_padding": (p.query_lengths is not None, "missing"),
        "segments": (p.query_segments is not None, "missing"),
    }
    change = {field: value for field, (active, value) in rules.items() if active}
    return [change] if len(change) > 2 else []


def _mask(inputs: Inputs) -> bool:
    return inputs.problem.mask is not None


_MORE = ("more than one token", "不止一个词元")
_HIDDEN = ("a key that is hidden from some query", "某个查询看不到的键")
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
        when(_alone, {"causal": "missing"}),
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
        "causal mask one ahead",
        when(_causal, {"causal": "ahead"}),
        (
            "the causal mask is one too loose: a query sees the next key as well",
            "因果掩码松了一位：查询还看到了下一个键",
        ),
        (
            "j <= i, not j <= i + 1: tril(k=0), or triu(k=1) for what is hidden",
            "用 j <= i 而不是 j <= i + 1：tril(k=0)；表示遮蔽时用 triu(k=1)",
        ),
        _MORE,
        rule="causal",
        seldom=True,
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
            "the mask is transposed: it is read as mask[key, query]",
            "掩码被转置了：读成了 mask[键, 查询]",
        ),
        (
            "mask[i, j] is for query i and key j: mask.swapaxes(-1, -2)",
            "mask[i, j] 对应查询 i 和键 j：用 mask.swapaxes(-1, -2)",
        ),
        ("a mask that is not symmetric", "不对称的掩码"),
        rule="mask",
    ),
    Mistake(
        "segments ignored",
        when(lambda inputs: inputs.problem.query_segments is not None, {"segments": "missing"}),
        ("the segments are ignored: packed sequences see each other", "忽略了分段：打包在一起的序列互相可见"),
        ("scores = where(query_segments[:, None, :, None] == kv_segments[:, None, None, :], scores, -inf)",) * 2,
        ("two segments", "两个分段"),
        rule="query_segments",
    ),
    Mistake(
        "window missing",
        when(lambda inputs: inputs.problem.window != (None, None), {"window": "missing"}),
        ("the window is missing: queries see keys far away", "缺少窗口：查询看到了远处的键"),
        _WINDOW,
        ("more keys than the window holds", "键数超过窗口宽度"),
        rule="window",
    ),
    Mistake(
        "window off by one",
        _windows,
        ("the window is off by one: it is {window}", "窗口差了一位：{window}"),
        _WINDOW,
        ("more keys than the window holds", "键数超过窗口宽度"),
        rule="window",
    ),
    Mistake(
        "window on both sides",
        when(_one_sided, {"window": "both sides"}),
        (
            "the window reaches as far to the right as to the left: |i - j| <= left",
            "窗口向右伸得和向左一样远：|i - j| <= left",
        ),
        _WINDOW,
        ("more keys than the window holds", "键数超过窗口宽度"),
        rule="window",
        seldom=True,
    ),
    Mistake(
        "window on the left only",
        when(_two_sided, {"window": "left only"}),
        ("the window has no right side: queries see no later key", "窗口没有右边：查询看不到后面的键"),
        _WINDOW,
        ("more than one token", "不止一个词元"),
        rule="window",
        seldom=True,
    ),
    Mistake(
        "chunks in place of a window",
        _chunks,
        (
            "a query sees its own chunk of {chunk} tokens (i // {chunk} == j // {chunk}), not a window around it",
            "查询看到的是自己所在的 {chunk} 个词元的分块（i // {chunk} == j // {chunk}），而不是自己周围的窗口",
        ),
        _WINDOW,
        ("more keys than the window holds", "键数超过窗口宽度"),
        rule="window",
        seldom=True,
    ),
    Mistake(
        "mask tiled over heads",
        when(_per_batch, {"mask": "tiled"}),
        (
            "the mask of (batch, queries, keys) is tiled over the heads: head h of entry b gets that of entry "
            "(b·heads + h) % batch",
            "形如 (batch, queries, keys) 的掩码按头整体平铺：条目 b 的头 h 用了条目 (b·heads + h) % batch 的掩码",
        ),
        (
            "mask[:, None], or mask.repeat_interleave(heads, dim=0) where heads are in the batch",
            "用 mask[:, None]；头并入批次时用 mask.repeat_interleave(heads, dim=0)",
        ),
        ("a mask that differs from entry to entry, and more than one head", "随批次条目而变的掩码，且不止一个头"),
        rule="mask",
        seldom=True,
    ),
    Mistake(
        "rules joined by or",
        when(lambda inputs: len(rules(inputs.problem)) > 1, {"joined": "or"}),
        (
            "the masks are combined with or: a key is seen where any of them allows it",
            "各个掩码用“或”连接：只要有一个允许就可见",
        ),
        (
            "seen = causal & padding & mask: a key must be allowed by each",
            "seen = causal & padding & mask：每个掩码都允许才可见",
        ),
        ("two rules that hide different keys", "遮蔽不同键的两个规则"),
        seldom=True,
    ),
    Mistake(
        "mask of the wrong sign",
        when(hides, {"masking": "fill", "fill": 1e9}),
        (
            "hidden scores become a large positive number, as 1e9: hidden keys get all the weight",
            "被遮蔽的得分成了很大的正数（如 1e9）：全部权重都给了被遮蔽的键",
        ),
        ("scores = where(mask, scores, -inf), not +1e9", "scores = where(mask, scores, -inf)，而不是 +1e9"),
        _HIDDEN,
        seldom=True,
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
            "加到得分上的掩码是 0 和 1（{masking}），而不是 0 和 -∞",
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
        ("no mask has any effect: every query sees every key", "没有任何掩码起作用：每个查询都看到所有的键"),
        _WHERE,
        _HIDDEN,
    ),
)
