"""Mistakes in rotary positions."""

from clearhead.diagnosing.mistakes.base import Mistake, when
from clearhead.diagnosing.recipe import Inputs


def _rotary(inputs: Inputs) -> bool:
    return inputs.rotary is not None


def _wide(inputs: Inputs) -> bool:
    return _rotary(inputs) and inputs.problem.d_k >= 4


_ROTATE = ("q, k = rotate(q), rotate(k)",) * 2
_MORE = ("more than one token", "不止一个词元")
_WIDE = ("d_k > 2 and more than one token", "d_k > 2 且不止一个词元")

ROTARY = (
    Mistake(
        "rotary missing",
        when(_rotary, {"rotary": "missing"}),
        ("queries and keys are not rotated to their positions", "查询和键没有按位置旋转"),
        ("q, k = rotate(q), rotate(k)",) * 2,
        ("more than one token", "不止一个词元"),
        rule="rotary",
    ),
    Mistake(
        "rotary pairing",
        when(_rotary, {"rotary": "pairing"}),
        (
            "rotary positions turn the wrong pairs: (2i, 2i + 1) where (i, i + d/2) is meant, or the other way round",
            "旋转位置编码的维度配对错了：应为 (i, i + d/2) 却用了 (2i, 2i + 1)，或正好相反",
        ),
        ("use the other rotate function, or permute W^Q and W^K once", "改用另一种旋转方式，或把 W^Q、W^K 重排一次"),
        ("d_k > 2 and more than one token", "d_k > 2 且不止一个词元"),
        rule="rotary",
    ),
    Mistake(
        "rotary off by one",
        when(_rotary, {"rotary_shift": 1}, {"rotary_shift": -1}),
        (
            "queries and keys are rotated to positions that are off by one from each other (queries {rotary_shift:+d})",
            "旋转时查询和键的位置错开了一位（查询 {rotary_shift:+d}）",
        ),
        (
            "count both from the same 0: with a cache, the query's position is its length before",
            "两者都从同一个 0 数起：用缓存时，查询的位置是此前的长度",
        ),
        ("keys that differ", "彼此不同的键"),
        rule="rotary",
    ),
    Mistake(
        "rotary on values",
        when(_rotary, {"rotary_on": "qkv"}),
        ("the values are rotated too: only queries and keys should be", "值也被旋转了：只应旋转查询和键"),
        ("q, k = rotate(q), rotate(k); leave v alone", "q, k = rotate(q), rotate(k)；v 保持不变"),
        ("a token beyond position 0", "位置 0 之后的词元"),
        rule="rotary",
    ),
    Mistake(
        "rotary restarted",
        when(lambda inputs: _rotary(inputs) and bool(inputs.problem.query_offset.any()), {"rotary_from": "zero"}),
        (
            "the queries are rotated from position 0, though earlier keys are in the cache",
            "缓存中已有更早的键，查询却仍从位置 0 开始旋转",
        ),
        (
            "positions = arange(n) + offset: with a cache, its length before",
            "positions = arange(n) + offset：用缓存时 offset 是此前的长度",
        ),
        ("a query_offset other than 0", "不为 0 的 query_offset"),
        rule="rotary",
        seldom=True,
    ),
    Mistake(
        "rotary backwards",
        when(_rotary, {"rotary": "backwards"}),
        ("queries and keys are rotated backwards: the sign of the sine is wrong", "查询和键转反了方向：正弦的符号错了"),
        ("a * cos - b * sin, and a * sin + b * cos",) * 2,
        _MORE,
        rule="rotary",
        seldom=True,
    ),
    Mistake(
        "rotary on one side",
        when(_rotary, {"rotary_on": "q"}, {"rotary_on": "k"}),
        ("only {rotary_on} are rotated", "只旋转了{rotary_on}"),
        _ROTATE,
        _MORE,
        rule="rotary",
        seldom=True,
    ),
    Mistake(
        "rotary on a part",
        when(_wide, {"rotary_part": 0.5}, {"rotary_part": 0.25}, {"rotary_part": 0.75}),
        ("only {rotary_part} of the columns are rotated", "只旋转了 {rotary_part} 的列"),
        (
            "rotate all of the d_k columns, or say how many are meant (rotary_dim, partial_rotary_factor)",
            "旋转全部 d_k 列；若本应只转一部分，请核对 rotary_dim 或 partial_rotary_factor",
        ),
        _WIDE,
        rule="rotary",
        seldom=True,
    ),
    Mistake(
        "rotary angles for other pairs",
        when(_wide, {"rotary": "mixed"}, {"rotary": "mixed, pairing"}),
        (
            "the angles are laid out for one pairing and the columns are turned by the other: "
            "repeat(angles, 2) goes with pairs (2i, 2i + 1), concat(angles, angles) with (i, i + d/2)",
            "角度按一种配对排列，列却按另一种配对旋转：repeat(angles, 2) 对应 (2i, 2i + 1)，"
            "concat(angles, angles) 对应 (i, i + d/2)",
        ),
        ("lay cos and sin out as the rotate function pairs the columns", "让 cos、sin 的排列与旋转函数的配对一致"),
        _WIDE,
        rule="rotary",
        seldom=True,
    ),
    Mistake(
        "another rotary base",
        lambda _: [],
        ("the rotary positions have another base, {rotary_base}", "旋转位置编码用了另一个底数 {rotary_base}"),
        ("use the checkpoint's base (rope_theta)", "底数（rope_theta）应与检查点一致"),
        _WIDE,
        rule="rotary",
        alone=True,
        rare=when(_wide, {"rotary_base": None}),
    ),
    Mistake(
        "rotary positions scaled",
        lambda _: [],
        ("the rotary positions are divided by {rotary_factor}", "旋转位置被除以了 {rotary_factor}"),
        (
            "use the checkpoint's factor (rope_scaling): 1 where it has none",
            "系数（rope_scaling）应与检查点一致：没有时为 1",
        ),
        _MORE,
        rule="rotary",
        alone=True,
        rare=when(_rotary, {"rotary_factor": None}),
    ),
)
