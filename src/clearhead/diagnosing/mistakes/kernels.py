"""Mistakes of tiled kernels, of narrow dtypes, and dropout left on."""

from collections.abc import Iterable, Iterator

import numpy as np

from clearhead.diagnosing.mistakes.base import Mistake, Variants
from clearhead.diagnosing.recipe import Change, Inputs


def sizes(length: int) -> set[int]:
    """The usual sizes of blocks; 2 and 4 only where the length is short."""
    return {size for size in (8, 16, 32, 64, 128) if size < length} | ({2, 4} if length <= 64 else set())


def _blocks(*bugs: str) -> Variants:
    return lambda inputs: [{"blocks": (bug, size)} for bug in bugs for size in sorted(sizes(inputs.problem.keys))]


def _other_blocks(*bugs: str) -> Variants:
    def variants(inputs: Inputs) -> Iterator[Change]:
        keys = inputs.problem.keys
        for size in sorted({*range(1, min(keys, 257)), 512, 1024} - sizes(keys)):
            if size < keys:
                yield from ({"blocks": (bug, size)} for bug in bugs)

    return variants


def _tails(keys: int, sizes: Iterable[int]) -> list[Change]:
    """One block size for each number of skipped keys, and one for each number of zeros that are read."""
    uneven = sorted((size for size in sizes if keys % size), reverse=True)
    skipped = {keys // size * size: size for size in uneven}
    zeros = {-keys % size: size for size in uneven}
    kinds = (("skipped", skipped), ("zeros", zeros))
    return [{"key_tail": (kind, size)} for kind, found in kinds for size in sorted(found.values())]


def _key_tails(inputs: Inputs) -> Iterable[Change]:
    return _tails(inputs.problem.keys, sizes(inputs.problem.keys))


def _other_tails(inputs: Inputs) -> Iterable[Change]:
    common = list(_key_tails(inputs))
    return [
        change
        for change in _tails(inputs.problem.keys, range(1, min(inputs.problem.keys, 257)))
        if change not in common
    ]


def _row_tails(inputs: Inputs) -> Iterable[Change]:
    """The rows behind the last whole block of queries: 0, or whatever the memory held."""
    n = inputs.problem.queries
    starts = sorted({n // size * size for size in (*sizes(n), *range(3, min(n, 33))) if n % size}, reverse=True)
    rows = np.arange(n)
    theirs = inputs.theirs.astype(np.float64)
    zero = [{"tail": ("zero", start)} for start in starts if not theirs[:, :, rows >= start].any()]
    return zero or [{"tail": ("unknown", start)} for start in starts]


def _halves(*where: str) -> Variants:
    def variants(inputs: Inputs) -> Iterable[Change]:
        size = min(inputs.theirs.dtype.itemsize, inputs.problem.dtype.itemsize)
        kinds = [kind for kind, bytes_ in (("float32", 4), ("float16", 2), ("bfloat16", 2)) if bytes_ < size]
        return [{"half": place, "half_dtype": kind} for place in where for kind in kinds]

    return variants


_RESCALE = ("acc = acc * exp(m_old - m_new) + p @ v;  l = l * exp(m_old - m_new) + p.sum(-1)",) * 2
_WIDE = (
    "keep it in the inputs' dtype, float32 or better, until the output is written",
    "在写出结果之前保持输入的精度，至少 float32",
)
_UNEVEN = ("a length that is no multiple of the block", "不是块大小整数倍的长度")
_FLOAT32 = ("inputs and an output of a wider dtype", "精度更高的输入和输出")

KERNELS = (
    Mistake(
        "rescale missing",
        _blocks("rescale", "rescale values", "rescale sum"),
        (
            "an online softmax over blocks of {size} keys does not rescale {what} when a later block raises the "
            "row's maximum",
            "按每块 {size} 个键做在线 softmax，后面的块抬高行最大值时，没有重新缩放{what}",
        ),
        _RESCALE,
        ("a row whose largest score is not in its first block", "最大得分不在第一块中的行"),
        rare=_other_blocks("rescale", "rescale values", "rescale sum"),
        seldom=True,
    ),
    Mistake(
        "last block only",
        _blocks("last", "last values"),
        (
            "a kernel over blocks of {size} keys (or a size that leaves as many for the last) keeps only the last "
            "block: its {what} overwritten, not added to",
            "按每块 {size} 个键（或使最后一块同样长的大小）计算，却只保留了最后一块：{what}被覆盖，而没有累加",
        ),
        (
            "acc = acc * exp(m_old - m_new) + p @ v, not acc = p @ v;  l alike",
            "acc = acc * exp(m_old - m_new) + p @ v，而不是 acc = p @ v；l 亦然",
        ),
        ("more keys than a block holds", "键数超过一块"),
        rare=_other_blocks("last", "last values"),
        seldom=True,
    ),
    Mistake(
        "tail of the keys",
        _key_tails,
        (
            "the keys beyond the last whole block of {size} are wrong: {what}",
            "最后一个整块（每块 {size} 个键）之后的键处理有误：{what}",
        ),
        (
            "loop over ceil(m / block) blocks, and mask j < m in the last",
            "循环 ceil(m / block) 块，并在最后一块遮蔽 j >= m 的键",
        ),
        _UNEVEN,
        rare=_other_tails,
        seldom=True,
    ),
    Mistake(
        "tail of the queries",
        _row_tails,
        (
            "the queries from {size} on were never written: they are {what} (n is no multiple of the block)",
            "从第 {size} 个查询起没有写出结果：它们是{what}（n 不是块大小的整数倍）",
        ),
        ("launch ceil(n / block) blocks, and store where i < n", "启动 ceil(n / block) 个块，并在 i < n 处写出"),
        _UNEVEN,
        seldom=True,
    ),
    Mistake(
        "scores in a narrow dtype",
        _halves("scores", "logits"),
        ("the scores are rounded to {half_dtype}", "得分被舍入到 {half_dtype}"),
        _WIDE,
        _FLOAT32,
        evidence="rounding",
    ),
    Mistake(
        "weights in a narrow dtype",
        _halves("powers", "weights"),
        (
            "the weights are rounded to {half_dtype} before they are multiplied by the values",
            "权重在乘以值之前被舍入到 {half_dtype}",
        ),
        _WIDE,
        _FLOAT32,
        evidence="rounding",
    ),
    Mistake(
        "sum in a narrow dtype",
        _halves("sum"),
        ("the sums over keys are kept in {half_dtype}", "对键的求和用 {half_dtype} 累加"),
        _WIDE,
        _FLOAT32,
        evidence="rounding",
    ),
    Mistake(
        "a narrow dtype somewhere",
        _halves("somewhere"),
        (
            "the numbers are off by as much as rounding to {half_dtype} somewhere on the way makes them, "
            "and by no more",
            "误差的大小正像中间某一步舍入到了 {half_dtype}，看不出别的问题",
        ),
        _WIDE,
        _FLOAT32,
        evidence="rounding",
    ),
    Mistake(
        "dropout left on",
        lambda _: [{"dropout": 0.5}],
        (
            "dropout is left on: about {rate} of the weights are dropped at random",
            "dropout 没有关闭：约 {rate} 的权重被随机丢弃",
        ),
        ("model.eval(), or dropout_p=0.0 outside of training", "model.eval()，或在训练以外用 dropout_p=0.0"),
        ("two runs that differ", "两次结果不同的运行"),
        evidence="chance",
    ),
)
