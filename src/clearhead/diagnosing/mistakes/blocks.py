"""Mistakes of tiled kernels about whole blocks of keys."""

from collections.abc import Callable
from functools import partial

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants, hides
from clearhead.diagnosing.mistakes.kernels import sizes
from clearhead.diagnosing.recipe import Change, Inputs


def _blocks(
    field: str, *kinds: str, holds: Callable[[Inputs, int], bool] = lambda *_: True, **more: str
) -> tuple[Variants, Variants]:
    """A change for each kind and usual size of block; and for the other sizes, which are tried alone."""

    def variants(inputs: Inputs, *, rare: bool) -> list[Change]:
        every = sorted(sizes(inputs.problem.keys))
        usual = [size for size in every if size >= 16] or every[-1:]
        chosen = [size for size in every if (size not in usual) == rare and holds(inputs, size)]
        return [{field: (kind, size), **more} for kind in kinds for size in chosen]

    return partial(variants, rare=False), partial(variants, rare=True)


def _causal(inputs: Inputs, _: int) -> bool:
    return inputs.problem.causal


def _nan(inputs: Inputs, _: int) -> bool:
    return hides(inputs) and bool(np.isnan(inputs.theirs.astype(np.float64)).any())


def _uneven(inputs: Inputs, size: int) -> bool:
    return inputs.problem.keys % size != 0


_UNMASKED = _blocks("tile", "diagonal seen", holds=_causal)
_SKIPPED = _blocks("tile", "diagonal skipped", holds=_causal)
_LOCAL = _blocks("tile", "local indices", "local indices, all blocks", holds=_causal)
_SUMMED = _blocks("tile", "visited", holds=_causal, masking="after")
_AVERAGED = _blocks("blocks", "averaged")
_UNSHIFTED = _blocks("blocks", "unshifted")
_FIRST = _blocks("tile", "first missing")
_OVERLAPPING = _blocks("tile", "overlapping", holds=_uneven)
_STALE = _blocks("tile", "stale keys", "stale values", "first keys", "first values")
_NAN = _blocks("blocks", "nan", holds=_nan)


_CAUSAL = (
    "mask = i >= j in the blocks that the diagonal crosses, with i and j counted from the start of the sequence",
    "对角线穿过的块中 mask = i >= j，i 和 j 都从序列开头数起",
)
_MERGE = (
    "m = max(m_1, m_2);  l = l_1 * exp(m_1 - m) + l_2 * exp(m_2 - m), and the sums of values alike",
    "m = max(m_1, m_2);  l = l_1 * exp(m_1 - m) + l_2 * exp(m_2 - m)，值的累加亦然",
)
_LOAD = (
    "wait for the load of the block before it is used, and advance its pointer once for each",
    "用到某块之前等它载入完毕，且每块只移动一次指针",
)
_MORE = ("more keys than a block holds", "键数超过一块")

BLOCKS = (
    Mistake(
        "diagonal block unmasked",
        _UNMASKED[0],
        (
            "the blocks of {size} that the diagonal crosses are not masked: queries see all keys of their own block",
            "对角线穿过的块（每块 {size} 个）没有遮蔽：查询看到了自己块中所有的键",
        ),
        _CAUSAL,
        _MORE,
        rare=_UNMASKED[1],
        seldom=True,
    ),
    Mistake(
        "diagonal block skipped",
        _SKIPPED[0],
        (
            "the blocks of {size} that the diagonal crosses are skipped: queries see earlier blocks only",
            "对角线穿过的块（每块 {size} 个）被跳过：查询只看到更早的块",
        ),
        ("loop up to and including the block of the diagonal", "循环到对角线所在的块为止（含该块）"),
        _MORE,
        rare=_SKIPPED[1],
        seldom=True,
    ),
    Mistake(
        "indices local to a block",
        _LOCAL[0],
        (
            "the causal mask compares indices inside blocks of {size}, not those of the sequence ({what})",
            "因果掩码比较的是块内（每块 {size} 个）的下标，而不是序列中的下标（{what}）",
        ),
        _CAUSAL,
        _MORE,
        rare=_LOCAL[1],
        seldom=True,
    ),
    Mistake(
        "hidden keys in the sum",
        _SUMMED[0],
        (
            "hidden keys of the blocks of {size} that are visited stay in the softmax's sum",
            "所访问的块（每块 {size} 个键）中被遮蔽的键仍计入 softmax 的分母",
        ),
        (
            "mask the scores before exp: p = exp(where(mask, s, -inf) - m)",
            "在 exp 之前遮蔽得分：p = exp(where(mask, s, -inf) - m)",
        ),
        _MORE,
        rare=_SUMMED[1],
        seldom=True,
    ),
    Mistake(
        "blocks averaged",
        _AVERAGED[0],
        (
            "each block of {size} keys has its own softmax, and their outputs are averaged",
            "每块 {size} 个键各做各的 softmax，再对结果取平均",
        ),
        _MERGE,
        _MORE,
        rare=_AVERAGED[1],
        seldom=True,
    ),
    Mistake(
        "blocks merged without their maxima",
        _UNSHIFTED[0],
        (
            "the sums of blocks of {size} keys are added though each is relative to its own block's maximum",
            "每块 {size} 个键的和各以本块的最大值为基准，却直接相加了",
        ),
        _MERGE,
        _MORE,
        rare=_UNSHIFTED[1],
        seldom=True,
    ),
    Mistake(
        "first block missing",
        _FIRST[0],
        ("the first block of {size} keys is never read", "第一块的 {size} 个键从未读取"),
        ("for start in range(0, m, block): from 0", "for start in range(0, m, block)：从 0 开始"),
        _MORE,
        rare=_FIRST[1],
        seldom=True,
    ),
    Mistake(
        "tail overlapping",
        _OVERLAPPING[0],
        (
            "the last block of {size} keys is moved back to fit, and the keys that two blocks share count twice",
            "最后一块（{size} 个键）为了凑满而前移，两块重叠的键被算了两次",
        ),
        (
            "mask j >= start in the last block, or j < m without moving it",
            "在最后一块遮蔽 j < start 的键，或不移动而遮蔽 j >= m 的键",
        ),
        ("a length that is no multiple of the block", "不是块大小整数倍的长度"),
        rare=_OVERLAPPING[1],
        seldom=True,
    ),
    Mistake(
        "stale tile",
        _STALE[0],
        ("blocks of {size} keys are computed with an old tile: {what}", "按每块 {size} 个键计算时用了旧的数据：{what}"),
        _LOAD,
        _MORE,
        rare=_STALE[1],
        seldom=True,
    ),
    Mistake(
        "NaN from a hidden block",
        _NAN[0],
        (
            "a row whose first block of {size} keys is wholly hidden becomes NaN: exp(-inf - -inf)",
            "第一块（{size} 个键）全被遮蔽的行变成了 NaN：exp(-inf - -inf)",
        ),
        (
            "m = where(m == -inf, 0, m) before exp(s - m), or skip blocks that are wholly hidden",
            "exp(s - m) 之前用 m = where(m == -inf, 0, m)，或跳过全被遮蔽的块",
        ),
        ("a row whose first keys are hidden, as with a window", "前面的键被遮蔽的行，如使用窗口时"),
        rare=_NAN[1],
        seldom=True,
    ),
)
